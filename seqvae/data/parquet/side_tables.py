"""The small tables beside the Parquet: labels, moments to normalise by, embeddings of variables, MEDS splits."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.fs as pa_fs
import pyarrow.parquet as pq

from seqvae.data.parquet.discovery import SPLIT_NAMES, SUFFIXES, VOCABULARY_INDEX
from seqvae.data.parquet.schema import ID_NAMES, closest
from seqvae.data.storage import DataFile, RemoteFile, trouble_with
from seqvae.errors import DataError
from seqvae.text import some


def read_labels(path: str, column: str | None, id_column: str | None) -> pd.Series:
    """Return the label of each sequence as text, None where it is missing, by id as text: 200001, "200001" and 200001.0 are the
    same sequence."""
    where = f"--label_path {path}"
    id_names = [name for name in (id_column, *ID_NAMES) if name]
    table = _read_table(where, path, as_text=id_names)
    identity = next((name for name in id_names if name in table.columns), table.columns[0])
    if column is None:
        others = [str(name) for name in table.columns if name != identity]
        if len(others) != 1:
            raise DataError(f"{where}: choose one of its columns ({', '.join(others)}) with --label_column.")
        column = others[0]
    _require_columns(where, table, [column], "Name another with --label_column.")
    ids = pd.Index(ids_as_text(table[identity].to_numpy()))
    if ids.has_duplicates:
        again = int(np.flatnonzero(ids.duplicated())[0])
        raise DataError(f"{where}: row {again}: id {ids[again]!r} occurred before; keep one row per sequence.")
    names = label_names(table[column].to_numpy(), lambda row: f"{where}: row {row}: column {column!r}")
    return pd.Series(names, ids, dtype=object)


def columns_beside(path: str) -> list[str]:
    """Return the columns of a file of labels; none where it is gone."""
    return [*map(str, _read_table(f"--label_path {path}", path, None).columns)] if Path(path).is_file() else []


def label_names(values: np.ndarray, where: Callable[[int], str], known: Sequence[str] = ()) -> np.ndarray:
    """Return class names as text, None where missing; numbers must be whole, as a label is a class.

    `known`: what the numbers 0, 1, ... stand for; -1 is then a missing label, and other numbers are names of their own.
    """
    names = np.full(len(values), None, object)
    present = np.flatnonzero(~pd.isna(values))
    if np.issubdtype(values.dtype, np.number) or np.issubdtype(values.dtype, np.bool_):
        numbers = values[present].astype(np.float64)
        measures = present[~np.isfinite(numbers) | (numbers != np.round(numbers))]
        if len(measures):
            raise DataError(
                f"{where(int(measures[0]))} holds {values[measures[0]]:g}, but a label must be a class: a whole number or "
                f"text. Choose another with --label_column."
            )
        whole = numbers.astype(np.int64)
        name_of: dict[int, str | None] = {-1: None, **dict(enumerate(known))} if known else {}
        names[present] = [name_of.get(number, str(number)) for number in whole.tolist()]
    else:
        names[present] = [str(value) or None for value in values[present]]
    return names


def ids_as_text(ids: np.ndarray) -> np.ndarray:
    """Return ids in one form, whichever program wrote them: 7, 7.0, "7" and "007" are all "7".

    >>> ids_as_text(np.array(["007", "7.0", "a1"], dtype=object)).tolist()
    ['7', '7', 'a1']
    """
    if np.issubdtype(ids.dtype, np.integer):
        return ids.astype(str).astype(object)
    text = pd.Series(ids).astype(str).str.strip()
    return text.str.replace(r"^(-?)0*(\d+)(\.0+)?$", r"\1\2", regex=True).to_numpy(dtype=object)


def read_params_map(path: str) -> dict[str, tuple[float, float]]:
    """Return the mean and the standard deviation of each variable."""
    where = f"--params_map_path {path}"
    table = _read_table(where, path, as_text=["variable"])
    _require_columns(where, table, ["variable", "mean", "std"], "Wanted: variable, mean, std.")
    moments = table[["mean", "std"]].apply(pd.to_numeric, errors="coerce").to_numpy(np.float64)
    variables = _distinct_names(where, table["variable"])
    bad = np.flatnonzero(~np.isfinite(moments).all(axis=1) | (moments[:, 1] < 0))
    if len(bad):
        mean, std = (_shown(table[name].iloc[bad[0]]) for name in ("mean", "std"))
        raise DataError(
            f"{where}: row {bad[0]}: variable {variables[bad[0]]!r} has mean {mean} and std {std}. Wanted: finite numbers, "
            f"std not negative."
        )
    return {name: (mean, std) for name, (mean, std) in zip(variables, moments.tolist(), strict=True)}


def read_variable_embeddings(path: str, names: tuple[str, ...]) -> np.ndarray:
    """Return float32 [V, width], in the order of `names`; <unknown>, which no file holds, gets the mean of the others."""
    where = f"--variable_embeddings_path {path}"
    table = _read_table(where, path, as_text=None)
    row_of = {name: row for row, name in enumerate(_distinct_names(where, table.iloc[:, 0]))}
    missing = [name for name in names[1:] if name not in row_of]
    if missing:
        raise DataError(f"{where}: lacks {len(missing)} of {len(names) - 1} variables ({some(missing, 5)}). Add them.")
    vectors = table.iloc[:, 1:].apply(pd.to_numeric, errors="coerce").to_numpy(np.float32)
    bad = np.argwhere(~np.isfinite(vectors))
    if len(bad):
        row, column = bad[0]
        raise DataError(
            f"{where}: row {row}: column {table.columns[column + 1]!r} holds {_shown(table.iloc[row, column + 1])}. "
            f"Wanted: finite numbers after the first column."
        )
    chosen = vectors[[row_of[name] for name in names[1:]]]
    return np.concatenate([chosen.mean(axis=0, keepdims=True), chosen])


def read_subject_splits(paths: tuple[DataFile, ...]) -> pd.Series:
    """Return the split of each subject of MEDS data, by id as text."""
    tables = []
    for path in paths:
        table = _read_table(str(path), path, as_text=[])
        _require_columns(str(path), table, ["subject_id", "split"], "Wanted: subject_id, split.")
        splits = table["split"].astype(str).str.lower().map(SPLIT_NAMES)
        unknown = np.flatnonzero(splits.isna())
        if len(unknown):
            found = table["split"].iloc[unknown[0]]
            raise DataError(f"{path}: row {unknown[0]}: split {found!r} is unknown. Wanted: train, tuning, held_out.")
        tables.append(pd.Series(splits.to_numpy(), index=ids_as_text(table["subject_id"].to_numpy())))
    every = pd.concat(tables)
    twice = every.index[every.index.duplicated()]
    if len(twice):
        where = ", ".join(map(str, paths))
        raise DataError(f"{where}: subject {twice[0]} occurs more than once. Keep one row per subject.")
    return every


def read_code_names(paths: tuple[DataFile, ...]) -> tuple[tuple[str, str], ...]:
    """Return the number of each code of MEDS data that were normalised, as text, and its name.

    A code with several numbers (one for each unit, for example) has several names, so that its variables stay apart.
    """
    names: dict[str, str] = {}
    for path in paths:
        table = _read_table(str(path), path, as_text=[])
        _require_columns(str(path), table, ["code", VOCABULARY_INDEX], f"Wanted: code, {VOCABULARY_INDEX}.")
        known = table[table["code"].notna() & table[VOCABULARY_INDEX].notna()]
        is_shared = known["code"].duplicated(keep=False)
        for code, number, shares in zip(known["code"], known[VOCABULARY_INDEX], is_shared, strict=True):
            name = f"{code} #{int(number)}" if shares else str(code)
            if names.setdefault(str(int(number)), name) != name:
                raise DataError(
                    f"{path}: {VOCABULARY_INDEX} {int(number)} is {name!r} here and {names[str(int(number))]!r} elsewhere. "
                    "Give cohorts with different vocabularies to --data_dir apart."
                )
    return tuple(names.items())


def _read_table(where: str, path: str | DataFile, as_text: Collection[str] | None) -> pd.DataFrame:
    """Read a small table from CSV or Parquet. Of a CSV, the columns named in `as_text` (None: the first column) stay as they are
    written: "007" and "NA" are names."""
    try:
        if isinstance(path, RemoteFile):
            table = pq.read_table(path.open()).to_pandas(ignore_metadata=True)
        elif str(path).lower().endswith(SUFFIXES):
            table = pq.read_table(str(path), filesystem=pa_fs.LocalFileSystem()).to_pandas(ignore_metadata=True)
        else:
            if as_text is None:
                with pa_csv.open_csv(path) as reader:
                    as_text = reader.schema.names[:1]
            as_written = pa_csv.ConvertOptions(column_types=dict.fromkeys(as_text, pa.string()))
            table = pa_csv.read_csv(path, convert_options=as_written).to_pandas()
    except FileNotFoundError as error:
        raise DataError(f"{where}: does not exist. Check the path.") from error
    except (OSError, pa.ArrowException) as error:
        if isinstance(path, RemoteFile) and (trouble := trouble_with(path, error)):
            raise trouble from error
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"{where}: cannot be read as a table ({reason}). Wanted: CSV with commas, or Parquet."
        ) from error
    if table.empty or table.shape[1] < 2:
        raise DataError(
            f"{where}: needs one row per name and at least two columns, has {table.shape[0]} rows and {table.shape[1]} columns."
        )
    return table


def _require_columns(where: str, table: pd.DataFrame, names: Sequence[str], advice: str) -> None:
    for name in names:
        if name not in table.columns:
            end = closest(name, map(str, table.columns))
            has = f" (it has: {', '.join(map(repr, table.columns))})." if end == "." else end
            raise DataError(f"{where}: has no column {name!r}{has} {advice}")


def _distinct_names(where: str, names: pd.Series) -> list[str]:
    """Return the names of variables as text; each may occur once."""
    twice = np.flatnonzero(names.duplicated())
    if len(twice):
        raise DataError(
            f"{where}: row {twice[0]}: variable {names.iloc[twice[0]]!r} occurred before; keep one row each."
        )
    return [str(name) for name in names]


def _shown(value: Any) -> str:
    return "nothing" if pd.isna(value) else str(value)
