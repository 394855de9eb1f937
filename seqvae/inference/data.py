"""Data as a trained model understands them: its own, or others read with its vocabulary and its moments.

In: a `Trained` and what the user chose. Out: an opened `SequenceDataModule`, and the split that is meant.
"""

import glob
import re
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from seqvae.config.data_settings import CacheSettings, LengthSettings, SourceSettings
from seqvae.config.inference_settings import DataChoices
from seqvae.data.datamodule import SequenceDataModule
from seqvae.data.description import DataDescription, Learnt
from seqvae.errors import DataError
from seqvae.exit_codes import UsageError
from seqvae.inference.trained import Trained

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
    learnt = Learnt(_without_classes(trained.description), pools_are_whole=not own)
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
