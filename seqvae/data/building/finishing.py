"""The second pass of a cache build: from raw arrays to final ones, with what is known only from the whole training split.

Tokens get their final ids in the smallest integer type; vectors and events are normalised, once and for all, by the
training split's mean and standard deviation; values of names of which that split has none become missing ones. Gaps stay as they
are, and the moments of their logarithms are noted. Labels become the numbers of their classes.

What is known only from all parts is gathered from each of them and added up; then each is written, and all are joined.

`known` is the data that a trained network understands, where the cache is built for one: its vocabulary and moments are then used.

Shapes: V names (tokens, features, variables), T steps, D features, E values or events, N sequences, C classes, L rows of the
label file.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from seqvae.config.data import SourceSettings
from seqvae.data.building.encoders import Tokenizer, number_texts
from seqvae.data.building.parts import Each, Part, Pieces
from seqvae.data.building.tails import OUTER, measure_tails
from seqvae.data.description import UNKNOWN, DataDescription
from seqvae.data.flat_file import FINAL_TYPES, PIECE_ITEMS, SplitFiles, read_pieces
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


@dataclass
class Written:
    """The counts taken while the final arrays of a part, or of several, were written."""

    counts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Per split: numbers, and numbers of each name [V], which add up over parts."""
    far_V: Any = 0
    """Values of each name that lie far out."""
    codes: dict[float, np.ndarray] = field(default_factory=dict)
    """Values that look like codes for what was not measured: how often they stand in each name, [V]."""
    unlearned: dict[str, np.ndarray] = field(default_factory=dict)
    """Per split: how many values each name has that count as missing, as training saw none of its values, [V]."""

    def add(self, other: "Written") -> None:
        for split, counts in other.counts.items():
            _add_to(self.counts.setdefault(split, {}), counts)
        self.far_V = self.far_V + other.far_V
        _add_to(self.codes, other.codes)
        _add_to(self.unlearned, other.unlearned)


@dataclass(frozen=True)
class SecondPass:
    """The parts that were read, and all that the second pass needs beside them."""

    parts: Sequence[Part]
    splits: dict[str, SplitFiles]
    """Those of all parts together, to which their final arrays are joined."""
    source: SourceSettings
    known: DataDescription | None
    each: Each

    def write(self, write_part: Callable[[Part], tuple[Part, Written]]) -> tuple[dict[str, dict[str, Any]], Written]:
        """Write the final arrays of all parts and join them; return the counts of each split, and all that was counted."""
        total = Written()
        for part, written in self.each(write_part, self.parts):
            total.add(written)
            for split, files in part.splits.items():
                if files.directory == self.splits[split].directory:  # a single part
                    self.splits[split].entries = files.entries
                else:
                    self.splits[split].join_arrays(files)
        for files in self.splits.values():
            files.close()
        counts = {split: {name: _plain(count) for name, count in total.counts[split].items()} for split in self.splits}
        return counts, total


def _add_to(sums: dict[Any, Any], numbers: Mapping[Any, Any]) -> None:
    for name, number in numbers.items():
        sums[name] = sums.get(name, 0) + number


def _plain(count: Any) -> Any:
    """Return a number, or a list of them, as JSON has it."""
    return count.tolist() if isinstance(count, np.ndarray) else int(count)


# --- Tokens ---------------------------------------------------------------------------------------------------------


def finish_tokens(second: SecondPass, tokenizer: Tokenizer | None) -> Finished:
    source, known, splits = second.source, second.known, second.splits
    symbols = () if tokenizer is None else tuple(tokenizer.symbols())
    learns, unknown_share = tokenizer is not None and tokenizer.learns, 0.0
    if learns:
        symbols, unknown_share = _vocabulary(second, "tokens")
    if known is not None:
        size, symbols = known.vocabulary_size, known.symbols
    elif tokenizer is not None:
        size = len(symbols)
    elif source.vocabulary_size is not None:
        size = source.vocabulary_size
    else:
        found = [largest for largest in second.each(_largest_token, second.parts) if largest is not None]
        largest, place = max(found, key=lambda one: one[0])  # the first of several
        size = largest + 1
        if size > LARGEST_VOCABULARY:
            raise DataError(
                f"{place}: holds token id {largest}, which would make a vocabulary of {size:,} "
                f"ids, with weights for each of them. Correct it, or number the ids 0, 1, 2, ...; if the vocabulary is that "
                f"large, give its size with --vocabulary_size, or a smaller one to leave out larger ids with --bad_values drop."
            )
    counts, _ = second.write(partial(_write_tokens, symbols if learns else None, size))
    notes = [
        f"{split}: {of['unknown']:,} of {counted(splits[split].steps, 'token')} count as {UNKNOWN}"
        for split, of in counts.items()
        if of["unknown"]
    ]
    description = {"vocabulary_size": size, "symbols": symbols, "tokenizer": tokenizer.name if tokenizer else None}
    return Finished(description | {"unknown_share": unknown_share}, counts, notes)


def _largest_token(part: Part) -> tuple[int, str] | None:
    """Return the largest token id of the training split, and where the first sequence that has it begins."""
    if "train" not in part.splits:
        return None
    files = part.splits["train"]
    largest, first, done = -1, 0, 0
    for ids_T in read_pieces(*files.raw("tokens")):
        if ids_T.max() > largest:
            largest, first = int(ids_T.max()), done + int(ids_T.argmax())
        done += len(ids_T)
    return largest, files.place_of_step(first)


def _write_tokens(vocabulary: Sequence[str] | None, size: int, part: Part) -> tuple[Part, Written]:
    """Write the final ids of a part's tokens: by a vocabulary, or as they are."""
    final_V = None if vocabulary is None else _final_numbers(vocabulary, part.symbols)
    written = Written()
    for split, files in part.splits.items():
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
        written.counts[split] = {"unknown": unknown}
    return part, written


def _vocabulary(second: SecondPass, array: str) -> tuple[tuple[str, ...], float]:
    """Return a vocabulary, <unknown> first, of the symbols that numbers of a raw array stand for, and the share of steps that will
    hold an unknown one.

    It is what a trained network knows, or else the symbols that are frequent enough in the training split: those of tokens
    with the more frequent first, variables by name. New symbols will come as often as those of the training split did that
    were new there and stayed so (Good and Turing: the symbols seen once, of all that was seen).
    """
    source, known = second.source, second.known
    if known is not None:
        return known.symbols if array == "tokens" else known.names, known.unknown_share
    counts: Counter[str] = Counter()
    for part, counts_V in zip(second.parts, second.each(partial(_count_symbols, array), second.parts), strict=True):
        counts.update(dict(zip(part.symbols, counts_V.tolist(), strict=True)))
    kept = [symbol for symbol, count in counts.items() if count >= source.minimum_count and symbol != UNKNOWN]
    kept.sort(key=lambda symbol: (-counts[symbol] if array == "tokens" else 0, symbol))
    if not kept:
        noun = "symbol" if array == "tokens" else "variable"
        raise DataError(
            f"{source.data_dir}: no {noun} of the training split is seen --minimum_count {source.minimum_count} times, "
            f"the most frequent one {max(counts.values())} times. Lower it."
        )
    seen_once = sum(counts[symbol] == 1 for symbol in kept)
    return (UNKNOWN, *kept), min(MOST_UNKNOWN, seen_once / second.splits["train"].steps)


def _count_symbols(array: str, part: Part) -> np.ndarray:
    """Return how often each symbol of a part stands in its training split."""
    counts_V = np.zeros(len(part.symbols), np.int64)
    if "train" in part.splits:
        for piece in read_pieces(*part.splits["train"].raw(array)):
            counts_V += np.bincount(piece, minlength=len(part.symbols))
    return counts_V


def _final_numbers(vocabulary: Sequence[str], symbols: Sequence[str]) -> np.ndarray:
    """Return the number in a vocabulary of each symbol."""
    number_of = {symbol: number for number, symbol in enumerate(vocabulary)}
    return np.array([number_of.get(symbol, 0) for symbol in symbols], np.int32)


# --- Vectors and events ---------------------------------------------------------------------------------------------


def finish_vectors(second: SecondPass, layout: Layout) -> Finished:
    source, known, splits = second.source, second.known, second.splits
    width = max(part.width for part in second.parts)
    assert all(part.width in (0, width) for part in second.parts), "every part was told the width"
    names = layout.features or tuple(f"{layout.sequence}[{place}]" for place in range(width))
    if known is not None:
        # Lists have no names of their own: theirs are made of the column's, which may be called otherwise.
        here, trained = ([re.sub(r"^.*(?=\[\d+\]$)", "", name) for name in each] for each in (names, known.names))
        if here != trained:
            raise DataError(
                f"{source.data_dir}: holds {counted(width, 'feature')} per step ({some(list(names))}), but the network was trained "
                f"on {len(known.names)} ({some(list(known.names))}). Give it data with the same features."
            )
    scale = fit_scale(second, partial(_vector_pieces, width), names)
    counts, written = second.write(partial(_write_vectors, width, scale))
    notes = []
    for split, of in counts.items():
        if any(of["missing"]):
            values = counted(splits[split].steps * width, "value")
            notes.append(f"{split}: {sum(of['missing']):,} of {values} are missing")
    without = [names[v] for v in np.flatnonzero(scale.count_V == 0)]
    if without:
        notes.append(f"warning: without any value in the training split: {some(without)}")
    return Finished({"names": names} | scale.fields, counts, notes + scale.notes(written))


def _vector_pieces(width: int, split: str, part: Part) -> Pieces:
    if split in part.splits:
        for values_E in read_pieces(*part.splits[split].raw("values"), max(1, PIECE_ITEMS // width) * width):
            yield np.tile(np.arange(width), len(values_E) // width), values_E


def _write_vectors(width: int, scale: "Scale", part: Part) -> tuple[Part, Written]:
    written = Written()
    for split, files in part.splits.items():
        writer = files.new_writer("values.bin", np.float32)
        missing_V = np.zeros(width, np.int64)
        for features_E, raw_E in _vector_pieces(width, split, part):
            values_E = scale.normalise(raw_E, features_E, split, written)
            missing_V += np.isnan(values_E.reshape(-1, width)).sum(axis=0)
            writer.append(values_E)
        files.finish(writer)
        written.counts[split] = {"missing": missing_V}
    return part, written


def finish_events(second: SecondPass, time_unit: str) -> Finished:
    source, known, splits = second.source, second.known, second.splits
    names, unknown_share = _vocabulary(second, "variables")
    scale = fit_scale(second, partial(_event_pieces, names), names)
    if known is not None:
        gaps = GapMoments(known.log_gap_mean, known.log_gap_std, known.shortest_gap)
        if "minutes" in (time_unit, known.time_unit) and time_unit != known.time_unit:
            raise DataError(
                f"{source.data_dir}: times are in {time_unit!r}, but the network was trained on {known.time_unit!r}. Convert "
                f"them."
            )
    else:
        gaps = gap_moments(_later_gaps, second.parts, second.each)
    counts, written = second.write(partial(_write_events, names, scale))
    notes = []
    for split, of in counts.items():
        if of["per_name"][0]:
            events = counted(of["events"], "event")
            notes.append(
                f"{split}: {of['per_name'][0]:,} of {events} count as {UNKNOWN}, and their values are not used"
            )
    rates = (
        known.presence_rates
        if known is not None
        else presence_rates(counts["train"]["per_name"], splits["train"].steps)
    )
    description = {"names": names, "unknown_share": unknown_share, "presence_rates": rates, "time_unit": time_unit}
    return Finished(description | scale.fields | gaps._asdict(), counts, notes + scale.notes(written))


def _event_pieces(names: Sequence[str], split: str, part: Part) -> Pieces:
    if split in part.splits:
        files, final_V = part.splits[split], _final_numbers(names, part.symbols)
        values = read_pieces(*files.raw("values"))
        for numbers_E, values_E in zip(read_pieces(*files.raw("variables")), values, strict=True):
            variables_E = final_V[numbers_E]
            yield variables_E, np.where(variables_E == 0, np.nan, values_E)  # what is unknown has no scale of its own


def _write_events(names: Sequence[str], scale: "Scale", part: Part) -> tuple[Part, Written]:
    written = Written()
    for split, files in part.splits.items():
        number_V, valued_V = np.zeros(len(names), np.int64), np.zeros(len(names), np.int64)
        variables = files.new_writer("variables.bin", np.min_scalar_type(len(names)))
        values = files.new_writer("values.bin", np.float32)
        for variables_E, raw_E in _event_pieces(names, split, part):
            values_E = scale.normalise(raw_E, variables_E, split, written)
            number_V += np.bincount(variables_E, minlength=len(names))
            valued_V += np.bincount(variables_E[~np.isnan(values_E)], minlength=len(names))
            variables.append(variables_E)
            values.append(values_E)
        files.finish(variables)
        files.finish(values)
        written.counts[split] = {"events": number_V.sum(), "per_name": number_V, "valued": valued_V}
    return part, written


def presence_rates(number_V: Sequence[int], steps: int) -> tuple[float, ...]:
    """Return the share of the steps that hold each variable; a step may hold several that count as <unknown>."""
    return tuple((min(number, steps) + 0.5) / (steps + 1) for number in number_V)


def _later_gaps(part: Part) -> Iterator[np.ndarray]:
    """Yield the gaps of the training split except those of first steps, before which there was nothing."""
    if "train" not in part.splits:
        return
    files = part.splits["train"]
    starts_S, done = files.offsets(), 0
    for gaps_T in read_pieces(files.directory / files.entries["gaps"]["file"], FINAL_TYPES["gaps"]):
        first, behind = np.searchsorted(starts_S, (done, done + len(gaps_T)))
        yield np.delete(gaps_T, starts_S[first:behind] - done)
        done += len(gaps_T)


# --- Moments --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """The moments of each of V names by which values are normalised."""

    names: tuple[str, ...]
    fields: dict[str, tuple[Any, ...]]
    """Fields of the DataDescription."""
    mean_V: np.ndarray
    std_V: np.ndarray
    """NaN for names of which training saw no value: no network learns anything of them, and what they hold counts as missing."""
    count_V: np.ndarray
    constant_V: np.ndarray
    codes: dict[float, np.ndarray]
    """Values that look like codes for what was not measured: bool [V], of which names."""
    tamed: tuple[str, ...] = ()
    """Names with heavy tails: their scale, and what it would be with all values."""

    def normalise(self, raw_E: np.ndarray, names_E: np.ndarray, split: str, written: Written) -> np.ndarray:
        """Return the values in standard deviations from the mean of their name; those that lie far out are counted."""
        size = len(self.names)
        values_E = (raw_E - self.mean_V[names_E]) / self.std_V[names_E]
        distance_E = np.abs(values_E)
        beyond = np.flatnonzero(distance_E > LARGEST_FLOAT32)
        if len(beyond):
            worst = int(beyond[0])
            raise DataError(
                f"{split}: {self.names[names_E[worst]]!r} is {raw_E[worst]:g} once, {values_E[worst]:.0e} standard deviations "
                f"of the training split from its mean, which float32 cannot hold. Correct it, or give moments with "
                f"--params_map_path."
            )
        far_V = np.bincount(names_E[distance_E > FAR_OUT], minlength=size)
        codes = {code: np.bincount(names_E[raw_E == code], minlength=size) * of_V for code, of_V in self.codes.items()}
        unlearned_E = np.isnan(values_E) & ~np.isnan(raw_E)
        unlearned_V = np.bincount(names_E[unlearned_E], minlength=size)
        written.add(Written(far_V=far_V, codes=codes, unlearned={split: unlearned_V}))
        return values_E

    def notes(self, written: Written) -> list[str]:
        """Return what a user should know of the values, of which `written` was counted."""
        notes, names, far_V = [], self.names, np.asarray(written.far_V)
        constant = [names[v] for v in np.flatnonzero(self.constant_V & (self.count_V > 0))]
        if constant:
            notes.append(f"warning: constant in the training split, left unscaled: {some(constant)}")
        if self.codes:
            shown = [
                f"{_written(code)} in {some([f'{names[v]} ({counts_V[v]:,})' for v in np.flatnonzero(counts_V)])}"
                for code, counts_V in written.codes.items()
            ]
            they = "it means" if len(shown) == 1 else "they mean"
            notes.append(
                f"warning: repeated, and far from all other values: {'; '.join(shown)}. If {they} that nothing was measured: "
                f"--missing_values {','.join(map(_written, self.codes))}"
            )
        if self.tamed:
            low, high = OUTER
            notes.append(
                f"heavy tails: scaled by the values between their {low:.0%} and {high:.0%} quantiles alone "
                f"(--no_robust_scaling: by all): {some(self.tamed)}"
            )
        for split, unlearned_V in written.unlearned.items():
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


def fit_scale(second: SecondPass, pieces_of: Callable[[str, Part], Pieces], names: tuple[str, ...]) -> Scale:
    """Return the moments that a trained network knows, those of --params_map_path, or else those of the training split, where tails
    are heavy without the extreme values."""
    source, known, size = second.source, second.known, len(names)
    codes: dict[float, np.ndarray] = {}
    constant_V, tamed = np.zeros(size, bool), []
    if known is not None:
        fields = {"mean": known.mean, "std": known.std, "valued": known.valued, "robust": known.robust}
        count_V, mean_V, std_V = np.array(known.valued, np.int64), np.array(known.mean), np.array(known.std)
    else:
        of_train = partial(pieces_of, "train")
        count_V, mean_V, std_V = _measure(of_train, size, second.parts, second.each)
        tails = measure_tails(of_train, count_V, second.parts, second.each)
        robust_V, codes = np.zeros(size, bool), tails.codes
        if source.params_map_path is not None:
            moments_of = read_params_map(source.params_map_path)
            valued = [name for name, count in zip(names, count_V, strict=True) if count > 0]
            if missing := [name for name in valued if name not in moments_of]:
                raise DataError(
                    f"--params_map_path {source.params_map_path}: lacks {len(missing)} of those that have values "
                    f"({some(missing)}). Add them."
                )
            mean_V, std_V = np.array([moments_of.get(name, (0.0, 1.0)) for name in names]).T
        elif source.robust_scaling:
            inner_V = tails.inner_std_V
            robust_V = (inner_V > CONSTANT * np.abs(tails.inner_mean_V)) & (std_V > HEAVY * inner_V)
            tamed = [f"{names[v]} ({inner_V[v]:.4g}, not {std_V[v]:.4g})" for v in np.flatnonzero(robust_V)]
            mean_V, std_V = np.where(robust_V, tails.inner_mean_V, mean_V), np.where(robust_V, inner_V, std_V)
        constant_V = std_V <= CONSTANT * np.abs(mean_V)
        std_V = np.where(constant_V, 1.0, std_V)
        arrays = {"mean": mean_V, "std": std_V, "valued": count_V > 0}
        fields = {name: tuple(array.tolist()) for name, array in arrays.items()}
        fields["robust"] = tuple(robust_V.tolist()) if robust_V.any() else ()
    std_V = np.where(count_V > 0, std_V, np.nan)
    return Scale(names, fields, mean_V, std_V, count_V, constant_V, codes, tuple(tamed))


def _written(value: float) -> str:
    """Return a number as a user would write it, also one that was stored with the digits of a float32.

    >>> _written(-9999.0), _written(float(np.float32(-999.9)))
    ('-9999', '-999.9')
    """
    single = np.float32(value)
    return np.format_float_positional(single if float(single) == value else value, trim="-")


def gap_moments(gaps_of: Callable[[Any], Iterator[np.ndarray]], parts: Sequence[Any], each: Each = map) -> GapMoments:
    """Return the moments of the gaps before all but the first steps.

    The shortest gap that differs from 0 is half the smallest that is not 0: where times are rounded, a shorter one becomes 0.
    """
    smallest = min(each(partial(_smallest_gap, gaps_of), parts), default=np.inf)
    if smallest == np.inf:
        return GapMoments(0.0, 1.0, 1.0)
    shortest = smallest / 2
    _, mean_1, std_1 = _measure(partial(_log_gaps, gaps_of, shortest), 1, parts, each)
    return GapMoments(float(mean_1[0]), max(float(std_1[0]), LEAST_LOG_GAP_STD), shortest)


def _smallest_gap(gaps_of: Callable[[Part], Iterator[np.ndarray]], part: Part) -> float:
    return min((float(gaps_T[gaps_T > 0].min(initial=np.inf)) for gaps_T in gaps_of(part)), default=np.inf)


def _log_gaps(gaps_of: Callable[[Part], Iterator[np.ndarray]], shortest: float, part: Part) -> Pieces:
    for gaps_T in gaps_of(part):
        yield np.zeros(len(gaps_T), np.int64), np.log(np.maximum(gaps_T, shortest, dtype=np.float64))


def _measure(
    pieces_of: Callable[[Part], Pieces], size: int, parts: Sequence[Part], each: Each
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return count, mean and standard deviation in two passes, which is exact where one pass would cancel.

    Sums are of differences to one value of each name: those of a constant are exactly 0. Those of the parts are added up in their
    order, so that they come to the same whoever computed them.
    """
    count_V, base_V, sum_V = np.zeros(size, np.int64), np.full(size, np.nan), np.zeros(size)
    for counts_V, bases_V, sums_V in each(partial(_sums, pieces_of, size), parts):
        base_V = np.where(np.isnan(base_V), bases_V, base_V)
        count_V += counts_V
        sum_V += sums_V + counts_V * np.nan_to_num(bases_V - base_V)
    mean_V = np.nan_to_num(base_V) + sum_V / np.maximum(count_V, 1)
    square_V = np.zeros(size)
    for squares_V in each(partial(_squares, pieces_of, mean_V), parts):
        square_V += squares_V
    return count_V, mean_V, np.sqrt(square_V / np.maximum(count_V, 1))


def _sums(pieces_of: Callable[[Part], Pieces], size: int, part: Part) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return for each name of a part how many values it has, one of them, and the sum of their differences to that one."""
    count_V, base_V, sum_V = np.zeros(size, np.int64), np.full(size, np.nan), np.zeros(size)
    for every_E, raw_E in pieces_of(part):
        present_E = ~np.isnan(raw_E)
        names_E, values_E = every_E[present_E], raw_E[present_E]
        found_V = np.full(size, np.nan)
        found_V[names_E] = values_E
        base_V = np.where(np.isnan(base_V), found_V, base_V)
        count_V += np.bincount(names_E, minlength=size)
        sum_V += np.bincount(names_E, values_E - base_V[names_E], minlength=size)
    return count_V, base_V, sum_V


def _squares(pieces_of: Callable[[Part], Pieces], mean_V: np.ndarray, part: Part) -> np.ndarray:
    """Return for each name of a part the sum of its values' squared differences to their mean."""
    square_V = np.zeros(len(mean_V))
    for every_E, raw_E in pieces_of(part):
        present_E = ~np.isnan(raw_E)
        names_E, values_E = every_E[present_E], raw_E[present_E]
        square_V += np.bincount(names_E, (values_E - mean_V[names_E]) ** 2, minlength=len(mean_V))
    return square_V


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
