"""The class of each sequence, from a column of the data or from a file beside them, on its way into the cache."""

from typing import NamedTuple

import numpy as np

from sequences.encoded import counted
from sequences.errors import DataError
from sequences.layout import Layout
from sequences.moments import some
from sequences.settings import SourceSettings
from sequences.side_tables import class_order, ids_as_text, read_labels
from sequences.split_files import SplitFiles

SHOWN_CLASSES = 10


class Labelled(NamedTuple):
    classes: tuple[str, ...]
    """What the labels 0, 1, ... stand for."""
    notes: list[str]


def finish_labels(splits: dict[str, SplitFiles], layout: Layout, source: SourceSettings) -> Labelled:
    """Write labels.bin for each split: the number of the class, -1 where there is none."""
    if source.label_path is None and layout.label is None:
        return Labelled((), [])
    notes: list[str] = []
    if source.label_path is None:
        names = {split: files.table()["label"].to_numpy() for split, files in splits.items()}
    else:
        names, notes = _from_file(source.label_path, splits, layout, source)
    where = f"--label_path {source.label_path}" if source.label_path else f"column {layout.label!r}"
    notes += _missing_notes(names, splits, where, source)
    classes = class_order({name for names_S in names.values() for name in names_S if name is not None})
    if not classes:
        raise DataError(
            f"{where}: no sequence has a label there. Check the ids, or leave --label_path and --label_column out."
        )
    number_of = {name: number for number, name in enumerate(classes)} | {None: -1}
    for split, files in splits.items():
        writer = files.new_writer("labels.bin", np.int32)
        writer.append(np.array([number_of[name] for name in names[split]], np.int32))
        files.entries["labels"] = writer.close()
    counts_C = [int((names["train"] == name).sum()) for name in classes]
    return Labelled(tuple(classes), [*notes, *_class_notes(classes, counts_C)])


def _from_file(
    path: str, splits: dict[str, SplitFiles], layout: Layout, source: SourceSettings
) -> tuple[dict[str, np.ndarray], list[str]]:
    table = read_labels(path, source.label_column, layout.id or source.id_column)
    names, used_L = {}, np.zeros(len(table.ids), bool)
    for split, files in splits.items():
        row_S = table.ids.get_indexer(ids_as_text(files.table()["id"].to_numpy()))
        names[split] = np.where(row_S >= 0, table.labels[row_S], np.array(None))
        used_L[row_S[row_S >= 0]] = True
    unused = int((~used_L).sum())
    return names, [f"--label_path {path}: {counted(unused, 'row')} without a sequence in the data"] if unused else []


def _missing_notes(
    names: dict[str, np.ndarray], splits: dict[str, SplitFiles], where: str, source: SourceSettings
) -> list[str]:
    notes = []
    for split, names_S in names.items():
        missing = [s for s, name in enumerate(names_S) if name is None]
        if not missing:
            continue
        how_many = f"{len(missing):,} of {counted(len(names_S), 'sequence')} have no label"
        if not source.allow_missing_labels:
            files = splits[split]
            raise DataError(
                f"{files.place_of(missing[0])}: id {files.table()['id'][missing[0]].as_py()!r} has no label in {where}; in "
                f"{split} {how_many}. Add them, or accept that with --allow_missing_labels."
            )
        notes.append(f"{split}: {how_many}")
    return notes


def _class_notes(classes: list[str], counts_C: list[int]) -> list[str]:
    if len(classes) == 1:
        return [f"warning: all labels are {classes[0]!r}, so that there is nothing to tell apart"]
    shown = ", ".join(
        f"{name!r}: {count:,}" for name, count in list(zip(classes, counts_C, strict=True))[:SHOWN_CLASSES]
    )
    notes = [f"labels have {len(classes)} classes (in train {shown}{', ...' if len(classes) > SHOWN_CLASSES else ''})"]
    absent = [repr(name) for name, count in zip(classes, counts_C, strict=True) if count == 0]
    if absent:
        notes.append(f"warning: no sequence of the training split has the label {some(absent)}")
    return notes
