"""The class of each sequence, from a column of the data or from a file beside them, on its way into the cache."""

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from seqvae.config.data_settings import SourceSettings
from seqvae.data.building.encoded import counted
from seqvae.data.building.moments import some
from seqvae.data.building.split_files import SplitFiles
from seqvae.data.parquet.layout import Layout
from seqvae.data.parquet.side_tables import class_order, ids_as_text, read_labels
from seqvae.errors import DataError

SHOWN_CLASSES = 10


class Labelled(NamedTuple):
    classes: tuple[str, ...]
    """What the labels 0, 1, ... stand for."""
    notes: list[str]


class Codes:
    """Numbers texts in order of appearance; -1 stands for none."""

    def __init__(self) -> None:
        self.number_of: dict[str, int] = {}

    def __call__(self, texts: pa.Array) -> np.ndarray:
        encoded = texts.dictionary_encode()
        numbers = [self.number_of.setdefault(text, len(self.number_of)) for text in encoded.dictionary.to_pylist()]
        return np.array([*numbers, -1], np.int32)[np.asarray(encoded.indices.fill_null(-1))]


def finish_labels(splits: dict[str, SplitFiles], layout: Layout, source: SourceSettings) -> Labelled:
    """Write labels.bin for each split: the number of the class, -1 where there is none."""
    if source.label_path is None and layout.label is None:
        return Labelled((), [])
    notes: list[str] = []
    codes = Codes()
    if source.label_path is None:
        coded = {split: _concat([codes(c) for c in files.table()["label"].chunks]) for split, files in splits.items()}
    else:
        coded, notes = _from_file(source.label_path, codes, splits, layout, source)
    where = f"--label_path {source.label_path}" if source.label_path else f"column {layout.label!r}"
    notes += _missing_notes(coded, splits, where, source)
    counts = {
        split: np.bincount(coded_S[coded_S >= 0], minlength=len(codes.number_of)) for split, coded_S in coded.items()
    }
    in_use = np.flatnonzero(sum(counts.values()))
    if not len(in_use):
        raise DataError(
            f"{where}: no sequence has a label there. Check the ids, or leave --label_path and --label_column out."
        )
    names = list(codes.number_of)
    classes = class_order([names[code] for code in in_use])
    final = np.full(len(names) + 1, -1, np.int32)  # the last one stands for code -1
    final[[codes.number_of[name] for name in classes]] = np.arange(len(classes))
    for split, files in splits.items():
        writer = files.new_writer("labels.bin", np.int32)
        writer.append(final[coded[split]])
        files.entries["labels"] = writer.close()
    if "train" not in counts:  # data that a trained network is used on
        return Labelled(tuple(classes), notes)
    counts_C = [int(counts["train"][codes.number_of[name]]) for name in classes]
    return Labelled(tuple(classes), [*notes, *_class_notes(classes, counts_C)])


def _from_file(
    path: str, codes: Codes, splits: dict[str, SplitFiles], layout: Layout, source: SourceSettings
) -> tuple[dict[str, np.ndarray], list[str]]:
    table = read_labels(path, source.label_column, layout.id or source.id_column)
    code_L = np.append(codes(pa.array(table.labels, pa.large_string())), -1)
    coded, used_L = {}, np.zeros(len(code_L), bool)
    for split, files in splits.items():
        ids = files.table()["id"].chunks
        row_S = _concat([table.ids.get_indexer(ids_as_text(chunk.to_numpy(zero_copy_only=False))) for chunk in ids])
        coded[split] = code_L[row_S]
        used_L[row_S] = True
    unused = int((~used_L[:-1]).sum())
    return coded, [f"--label_path {path}: {counted(unused, 'row')} without a sequence in the data"] if unused else []


def _missing_notes(
    coded: dict[str, np.ndarray], splits: dict[str, SplitFiles], where: str, source: SourceSettings
) -> list[str]:
    notes = []
    for split, coded_S in coded.items():
        missing = np.flatnonzero(coded_S < 0)
        if not len(missing):
            continue
        how_many = f"{len(missing):,} of {counted(len(coded_S), 'sequence')} have no label"
        if not source.allow_missing_labels:
            files, first = splits[split], int(missing[0])
            raise DataError(
                f"{files.place_of(first)}: id {files.table()['id'][first].as_py()!r} has no label in {where}; in "
                f"{split} {how_many}. Add them, or accept that with --allow_missing_labels."
            )
        notes.append(f"{split}: {how_many}")
    return notes


def _concat(pieces: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int32), *pieces])


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
