"""A run directory -> `Run`: everything that a report or a figure is made of, as far as it is there, and what is missing.

The one reader of a run's files. Nothing is taken for granted: a run may have just begun, been killed, be damaged, or come from an
older version. Half lines and foreign lines are passed over. A long run is thinned to what a page can show, its last row included.

Shapes: R readings, P of them at which the decoder was probed, E at which the escape threshold was read, N posteriors,
Z latent dimensions.
"""

import csv
import math
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import yaml

from seqvae.files import parse_rows, whole_lines
from seqvae.reports.previews import Preview, read_preview
from seqvae.reports.run_files import ENVIRONMENT, EVENTS, FACTS, LATENTS
from seqvae.text import counted, step_name

CONFIG, METRICS, READINGS, THROUGHPUT = "config.yaml", "metrics.csv", "posterior.jsonl", "throughput.jsonl"
EVALUATION = "evaluation.jsonl"
STEP_LEVEL = "step_level"
"""The folder of the monitor that reads the latents of steps below their sequence's."""
PLOTS, SAMPLES = "plots", "samples"
POSTERIORS = f"{PLOTS}/posteriors.npz"
"""Written by `seqvae/monitors/drawing.py`: the posteriors of the last reading that was drawn."""
GROWING_FILES = (METRICS, READINGS, THROUGHPUT, EVENTS)
"""Files that a run writes to while it lives."""
MOST_ROWS = 1000
"""Rows of a kind that are kept: about as many as a figure has columns of pixels."""
MOST_POSTERIORS = 2048
MOST_EVENTS = 5000
MOST_CONFIG_BYTES = 100_000
MOST_BYTES = 64_000_000
"""Bytes of a table or of events that are read, from the file's end."""
MOST_HEAD = 100_000
"""Bytes of a header."""
LARGEST = 1e100
"""Numbers beyond it are no measurement; sums and squares of the rest are finite."""

Row = dict[str, Any]


class Posteriors(NamedTuple):
    """The posteriors of one reading: finite ones, float64."""

    mean_NZ: np.ndarray
    logvar_NZ: np.ndarray
    dimensions_Z: np.ndarray
    """The model's index of each column: dimensions that are nowhere finite are left out."""
    step: int | None
    notes: tuple[str, ...]
    """How many there are, and what was left out."""


class Shown(NamedTuple):
    """A sequence in a report: text, a drawing, or the points of one feature; with id and class where it is one of the data."""

    id: str
    group: str
    """Its class; empty where that is not known."""
    text: str
    points: tuple[tuple[float, float], ...]
    is_drawing: bool
    """The points lie in the plane, and are not values over time."""


class Neighbours(NamedTuple):
    """A sequence, and those whose latents are nearest to its own."""

    of: Shown
    nearest: tuple[Shown, ...]
    distances: tuple[float | None, ...]
    name: str
    """The feature that is shown; empty for tokens."""


class Moved(NamedTuple):
    """Decoded sequences while one dimension of a latent is moved."""

    dimension: int
    moves: tuple[float, ...]
    """In standard deviations of the posterior means."""
    decoded: tuple[Shown, ...]
    name: str


class ClassShown(NamedTuple):
    """A known class: a sequence of the data, and what is drawn from the decoder at the mean of the class's latents."""

    name: str
    original: Shown
    drawn: tuple[Shown, ...]


class Walk(NamedTuple):
    """Decoded sequences between the latents of two sequences."""

    ends: tuple[Shown, ...]
    shares: tuple[float, ...]
    """How far along the way, from 0 to 1."""
    decoded: tuple[Shown, ...]


class ToldApart(NamedTuple):
    """The share of a class whose latents tell which it is, as a mean over the classes, and its 95 % interval."""

    sequences: int
    classes: int
    score: float
    low: float
    high: float


class Latents(NamedTuple):
    """The latents of a run's validation sequences at its end, as the report shows them."""

    step: int
    of: int | None
    """Sequences that there were to choose from."""
    steps: int
    """Of the chosen sequences together."""
    places: tuple[tuple[float, float], ...]
    """Of each sequence, in the plane in which they differ most."""
    shares: tuple[float, ...]
    """Of the variance, of its two directions; empty where it is the plane in which classes lie furthest apart."""
    groups: tuple[str, ...]
    """The class of each sequence; where there are none, its length."""
    are_classes: bool
    told_apart: ToldApart | None
    by_class: tuple[ClassShown, ...]
    walk: Walk | None
    neighbours: tuple[Neighbours, ...]
    moved: tuple[Moved, ...]
    feature: str
    """That is shown of whole sequences; empty where it is not a single one."""
    time_label: str


class Run(NamedTuple):
    """The content of a run directory; rows are in the order of the run."""

    directory: Path
    facts: Row
    """run.json: what the newest session reported when it began (`seqvae/training/run_directory/records.py`)."""
    environment: Row
    settings: Mapping[str, str | None]
    """config.yaml: the text of each value."""
    training: list[Row]
    validations: list[Row]
    readings: list[Row]
    readings_taken: int
    """Where that is more than there are `readings`, those are spread evenly over them."""
    throughput: list[Row]
    events: list[Row]
    evaluations: list[Row]
    preview: Preview | None
    picture: Path | None
    """The newest preview that is a picture."""
    posteriors: Posteriors | None
    latents: Latents | None
    last_sign: float | None
    """When the run last wrote something, in seconds since 1970."""
    levels: Mapping[str, "Run"] = MappingProxyType({})
    """The run with the readings, verdicts and posteriors of each level of latents; empty where there is one level."""

    @property
    def name(self) -> str:
        return self.directory.absolute().name

    @property
    def is_monitored(self) -> bool:
        return self.settings.get("disable_metrics_monitoring") != "true"

    @property
    def unit(self) -> str:
        """Return what a step of a sequence is called."""
        return step_name(text(row_in(self.facts, "data"), "kind"))

    @property
    def label(self) -> str:
        """Return what the classes of sequences are called."""
        return self.settings.get("label_column") or "class"

    @property
    def step(self) -> int:
        """The last step that any file mentions."""
        rows = [of[-1] for of in (self.training, self.validations, self.readings, self.events) if of]
        return max((whole(row, "step") or 0 for row in rows), default=0)

    @property
    def last_probe(self) -> Row:
        """The last reading at which the decoder was probed; empty where there is none."""
        return next((row for row in reversed(self.readings) if number(row, "decoder_use") is not None), {})

    @property
    def validation_sets(self) -> list[list[Row]]:
        """The validations by how many sequences they were on, in the order in which the sets came up.

        Those on different sets cannot be compared: a run validates on a part while it trains, and on all at its end.
        """
        sets: dict[float | None, list[Row]] = {}
        for row in self.validations:
            sets.setdefault(number(row, "valid_sequences"), []).append(row)
        return list(sets.values())

    @property
    def comparable_validations(self) -> list[Row]:
        """Return the validations on the set that most of them were on, the first of equals."""
        return max(self.validation_sets, key=len, default=[])

    def validated_on(self, row: Row) -> str:
        """Return what a validation was on: `on 200 of 2,000 sequences`, `on all 2,000 sequences`; empty where it is not known."""
        of = whole(row, "valid_sequences")
        if of is None:
            return ""
        splits = rows_in(row_in(self.facts, "data"), "splits")
        total = next((whole(split, "sequences") for split in splits if text(split, "split") == "valid"), None)
        if total is None or total < of:
            return f"on {counted(of, 'sequence')}"
        return f"on all {counted(of, 'sequence')}" if of == total else f"on {of:,} of {counted(total, 'sequence')}"

    @property
    def missing(self) -> tuple[str, ...]:
        """Files that a run of this kind has, and this one has not."""
        is_there = {
            CONFIG: self.settings,
            ENVIRONMENT: self.environment,
            FACTS: self.facts,
            METRICS: self.training or self.validations,
            EVENTS: self.events,
            READINGS: self.readings or not self.is_monitored,
            THROUGHPUT: self.throughput or not self.is_monitored,
            SAMPLES: self.preview is not None or self.picture is not None,
        }
        return tuple(name for name, there in is_there.items() if not there)


def is_run_directory(directory: Path) -> bool:
    """Return whether any of its files is a run's."""
    return any((directory / name).is_file() for name in (CONFIG, ENVIRONMENT, FACTS, *GROWING_FILES))


def read_run(directory: Path) -> Run:
    """Read whatever of a run is there."""
    run = _read_files(directory)
    return with_levels(run) if (directory / STEP_LEVEL).is_dir() else run


def _read_files(directory: Path) -> Run:
    metrics = _last_lines(directory / METRICS, head=MOST_HEAD)
    previews = sorted((directory / SAMPLES).glob("step-*"))
    pages = [path for path in previews if path.suffix == ".txt"]
    pictures = [path for path in previews if path.suffix == ".png" and path.is_file()]
    readings_taken, readings = _rows_over_the_run(directory / READINGS)
    events = parse_rows(_last_lines(directory / EVENTS)[-MOST_EVENTS:])
    times = []
    for name in GROWING_FILES:
        with suppress(OSError):
            times.append((directory / name).stat().st_mtime)
    try:
        posteriors = read_posteriors(directory / POSTERIORS)
    except (OSError, ValueError):
        posteriors = None
    return Run(
        directory,
        facts=_read_object(directory / FACTS),
        environment=_read_object(directory / ENVIRONMENT),
        settings=_read_settings(directory / CONFIG),
        training=_table(metrics, ("loss", "kl_weight")),
        validations=_table(metrics, ("valid_elbo",)),
        readings=readings,
        readings_taken=readings_taken,
        throughput=_rows_over_the_run(directory / THROUGHPUT)[1],
        events=[row for row in events if isinstance(row.get("event"), str) and number(row, "step") is not None],
        evaluations=parse_rows(_last_lines(directory / EVALUATION)),
        preview=read_preview(pages[-1]) if pages else None,
        picture=pictures[-1] if pictures else None,
        posteriors=posteriors,
        latents=read_latents(directory / LATENTS),
        last_sign=max(times, default=None),
    )


def with_levels(run: Run) -> Run:
    """Return a run with its levels of latents: that of the sequences, which its own files hold, and that of the steps."""
    below = _read_files(run.directory / STEP_LEVEL)
    judged = [row for row in below.events if row["event"] != "stopped"]
    # What ended a run may stand in the files of either level.
    events = sorted(
        [*run.events, *(row for row in below.events if row["event"] == "stopped")], key=lambda row: text(row, "time")
    )
    run = run._replace(events=events)
    others = [row for row in events if row["event"] != "verdict"]
    steps = run._replace(
        readings=below.readings,
        readings_taken=below.readings_taken,
        events=[*others, *judged],
        posteriors=below.posteriors,
    )
    return run._replace(levels={"sequence": run, "step": steps})


def read_posteriors(path: Path, most: int = MOST_POSTERIORS) -> Posteriors:
    """Read the monitor's posteriors, without dimensions that are nowhere finite and then without posteriors that are not."""
    with path.open("rb") as file:  # not left to numpy, which leaves a damaged file open
        try:
            with np.load(file, allow_pickle=False) as stored:
                mean_NZ, logvar_NZ = (np.asarray(stored[name], dtype=float) for name in ("mean_NZ", "logvar_NZ"))
                step = int(stored["step"]) if "step" in stored else None
            if mean_NZ.ndim != 2 or mean_NZ.shape != logvar_NZ.shape:
                raise ValueError(f"means of shape {mean_NZ.shape} and log variances of shape {logvar_NZ.shape}")
        except (zipfile.BadZipFile, EOFError, KeyError, OSError, OverflowError, TypeError, ValueError) as error:
            raise ValueError(f"{path.name} holds no posteriors ({error})") from error
    finite_NZ = (np.abs(mean_NZ) <= LARGEST) & (np.abs(logvar_NZ) <= LARGEST)
    dimensions_Z = np.flatnonzero(finite_NZ.any(axis=0))
    posteriors_N = np.flatnonzero(finite_NZ[:, dimensions_Z].all(axis=1))
    apart = max(1, math.ceil(len(posteriors_N) / most))
    shown_N = posteriors_N[::apart]
    notes = [counted(len(shown_N), "posterior")]
    if apart > 1:
        notes.append(f"one in {apart} of {len(posteriors_N):,}")
    if gone := len(mean_NZ) - len(posteriors_N):
        notes.append(f"{gone:,} left out: not finite")
    if gone := mean_NZ.shape[1] - len(dimensions_Z):
        notes.append(f"{gone:,} of {mean_NZ.shape[1]:,} dimensions left out: not finite")
    chosen = np.ix_(shown_N, dimensions_Z)
    return Posteriors(mean_NZ[chosen], logvar_NZ[chosen], dimensions_Z, step, tuple(notes))


MOST_GROUPS, LENGTH_GROUPS = 8, 4
"""Classes that have a colour of their own, and groups of lengths."""
MOST_LATENT_BYTES = 2_000_000


def read_latents(path: Path) -> Latents | None:
    """Read what a run's end wrote of its latents; None where there is nothing, or nothing that can be shown."""
    try:
        if path.stat().st_size > MOST_LATENT_BYTES:
            return None
    except OSError:
        return None
    row = _read_object(path)
    places = _pairs(row, "places")
    lengths, labels, classes = numbers(row, "lengths"), numbers(row, "labels"), texts(row, "classes")
    are_classes = len(classes) > 1 and any(label is not None and label >= 0 for label in labels)
    groups = _named(labels, classes) if are_classes else _by_length([length or 0.0 for length in lengths])
    if len(groups) != len(places):
        places = ()
    neighbours = [
        Neighbours(
            _shown(row_in(one, "of")),
            tuple(_shown(each) for each in rows_in(one, "nearest")),
            tuple(numbers(one, "distances")),
            text(one, "name"),
        )
        for one in rows_in(row, "neighbours")
    ]
    moved = [
        Moved(
            whole(one, "dimension") or 0,
            tuple(move or 0.0 for move in numbers(one, "moves")),
            tuple(_shown(each) for each in rows_in(one, "decoded")),
            text(one, "name"),
        )
        for one in rows_in(row, "moved")
    ]
    by_class = [
        ClassShown(text(one, "class"), _shown(row_in(one, "original")), tuple(map(_shown, rows_in(one, "drawn"))))
        for one in rows_in(row, "by_class")
    ]
    walked = row_in(row, "walk")
    ends, decoded = rows_in(walked, "ends"), tuple(map(_shown, rows_in(walked, "decoded")))
    shares = tuple(share or 0.0 for share in numbers(walked, "shares"))
    walk = None
    if len(ends) == 2 and len(shares) == len(decoded) > 0:
        walk = Walk(tuple(map(_shown, ends)), shares, decoded)
    apart = row_in(row, "told_apart")
    score, low, high = (number(apart, name) for name in ("score", "low", "high"))
    told_apart = None
    if score is not None and low is not None and high is not None:
        told_apart = ToldApart(whole(apart, "sequences") or 0, whole(apart, "classes") or 0, score, low, high)
    if told_apart and told_apart.classes < 2:
        told_apart = None
    if not (places or neighbours or moved or by_class or walk):
        return None
    return Latents(
        step=whole(row, "step") or 0,
        of=whole(row, "of"),
        steps=int(sum(length or 0.0 for length in lengths)),
        places=places,
        shares=tuple(share or 0.0 for share in numbers(row, "shares"))[:2],
        groups=tuple(groups),
        are_classes=are_classes,
        told_apart=told_apart,
        by_class=tuple(by_class),
        walk=walk,
        neighbours=tuple(one for one in neighbours if len(one.nearest) == len(one.distances)),
        moved=tuple(one for one in moved if len(one.moves) == len(one.decoded) > 0),
        feature=text(row, "feature"),
        time_label=text(row, "time_label"),
    )


def _pairs(row: Mapping[str, Any], name: str) -> tuple[tuple[float, float], ...]:
    """Return the points of a list that are two finite numbers."""
    value = row.get(name)
    found = [numbers({name: one}, name) for one in value] if isinstance(value, list) else []
    return tuple((one[0], one[1]) for one in found if len(one) == 2 and one[0] is not None and one[1] is not None)


def _shown(row: Mapping[str, Any]) -> Shown:
    points = _pairs(row, "points")
    return Shown(text(row, "id"), text(row, "class"), text(row, "text"), points, row.get("is_drawing") is True)


def _named(labels: Sequence[float | None], classes: Sequence[str]) -> list[str]:
    """Return the class of each sequence; of many classes the most frequent ones, and `other`."""
    names = [classes[int(one)] if one is not None and 0 <= one < len(classes) else "none" for one in labels]
    kept = [name for name, _ in Counter(names).most_common(MOST_GROUPS)]
    return [name if name in kept else "other" for name in names]


def _by_length(lengths: Sequence[float]) -> list[str]:
    """Return for each length the span that it is in; spans hold about as many sequences each.

    >>> _by_length([1, 1, 2, 3, 8, 9])
    ['1', '1', '2', '3', '8 to 9', '8 to 9']
    """
    if not lengths:
        return []
    edges = np.unique(np.quantile(lengths, np.linspace(0, 1, LENGTH_GROUPS + 1)[1:-1]))
    place_N = np.searchsorted(edges, lengths, side="right")
    names = {}
    for place in np.unique(place_N).tolist():
        inside = [length for length, of in zip(lengths, place_N, strict=True) if of == place]
        ends = dict.fromkeys((f"{min(inside):,.0f}", f"{max(inside):,.0f}"))
        names[place] = " to ".join(ends)
    return [names[place] for place in place_N.tolist()]


# --- The history of readings ----------------------------------------------------------------------------------------


class History(NamedTuple):
    """The readings of a run as arrays; what a reading does not hold, or is no number, is NaN."""

    steps_R: np.ndarray
    kl_RZ: np.ndarray
    rate_R: np.ndarray
    mutual_information_R: np.ndarray
    cap_R: np.ndarray
    """The most that the mutual information can be seen to be."""
    active_units_R: np.ndarray
    effective_dimensions_R: np.ndarray
    codes: int
    """Of a codebook, where latents are codes; 0: they are not."""
    codes_in_use_R: np.ndarray
    """Their share, and their perplexity."""
    code_perplexity_R: np.ndarray
    kl_weight_R: np.ndarray
    probed_steps_P: np.ndarray
    decoder_use_P: np.ndarray
    decoder_use_error_P: np.ndarray
    threshold_steps_E: np.ndarray
    """Steps at which the escape threshold was read."""
    threshold_E: np.ndarray
    threshold_error_E: np.ndarray
    verdicts: tuple[str | None, ...]
    """The R names of the verdict in force after each reading; None before any judgement."""
    readings_taken: int

    @property
    def starts_at(self) -> float:
        """The first step that the first reading looked at; readings are about as far apart as the first is from there."""
        apart = float(np.median(np.diff(self.steps_R))) if len(self.steps_R) > 1 else math.inf
        return max(0.0, float(self.steps_R[0]) - apart)


def read_history(path: Path) -> History | None:
    """Read a posterior.jsonl, also one that is being written; None if it holds no reading yet.

    Raises ValueError where it holds rows, but none of them is a reading.
    """
    path.stat()  # a missing file is an error here, not an empty one
    taken, rows = _rows_over_the_run(path)
    history = history_of(rows, taken)
    if rows and history is None:
        raise ValueError(f"a row of {path.name} has no kl_per_dim")
    return history


def history_of(readings: Sequence[Row], readings_taken: int) -> History | None:
    """Return readings as arrays; None where there are none with a KL per dimension."""
    pairs = [(row, numbers(row, "kl_per_dim")) for row in readings]
    dimensions = len(pairs[-1][1]) if pairs else 0
    pairs = [(row, kl_Z) for row, kl_Z in pairs if dimensions and len(kl_Z) == dimensions]
    if not pairs:
        return None
    rows = [row for row, _ in pairs]
    probed = [row for row in rows if "decoder_use" in row]
    escaping = [row for row in rows if "escape_threshold" in row]

    def array(rows: Sequence[Row], name: str) -> np.ndarray:
        return np.array([number(row, name) for row in rows], dtype=float)

    return History(
        steps_R=array(rows, "step"),
        kl_RZ=np.array([kl_Z for _, kl_Z in pairs], dtype=float),
        rate_R=array(rows, "rate"),
        mutual_information_R=array(rows, "mutual_information"),
        cap_R=array(rows, "mutual_information_cap"),
        active_units_R=array(rows, "active_units"),
        effective_dimensions_R=array(rows, "effective_dimensions"),
        codes=whole(rows[-1], "codebook_size") or 0,
        codes_in_use_R=array(rows, "codes_in_use"),
        code_perplexity_R=array(rows, "code_perplexity"),
        kl_weight_R=array(rows, "kl_weight"),
        probed_steps_P=array(probed, "step"),
        decoder_use_P=array(probed, "decoder_use"),
        decoder_use_error_P=array(probed, "decoder_use_error"),
        threshold_steps_E=array(escaping, "step"),
        threshold_E=array(escaping, "escape_threshold"),
        threshold_error_E=array(escaping, "escape_threshold_error"),
        verdicts=tuple(text(row, "verdict") or None for row in rows),
        readings_taken=readings_taken,
    )


def thin(lines: Iterable[bytes], most: int) -> tuple[int, list[bytes]]:
    """Count the lines that may be JSON objects, and keep at most `most` (an even number) of them, evenly spread, and the last.

    One of every 1, 2, 4 ... in a row is kept, in one pass and bounded memory. Of those in a row one at which the escape threshold
    or the decoder use was read is preferred, or rare ones would meet the lines that are kept by chance only.

    >>> thin([b'{"step": %d}\\n' % step for step in range(1, 6)], most=4)
    (5, [b'{"step": 2}\\n', b'{"step": 4}\\n', b'{"step": 5}\\n'])
    """

    def better(one: bytes, other: bytes) -> bytes:
        return max(other, one, key=lambda line: (b'"escape_threshold"' in line, b'"decoder_use"' in line))

    kept: list[bytes] = []
    count, in_a_row, waiting, last = 0, 1, b"", b""
    for line in lines:
        if not (line.startswith(b"{") and line.endswith(b"}\n")):  # foreign, or still being written
            continue
        count += 1
        waiting = better(waiting, line)
        if count % in_a_row == 0:
            if len(kept) == most:
                kept = [better(*pair) for pair in zip(kept[::2], kept[1::2], strict=True)]
                in_a_row *= 2
            if count % in_a_row == 0:
                kept.append(waiting)
                waiting = b""
        last = line
    if count and kept[-1] != last:
        kept.append(last)
    return count, kept


# --- Values of a row, whatever stands there --------------------------------------------------------------------------


def number(row: Mapping[str, Any], name: str) -> float | None:
    """Return a finite number of a row, or None.

    >>> number({"a": 1, "b": True, "c": "x"}, "a"), number({"b": True}, "b"), number({}, "a")
    (1.0, None, None)
    """
    value: Any = row.get(name)
    return float(value) if type(value) in (int, float) and abs(value) <= LARGEST else None


def whole(row: Mapping[str, Any], name: str) -> int | None:
    value = number(row, name)
    return None if value is None else int(value)


def text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    return value if isinstance(value, str) else ""


def texts(row: Mapping[str, Any], name: str) -> list[str]:
    value = row.get(name)
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def numbers(row: Mapping[str, Any], name: str) -> list[float | None]:
    """Return a list in its order and length, None for what is no finite number."""
    value = row.get(name)
    if not isinstance(value, list):
        return []
    # floats are checked in place: a call for each takes twice the time, and 1,000 rows may have thousands each
    return [one if type(one) is float and abs(one) <= LARGEST else number({name: one}, name) for one in value]


def rows_in(row: Mapping[str, Any], name: str) -> list[Row]:
    value = row.get(name)
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def row_in(row: Mapping[str, Any], name: str) -> Row:
    value = row.get(name)
    return value if isinstance(value, dict) else {}


def column(rows: Sequence[Row], name: str) -> list[tuple[float, float]]:
    """Return (step, value) of the rows that hold both."""
    return [
        (step, value)
        for row in rows
        if (value := number(row, name)) is not None
        if (step := number(row, "step")) is not None
    ]


# --- Files ------------------------------------------------------------------------------------------------------------


def _rows_over_the_run(path: Path) -> tuple[int, list[Row]]:
    """Read JSON lines of a run of any length: how many there are, and about MOST_ROWS of them, spread evenly.

    Of the lists in a row only `kl_per_dim` is kept: the others are thousands of numbers where there are many dimensions.
    """
    try:
        with path.open("rb") as file:
            taken, lines = thin(file, MOST_ROWS)
    except OSError:
        return 0, []
    kept = [
        {name: value for name, value in row.items() if name == "kl_per_dim" or not isinstance(value, list)}
        for row in parse_rows(lines)
        if number(row, "step") is not None
    ]
    return (len(kept) if taken == len(lines) else taken), kept


def _last_lines(path: Path, head: int = 0) -> list[bytes]:
    """Return whole lines of a file's end, behind the first line if it is up to `head` bytes; none where it cannot be read."""
    try:
        return whole_lines(path, at_most=MOST_BYTES, head=head)
    except OSError:
        return []


def _read_object(path: Path) -> Row:
    """Read a file that is one JSON object; empty where it is not."""
    try:
        return next(iter(parse_rows([path.read_bytes()])), {})
    except OSError:
        return {}


def _table(lines: Sequence[bytes], names: Sequence[str]) -> list[Row]:
    """Return the numbers of the rows of a CSV that have one of these columns, at most MOST_ROWS of them.

    To parse the whole of a long file takes seconds, so lines are chosen first. What is no number is left out, and so is all behind
    what is no CSV.
    """
    heads = [head.decode("utf-8", "replace") for head in lines[0].rstrip().split(b",")] if lines else []
    places = [place for place, head in enumerate(heads) if head in names]
    last = max(places, default=0) + 1
    cut = ((line, line.rstrip().split(b",", last)) for line in lines[1:])
    found = [line for line, fields in cut if any(fields[place] for place in places if place < len(fields))]
    if len(found) > MOST_ROWS:
        found = [found[round(place * (len(found) - 1) / (MOST_ROWS - 1))] for place in range(MOST_ROWS)]
    rows: list[Row] = []
    with suppress(csv.Error):
        for fields in csv.DictReader(line.decode("utf-8", "replace") for line in [*lines[:1], *found]):
            row: Row = {}
            for name, field in fields.items():
                try:
                    value = float(field)
                except (TypeError, ValueError):
                    continue
                if isinstance(name, str) and abs(value) <= LARGEST:
                    row[name] = value
            if "step" in row and any(name in row for name in names):
                rows.append(row)
    return rows


def _read_settings(path: Path) -> dict[str, str | None]:
    """Return the text of each value, None for null; the YAML is composed but never constructed, so it can make no object."""
    try:
        with path.open("rb") as file:
            root = yaml.compose(file.read(MOST_CONFIG_BYTES).decode("utf-8", "replace"), Loader=yaml.SafeLoader)
    except (OSError, yaml.YAMLError, ValueError, OverflowError, RecursionError):
        return {}
    if not isinstance(root, yaml.MappingNode):
        return {}
    pairs = [(key, value) for key, value in root.value if isinstance(value, yaml.ScalarNode)]
    return {str(key.value): None if value.tag.endswith(":null") else value.value for key, value in pairs}
