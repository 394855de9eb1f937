"""The second pass of a cache build: from raw arrays to final ones, with what only the whole training split can tell.

Tokens get their final ids in the smallest integer type; vectors and events are normalised, once and for all, by the
training split's mean and standard deviation. Gaps stay as they are, and the moments of their logarithms are noted.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from seqvae.config.data import SourceSettings
from seqvae.data.building.split_files import FINAL_TYPES, RAW_TYPES, SplitFiles
from seqvae.data.building.statistics import (
    FAR_OUT,
    GapMoments,
    Moments,
    Pieces,
    gap_moments,
    moment_notes,
    training_moments,
)
from seqvae.data.building.tokens import Tokenizer, places_in, vocabulary
from seqvae.data.description import UNKNOWN, DataDescription
from seqvae.data.flat_file import OFFSETS, PIECE_ITEMS, read_pieces, smallest_unsigned
from seqvae.errors import DataError
from seqvae.text import counted, some

LARGEST_VOCABULARY = 2**24
"""Of ids, unless --vocabulary_size says so: the weights of more fit hardly any machine, and one wrong id would ask for them."""
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


class Finished(NamedTuple):
    description: dict[str, Any]
    """Fields of the DataDescription."""
    counts: dict[str, dict[str, Any]]
    """Per split: missing values, unknown tokens, ..."""
    notes: list[str]


def finish_tokens(
    splits: dict[str, SplitFiles],
    tokenizer: Tokenizer | None,
    source: SourceSettings,
    known: DataDescription | None = None,
) -> Finished:
    """`known`, here and below, is what a trained network understands: its vocabulary and moments then hold."""
    symbols: tuple[str, ...] = ()
    final = None
    if known is not None:
        size, symbols = known.vocabulary_size, known.symbols
        final = places_in(symbols, tokenizer.symbols()) if tokenizer is not None and tokenizer.learns else None
    elif tokenizer is None:
        size = source.vocabulary_size or _vocabulary_of_ids(splits["train"])
    else:
        symbols = tuple(tokenizer.symbols())
        if tokenizer.learns:
            counts_V = _count(splits["train"], "tokens", len(symbols))
            symbols, final = vocabulary(list(symbols), counts_V, source.minimum_count)
            _refuse_empty(symbols, "symbol", counts_V, source)
        size = len(symbols)
    counts: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    for name, files in splits.items():
        unknown = _write_tokens(files, final, size)
        counts[name] = {"unknown": unknown}
        if unknown:
            notes.append(f"{name}: {unknown:,} of {counted(files.steps, 'token')} count as {UNKNOWN}")
    description = {"vocabulary_size": size, "symbols": symbols, "tokenizer": tokenizer.name if tokenizer else None}
    return Finished(description, counts, notes)


def finish_vectors(
    splits: dict[str, SplitFiles],
    names: tuple[str, ...],
    source: SourceSettings,
    known: DataDescription | None = None,
) -> Finished:
    width = len(names)
    if known is not None:
        _refuse_other_features(names, known, source)
        moments = _moments_of(known)
    else:
        moments = training_moments(_vector_pieces(splits["train"], width), names, source.params_map_path)
    counts: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    far_V = np.zeros(width, np.int64)
    for split, files in splits.items():
        writer = files.new_writer("values.bin", np.float32)
        missing_V = np.zeros(width, np.int64)
        for features_E, raw_E in _vector_pieces(files, width)():
            values_TD = _normalise(raw_E, features_E, moments, names, split).reshape(-1, width)
            missing_V += np.isnan(values_TD).sum(axis=0)
            far_V += (np.abs(values_TD) > FAR_OUT).sum(axis=0)
            writer.append(values_TD)
        files.finish("values", writer)
        counts[split] = {"missing": missing_V.tolist()}
        if missing_V.any():
            notes.append(f"{split}: {missing_V.sum():,} of {counted(files.steps * width, 'value')} are missing")
    without = [names[v] for v in np.flatnonzero(moments.count_V == 0)]
    if without:
        unused = "" if known is None else "; here they are not used"
        notes.append(f"warning: without any value in the training split: {some(without)}{unused}")
    description = {"names": names} | _description_of(moments, known)
    return Finished(description, counts, notes + moment_notes(names, moments, far_V))


def finish_events(
    splits: dict[str, SplitFiles],
    symbols: list[str],
    time_unit: str,
    source: SourceSettings,
    known: DataDescription | None = None,
) -> Finished:
    if known is not None:
        names, final_V, moments = known.names, places_in(known.names, symbols), _moments_of(known)
    else:
        seen_V = _count(splits["train"], "variables", len(symbols))
        names, final_V = vocabulary_by_name(symbols, seen_V, source.minimum_count)
        _refuse_empty(names, "variable", seen_V, source)
        moments = training_moments(_event_pieces(splits["train"], final_V), names, source.params_map_path)
    counts: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    far_V = np.zeros(len(names), np.int64)
    for split, files in splits.items():
        number_V, valued_V = np.zeros(len(names), np.int64), np.zeros(len(names), np.int64)
        variables = files.new_writer("variables.bin", smallest_unsigned(len(names)))
        values = files.new_writer("values.bin", np.float32)
        for variables_E, raw_E in _event_pieces(files, final_V)():
            values_E = _normalise(raw_E, variables_E, moments, names, split)
            number_V += np.bincount(variables_E, minlength=len(names))
            valued_V += np.bincount(variables_E[~np.isnan(values_E)], minlength=len(names))
            far_V += np.bincount(variables_E[np.abs(values_E) > FAR_OUT], minlength=len(names))
            variables.append(variables_E)
            values.append(values_E)
        files.finish("variables", variables)
        files.finish("values", values)
        counts[split] = {"events": int(number_V.sum()), "per_name": number_V.tolist(), "valued": valued_V.tolist()}
        if number_V[0]:
            events = counted(int(number_V.sum()), "event")
            notes.append(f"{split}: {number_V[0]:,} of {events} count as {UNKNOWN}, and their values are not used")
    if known is not None:
        gaps = GapMoments(known.log_gap_mean, known.log_gap_std, known.shortest_gap)
        _refuse_other_unit(time_unit, known, source)
    else:
        gaps = gap_moments(lambda: _later_gaps(splits["train"]))
    description = {"names": names, "time_unit": time_unit} | _description_of(moments, known) | gaps._asdict()
    return Finished(description, counts, notes + moment_notes(names, moments, far_V))


def _description_of(moments: Moments, known: DataDescription | None) -> dict[str, Any]:
    if known is not None:
        return {"mean": known.mean, "std": known.std, "valued": known.valued}
    return {
        "mean": tuple(moments.mean_V.tolist()),
        "std": tuple(moments.std_V.tolist()),
        "valued": tuple((moments.count_V > 0).tolist()),
    }


def _moments_of(known: DataDescription) -> Moments:
    """Values of names that training saw none of become NaN: the network has learnt nothing that they could tell it."""
    valued_V, mean_V, std_V = (np.array(each) for each in (known.valued, known.mean, known.std))
    return Moments(valued_V.astype(np.int64), mean_V, np.where(valued_V, std_V, np.nan), np.zeros(len(mean_V), bool))


def _refuse_other_features(names: tuple[str, ...], known: DataDescription, source: SourceSettings) -> None:
    """Lists have no names of their own: theirs are made of the column's, which may be called otherwise."""
    found, wanted = (tuple(re.sub(r"^.*(?=\[\d+\]$)", "", name) for name in each) for each in (names, known.names))
    if found != wanted:
        raise DataError(
            f"{source.data_dir}: holds {counted(len(names), 'feature')} a step ({some(list(names))}), but the network was trained "
            f"on {len(known.names)} ({some(list(known.names))}). Give it data with the same features."
        )


def _refuse_other_unit(time_unit: str, known: DataDescription, source: SourceSettings) -> None:
    if "minutes" in (time_unit, known.time_unit) and time_unit != known.time_unit:
        raise DataError(
            f"{source.data_dir}: times are in {time_unit!r}, but the network was trained on {known.time_unit!r}. Convert them."
        )


def _normalise(
    raw_E: np.ndarray, names_E: np.ndarray, moments: Moments, names: tuple[str, ...], split: str
) -> np.ndarray:
    values_E = (raw_E - moments.mean_V[names_E]) / moments.std_V[names_E]
    beyond = np.flatnonzero(np.abs(values_E) > LARGEST_FLOAT32)
    if len(beyond):
        worst = int(beyond[0])
        raise DataError(
            f"{split}: {names[names_E[worst]]!r} is {raw_E[worst]:g} once, {values_E[worst]:.0e} standard deviations of the "
            f"training split from its mean, which float32 cannot hold. Correct it, or give moments with --params_map_path."
        )
    return values_E


def vocabulary_by_name(
    symbols: list[str], seen_V: np.ndarray, minimum_count: int
) -> tuple[tuple[str, ...], np.ndarray]:
    """The variables kept, <unknown> first and the others by name, and the final number of each.

    >>> vocabulary_by_name(["pulse", "age", "rare"], np.array([3, 2, 1]), minimum_count=2)
    (('<unknown>', 'age', 'pulse'), array([2, 1, 0], dtype=int32))
    """
    kept = sorted(
        (symbol, number)
        for number, symbol in enumerate(symbols)
        if seen_V[number] >= minimum_count and symbol != UNKNOWN
    )
    final_V = np.zeros(len(symbols), np.int32)
    final_V[[number for _, number in kept]] = np.arange(1, len(kept) + 1)
    return (UNKNOWN, *(symbol for symbol, _ in kept)), final_V


def _refuse_empty(kept: tuple[str, ...], noun: str, counts_V: np.ndarray, source: SourceSettings) -> None:
    if len(kept) == 1:
        raise DataError(
            f"{source.data_dir}: no {noun} of the training split is seen --minimum_count {source.minimum_count} times, the "
            f"most frequent one {counts_V.max()} times. Lower it."
        )


def _write_tokens(files: SplitFiles, final: np.ndarray | None, size: int) -> int:
    """Write tokens.bin; return how many tokens are unknown."""
    unknown = done = 0
    writer = files.new_writer("tokens.bin", smallest_unsigned(max(size - 1, 1)))
    for ids_T in read_pieces(files.raw_path("tokens"), RAW_TYPES["tokens"]):
        if final is not None:
            ids_T = final[ids_T]
            unknown += int((ids_T == 0).sum())
        elif ids_T.max() >= size:
            step = int(np.flatnonzero(ids_T >= size)[0])
            raise DataError(
                f"{files.place_of_step(done + step)}: holds token id {ids_T[step]}, which is past the vocabulary of {size} ids "
                f"(the largest of the training split is {size - 1}). Correct it, or say how many ids there are with "
                f"--vocabulary_size."
            )
        done += len(ids_T)
        writer.append(ids_T)
    files.finish("tokens", writer)
    return unknown


def _vocabulary_of_ids(files: SplitFiles) -> int:
    """The largest id and one, where that is a size that somebody can have meant."""
    largest = first = done = 0
    for piece in read_pieces(files.raw_path("tokens"), RAW_TYPES["tokens"]):
        if piece.max() > largest:
            largest, first = int(piece.max()), done + int(piece.argmax())
        done += len(piece)
    if largest >= LARGEST_VOCABULARY:
        raise DataError(
            f"{files.place_of_step(first)}: holds token id {largest}, which would make a vocabulary of {largest + 1:,} ids, with "
            f"weights for each of them. Correct it, or number the ids 0, 1, 2, ...; if there are so many, say so with "
            f"--vocabulary_size, or with less to leave out what is larger with --bad_values drop."
        )
    return largest + 1


def _count(files: SplitFiles, name: str, size: int) -> np.ndarray:
    """How often each symbol number occurs."""
    counts_V = np.zeros(size, np.int64)
    for piece in read_pieces(files.raw_path(name), RAW_TYPES[name]):
        counts_V += np.bincount(piece, minlength=size)
    return counts_V


def _vector_pieces(files: SplitFiles, width: int) -> Pieces:
    def pieces() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for values_E in read_pieces(
            files.raw_path("values"), RAW_TYPES["values"], max(1, PIECE_ITEMS // width) * width
        ):
            yield np.tile(np.arange(width), len(values_E) // width), values_E

    return pieces


def _event_pieces(files: SplitFiles, final_V: np.ndarray) -> Pieces:
    def pieces() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        variables = read_pieces(files.raw_path("variables"), RAW_TYPES["variables"])
        values = read_pieces(files.raw_path("values"), RAW_TYPES["values"])
        for numbers_E, values_E in zip(variables, values, strict=True):
            variables_E = final_V[numbers_E]
            yield variables_E, np.where(variables_E == 0, np.nan, values_E)  # what is unknown has no scale of its own

    return pieces


def _later_gaps(files: SplitFiles) -> Iterator[np.ndarray]:
    """The gaps of a split but those of first steps, before which there was nothing."""
    starts_S = np.fromfile(files.directory / OFFSETS, np.int64)
    done = 0
    for gaps_T in read_pieces(files.directory / files.entries["gaps"]["file"], FINAL_TYPES["gaps"]):
        first, behind = np.searchsorted(starts_S, (done, done + len(gaps_T)))
        yield np.delete(gaps_T, starts_S[first:behind] - done)
        done += len(gaps_T)
