"""Checkpoints of small networks on small Parquet of each kind; nothing is trained."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from seqvae.config.data import CacheSettings, LengthSettings, SourceSettings
from seqvae.config.model import ModelSettings
from seqvae.config.training import TrainingSettings
from seqvae.config.yaml_files import to_flat_dict
from seqvae.data.datamodule import SequenceDataModule
from seqvae.models.vae import SequenceVAE
from seqvae.training.run_directory.resume import identity_of
from tests.support.parquet_files import write

TINY = ModelSettings(width=16, depth=1, heads=2, latent_size=3)
SIZES = {"train": 40, "valid": 9, "test": 12}
KINDS = ("tokens", "vectors", "events")
TOKENIZER = {"tokens": "characters", "vectors": None, "events": None}


def columns(kind: str, split: str) -> pa.Table:
    """Return sequences of 1 to 9 steps; ids begin with the split's name."""
    random = np.random.default_rng(list(SIZES).index(split))
    lengths = random.integers(1, 10, SIZES[split])
    ids = [f"{split}-{number:02d}" for number in range(SIZES[split])]
    if kind == "tokens":
        return pa.table({"id": ids, "text": ["".join(random.choice(list("abcdé "), size)) + "a" for size in lengths]})
    rows = np.repeat(ids, lengths)
    time = np.concatenate([np.arange(size) * 2.5 for size in lengths])
    if kind == "vectors":
        pulse, heat = random.normal(80, 10, len(rows)), random.normal(37, 0.5, len(rows))
        missing = random.random(len(rows)) < 0.3
        return pa.table({"id": rows, "time": time, "pulse": pulse, "heat": pa.array(heat, mask=missing)})
    names = random.choice(["pulse", "heat", "rain"], len(rows))
    return pa.table({"id": rows, "time": time, "variable": names, "value": random.normal(50, 20, len(rows))})


def write_data(directory: Path, kind: str, rename: Mapping[str, str], pools: int | None = None) -> Path:
    """Write a file for each split; `pools`: so many files without splits."""
    if pools is not None:
        whole = pa.concat_tables([columns(kind, split) for split in SIZES])
        for number, rows in enumerate(np.array_split(np.arange(len(whole)), pools)):
            write(directory / f"{number}.parquet", whole.take(pa.array(rows)))
        return directory
    for split in SIZES:
        table = columns(kind, split)
        write(
            directory / f"{split}.parquet", table.rename_columns([rename.get(one, one) for one in table.column_names])
        )
    return directory


def make_checkpoint(
    directory: Path,
    kind: str,
    model: ModelSettings = TINY,
    rename: Mapping[str, str] | None = None,
    *,
    robust_scaling: bool = True,
    pools: int | None = None,
    **lengths: Any,
) -> Path:
    """Write a run's directory with best.ckpt, and its data in `data/` beside it, with columns renamed, or in so many `pools`."""
    data_dir = write_data(directory / "data", kind, rename or {}, pools)
    settings = TrainingSettings(
        source=SourceSettings(
            data_dir=str(data_dir),
            tokenizer=TOKENIZER[kind],
            robust_scaling=robust_scaling,
            validation_fraction=0.3,
        ),
        lengths=LengthSettings(**lengths),
        cache=CacheSettings(cache_dir=str(directory / "cache")),
        model=model,
    )
    data = SequenceDataModule(settings.source, settings.lengths, settings.cache)
    torch.manual_seed(0)
    network = SequenceVAE(data.description, model)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # nothing is near 0, nor like anything else
    split = data.split("train")
    content = {
        "state_dict": {f"network.{name}": weight for name, weight in network.state_dict().items()},
        "global_step": 7,
        "origin": {
            "settings": to_flat_dict(settings),
            "description": {**data.description.__dict__},
            "data": identity_of(split.lengths_N, split.content),
        },
    }
    path = directory / "run" / "checkpoints" / "best.ckpt"
    path.parent.mkdir(parents=True)
    torch.save(content, path)
    return path.parent.parent
