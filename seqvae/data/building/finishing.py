"""The second pass of a cache build: from raw arrays to final ones, with what is known only from the whole training split.

Tokens get their final ids in the smallest integer type; vectors and events are normalised, once and for all, by the
training split's mean and standard deviation; values of names of which that split has none become missing ones. Gaps stay as they
are, and the moments of their logarithms are noted. Labels become the numbers of their classes.

`known` is the data that a trained network understands, where the cache is built for one: its vocabulary and moments are then used.

Shapes: V names (tokens, features, variables), T steps, D features, E values or events, N sequences, C classes, L rows of the
label file.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from seqvae.config.data import SourceSettings
from seqvae.data.building.encoders import Tokenizer, number_texts
from seqvae.data.building.tails import OUTER, measure_tails
from seqvae.data.description import UNKNOWN, DataDescription
from seqvae.data.flat_file import FINAL_TYPES, OFFSETS, PIECE_ITEMS, SplitFiles, read_pieces
from seqvae.data.parquet.schema import Layout
from seqvae.data.parquet.side_tables import ids_as_text, read_labels, read_params_map
from seqvae.errors import DataError
from seqvae.text import counted, some

LARGEST_VOCABULARY = 2**24
"""Most token ids without --vocabulary_size: the weights of more fit hardly any machine, and one wrong id would require them."""
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
FAR_OUT = 10.0
"""Standard deviations, as values are scaled, from the mean beyond which a value is counted as an outlier."""
HEAVY = 3.0
"""Standard deviation of all values over that of the values between the outer quantiles, above which tails are heavy: of a normal
distribution it is 1.07, of an exponential one 1.13, of a log-normal one of 1 nat 1.4."""
CONSTANT = 1e-12
"""A standard deviation below this share of the mean is rounding, not variation."""
LEAST_LOG_GAP_STD = 0.1
"""Gaps that differ by less than a tenth come from a clock: normalised by its jitter, a gap twice as long would be far too large."""
MOST_UNKNOWN = 0.5
"""The largest probability of <unknown>: where all symbols occur only once, the estimate would leave nothing for those known."""
SHOWN_CLASSES = 10
WHOLE = re.compile(r"-?\d+", re.ASCII)

Pieces = Callable[[], Iterator[tuple[np.ndarray, np.ndarray]]]
"""Starts over at each call; yields arrays of names (as numbers) and of their values, NaN where missing."""


class Finished(NamedTuple):
    """The result of the second pass."""

    description: dict[str, Any]
    """Fields of the DataDescription."""
    counts: dict[str, dict[str, Any]]
    """Counts of each split: missing values, unknown tokens, ..."""
    notes: list[str]


class GapMoments(NamedTuple):
    """Moments of the logarithms of gaps: fields of the DataDescription."""

    log_gap_mean: float
    log_gap_std: float
    shortest_gap: float


# --- Tokens ---------------------------------------------------------------------------------------------------------


def finish_tokens(
    splits: dict[str, SplitFiles], tokenizer: Tokenizer | None, source: SourceSettings, known: DataDescription | None
) -> Finished:
    symbols = () if tokenizer is None else tuple(tokenizer.symbols())
    final_V, unknown_share = None, 0.0
    if tokenizer is not None and tokenizer.learns:
        symbols, final_V, unknown_share = _vocabulary(splits, "tokens", symbols, source, known)
    if known is not None:
        size, symbols = known.vocabulary_size, known.symbols
    elif tokenizer is not None:
        size = len(symbols)
    elif source.vocabulary_size is not None:
        size = source.vocabulary_size
    else:
        largest = first = done = 0
        for ids_T in read_pieces(*splits["train"].raw("tokens")):
            if ids_T.max() > largest:
                largest, first = int(ids_T.max()), done + int(ids_T.argmax())
            done += len(ids_T)
        size = largest + 1
        if size > LARGEST_VOCABULARY:
            raise DataError(
                f"{splits['train'].place_of_step(first)}: holds token id {largest}, which would make a vocabulary of {size:,} "
                f"ids, with weights for each of them. Correct it, or number the ids 0, 1, 2, ...; if the vocabulary is that "
                f"large, give its size with --vocabulary_size, or a smaller one to leave out larger ids with --bad_values drop."
            )
    counts: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    for name, files in splits.items():
        unknown = done = 0
        writer = files.new_writer("tokens.bin", np.min_scalar_type(max(size - 1, 1)))
        for ids_T in read_pieces(*files.raw("tokens")):
            if final_V is not None:
                ids_T = final_V[ids_T]
                unknown += int((ids_T == 0).sum())
            elif ids_T.max() >= size:
                step = int(np.flatnonzero(ids_T >= size)[0])
                raise DataError(
                    f"{files.place_of_step(done + step)}: holds token id {ids_T[step]}, which is past the vocabulary of {size} "
                    f"ids (the largest of the training split is {size - 1}). Correct it, or give the number of ids with "
                    f"--vocabulary_size."
                )
            done += len(ids_T)
            writer.append(ids_T)
        files.finish(writer)
        counts[name] = {"unknown": unknown}
        if unknown:
            notes.append(f"{name}: {unknown:,} of {counted(files.steps, 'token')} count as {UNKNOWN}")
    description = {"vocabulary_size": size, "symbols": symbols, "tokenizer": tokenizer.name if tokenizer else None}
    return Finished(description | {"unknown_share": unknown_share}, counts, notes)


def _vocabulary(
    splits: dict[str, SplitFiles],
    array: str,
    symbols: Sequence[str],
    source: SourceSettings,
    known: DataDescription | None,
) -> tuple[tuple[str, ...], np.ndarray, float]:
    """Return a vocabulary, <unknown> first, the id in it of each symbol that numbers of a raw array stand for, and the share of
    steps that will hold an unknown one.

    It is what a trained network knows, or else the symbols that are frequent enough in the training split: those of tokens
    with the more frequent first, variables by name. New symbols will come as often as those of the training split did that
    were new there and stayed so (Good and Turing: the symbols seen once, of all that was seen).
    """
    if known is not None:
        vocabulary, unknown_share = known.symbols if array == "tokens" else known.names, known.unknown_share
    else:
        counts_V = np.zeros(len(symbols), np.int64)
        for piece in read_pieces(*splits["train"].raw(array)):
            counts_V += np.bincount(piece, minlength=len(symbols))
        kept = np.flatnonzero(counts_V >= source.minimum_count).tolist()
        kept.sort(key=lambda number: (-counts_V[number] if array == "tokens" else 0, symbols[number]))
        kept = [number for number in kept if symbols[number] != UNKNOWN]
        vocabulary = (UNKNOWN, *(symbols[number] for number in kept))
        if len(vocabulary) == 1:
            noun = "symbol" if array == "tokens" else "variable"
            raise DataError(
                f"{source.data_dir}: no {noun} of the training split is seen --minimum_count {source.minimum_count} times, "
                f"the most frequent one {counts_V.max()} times. Lower it."
            )
        unknown_share = min(MOST_UNKNOWN, int((counts_V[kept] == 1).sum()) / splits["train"].steps)
    id_of = {symbol: number for number, symbol in enumerate(vocabulary)}
    return vocabulary, np.array([id_of.get(symbol, 0) for symbol in symbols], np.int32), unknown_share


# --- Vectors and events ---------------------------------------------------------------------------------------------


def finish_vectors(
    splits: dict[str, SplitFiles], names: tuple[str, ...], source: SourceSettings, known: DataDescription | None
) -> Finished:
    width = len(names)

    def pieces_of(files: SplitFiles) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for values_E in read_pieces(*files.raw("values"), max(1, PIECE_ITEMS // width) * width):
            yield np.tile(np.arange(width), len(values_E) // width), values_E

    if known is not None:
        # Lists have no names of their own: theirs are made of the column's, which may be called otherwise.
        here, trained = ([re.sub(r"^.*(?=\[\d+\]$)", "", name) for name in each] for each in (names, known.names))
        if here != trained:
            raise DataError(
                f"{source.data_dir}: holds {counted(width, 'feature')} per step ({some(list(names))}), but the network was trained "
                f"on {len(known.names)} ({some(list(known.names))}). Give it data with the same features."
            )
    scale = Scale(lambda: pieces_of(splits["train"]), names, source, known)
    counts: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    for split, files in splits.items():
        writer = files.new_writer("values.bin", np.float32)
        missing_V = np.zeros(width, np.int64)
        for features_E, raw_E in pieces_of(files):
            values_E = scale.normalise(raw_E, features_E, split)
            missing_V += np.isnan(values_E.reshape(-1, width)).sum(axis=0)
            writer.append(values_E)
        files.finish(writer)
        counts[split] = {"missing": missing_V.tolist()}
        if missing_V.any():
            notes.append(f"{split}: {missing_V.sum():,} of {counted(files.steps * width, 'value')} are missing")
    without = [names[v] for v in np.flatnonzero(scale.count_V == 0)]
    if without:
        notes.append(f"warning: without any value in the training split: {some(without)}")
    return Finished({"names": names} | scale.fields, counts, notes + scale.notes())


def finish_events(
    splits: dict[str, SplitFiles],
    symbols: list[str],
    time_unit: str,
    source: SourceSettings,
    known: DataDescription | None,
) -> Finished:
    def pieces_of(files: SplitFiles) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        values = read_pieces(*files.raw("values"))
        for numbers_E, values_E in zip(read_pieces(*files.raw("variables")), values, strict=True):
            variables_E = final_V[numbers_E]
            yield variables_E, np.where(variables_E == 0, np.nan, values_E)  # what is unknown has no scale of its own

    names, final_V, unknown_share = _vocabulary(splits, "variables", symbols, source, known)
    scale = Scale(lambda: pieces_of(splits["train"]), names, source, known)
    counts: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    for split, files in splits.items():
        number_V, valued_V = np.zeros(len(names), np.int64), np.zeros(len(names), np.int64)
        variables = files.new_writer("variables.bin", np.min_scalar_type(len(names)))
        values = files.new_writer("values.bin", np.float32)
        for variables_E, raw_E in pieces_of(files):
            values_E = scale.normalise(raw_E, variables_E, split)
            number_V += np.bincount(variables_E, minlength=len(names))
            valued_V += np.bincount(variables_E[~np.isnan(values_E)], minlength=len(names))
            variables.append(variables_E)
            values.append(values_E)
        files.finish(variables)
        files.finish(values)
        counts[split] = {"events": int(number_V.sum()), "per_name": number_V.tolist(), "valued": valued_V.tolist()}
        if number_V[0]:
            events = counted(int(number_V.sum()), "event")
            notes.append(f"{split}: {number_V[0]:,} of {events} count as {UNKNOWN}, and their values are not used")
    if known is not None:
        gaps = GapMoments(known.log_gap_mean, known.log_gap_std, known.shortest_gap)
        if "minutes" in (time_unit, known.time_unit) and time_unit != known.time_unit:
            raise DataError(
                f"{source.data_dir}: times are in {time_unit!r}, but the network was trained on {known.time_unit!r}. Convert "
                f"them."
            )
    else:
        gaps = gap_moments(lambda: _later_gaps(splits["train"]))
    rates = (
        known.presence_rates
        if known is not None
        else presence_rates(counts["train"]["per_name"], splits["train"].steps)
    )
    description = {"names": names, "unknown_share": unknown_share, "presence_rates": rates, "time_unit": time_unit}
    return Finished(description | scale.fields | gaps._asdict(), counts, notes + scale.notes())


def presence_rates(number_V: Sequence[int], steps: int) -> tuple[float, ...]:
    """Return the share of the steps that hold each variable; a step may hold several that count as <unknown>."""
    return tuple((min(number, steps) + 0.5) / (steps + 1) for number in number_V)


def _later_gaps(files: SplitFiles) -> Iterator[np.ndarray]:
    """Yield the gaps of a split except those of first steps, before which there was nothing."""
    starts_S = np.fromfile(files.directory / OFFSETS, np.int64)
    done = 0
    for gaps_T in read_pieces(files.directory / files.entries["gaps"]["file"], FINAL_TYPES["gaps"]):
        first, behind = np.searchsorted(starts_S, (done, done + len(gaps_T)))
        yield np.delete(gaps_T, starts_S[first:behind] - done)
        done += len(gaps_T)


# --- Moments --------------------------------------------------------------------------------------------------------


class Scale:
    """The moments of each of V names over the training split, by which values are normalised: those that a trained network knows,
    those of --params_map_path, or else those of the pieces, where tails are heavy without the extreme ones."""

    def __init__(
        self, pieces: Pieces, names: tuple[str, ...], source: SourceSettings, known: DataDescription | None
    ) -> None:
        self._names = names
        self._far_V = np.zeros(len(names), np.int64)
        self._constant_V = np.zeros(len(names), bool)
        self._tamed: list[str] = []
        """Names with heavy tails: their scale, and what it would be with all values."""
        self._codes: dict[float, np.ndarray] = {}
        """Values that look like codes for what was not measured: how often they stand in each name, [V]; -1: they do not there."""
        self._unlearned_V: dict[str, np.ndarray] = {}
        """Per split: how many values each name has that count as missing, as training saw none of its values."""
        self.fields: dict[str, tuple[Any, ...]]
        """Fields of the DataDescription."""
        if known is not None:
            self.fields = {"mean": known.mean, "std": known.std, "valued": known.valued, "robust": known.robust}
            self.count_V = np.array(known.valued, np.int64)
            self._set_moments(np.array(known.mean), np.array(known.std))
            return
        self.count_V, mean_V, std_V = _measure(pieces, len(names))
        tails = measure_tails(pieces, self.count_V)
        self._codes = {code: np.where(of_V, 0, -1) for code, of_V in tails.codes.items()}
        robust_V = np.zeros(len(names), bool)
        if source.params_map_path is not None:
            moments_of = read_params_map(source.params_map_path)
            valued = [name for name, count in zip(names, self.count_V, strict=True) if count > 0]
            if missing := [name for name in valued if name not in moments_of]:
                raise DataError(
                    f"--params_map_path {source.params_map_path}: lacks {len(missing)} of those that have values "
                    f"({some(missing)}). Add them."
                )
            mean_V, std_V = np.array([moments_of.get(name, (0.0, 1.0)) for name in names]).T
        elif source.robust_scaling:
            inner_V = tails.inner_std_V
            robust_V = (inner_V > CONSTANT * np.abs(tails.inner_mean_V)) & (std_V > HEAVY * inner_V)
            self._tamed = [f"{names[v]} ({inner_V[v]:.4g}, not {std_V[v]:.4g})" for v in np.flatnonzero(robust_V)]
            mean_V, std_V = np.where(robust_V, tails.inner_mean_V, mean_V), np.where(robust_V, inner_V, std_V)
        self._constant_V = std_V <= CONSTANT * np.abs(mean_V)
        std_V = np.where(self._constant_V, 1.0, std_V)
        arrays = {"mean": mean_V, "std": std_V, "valued": self.count_V > 0}
        self.fields = {name: tuple(array.tolist()) for name, array in arrays.items()}
        self.fields["robust"] = tuple(robust_V.tolist()) if robust_V.any() else ()
        self._set_moments(mean_V, std_V)

    def _set_moments(self, mean_V: np.ndarray, std_V: np.ndarray) -> None:
        """Scale by these moments. Values of names of which training saw none become NaN: no network learns anything of them."""
        self._mean_V, self._std_V = mean_V, np.where(self.count_V > 0, std_V, np.nan)

    def normalise(self, raw_E: np.ndarray, names_E: np.ndarray, split: str) -> np.ndarray:
        """Return the values in standard deviations from the mean of their name; those that lie far out are counted."""
        values_E = (raw_E - self._mean_V[names_E]) / self._std_V[names_E]
        distance_E = np.abs(values_E)
        beyond = np.flatnonzero(distance_E > LARGEST_FLOAT32)
        if len(beyond):
            worst = int(beyond[0])
            raise DataError(
                f"{split}: {self._names[names_E[worst]]!r} is {raw_E[worst]:g} once, {values_E[worst]:.0e} standard deviations "
                f"of the training split from its mean, which float32 cannot hold. Correct it, or give moments with "
                f"--params_map_path."
            )
        self._far_V += np.bincount(names_E[distance_E > FAR_OUT], minlength=len(self._names))
        for code, counts_V in self._codes.items():
            found_V = np.bincount(names_E[raw_E == code], minlength=len(self._names))
            self._codes[code] = np.where(counts_V < 0, counts_V, counts_V + found_V)
        unlearned_E = np.isnan(values_E) & ~np.isnan(raw_E)
        counts_V = np.bincount(names_E[unlearned_E], minlength=len(self._names))
        self._unlearned_V[split] = self._unlearned_V.get(split, 0) + counts_V
        return values_E

    def notes(self) -> list[str]:
        notes, names, far_V = [], self._names, self._far_V
        constant = [names[v] for v in np.flatnonzero(self._constant_V & (self.count_V > 0))]
        if constant:
            notes.append(f"warning: constant in the training split, left unscaled: {some(constant)}")
        if self._codes:
            shown = [
                f"{_written(code)} in {some([f'{names[v]} ({counts_V[v]:,})' for v in np.flatnonzero(counts_V > 0)])}"
                for code, counts_V in self._codes.items()
            ]
            they = "it means" if len(shown) == 1 else "they mean"
            notes.append(
                f"warning: repeated, and far from all other values: {'; '.join(shown)}. If {they} that nothing was measured: "
                f"--missing_values {','.join(map(_written, self._codes))}"
            )
        if self._tamed:
            low, high = OUTER
            notes.append(
                f"heavy tails: scaled by the values between their {low:.0%} and {high:.0%} quantiles alone "
                f"(--no_robust_scaling: by all): {some(self._tamed)}"
            )
        for split, unlearned_V in self._unlearned_V.items():
            if unlearned_V.any():
                shown = [f"{names[v]} ({unlearned_V[v]:,})" for v in np.flatnonzero(unlearned_V)]
                values, count = (
                    counted(int(unlearned_V.sum()), "value"),
                    "counts" if unlearned_V.sum() == 1 else "count",
                )
                notes.append(
                    f"warning: {split}: {values} {count} as missing, as training saw no value of theirs: {some(shown)}"
                )
        if far_V.sum():
            worst = [f"{names[v]} {far_V[v]:,}" for v in np.argsort(-far_V)[:5] if far_V[v]]
            lie = "lies" if far_V.sum() == 1 else "lie"
            notes.append(
                f"{counted(int(far_V.sum()), 'value')} {lie} more than {FAR_OUT:g} standard deviations from the mean "
                f"({', '.join(worst)}{', ...' if (far_V > 0).sum() > 5 else ''})"
            )
        return notes


def _written(value: float) -> str:
    """Return a number as a user would write it, also one that was stored with the digits of a float32.

    >>> _written(-9999.0), _written(float(np.float32(-999.9)))
    ('-9999', '-999.9')
    """
    single = np.float32(value)
    return np.format_float_positional(single if float(single) == value else value, trim="-")


def gap_moments(pieces: Callable[[], Iterator[np.ndarray]]) -> GapMoments:
    """Return the moments of the gaps before all but the first steps.

    The shortest gap that differs from 0 is half the smallest that is not 0: where times are rounded, a shorter one becomes 0.
    """
    smallest = min((float(gaps_T[gaps_T > 0].min(initial=np.inf)) for gaps_T in pieces()), default=np.inf)
    if smallest == np.inf:
        return GapMoments(0.0, 1.0, 1.0)
    shortest = smallest / 2
    _, mean_1, std_1 = _measure(
        lambda: (
            (np.zeros(len(gaps_T), np.int64), np.log(np.maximum(gaps_T, shortest, dtype=np.float64)))
            for gaps_T in pieces()
        ),
        size=1,
    )
    return GapMoments(float(mean_1[0]), max(float(std_1[0]), LEAST_LOG_GAP_STD), shortest)


def _measure(pieces: Pieces, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return count, mean and standard deviation in two passes, which is exact where one pass would cancel.

    Sums are of differences to one value of each name: those of a constant are exactly 0.
    """
    count_V, base_V = np.zeros(size, np.int64), np.full(size, np.nan)
    sum_V, square_V = np.zeros(size), np.zeros(size)
    for every_E, raw_E in pieces():
        present_E = ~np.isnan(raw_E)
        names_E, values_E = every_E[present_E], raw_E[present_E]
        found_V = np.full(size, np.nan)
        found_V[names_E] = values_E
        base_V = np.where(np.isnan(base_V), found_V, base_V)
        count_V += np.bincount(names_E, minlength=size)
        sum_V += np.bincount(names_E, values_E - base_V[names_E], minlength=size)
    mean_V = np.nan_to_num(base_V) + sum_V / np.maximum(count_V, 1)
    for every_E, raw_E in pieces():
        present_E = ~np.isnan(raw_E)
        names_E, values_E = every_E[present_E], raw_E[present_E]
        square_V += np.bincount(names_E, (values_E - mean_V[names_E]) ** 2, minlength=size)
    return count_V, mean_V, np.sqrt(square_V / np.maximum(count_V, 1))


# --- Labels ---------------------------------------------------------------------------------------------------------


def finish_labels(
    splits: dict[str, SplitFiles], layout: Layout, source: SourceSettings
) -> tuple[tuple[str, ...], list[str]]:
    """Write labels.bin for each split (the number of the class, -1 where there is none), from a column of the data or from a file
    beside them. Return the names of the classes, and notes."""
    if source.label_path is None and layout.label is None:
        return (), []
    notes: list[str] = []
    number_of: dict[str, int] = {}
    coded: dict[str, np.ndarray] = {}
    if source.label_path is None:
        where = f"column {layout.label!r}"
        for split, files in splits.items():
            coded[split] = np.concatenate([number_texts(chunk, number_of) for chunk in files.table["label"].chunks])
    else:
        where = f"--label_path {source.label_path}"
        labels = read_labels(source.label_path, source.label_column, layout.id or source.id_column)
        code_L = np.append(number_texts(pa.array(labels, pa.large_string()), number_of), -1)
        used_L = np.zeros(len(code_L), bool)
        for split, files in splits.items():
            texts = (ids_as_text(chunk.to_numpy(zero_copy_only=False)) for chunk in files.table["id"].chunks)
            row_N = np.concatenate([labels.index.get_indexer(ids) for ids in texts])
            coded[split] = code_L[row_N]
            used_L[row_N] = True
        if unused := int((~used_L[:-1]).sum()):
            notes.append(f"{where}: {counted(unused, 'row')} without a sequence in the data")
    for split, code_N in coded.items():
        missing = np.flatnonzero(code_N < 0)
        how_many = f"{len(missing):,} of {counted(len(code_N), 'sequence')} have no label"
        if len(missing) and not source.allow_missing_labels:
            files, first = splits[split], int(missing[0])
            raise DataError(
                f"{files.place_of(first)}: id {files.table['id'][first].as_py()!r} has no label in {where}; in "
                f"{split} {how_many}. Add them, or accept that with --allow_missing_labels."
            )
        if len(missing):
            notes.append(f"{split}: {how_many}")

    names = list(number_of)
    count_V = {split: np.bincount(code_N[code_N >= 0], minlength=len(names)) for split, code_N in coded.items()}
    in_use = np.flatnonzero(sum(count_V.values()))
    if not len(in_use):
        raise DataError(
            f"{where}: no sequence has a label there. Check the ids, or leave --label_path and --label_column out."
        )
    classes = [
        names[code] for code in in_use
    ]  # names of numbers and whole numbers in their order, then text in its order
    number_named = {name: number for number, name in enumerate(layout.label_names)}
    number_named |= {name: int(name) for name in classes if WHOLE.fullmatch(name) and name not in number_named}
    classes.sort(key=lambda name: (name not in number_named, number_named.get(name, 0), name))
    code_C = [number_of[name] for name in classes]
    final_V = np.full(len(names) + 1, -1, np.int32)  # the last one stands for code -1
    final_V[code_C] = np.arange(len(classes))
    for split, files in splits.items():
        writer = files.new_writer("labels.bin", np.int32)
        writer.append(final_V[coded[split]])
        files.finish(writer)

    if "train" not in splits:  # data that a trained network is used on
        return tuple(classes), notes
    if len(classes) == 1:
        notes.append(f"warning: all labels are {classes[0]!r}, so that there is nothing to tell apart")
        return tuple(classes), notes
    counts_C = count_V["train"][code_C].tolist()
    shown = [f"{name!r}: {count:,}" for name, count in zip(classes, counts_C, strict=True)]
    more = ", ..." if len(classes) > SHOWN_CLASSES else ""
    notes.append(f"labels have {len(classes)} classes (in train {', '.join(shown[:SHOWN_CLASSES])}{more})")
    absent = [repr(name) for name, count in zip(classes, counts_C, strict=True) if count == 0]
    if absent:
        notes.append(f"warning: no sequence of the training split has the label {some(absent)}")
    return tuple(classes), notes
