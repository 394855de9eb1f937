"""A trained model, opened: out of a checkpoint, a run's directory, or what `use_model.py export` wrote.

In: a path as typed. Out: the network, ready to be used, with all that it takes to give it data and to read what it says.
"""

import glob
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from seqvae.config.data import CacheSettings, LengthSettings, SourceSettings
from seqvae.config.inference import DataChoices, MachineChoices
from seqvae.data.batch import Batch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.data.description import DataDescription, FittedPreprocessing
from seqvae.errors import DataError, UsageError
from seqvae.files import why_no_path
from seqvae.inference.estimates import batches_of
from seqvae.inference.export import MODEL, read_exported
from seqvae.models.vae import SequenceVAE
from seqvae.monitors.decoder_use import undisturbed
from seqvae.training.network import StoredNetwork, build_stored, read_network
from seqvae.training.run_directory.checkpoint_file import BEST, LAST, PREVIOUS, damage_of

_log = logging.getLogger(__name__)


class Trained(NamedTuple):
    """A network and where it came from."""

    network: SequenceVAE
    stored: StoredNetwork
    path: Path
    """The file that the weights lie in."""
    run: Path | None
    """The directory of the run that it is a checkpoint of."""
    autocast: torch.dtype | None
    """What the decoder computes in; None: float32."""

    @property
    def description(self) -> DataDescription:
        return self.stored.description

    @property
    def settings(self) -> dict[str, Any]:
        """All of the run that it was trained in, by the names of their flags."""
        return self.stored.settings

    @property
    def step(self) -> int:
        return self.stored.step

    @property
    def device(self) -> torch.device:
        return self.network.begin_W.device

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.network.parameters())


def open_trained(place: str, machine: MachineChoices | None = None) -> Trained:
    """`place` is a checkpoint, a run's directory (its best checkpoint, by the ELBO of validation) or an export."""
    machine = machine or MachineChoices()
    if reason := why_no_path(place):
        raise UsageError(f"CHECKPOINT {reason}")
    path, stored = _read(Path(place).expanduser())
    network = build_stored(stored, path)
    autocast = torch.bfloat16 if machine.precision == "bf16-mixed" else None
    return Trained(network.to(_device(machine.accelerator)), stored, path, _run_of(path), autocast)


@contextmanager
def at_work(trained: Trained) -> Iterator[None]:
    """No gradients, no dropout; torch's own random numbers are left as they were."""
    device = trained.device
    precision = torch.autocast(device.type, trained.autocast, enabled=trained.autocast is not None)
    with undisturbed(trained.network, device, precision):
        yield


def _device(asked: str) -> str:
    """Never an Apple GPU, which has no float64."""
    there = torch.cuda.is_available()
    if asked == "gpu" and not there:
        raise UsageError("--accelerator gpu: there is none here that torch can use and that has float64")
    return "cuda" if there and asked != "cpu" else "cpu"


def _read(path: Path) -> tuple[Path, StoredNetwork]:
    if path.is_dir():
        if (path / MODEL).is_file():
            return path / MODEL, read_exported(path)
        path = _best_of(path)
    if path.name == MODEL:
        return path, read_exported(path.parent)
    return path, read_network(path, "CHECKPOINT")


def _best_of(directory: Path) -> Path:
    folder = directory if directory.name == "checkpoints" else directory / "checkpoints"
    there = [path for name in (BEST, LAST, PREVIOUS) if (path := folder / name).exists()]
    for path in there:
        if damage := damage_of(path):
            _log.warning("%s: %s; left aside", path, damage)
        else:
            return path
    found = "its checkpoints are damaged" if there else "it holds no checkpoint"
    raise UsageError(f"CHECKPOINT {directory}: {found}. Wanted: a .ckpt file, a run's directory, or an export.")


def _run_of(path: Path) -> Path | None:
    directory = path.absolute().parent
    return directory.parent if directory.name == "checkpoints" else None


# Data as a trained model understands them: its own, or others read with its vocabulary and its moments.
#
# In: a `Trained` and what the user chose. Out: an opened `SequenceDataModule`, and the split that is meant.

_INDEXED = re.compile(r".*\[\d+\]")
"""Features of a column of lists have no names of their own."""


class Labels(NamedTuple):
    """What the sequences are labelled with."""

    column: str
    """In the data, or in the label file."""


def open_data(trained: Trained, choices: DataChoices, labels: Labels | None = None) -> SequenceDataModule:
    """`labels`: have each sequence's label at hand; those that have none are kept."""
    own = choices.data_dir is None
    source, lengths, cache = _settings_of(trained, choices, labels)
    if own:
        _refuse_what_is_gone(source)
    if own and _sides_are_there(source):
        data = SequenceDataModule(source, lengths, cache)
        if _without_classes(data.description) == _without_classes(trained.description):
            return data
    # What training's own vocabulary and moments came from is not needed any more, and may be gone; so may labels.
    source = replace(source, params_map_path=None, variable_embeddings_path=None, freeze_variable_embeddings=False)
    if labels is None:
        source = replace(source, label_path=None, label_column=None)
    learnt = FittedPreprocessing(_without_classes(trained.description), pools_are_whole=not own)
    return SequenceDataModule(source, lengths, cache, learnt=learnt)


def chosen_split(data: SequenceDataModule, asked: str | None) -> str:
    """The split that was asked for; else the one that training did not see."""
    there = list(data.data.splits)
    if asked is None:
        return next((name for name in ("test", "valid", "pool", "train") if name in there), there[0])
    if asked not in there:
        raise UsageError(f"--split {asked}: these data have {' and '.join(there)}")
    return asked


def _settings_of(
    trained: Trained, choices: DataChoices, labels: Labels | None
) -> tuple[SourceSettings, LengthSettings, CacheSettings]:
    source, lengths, cache = (
        kind(**{each.name: trained.settings[each.name] for each in fields(kind)})
        for kind in (SourceSettings, LengthSettings, CacheSettings)
    )
    assert isinstance(source, SourceSettings)
    assert isinstance(lengths, LengthSettings)
    assert isinstance(cache, CacheSettings)
    given = {name: value for name, value in asdict(choices).items() if value is not None}
    names = trained.description.names
    has_names = trained.description.kind == "vectors" and not any(_INDEXED.fullmatch(name) for name in names)
    if "data_dir" in given and has_names and source.feature_columns is None:
        given["feature_columns"] = ",".join(names)
    if labels is not None:
        if labels.column != source.label_column:  # the training's own label file is about another
            given = {"label_path": None} | given
        given |= {"label_column": labels.column, "allow_missing_labels": True}
    elif "data_dir" in given:  # nobody asks for labels, and these data may have none
        given = {"label_path": None, "label_column": None, "allow_missing_labels": True} | given
    return _changed(source, given), _changed(lengths, given), _changed(cache, given)


def _refuse_what_is_gone(source: SourceSettings) -> None:
    place = source.data_dir
    if place is not None and not glob.has_magic(place) and not Path(place).expanduser().exists():
        raise DataError(f"{place}, which the model was trained on, is not there any more. Say where with --data_dir.")


def _sides_are_there(source: SourceSettings) -> bool:
    tokenizer = None if source.tokenizer in ("words", "characters", "bytes") else source.tokenizer
    sides = (source.params_map_path, source.variable_embeddings_path, source.label_path, tokenizer)
    return all(path is None or Path(path).is_file() for path in sides)


def _changed(settings: Any, given: dict[str, Any]) -> Any:
    names = {each.name for each in fields(settings)}
    return replace(settings, **{name: value for name, value in given.items() if name in names})


def _without_classes(description: DataDescription) -> DataDescription:
    return replace(description, classes=())


# One split, or several of them taken together: `--split valid+test`.
#
# In: opened data and what was asked for. Out: names of splits, and batches that go through all of them.


def chosen_splits(data: SequenceDataModule, asked: str | None) -> tuple[str, ...]:
    """The split that was asked for, or those with a + between them; else the one that training did not see."""
    names = tuple(chosen_split(data, name) for name in (asked.split("+") if asked is not None else [None]))
    if len(set(names)) < len(names):
        raise UsageError(f"--split {asked}: a split stands there twice")
    return names


def sequences_in(data: SequenceDataModule, splits: Sequence[str]) -> int:
    return sum(len(data.split(split)) for split in splits)


def joined_batches(
    data: SequenceDataModule, splits: Sequence[str], *, sequences: int | None = None, seed: int = 0
) -> Iterator[tuple[str, Batch]]:
    """Batches and the split each is of; `sequences` at random, of each split in proportion to its size."""
    for split, share in zip(splits, shares(data, splits, sequences), strict=True):
        if share:
            yield from ((split, batch) for batch in batches_of(data, split, sequences=share, seed=seed))


def shares(data: SequenceDataModule, splits: Sequence[str], sequences: int | None) -> list[int]:
    """How many sequences of each split."""
    ends = np.cumsum([len(data.split(split)) for split in splits])
    if sequences is not None and sequences < ends[-1]:
        ends = np.round(ends * sequences / ends[-1])
    return [int(share) for share in np.diff(ends, prepend=0)]
