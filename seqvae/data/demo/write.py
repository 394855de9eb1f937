"""Demo data with known truth: Parquet files of any kind, drawn from a process whose likelihood is exact.

In: a directory, a kind, a size and a seed. Out: a folder in there that --data_dir takes as it is, with train.parquet,
valid.parquet, test.parquet and truth.json, from which `read_truth` gives the process back. One row per sequence, except for
events:

    tokens   id, tokens list<uint8>, label, factor
    vectors  id, values list<fixed_size_list<float>[6]> with nulls where missing, label, factor
    events   ts_id, minute, variable, value (null: presence only), one row per event;
             beside them outcomes.csv (ts_id, label) and factors.csv (ts_id, factor)

The label is the sequence's latent class.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from seqvae.data.demo.processes import (
    VARIABLES,
    EventSample,
    EventTruth,
    LengthLaw,
    TokenSample,
    TokenTruth,
    VectorSample,
    VectorTruth,
    offsets_of,
)
from seqvae.data.description import Kind
from seqvae.files import wait_for_lock

VERSION = 1
"""Of the generator; to be raised with every change that changes the files."""
SEQUENCES = 20_000
MEAN_LENGTH = 50.0
"""Together a million steps: few enough to go through several times in a minute or two on two cores."""
HELD_OUT_SHARE = 10
ROW_GROUP_ROWS = {"tokens": 4_000, "vectors": 4_000, "events": 200_000}
TRUTHS: dict[str, type[TokenTruth] | type[VectorTruth] | type[EventTruth]] = {
    "tokens": TokenTruth,
    "vectors": VectorTruth,
    "events": EventTruth,
}


def write_demo(
    directory: Path, kind: Kind, *, sequences: int = SEQUENCES, mean_length: float = MEAN_LENGTH, seed: int = 0
) -> Path:
    """Return the folder below `directory` with these data, and write it first where it does not exist.

    `sequences` train; a tenth as many each validate and test. Safe for several processes at once, and to kill.
    """
    if sequences < 1:
        raise ValueError(f"demo data need 1 sequence or more, got {sequences}")
    lengths = LengthLaw(mean=mean_length)
    name = f"demo-{kind}-v{VERSION}-{sequences}x{mean_length:g}-seed{seed}"
    target = directory / name
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with wait_for_lock(directory / f".{name}.lock", lambda: None):
        if not target.exists():
            unfinished = directory / f".{name}.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed: the lock is ours
            try:
                unfinished.mkdir()
                _write_files(unfinished, kind, sequences, lengths, seed)
                unfinished.rename(target)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return target


def read_truth(folder: Path) -> TokenTruth | VectorTruth | EventTruth:
    """Return the process that the files in a folder of `write_demo` were drawn from."""
    stored = json.loads((folder / "truth.json").read_text(encoding="utf-8"))
    process = stored["process"]
    fields: dict[str, Any] = {n: np.array(value) if isinstance(value, list) else value for n, value in process.items()}
    return TRUTHS[stored["kind"]](**fields | {"lengths": LengthLaw(**process["lengths"])})


def read_tokens(path: Path) -> TokenSample:
    """Return the sample in one Parquet file of a token demo."""
    table = pq.read_table(path, page_checksum_verification=True).combine_chunks()
    lengths_N = pc.list_value_length(table["tokens"]).to_numpy()
    tokens_S = pc.list_flatten(table["tokens"]).to_numpy()
    return TokenSample(tokens_S, offsets_of(lengths_N), table["label"].to_numpy(), table["factor"].to_numpy())


def _write_files(folder: Path, kind: Kind, sequences: int, lengths: LengthLaw, seed: int) -> None:
    truth = TRUTHS[kind].draw(np.random.default_rng([seed, 0]), lengths)
    held_out = max(1, sequences // HELD_OUT_SHARE)
    latents = []
    first_id = 0
    for number, (split, count) in enumerate({"train": sequences, "valid": held_out, "test": held_out}.items(), start=1):
        sample = truth.sample(count, np.random.default_rng([seed, number]))
        latent = {"id": np.arange(first_id, first_id + count), "label": sample.classes_N, "factor": sample.factors_N}
        pq.write_table(
            _to_table(sample, latent),
            folder / f"{split}.parquet",
            row_group_size=ROW_GROUP_ROWS[kind],
            write_page_checksum=True,
        )
        latents.append(pd.DataFrame(latent).rename(columns={"id": "ts_id"}))
        first_id += count
    if kind == "events":
        table = pd.concat(latents)
        table[["ts_id", "label"]].to_csv(folder / "outcomes.csv", index=False)
        table[["ts_id", "factor"]].to_csv(folder / "factors.csv", index=False)
    process = dataclasses.asdict(truth)
    process = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in process.items()}
    stored = {"kind": kind, "version": VERSION, "sequences": sequences, "seed": seed, "process": process}
    (folder / "truth.json").write_text(json.dumps(stored), encoding="utf-8")


def _to_table(sample: TokenSample | VectorSample | EventSample, latent: dict[str, np.ndarray]) -> pa.Table:
    offsets_N1 = sample.offsets_N1
    if isinstance(sample, EventSample):
        step_E, variable_E = np.nonzero(sample.present_SV)
        elapsed_S, lengths_N = np.cumsum(sample.gaps_S), np.diff(offsets_N1)
        minutes_S = elapsed_S - np.repeat(elapsed_S[offsets_N1[:-1]], lengths_N)
        return pa.table(
            {
                "ts_id": np.repeat(latent["id"], lengths_N)[step_E],
                "minute": minutes_S[step_E],
                "variable": pa.array(VARIABLES).take(pa.array(variable_E)),
                "value": pa.array(sample.values_SV[step_E, variable_E], from_pandas=True),
            }
        )
    if isinstance(sample, TokenSample):
        name, steps = "tokens", pa.array(sample.tokens_S)
    else:
        values = pa.array(sample.values_SD.ravel(), from_pandas=True)  # NaN becomes null
        name, steps = "values", pa.FixedSizeListArray.from_arrays(values, sample.values_SD.shape[1])
    return pa.table(
        {"id": latent["id"], name: pa.ListArray.from_arrays(pa.array(offsets_N1, pa.int32()), steps)} | latent
    )
