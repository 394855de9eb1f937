"""Lengths -> which sequences make up which batch, in which order: pure functions of numbers, blind to the number of processes.

Once per run, `cut_batches` sorts the sequences into buckets of similar length, from the longest bucket to the shortest, and
cuts this order into batches by what the longest sequence of a bucket costs. Once per epoch, `plan_epoch` shuffles the
sequences within their buckets and the batches among themselves. The cut is the same in every epoch, so the number of
batches is constant, their cost is known beforehand, and a position (epoch, batches delivered) is all that a resume needs.

    limits = resolve_limits(lengths_N, BatchSettings(), max_sequence_length=1000, accumulate=2)
    cut = cut_batches(lengths_N, limits)
    plan = plan_epoch(cut, seed=0, epoch=3)
    plan.batch(0)  # the sequences of the epoch's first batch
    gather_batch(sequences, limits, plan.batch(0))

With --pad_grid, batches have few shapes: a GPU that replays recorded graphs (--compile_mode reduce-overhead) records one for each
shape. A shape is a length of the grid and the number of sequences of that length that make a full batch; what is missing in a batch
is filled up with sequences of length 0, which weigh nothing. A last batch that is not full has a shape of its own.

    limits = limits._replace(grid=grid_lengths(lengths_N, shapes=8))
    limits = with_last_shape(limits, cut_batches(lengths_N, limits))

Hundreds of millions of sequences are gone through in pieces that a processor's cache holds, and numbered in 32 bits.

Shapes: N sequences, P those of a piece, B those of one batch, C those chosen, K batches, K1 = K + 1 bounds, U buckets, L lengths
from 0 on, D distinct lengths, G lengths of the grid, T steps. A token is one step of a sequence.
"""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from seqvae.config.data import BatchSettings
from seqvae.data.batch import Batch, Gathers, with_rows
from seqvae.errors import SettingsError

STEPS_PER_EPOCH = 50
"""Optimizer steps that an epoch of a small set should have, unless the user says otherwise."""

BATCHES_PER_BUCKET = 4
"""A batch is a random quarter of its bucket, or less. More would mix better and pad more: 10,000 log-normal lengths (mean
75, cap 1000) at 4,096 tokens per batch have a padding efficiency of 0.97, 0.95 and 0.92 with 2, 4 and 8 batches."""

BATCHES_PER_GROUP = 16
"""Neighbours in length that stay together when batches are shuffled, so that processes which take turns do equal work."""

GROUPS_PER_EPOCH = 16
"""Where an epoch would have fewer groups, they are made smaller: short and long batches should alternate."""

HASH_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Those of splitmix64, whose 64 bits differ for different numbers and look random."""

GOLDEN_RATIO = (1 + 5**0.5) / 2
"""Its multiples, without their whole parts, leave no part of 0 to 1 out for long."""

PIECE = 1 << 16
"""Sequences that are looked at in one go: a hundred million are cut in 1.0 s of a core, in one go in 3.9 s."""

PARTS_PER_CHOICE, MOST_PARTS = 1024, 1 << 24
"""Parts that sequences are counted in, to choose some: only those in the parts of the chosen are then sorted."""

MOST_CANDIDATES = 512
"""Lengths that the grid is chosen from: its choice takes 20 ms for as many, and grows with their square."""


class Limits(NamedTuple):
    """The limits of a batch."""

    batch_size: int | None
    """At most this many sequences; None: no limit."""
    tokens_per_batch: int
    """At most this many steps, padding included."""
    pad_to: int | None
    """Steps that every sequence is padded to; None: the longest of its batch."""
    hint: str = ""
    """What the same memory would hold, where that is more."""
    quadratic: float | None = None
    """Steps of a sequence from which on attention costs more than all else: L steps cost as much as L + L^2 / `quadratic` would
    without. None: no quadratic term."""
    grid: tuple[int, ...] = ()
    """Lengths that batches are padded to, ascending, each with the rows of a full batch; (): the longest of the batch."""
    last_shape: tuple[int, int] | None = None
    """Rows and steps of one more shape of the grid, for a last batch that is not full; None: it is, or there is no grid."""

    def padded(self, lengths: np.ndarray) -> np.ndarray:
        """Return the length of the grid that each is padded to; without a grid, the lengths themselves."""
        return np.array(self.grid)[np.searchsorted(self.grid, lengths)] if self.grid else lengths

    def sequences_of(self, length: int) -> int:
        """Return how many sequences of this length make a batch: at least one."""
        cost = length + (length * length / self.quadratic if self.quadratic else 0)
        number = int(self.tokens_per_batch // cost)
        return max(1, number if self.batch_size is None else min(number, self.batch_size))


def resolve_limits(
    lengths_N: np.ndarray, settings: BatchSettings, max_sequence_length: int, accumulate: int = 1
) -> Limits:
    """Fill in what the user left open for training; `accumulate` batches make one optimizer step."""
    pad_to = None if settings.use_dynamic_padding else max_sequence_length
    row = pad_to or int(lengths_N.max())  # steps of the most expensive sequence
    by_length = settings.bucketing and settings.use_dynamic_padding
    if (tokens := settings.tokens_per_batch) is not None:
        if tokens < row and pad_to is None:
            raise SettingsError(
                f"--tokens_per_batch {tokens} is less than the longest sequence ({row} steps): "
                "raise it or lower --max_sequence_length"
            )
        if tokens < row:
            raise SettingsError(
                f"--tokens_per_batch {tokens} is less than --max_sequence_length {row}, to which --use_dynamic_padding false "
                "pads every sequence: raise the one or lower the other"
            )
        return Limits(settings.batch_size, tokens, pad_to)
    if settings.batch_size is not None:
        tokens = settings.batch_size * row
        packed, hint = int(tokens / lengths_N.mean()), ""
        if by_length and packed > settings.batch_size:
            hint = (
                f"--batch_size {settings.batch_size}: the same memory holds {packed} sequences of mean length in a batch of "
                f"{tokens:,} steps (--tokens_per_batch {tokens} in its place)"
            )
        return Limits(settings.batch_size, tokens, pad_to, hint)
    total = int(lengths_N.sum(dtype=np.int64)) if by_length else len(lengths_N) * row
    return Limits(None, max(row, min(4 * max_sequence_length, total // (STEPS_PER_EPOCH * accumulate))), pad_to)


def resolve_evaluation_limits(lengths_N: np.ndarray, settings: BatchSettings, max_sequence_length: int) -> Limits:
    """Fill in what the user left open for a pass without gradients: as many steps as it takes, room for any sequence."""
    pad_to = None if settings.use_dynamic_padding else max_sequence_length
    row = pad_to or int(lengths_N.max())
    default = 4 * max_sequence_length if settings.batch_size is None else settings.batch_size * row
    return Limits(settings.batch_size, max(row, settings.tokens_per_batch or default), pad_to)


class Cut(NamedTuple):
    """The cut that all epochs share: the sequences in their buckets, longest first, and where a batch begins."""

    order_N: np.ndarray
    """int32 where that holds their number, sequences, bucket by bucket."""
    bucket_starts: np.ndarray
    """int64, bounds of the buckets in `order_N`."""
    starts_K1: np.ndarray
    """int64, bounds of the batches in `order_N`; what lies behind the last bound is left out."""
    tokens_K: np.ndarray
    """int64, steps that a batch can come to, padding included."""

    @property
    def batches(self) -> int:
        return len(self.tokens_K)


class Plan(NamedTuple):
    """The batches of one epoch."""

    order_N: np.ndarray
    """int32 where that holds their number, sequences; a batch is a slice of them."""
    starts_K1: np.ndarray
    """int64, bounds of the slices."""
    turns_K: np.ndarray
    """int64, which slice comes at which place; not all of them need come."""

    @property
    def batches(self) -> int:
        return len(self.turns_K)

    def batch(self, k: int) -> np.ndarray:
        """Return the sequences of the k-th batch, int64; none behind the last one."""
        if k >= len(self.turns_K):
            return np.empty(0, np.int64)
        turn = self.turns_K[k]
        return self.order_N[self.starts_K1[turn] : self.starts_K1[turn + 1]].astype(np.int64)


def cut_batches(lengths_N: np.ndarray, limits: Limits, *, bucketing: bool = True, drop_last: bool = False) -> Cut:
    """Sort into buckets and cut into batches, both from long to short.

    A bucket takes in shorter and shorter lengths until it holds `BATCHES_PER_BUCKET` batches: where sequences are many
    it is a single length, where they are few it is wide enough for the batches to differ from epoch to epoch.
    Without bucketing, or where all are padded alike, there is one bucket: plain random batches of a fixed number of sequences.
    A batch that begins in one bucket may end in the next: what lies there is shorter.
    """
    tops: list[int] = []
    """The longest length of each bucket."""
    sizes: list[int] = []
    if bucketing and limits.pad_to is None:
        counts_L = counts_of(lengths_N)
        padded_L = limits.padded(np.arange(len(counts_L)))
        counts_L = np.bincount(padded_L, counts_L).astype(np.int64)
        present = np.flatnonzero(counts_L)[::-1]
        buckets: list[int] = []
        full = 0
        for length, count in zip(present.tolist(), counts_L[present].tolist(), strict=True):
            if not sizes or sizes[-1] >= full:
                tops.append(length)
                sizes.append(0)
                full = BATCHES_PER_BUCKET * limits.sequences_of(length)
            sizes[-1] += count
            buckets.append(len(tops) - 1)
        if len(sizes) > 1 and sizes[-1] < full:  # or the shortest ones would always make up the same last batch
            tops, sizes = tops[:-1], [*sizes[:-2], sizes[-2] + sizes[-1]]
            buckets = [min(bucket, len(tops) - 1) for bucket in buckets]
        bucket_L = np.zeros(len(counts_L), dtype=np.min_scalar_type(len(tops)))
        bucket_L[present] = buckets
        order_N = in_buckets(lengths_N, bucket_L[padded_L], sizes)
    else:
        tops, sizes = [limits.pad_to or int(limits.padded(lengths_N.max()))], [len(lengths_N)]
        order_N = np.arange(len(lengths_N), dtype=number_type(len(lengths_N)))
    bucket_starts = np.cumsum([0, *sizes])
    pieces: list[np.ndarray] = []
    tops_of: list[np.ndarray] = []
    begin = 0
    for top, end in zip(tops, bucket_starts[1:].tolist(), strict=True):
        if begin < end:
            piece = np.arange(begin, end, limits.sequences_of(top))
            pieces.append(piece)
            tops_of.append(np.full(len(piece), top))
            begin = int(piece[-1]) + limits.sequences_of(top)
    starts_K1, tops_K = np.concatenate([*pieces, bucket_starts[-1:]]), np.concatenate(tops_of)
    if drop_last and begin != bucket_starts[-1]:  # the last batch is not full
        starts_K1, tops_K = starts_K1[:-1], tops_K[:-1]
        if len(tops_K) == 0:
            raise SettingsError("--drop_last leaves out the only batch: lower --batch_size or --tokens_per_batch")
    return Cut(order_N, bucket_starts, starts_K1, np.diff(starts_K1) * tops_K)


def in_buckets(lengths_N: np.ndarray, bucket_L: np.ndarray, sizes_U: list[int]) -> np.ndarray:
    """Return the sequences bucket by bucket, those of a bucket as they are stored: a stable sort, but of one piece at a time.

    >>> in_buckets(np.array([5, 9, 5, 9, 5]), bucket_L=np.array([1] * 9 + [0]), sizes_U=[2, 3]).tolist()
    [1, 3, 0, 2, 4]
    """
    order_N = np.empty(len(lengths_N), number_type(len(lengths_N)))
    next_U = np.cumsum(sizes_U) - sizes_U  # where the next sequence of each bucket goes
    for piece in slices_of(len(lengths_N)):
        bucket_P = bucket_L[lengths_N[piece]]
        order_P = np.argsort(bucket_P, kind="stable")  # a radix sort, as the numbers are mostly uint16
        counts_U = np.bincount(bucket_P, minlength=len(sizes_U))
        place_P = np.arange(len(bucket_P)) + np.repeat(next_U - np.cumsum(counts_U) + counts_U, counts_U)
        order_N[place_P] = order_P + piece.start
        next_U += counts_U
    return order_N


def counts_of(lengths_N: np.ndarray) -> np.ndarray:
    """Return how many sequences there are of each length, int64 [L]."""
    counts_L = np.zeros(int(lengths_N.max()) + 1, np.int64)
    for piece in slices_of(len(lengths_N)):
        part_L = np.bincount(lengths_N[piece])
        counts_L[: len(part_L)] += part_L
    return counts_L


def slices_of(total: int) -> Iterator[slice]:
    """Yield slices of `PIECE` that make up 0 to `total`."""
    return (slice(begin, min(begin + PIECE, total)) for begin in range(0, total, PIECE))


def number_type(total: int) -> type[np.signedinteger]:
    """Return the type that so many sequences are numbered in: half the memory, and shuffled as fast and alike."""
    return np.int32 if total <= 2**31 else np.int64


def plan_epoch(cut: Cut, seed: int, epoch: int, *, shortest_last: bool = False) -> Plan:
    """Shuffle sequences within buckets and batches in groups: the same for the same (seed, epoch), wherever it runs.

    Neighbours stay together in a group. One that is not full comes last, so that all are aligned; of which lengths it is changes
    from epoch to epoch, or validations, which mostly stand behind it, would always come after the shortest sequences. In the first
    epoch the most expensive group comes first: then memory runs out at step 1, not in hour 9. What is most expensive depends on
    the model: the most steps, or the longest sequences (attention). Both come first.

    `shortest_last`: the last group is of the shortest, as in epochs that earlier versions began.
    """
    random = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    order_N = cut.order_N.copy()
    for begin, end in pairwise(cut.bucket_starts.tolist()):
        random.shuffle(order_N[begin:end])
    size = BATCHES_PER_GROUP
    while size > 1 and cut.batches < size * GROUPS_PER_EPOCH:
        size //= 2
    groups, rest = divmod(cut.batches, size)
    order_G = random.permutation(groups)
    dearest = [0, int(cut.tokens_K[: groups * size].argmax())] if epoch == 0 else []
    begins = np.arange(groups + 1) * size  # where the group that is not full may begin, from long to short
    for turn in dearest:
        begins = begins[(turn < begins) | (turn >= begins + rest)]
    begin = groups * size if shortest_last else int(random.choice(begins))
    turns_GS = np.delete(np.arange(cut.batches), slice(begin, begin + rest)).reshape(groups, size)
    if dearest:
        first = list(dict.fromkeys((turn if turn < begin else turn - rest) // size for turn in dearest))
        order_G = np.concatenate([first, order_G[~np.isin(order_G, first)]])
    turns_K = np.concatenate([turns_GS[order_G].ravel(), np.arange(begin, begin + rest)])
    return Plan(order_N, cut.starts_K1, turns_K)


def spread_out(plan: Plan) -> Plan:
    """Return the same batches in an order of which every stretch holds long and short ones alike: a part then stands for the whole.

    The k-th place goes to the batch that the golden ratio's k-th multiple points at, from long to short.
    """
    places_K = np.arange(plan.batches) * GOLDEN_RATIO % 1.0
    return plan._replace(turns_K=np.sort(plan.turns_K)[places_K.argsort().argsort()])


def some_batches(plan: Plan, most: int) -> Plan:
    """Return at most `most` batches, evenly spaced from long to short, without the sequences of the others."""
    number = min(most, plan.batches)
    turns = np.sort(plan.turns_K)[midpoints(plan.batches, number)]
    batches = [plan.order_N[plan.starts_K1[turn] : plan.starts_K1[turn + 1]] for turn in turns]
    return Plan(np.concatenate(batches), np.cumsum([0, *map(len, batches)]), np.arange(number))


def choose_and_cut(
    lengths_N: np.ndarray, stored_N: np.ndarray | None, limit: float | int, limits: Limits, *, bucketing: bool = True
) -> Cut:
    """Choose sequences to validate on, and cut them into batches.

    A float `limit` is a share of the sequences, but at least one; an int is the most batches that they may come to.
    """
    share, most = (limit, None) if isinstance(limit, float) else (1.0, max(1, limit))
    if share >= 1:
        cut = cut_batches(lengths_N, limits, bucketing=bucketing)
        if most is None or most >= cut.batches:
            return cut
        share = most / cut.batches
    number = max(1, round(share * len(lengths_N)))
    while True:
        chosen_C = choose_sequences(lengths_N, stored_N, number)
        cut = cut_batches(lengths_N[chosen_C], limits, bucketing=bucketing)
        if most is None or cut.batches <= most:
            return cut._replace(order_N=chosen_C[cut.order_N])
        number = number * most // cut.batches


def choose_sequences(lengths_N: np.ndarray, stored_N: np.ndarray | None, number: int) -> np.ndarray:
    """Choose sequences that stand for all: evenly spaced from short to long, those of one length in the order of a hash.

    `stored_N`: the stored sequence that each is (a part of); None: sequence n itself. The choice depends on nothing else: neither
    on a seed nor on how batches are made, so that runs with other flags are validated on the same data. Drawn as whole batches of
    like length, a tenth of 1,000 sequences scatters three times as far (19.5 nats of the ELBO against 6.5).

    Not all need be sorted for that: counted by length and the first bits of the hash, they show in which of these parts the chosen
    are, and these alone are sorted.

    >>> choose_sequences(np.array([9, 1, 5, 2, 8, 4]), None, number=2).tolist()
    [3, 4]
    """
    total, longest = len(lengths_N), int(lengths_N.max())
    wanted_C = midpoints(total, number)
    parts = min(total, PARTS_PER_CHOICE * number, MOST_PARTS)
    bits = max(1, parts.bit_length() - longest.bit_length())

    def hashes_of(piece: slice) -> np.ndarray:
        return hashed(np.arange(piece.start, piece.stop) if stored_N is None else stored_N[piece])

    def parts_of(piece: slice) -> np.ndarray:
        first_bits_P = (hashes_of(piece) >> np.uint64(64 - bits)).astype(np.int64)
        return lengths_N[piece].astype(np.int64) << bits | first_bits_P

    counts = np.zeros((longest + 1) << bits, np.int64)
    for piece in slices_of(total):
        np.add.at(counts, parts_of(piece), 1)
    part_C = np.searchsorted(np.cumsum(counts), wanted_C, side="right")
    is_needed = np.zeros(len(counts), bool)
    is_needed[part_C] = True
    found = [(piece, np.flatnonzero(is_needed[parts_of(piece)])) for piece in slices_of(total)]
    needed_M = np.concatenate([at + piece.start for piece, at in found])
    hashes_M = np.concatenate([hashes_of(piece)[at] for piece, at in found])
    order_M = needed_M[np.lexsort((hashes_M, lengths_N[needed_M]))]
    left_out = np.cumsum(np.where(is_needed, 0, counts))  # by each part, of those before it
    return np.sort(order_M[wanted_C - left_out[part_C]])


def hashed(numbers_N: np.ndarray) -> np.ndarray:
    """Return 64 bits for each number that look random and are always the same (splitmix64)."""
    mixed_N = (numbers_N.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, multiplier in zip((30, 27), HASH_MULTIPLIERS, strict=True):
        mixed_N = (mixed_N ^ (mixed_N >> np.uint64(shift))) * np.uint64(multiplier)
    return mixed_N ^ (mixed_N >> np.uint64(31))


def midpoints(total: int, parts: int) -> np.ndarray:
    """Return the place in the middle of each of so many equal parts, int64.

    >>> midpoints(total=10, parts=2).tolist()
    [2, 7]
    """
    return ((np.arange(parts) + 0.5) * total / parts).astype(np.int64)


def plan_in_order(lengths_N: np.ndarray, limits: Limits) -> Plan:
    """Return all sequences once, as they are stored, in batches of a fixed number."""
    size = limits.sequences_of(limits.pad_to or int(lengths_N.max()))
    starts = np.append(np.arange(0, len(lengths_N), size), len(lengths_N))
    return Plan(np.arange(len(lengths_N)), starts, np.arange(len(starts) - 1))


def padding_efficiency(lengths_N: np.ndarray, plan: Plan, pad_to: int | None = None) -> float:
    """Return real steps / padded steps of the plan's batches.

    >>> padding_efficiency(np.array([2, 4]), Plan(np.array([0, 1]), np.array([0, 2]), np.array([0])))
    0.75
    """
    sorted_N = lengths_N[plan.order_N[: plan.starts_K1[-1]]]
    begins_K = plan.starts_K1[:-1]
    real_K = np.add.reduceat(sorted_N, begins_K, dtype=np.int64)[plan.turns_K]
    rows_K = np.diff(plan.starts_K1)[plan.turns_K]
    longest_K = np.maximum.reduceat(sorted_N, begins_K)[plan.turns_K] if pad_to is None else pad_to
    return float(real_K.sum() / (rows_K * longest_K).sum())


def grid_lengths(lengths_N: np.ndarray, shapes: int) -> tuple[int, ...]:
    """Return at most `shapes` lengths, ascending up to the longest, to which all can be padded with the fewest steps.

    By dynamic programming over distinct lengths: the least padded steps of all up to the d-th, with the d-th in the grid.

    >>> grid_lengths(np.array([3, 3, 3, 4, 9]), shapes=2)
    (4, 9)
    """
    counts_L = counts_of(lengths_N)
    lengths_D = np.flatnonzero(counts_L)
    if len(lengths_D) > MOST_CANDIDATES:
        lengths_D = lengths_D[np.linspace(0, len(lengths_D) - 1, MOST_CANDIDATES).round().astype(np.int64)]
    until_D = np.cumsum(counts_L)[lengths_D]
    more_DD = (until_D[:, None] - until_D[None, :]) * lengths_D[:, None].astype(np.float64)
    more_DD[np.triu_indices(len(lengths_D))] = np.inf  # before a length stand shorter ones alone
    least_D = (until_D * lengths_D).astype(np.float64)
    choices: list[np.ndarray] = []  # for each length of the grid but the first: which one stands before it
    for _ in range(min(shapes, len(lengths_D)) - 1):
        padded_DD = least_D[None, :] + more_DD
        choices.append(padded_DD.argmin(axis=1))
        least_D = padded_DD.min(axis=1)
    chosen = [len(lengths_D) - 1]
    for before_D in reversed(choices):
        chosen.append(int(before_D[chosen[-1]]))
    return tuple(lengths_D[chosen[::-1]].tolist())


def with_last_shape(limits: Limits, cut: Cut) -> Limits:
    """Return the limits of a cut with the shape of its last batch, where that is not full and there is a grid.

    Filled up to a full batch, the 8 sequences that 520 leave at --batch_size 512 would cost as much as the other 512.
    """
    if not limits.grid:
        return limits
    rows, length = (int(of_K[-1]) for of_K in rows_and_lengths(cut))
    return limits._replace(last_shape=(rows, length) if rows < limits.sequences_of(length) else None)


def rows_and_lengths(cut: Cut) -> tuple[np.ndarray, np.ndarray]:
    """Return the sequences of each batch, and the most steps that its sequences are padded to, int64 [K]."""
    rows_K = np.diff(cut.starts_K1)
    return rows_K, cut.tokens_K // rows_K


def grid_steps(cut: Cut, limits: Limits) -> np.ndarray:
    """Return the padded steps of each batch on a grid, int64 [K]."""
    rows_K, lengths_K = rows_and_lengths(cut)
    lengths_D, places_K = np.unique(lengths_K, return_inverse=True)
    steps_K = (lengths_D * [limits.sequences_of(length) for length in lengths_D.tolist()])[places_K]
    if limits.last_shape is not None:
        steps_K[-1] = rows_K[-1] * lengths_K[-1]
    return steps_K


def grid_efficiency(lengths_N: np.ndarray, cut: Cut, limits: Limits) -> float:
    """Return real steps / padded steps of batches on a grid; what `drop_last` leaves out comes in other epochs."""
    return float(lengths_N.sum(dtype=np.int64) / grid_steps(cut, limits).sum())


def gather_batch(sequences: Gathers, limits: Limits, sequences_B: np.ndarray) -> Batch:
    """Return a batch of these sequences, padded as the limits have it; on a grid, the empty one is of the smallest shape."""
    if not limits.grid:
        return sequences.gather(sequences_B, limits.pad_to)
    longest = int(sequences.lengths_N[sequences_B].max(initial=0))
    length = limits.grid[bisect_left(limits.grid, longest)]
    rows = limits.sequences_of(length)
    if limits.last_shape is not None:
        rows_of_last, length_of_last = limits.last_shape
        is_held = len(sequences_B) <= rows_of_last and longest <= length_of_last
        if is_held and rows_of_last * length_of_last < rows * length:
            rows, length = limits.last_shape
    return with_rows(sequences.gather(sequences_B, length), rows)
