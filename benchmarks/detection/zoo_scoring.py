"""What a judge of collapse is worth: the true name of each recorded run, the verdicts of a replay, and the scores of both.

In: records of `zoo_recording.py`. `truth_of` names what a run came to; `replay` shows its readings to a judge (the detector, or one
of the rules it is compared with) at the cadences of the product; `score` counts recall, false alarms and how early the right
verdict came. Nothing here needs torch.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from seqvae.config.training import ObjectiveSettings
from seqvae.monitors.callback import steps_between_readings
from seqvae.monitors.detector import FULL_SHARE, Detector, KLSchedule
from seqvae.monitors.reading import Reading, Scope, from_row
from seqvae.training.schedules import scheduled_kl_weight
from seqvae.verdicts import VERDICTS, Circumstances, Verdict

# --- The truth: limits that were set before any verdict on the scored half was seen -----------------------------------

USED, USED_ERRORS = 0.5, 4.0
"""Limits from which the decoder uses z: another sequence's z costs half a nat, which chance would do once in 30,000 runs."""
UNUSED, UNUSED_ERRORS = 0.1, 2.0
"""Limits below which the decoder does not use z: 0.1 nats per sequence is less than two random seeds differ by."""


class Limits(NamedTuple):
    """Nats of a posterior, that of a sequence or of a step."""

    rate_gone: float
    """A rate, which I(x; z) never exceeds. Half a bit per sequence is no reason to train a latent."""
    rate_kept: float
    """Twice that: more than estimates scatter by, so something holds the rate up."""
    information_gone: float
    """I(x; z), judged beside the rate, because its estimate from 400 posteriors scatters by some hundredths."""


LIMITS: dict[Scope, Limits] = {"sequence": Limits(0.3, 0.6, 0.2), "step": Limits(0.03, 0.06, 0.1)}
"""Those of steps are to those of sequences as in the detector's thresholds."""
GAIN, GAIN_ERRORS = 0.3, 2.0
"""Nats by which importance weighting may find the model better than its decoder alone and the latent still be worth nothing, plus
that many standard errors: the one over sequences, and that of training both with other seeds, which is larger for few data."""

NARROW, BROAD = 0.015, 0.1
"""Geometric mean of the variances of the active dimensions. A dimension of NARROW costs at least 1.6 nats, one of BROAD 0.7.
Narrow posteriors alone are no fault: sequences of much information fill such a latent, and the gain shows it."""
LOSS = 1.0
"""Nats, plus GAIN_ERRORS standard errors, by which a model is worse than its decoder alone: its posteriors are so far from the
prior that the latent costs more than it tells."""
EXPLODED = 1000.0
"""Nats of rate that no sequence of the zoo has to tell: the run survived steps that were not finite, or came near to one."""

ACTIVE_VARIANCE = 0.01
MOSTLY_DEAD, MOSTLY_ALIVE = 0.4, 0.6
"""Shares of active dimensions; between them, healthy and partly collapsed are both right."""


class Measured(NamedTuple):
    """The final network on held-out sequences, in nats; numbers that are infinite or NaN are None."""

    sequences: int
    scope: Scope
    """What has a posterior. Decoder use and NLLs are per sequence either way, all else per posterior."""
    rate: float | None
    kl_per_dim: tuple[float | None, ...]
    mutual_information: float | None
    mutual_information_cap: float
    active_units: int
    variance_of_means: tuple[float | None, ...]
    mean_of_variances: tuple[float | None, ...]
    decoder_use: float | None
    decoder_use_error: float | None
    is_compared: bool
    """Whether a decoder without a latent was trained in the same way; without one there is no gain."""
    nll_without_latent: float | None
    gain: float | None
    """Exact NLL of the decoder without a latent, minus the model's own importance-weighted one, sequence by sequence."""
    gain_error: float | None


def measured_from(stored: Mapping[str, Any]) -> Measured:
    numbers: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()
    }
    return Measured(**numbers)


class Truth(NamedTuple):
    """What a run came to."""

    right: tuple[str, ...]
    """Verdicts that are right at its end. None of them: the run lies between the limits ("grey"), and is listed but not scored."""
    why: str

    @property
    def name(self) -> str:
        return " or ".join(self.right) or "grey"

    @property
    def is_sick(self) -> bool:
        """Whether nothing but an alarm is right at the end."""
        return bool(self.right) and all(VERDICTS[name].is_alarm for name in self.right)

    def forgives(self, name: str) -> bool:
        """Return whether an alarm of this name is right at some time in a run that is not sick for certain."""
        return name in self.right or (name == "collapsing" and "collapsed" in self.right)


def truth_of(measured: Measured | None, seed_error: float = 0.0) -> Truth:
    """Name a run by the limits above.

    `measured` is None if the run broke off or its weights became NaN or infinite; `seed_error` is the error of the gain, in nats,
    that other seeds make.
    """
    if measured is None:
        return Truth(("diverged",), "weights are not finite, or the run broke off")
    rate, information, use, use_error, gain, gain_error = (
        math.nan if number is None else number
        for number in (
            *(measured.rate, measured.mutual_information, measured.decoder_use, measured.decoder_use_error),
            *(measured.gain, measured.gain_error),
        )
    )
    if any(math.isnan(number) for number in (rate, information, use)) or (measured.is_compared and math.isnan(gain)):
        return Truth((), "finite weights, but numbers that are not")
    if rate > EXPLODED:
        ignored = ("decoder_ignores_z",) if use < UNUSED + UNUSED_ERRORS * use_error else ()
        return Truth(("diverged", "not_variational", *ignored), f"rate {rate:.3g}, with finite weights")
    gain_error = math.hypot(gain_error, seed_error)
    limits = LIMITS[measured.scope]
    if use < UNUSED + UNUSED_ERRORS * use_error:
        if measured.is_compared and gain > GAIN + GAIN_ERRORS * gain_error:
            return Truth((), f"not used, and yet better by {gain:.2f} ± {gain_error:.2f} than without a latent")
        if rate >= limits.rate_kept:
            return Truth(("decoder_ignores_z",), f"rate {rate:.2f}, not used")
        if rate < limits.rate_gone and information < limits.information_gone:
            return Truth(("collapsed",), f"rate {rate:.3f}, not used")
        return Truth((), f"not used, rate {rate:.2f}, MI {information:.2f}")
    if use < USED or use < USED_ERRORS * use_error:
        return Truth((), f"decoder use {use:.2f} ± {use_error:.2f}")
    if rate < limits.rate_gone or information < limits.information_gone:  # healthy is what all three say clearly
        return Truth((), f"used, although it tells only {min(rate, information):.2f} nats")
    logs = [
        math.log(variance)
        for moved, variance in zip(measured.variance_of_means, measured.mean_of_variances, strict=True)
        if moved is not None and moved >= ACTIVE_VARIANCE and variance is not None
    ]
    variance = math.exp(statistics.fmean(logs)) if logs else 1.0
    share = measured.active_units / len(measured.variance_of_means)
    about = f"variance {variance:.3f}"
    if measured.is_compared:
        about += f", {gain:+.2f} ± {gain_error:.2f} nats better than without a latent"
        if variance < NARROW and gain < -LOSS - GAIN_ERRORS * gain_error:
            return Truth(("not_variational",), about)
        if variance < BROAD and gain < -GAIN - GAIN_ERRORS * gain_error:
            return Truth((), about)
    elif variance < NARROW:
        return Truth((), f"{about}, and nothing to compare with")
    about = f"{about}, {share:.0%} of the dimensions active"
    if share <= MOSTLY_DEAD:
        return Truth(("partly_collapsed",), about)
    return Truth(("healthy",) if share >= MOSTLY_ALIVE else ("healthy", "partly_collapsed"), about)


SHORT, FEW_STEPS = 150, 100
"""Optimizer steps of a run, and those under the full KL weight, with which a judge may say that it cannot tell."""
OPEN = ("cannot_tell", "warming_up")


def as_far_as_can_be_told(truth: Truth, record: "Record") -> Truth:
    """Let a judge leave a short run open.

    Below FEW_STEPS under the full weight nothing may be held against it, but that it diverged; what came to life is healthy. A run
    between the limits stays there.
    """
    full = record.steps_under_full_weight
    if not truth.right or "diverged" in truth.right or not (record.total_steps <= SHORT or full < FEW_STEPS):
        return truth
    told = tuple(name for name in truth.right if full >= FEW_STEPS or VERDICTS[name].is_unharmed)
    return Truth((*OPEN, *told), f"{full:,} steps under the full weight; {truth.why}")


# --- Replay -----------------------------------------------------------------------------------------------------------


RECORDED_IN_ONE = 5
"""Readings that are recorded where a command makes one."""


def record_every(total_steps: int) -> int:
    """Return the steps between two recorded readings, a divisor of those between two of the commands' readings.

    >>> [record_every(steps) for steps in (60, 300, 750, 1000, 2000)]
    [1, 1, 3, 4, 4]
    """
    closest = steps_between_readings(CADENCES["closest"].update_frequency, total_steps)
    return max(each for each in range(1, max(1, closest // RECORDED_IN_ONE) + 1) if closest % each == 0)


class Cadence(NamedTuple):
    """How a run is watched."""

    update_frequency: int
    """Steps between two readings; fewer in a run so short that it would have less than fifty of them."""
    window: int
    probe_every_n_readings: int | None
    """None: decoder use is measured only when the judge requests it."""


CADENCES = {
    "closest": Cadence(20, 100, 1),
    "reference, fast": Cadence(50, 100, None),
    "default": Cadence(100, 50, 4),
    "throttled": Cadence(200, 50, None),
    "5 x, throttled": Cadence(4, 100, None),
    "5 x, closest": Cadence(4, 100, 1),
}
OF_COMMANDS = ("closest", "reference, fast", "default", "throttled")
"""Cadences of the two commands, each without and with --fast_detection. The others are of runs for which more was requested."""


class Judge(Protocol):
    """The detector, or a rule."""

    def wants_decoder_use(self, reading: Reading, /) -> bool: ...

    def judge(self, reading: Reading, /) -> Verdict: ...

    def diverged(self, step: int, message: str, /) -> Verdict: ...


@runtime_checkable
class WantsThreshold(Protocol):
    """A judge that asks for the escape threshold where it suspects a collapse."""

    def wants_escape_threshold(self, reading: Reading, /) -> bool: ...


class Record(NamedTuple):
    """One run, as it was recorded."""

    name: str
    total_steps: int
    objective: ObjectiveSettings
    readings: tuple[Reading, ...]
    """The readings, each with decoder use, and, where the rate was small, each fiftieth of the run with the escape threshold."""
    diverged_at_step: int | None
    message: str | None
    """The message of a run that ended because it diverged."""
    sees_inputs: bool | None = None
    """Whether the decoder gets earlier steps beside the latent."""

    @property
    def schedule(self) -> KLSchedule:
        """The part of its KL weight that a run knows beforehand."""
        if self.objective.target_kl is not None:
            return KLSchedule(self.total_steps, is_steered=True)
        return KLSchedule(self.total_steps, lambda step: scheduled_kl_weight(step, self.total_steps, self.objective))

    @property
    def steps_under_full_weight(self) -> int:
        """Optimizer steps whose weight was as high as it gets, counted over all cycles; all where it is steered."""
        if self.objective.target_kl is not None:
            return self.total_steps
        weights = [scheduled_kl_weight(step, self.total_steps, self.objective) for step in range(self.total_steps)]
        return sum(weight >= FULL_SHARE * max(weights) for weight in weights)


class Call(NamedTuple):
    """The verdict in force after a reading."""

    step: int
    name: str
    evidence: str


class Replayed(NamedTuple):
    """A judge's verdicts on a run."""

    calls: tuple[Call, ...]
    """The calls: one for each reading, and one more where the run's last message said that it diverged."""
    probed: int
    """Readings with decoder use."""
    thresholds: int = 0
    """Readings whose escape threshold was asked for and is recorded."""


def record_from(stored: Mapping[str, Any]) -> Record:
    return Record(
        name=stored["name"],
        total_steps=stored["total_steps"],
        objective=ObjectiveSettings(**stored["objective"]),
        readings=tuple(from_row(row) for row in stored["readings"]),
        diverged_at_step=stored["diverged_at_step"],
        message=stored["said"],
        sees_inputs=stored["features"]["is_autoregressive"],
    )


USE_FIELDS = tuple(name for name in Reading._fields if name.startswith("decoder_use"))
THRESHOLD_FIELDS = tuple(name for name in Reading._fields if "escape_threshold" in name)


def without(reading: Reading, fields: Sequence[str]) -> Reading:
    nothing: dict[str, Any] = dict.fromkeys(fields)
    return reading._replace(**nothing)


def due_readings(record: Record, cadence: Cadence) -> Iterator[Reading]:
    """Yield the readings that fall due, and the last, with decoder use only where the cadence measures it unrequested.

    None has the escape threshold, which is read on request alone.
    """
    every_n_steps = steps_between_readings(cadence.update_frequency, record.total_steps)
    nth = cadence.probe_every_n_readings
    for reading in record.readings:
        is_last = reading.step == record.total_steps
        number, rest = divmod(reading.step, every_n_steps)
        if rest == 0 or is_last:
            is_probed = nth is not None and (number % nth == 0 or is_last)
            yield without(reading, THRESHOLD_FIELDS if is_probed else (*USE_FIELDS, *THRESHOLD_FIELDS))


def replay(record: Record, cadence: Cadence, judge: Judge) -> Replayed:
    recorded = {reading.step: reading for reading in record.readings}
    calls, probed, thresholds = [], 0, 0
    for reading in due_readings(record, cadence):
        full = recorded[reading.step]
        if reading.decoder_use is None and judge.wants_decoder_use(reading):
            reading = without(full, THRESHOLD_FIELDS)
        if (
            full.escape_threshold is not None
            and isinstance(judge, WantsThreshold)
            and judge.wants_escape_threshold(reading)
        ):
            reading = reading._replace(**{name: getattr(full, name) for name in THRESHOLD_FIELDS})
            thresholds += 1
        probed += reading.decoder_use is not None
        verdict = judge.judge(reading)
        calls.append(Call(reading.step, verdict.name, verdict.evidence))
    if record.message is not None:
        last_step = calls[-1].step if calls else 0
        step = record.diverged_at_step or last_step
        verdict = judge.diverged(step, record.message)
        calls.append(Call(max(step, last_step), verdict.name, verdict.evidence))
    return Replayed(tuple(calls), probed, thresholds)


class Rule:
    """A rule of one number, which never abstains, requests nothing and does not know NaN."""

    def __init__(self, is_collapsed: Callable[[Reading], bool]) -> None:
        self.is_collapsed = is_collapsed
        self.verdict = Verdict("healthy", 0, "a rule of one number")

    def wants_decoder_use(self, reading: Reading) -> bool:
        return False

    def judge(self, reading: Reading) -> Verdict:
        name: str = "collapsed" if self.is_collapsed(reading) else "healthy"
        self.verdict = self.verdict._replace(name=name, since_step=reading.step)
        return self.verdict

    def diverged(self, step: int, message: str, /) -> Verdict:
        return self.verdict


SMALL_KL, SMALL_KL_STEPS = 0.01, 50
FEW_ACTIVE = 0.1
SMALL_INFORMATION, SMALL_INFORMATION_READINGS = 0.1, 5


class SmallKL:
    """Whether the KL was below 0.01 on average over 50 optimizer steps."""

    def __init__(self) -> None:
        self.last: list[Reading] = []

    def __call__(self, reading: Reading) -> bool:
        self.last = [one for one in [*self.last, reading] if one.step > reading.step - SMALL_KL_STEPS]
        return reading.step >= SMALL_KL_STEPS and sum(one.rate for one in self.last) / len(self.last) < SMALL_KL


class SmallInformation:
    """Whether the mutual information was below 0.1 at five readings in a row."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def __call__(self, reading: Reading) -> bool:
        self.in_a_row = self.in_a_row + 1 if reading.mutual_information < SMALL_INFORMATION else 0
        return self.in_a_row >= SMALL_INFORMATION_READINGS


def has_few_active(reading: Reading) -> bool:
    return reading.active_units is not None and reading.active_units < FEW_ACTIVE * len(reading.kl_per_dim)


def detector_of(record: Record, cadence: Cadence) -> Detector:
    """Return the detector as the product makes it for such a run."""
    return Detector(
        None,
        cadence.window,
        record.schedule,
        can_read_threshold=any(reading.escape_threshold is not None for reading in record.readings),
        circumstances=None if record.sees_inputs is None else Circumstances(sees_inputs=record.sees_inputs),
    )


JUDGES: dict[str, Callable[[Record, Cadence], Judge]] = {
    "detector": detector_of,
    "KL < 0.01 over 50 steps": lambda record, cadence: Rule(SmallKL()),
    "AU < 10 %": lambda record, cadence: Rule(has_few_active),
    "MI < 0.1, five in a row": lambda record, cadence: Rule(SmallInformation()),
}


# --- Scores: each of one half of the zoo at one cadence, without the runs whose truth is grey -------------------------


class Outcome(NamedTuple):
    """One run under one judge at one cadence."""

    name: str
    truth: Truth
    replayed: Replayed
    total_steps: int
    full_from: int | None
    """The step from which the KL weight is full; None: steered."""
    slept: bool = False
    """Whether the latent was silent for a while after the run's beginning."""

    @property
    def alarms(self) -> list[Call]:
        return [call for call in self.replayed.calls if VERDICTS[call.name].is_alarm]

    @property
    def false_alarms(self) -> list[Call]:
        """The alarms in a run that is not sick, and need not be called so."""
        return [] if self.truth.is_sick else [call for call in self.alarms if not self.truth.forgives(call.name)]

    @property
    def is_waker(self) -> bool:
        """Whether the latent was silent for a while, and ended alive."""
        return self.slept and not self.truth.is_sick and any(VERDICTS[name].is_unharmed for name in self.truth.right)

    @property
    def was_called_collapsed(self) -> bool:
        return any(VERDICTS[call.name].is_collapse for call in self.alarms)

    @property
    def is_found(self) -> bool:
        """Whether an alarm is in force at the end, of whatever kind."""
        return bool(self.replayed.calls) and VERDICTS[self.replayed.calls[-1].name].is_alarm

    @property
    def is_right_at_end(self) -> bool:
        return bool(self.replayed.calls) and self.replayed.calls[-1].name in self.truth.right

    @property
    def first_right(self) -> int | None:
        """The place of the first right call after which none was wrong; `collapsing` is right on the way to a collapse."""
        right = (*self.truth.right, "collapsing") if "collapsed" in self.truth.right else self.truth.right
        place = None
        for number, call in enumerate(self.replayed.calls):
            if call.name not in right:
                place = None
            elif place is None:
                place = number
        return place

    @property
    def readings_to_call(self) -> int | None:
        """Readings with the full weight, up to the first right call that stayed; None: there is no such call."""
        if self.first_right is None:
            return None
        return sum(call.step > (self.full_from or 0) for call in self.replayed.calls[: self.first_right + 1])


def outcome_of(record: Record, truth: Truth, replayed: Replayed) -> Outcome:
    return Outcome(
        record.name, truth, replayed, record.total_steps, record.schedule.full_from(), slept=has_slept(record)
    )


SILENT_SHARE = 0.05
"""Share of a run for which a rate below the limit is a silence, after as large a share at its beginning."""


def has_slept(record: Record) -> bool:
    """Return whether all rates of some stretch of the run were below the limit of a rate that is gone."""
    least = SILENT_SHARE * record.total_steps
    since = None
    for reading in record.readings:
        if reading.step < least or not reading.rate < LIMITS[reading.scope].rate_gone:
            since = None
        elif since is None:
            since = reading.step
        elif reading.step - since >= least:
            return True
    return False


class Silence(NamedTuple):
    """A run that fell silent: the escape threshold in units of the KL weight at its silent readings, and what was said of it."""

    run: str
    woke: bool
    """Or stayed dead, in truth."""
    weight: float
    """At the run's end."""
    readings: int
    lowest: float
    median: float
    last: float
    below: int
    """Readings at which the threshold lay below the weight by a standard error."""
    called: bool
    """Whether it was called collapsed, or ignored by the decoder, at some time."""


def silence_of(record: Record, outcome: Outcome) -> Silence | None:
    """Return what is known of a silence; None: the run did not fall silent, or between the limits, or no threshold was read."""
    if not (outcome.is_waker or outcome.truth.right == ("collapsed",)):
        return None
    ratios = [
        (reading.escape_threshold / reading.kl_weight, reading.escape_threshold_error / reading.kl_weight)
        for reading in record.readings
        if reading.rate < LIMITS[reading.scope].rate_gone
        and reading.kl_weight
        and reading.escape_threshold is not None
        and reading.escape_threshold_error is not None
        and math.isfinite(reading.escape_threshold + reading.escape_threshold_error)
    ]
    if not ratios:
        return None
    values = [round(ratio, 2) for ratio, _ in ratios]
    return Silence(
        run=record.name,
        woke=outcome.is_waker,
        weight=round(record.readings[-1].kl_weight or math.nan, 3),
        readings=len(values),
        lowest=min(values),
        median=round(statistics.median(values), 2),
        last=values[-1],
        below=sum(ratio + error < 1 for ratio, error in ratios),
        called=outcome.was_called_collapsed,
    )


class Score(NamedTuple):
    """Counts, and medians of what the right calls took."""

    runs: int
    sick: int
    """Runs that are collapsed, ignored, not variational or diverged in truth."""
    found: int
    """Sick runs with an alarm in force at the end, of whatever kind."""
    well: int
    false_alarms: int
    """Runs that are not sick in which an alarm was ever in force."""
    false_at_end: int
    """Those of them in which one was in force at the end."""
    wakers: int
    """Runs that were silent for a while and ended alive."""
    wakers_called: int
    """Those of them that were ever called collapsed, or ignored by the decoder."""
    right_kind: int
    """Runs of all kinds whose last verdict is right."""
    median_readings: float | None
    """Readings up to and including the first right alarm that stayed."""
    median_share: float | None
    """Share of the run that had passed by then."""
    dead_at_start: int
    """Runs that are collapsed in truth, under a constant weight."""
    most_readings_dead_at_start: int | None
    """The most readings that a right call took; None: there is a run without one, or no such run."""
    annealed: int
    """Runs that are collapsed in truth, under a weight that rises."""
    most_readings_after_annealing: int | None
    """The most readings after the weight was full, 0 where the call was earlier."""
    asked_share: float
    """Share of all readings that have decoder use."""
    threshold_readings: int
    """Readings of the escape threshold, in all runs."""


def score(outcomes: Sequence[Outcome]) -> Score:
    scored = [one for one in outcomes if one.truth.right]
    sick = [one for one in scored if one.truth.is_sick]
    well = [one for one in scored if not one.truth.is_sick]
    called = [(one, one.first_right) for one in sick]
    firsts = [(one, first) for one, first in called if first is not None]
    collapsed = [one for one in sick if one.truth.right == ("collapsed",) and one.full_from is not None]
    dead_at_start = [one for one in collapsed if one.full_from == 0]
    annealed = [one for one in collapsed if one.full_from != 0]
    readings = sum(len(one.replayed.calls) for one in scored)
    shares = [one.replayed.calls[first].step / one.total_steps for one, first in firsts]
    return Score(
        runs=len(scored),
        sick=len(sick),
        found=sum(one.is_found for one in sick),
        well=len(well),
        false_alarms=sum(bool(one.false_alarms) for one in well),
        false_at_end=sum(one.replayed.calls[-1] in one.false_alarms for one in well if one.replayed.calls),
        wakers=sum(one.is_waker for one in scored),
        wakers_called=sum(one.is_waker and one.was_called_collapsed for one in scored),
        right_kind=sum(one.is_right_at_end for one in scored),
        median_readings=statistics.median(first + 1 for _, first in firsts) if firsts else None,
        median_share=statistics.median(shares) if shares else None,
        dead_at_start=len(dead_at_start),
        most_readings_dead_at_start=_most_readings(dead_at_start),
        annealed=len(annealed),
        most_readings_after_annealing=_most_readings(annealed),
        asked_share=sum(one.replayed.probed for one in scored) / readings if readings else 0.0,
        threshold_readings=sum(one.replayed.thresholds for one in scored),
    )


def _most_readings(outcomes: Sequence[Outcome]) -> int | None:
    counts = [one.readings_to_call for one in outcomes]
    known = [count for count in counts if count is not None]
    return max(known) if known and len(known) == len(counts) else None


def history(outcome: Outcome) -> str:
    """Return the changes of a run's verdict in one line."""
    names = [None, *(call.name for call in outcome.replayed.calls)]
    changes = zip(names, outcome.replayed.calls, strict=False)
    return ", ".join(f"{call.step} {call.name}" for before, call in changes if call.name != before)
