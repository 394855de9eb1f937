"""What a judge of collapse is worth: the true name of each recorded run, the verdicts of a replay, and the scores of both.

In: records of `zoo_recording.py`. `truth_of` names what a run came to; `replay` shows its readings to a judge (the detector, or one
of the rules it is compared with) at the cadences of the product; `score` counts recall, false alarms and how early the right
verdict came. Nothing here needs torch.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from seqvae.config.training import ObjectiveSettings
from seqvae.monitors.detector import Detector, KLSchedule
from seqvae.monitors.reading import Reading, from_row
from seqvae.monitors.rules import Thresholds
from seqvae.training.schedules import scheduled_kl_weight
from seqvae.verdicts import VERDICTS, Verdict

# --- The truth: limits that were set before any verdict on the scored half was seen -----------------------------------

USED, USED_ERRORS = 0.5, 4.0
"""Limits from which the decoder uses z: another sequence's z costs half a nat, which chance would do once in 30,000 runs."""
UNUSED, UNUSED_ERRORS = 0.1, 2.0
"""Limits below which the decoder does not use z: 0.1 nats per sequence is less than two random seeds differ by."""
RATE_GONE = 0.3
"""A rate in nats, which I(x; z) never exceeds. Half a bit per sequence is no reason to train a latent."""
RATE_KEPT = 0.6
"""Nats, twice RATE_GONE: more than estimates scatter by, so something holds the rate up."""
INFORMATION_GONE = 0.2
"""Nats of I(x; z), judged beside the rate, because its estimate from 400 posteriors scatters by some hundredths."""
GAIN, GAIN_ERRORS = 0.3, 2.0
"""Nats by which importance weighting may find the model better than its decoder alone and the latent still be worth nothing, plus
that many standard errors: the one over sequences, and that of training both with other seeds, which is larger for few data."""

NARROW, BROAD = 0.015, 0.1
"""Geometric mean of the variances of the active dimensions. A dimension of NARROW costs at least 1.6 nats, one of BROAD 0.7.
Narrow posteriors alone are no fault: sequences of much information fill such a latent, and the gain shows it."""
LOSS = 1.0
"""Nats, plus GAIN_ERRORS standard errors, by which a model is worse than its decoder alone: its posteriors are so far from the
prior that the latent costs more than it tells."""

ACTIVE_VARIANCE = 0.01
MOSTLY_DEAD, MOSTLY_ALIVE = 0.4, 0.6
"""Shares of active dimensions; between them, healthy and partly collapsed are both right."""


class Measured(NamedTuple):
    """The final network on held-out sequences, in nats per sequence; numbers that are infinite or NaN are None."""

    sequences: int
    rate: float | None
    kl_per_dim: tuple[float | None, ...]
    mutual_information: float | None
    mutual_information_cap: float
    active_units: int
    variance_of_means: tuple[float | None, ...]
    mean_of_variances: tuple[float | None, ...]
    decoder_use: float | None
    decoder_use_error: float | None
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
        return any(VERDICTS[name].is_alarm for name in self.right)


def truth_of(measured: Measured | None, seed_error: float = 0.0) -> Truth:
    """Name a run by the limits above.

    `measured` is None if the run's loss or weights became NaN or infinite; `seed_error` is the error of the gain, in nats, that
    other seeds make.
    """
    if measured is None:
        return Truth(("diverged",), "loss or weights are not finite")
    rate, information, use, use_error, gain, gain_error = (
        math.nan if number is None else number
        for number in (
            *(measured.rate, measured.mutual_information, measured.decoder_use, measured.decoder_use_error),
            *(measured.gain, measured.gain_error),
        )
    )
    if any(math.isnan(number) for number in (rate, information, use, gain)):
        return Truth((), "finite weights, but numbers that are not")
    gain_error = math.hypot(gain_error, seed_error)
    if use < UNUSED + UNUSED_ERRORS * use_error:
        if gain > GAIN + GAIN_ERRORS * gain_error:
            return Truth((), f"not used, and yet better by {gain:.2f} ± {gain_error:.2f} than without a latent")
        if rate >= RATE_KEPT:
            return Truth(("decoder_ignores_z",), f"rate {rate:.2f}, not used")
        if rate < RATE_GONE and information < INFORMATION_GONE:
            return Truth(("collapsed",), f"rate {rate:.2f}, not used")
        return Truth((), f"not used, rate {rate:.2f}, MI {information:.2f}")
    if use < USED or use < USED_ERRORS * use_error:
        return Truth((), f"decoder use {use:.2f} ± {use_error:.2f}")
    if information < INFORMATION_GONE:
        return Truth((), f"used, although it tells only {information:.2f} nats")
    logs = [
        math.log(variance)
        for moved, variance in zip(measured.variance_of_means, measured.mean_of_variances, strict=True)
        if moved is not None and moved >= ACTIVE_VARIANCE and variance is not None
    ]
    variance = math.exp(statistics.fmean(logs)) if logs else 1.0
    share = measured.active_units / len(measured.variance_of_means)
    about = f"variance {variance:.3f}, {gain:+.2f} ± {gain_error:.2f} nats better than without a latent"
    if variance < NARROW and gain < -LOSS - GAIN_ERRORS * gain_error:
        return Truth(("not_variational",), about)
    if variance < BROAD and gain < -GAIN - GAIN_ERRORS * gain_error:
        return Truth((), about)
    about = f"{about}, {share:.0%} of the dimensions active"
    if share <= MOSTLY_DEAD:
        return Truth(("partly_collapsed",), about)
    return Truth(("healthy",) if share >= MOSTLY_ALIVE else ("healthy", "partly_collapsed"), about)


# --- Replay -----------------------------------------------------------------------------------------------------------


class Cadence(NamedTuple):
    """The intervals at which a run of 1,000 steps is watched."""

    every_n_steps: int
    window: int
    probe_every_n_readings: int | None
    """None: decoder use is measured only when the judge requests it."""


CADENCES = {
    "closest": Cadence(20, 100, 1),
    "reference, fast": Cadence(20, 100, None),
    "default": Cadence(20, 50, 4),
    "throttled": Cadence(20, 50, None),
    "2 x as close": Cadence(10, 50, 4),
    "2 x, throttled": Cadence(10, 50, None),
    "5 x, throttled": Cadence(4, 100, None),
    "10 x, closest": Cadence(2, 100, 1),
}
OF_COMMANDS = ("closest", "reference, fast", "default", "throttled")
"""Cadences of the two commands, each without and with --fast_detection, in a run so short that all of them read it 50 times. The
others are of runs for which more was requested."""


class Judge(Protocol):
    """The detector, or a rule."""

    def wants_decoder_use(self, reading: Reading, /) -> bool: ...

    def judge(self, reading: Reading, /) -> Verdict: ...

    def diverged(self, step: int, message: str, /) -> Verdict: ...


class Record(NamedTuple):
    """One run, as it was recorded."""

    name: str
    total_steps: int
    objective: ObjectiveSettings
    readings: tuple[Reading, ...]
    """The readings, each with decoder use."""
    diverged_at_step: int | None
    message: str | None
    """The message of a run that ended because it diverged."""

    @property
    def schedule(self) -> KLSchedule:
        """The part of its KL weight that a run knows beforehand."""
        if self.objective.target_kl is not None:
            return KLSchedule(self.total_steps, is_steered=True)
        return KLSchedule(self.total_steps, lambda step: scheduled_kl_weight(step, self.total_steps, self.objective))


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


def record_from(stored: Mapping[str, Any]) -> Record:
    return Record(
        name=stored["name"],
        total_steps=stored["total_steps"],
        objective=ObjectiveSettings(**stored["objective"]),
        readings=tuple(from_row(row) for row in stored["readings"]),
        diverged_at_step=stored["diverged_at_step"],
        message=stored["said"],
    )


def due_readings(record: Record, cadence: Cadence) -> Iterator[Reading]:
    """Yield the readings that fall due, and the last, with decoder use only where the cadence measures it unrequested."""
    nth = cadence.probe_every_n_readings
    for reading in record.readings:
        is_last = reading.step == record.total_steps
        number, rest = divmod(reading.step, cadence.every_n_steps)
        if rest == 0 or is_last:
            is_probed = nth is not None and (number % nth == 0 or is_last)
            yield reading if is_probed else reading._replace(decoder_use=None, decoder_use_error=None)


def replay(record: Record, cadence: Cadence, judge: Judge) -> Replayed:
    recorded = {reading.step: reading for reading in record.readings}
    calls, probed = [], 0
    for reading in due_readings(record, cadence):
        if reading.decoder_use is None and judge.wants_decoder_use(reading):
            reading = recorded[reading.step]
        probed += reading.decoder_use is not None
        verdict = judge.judge(reading)
        calls.append(Call(reading.step, verdict.name, verdict.evidence))
    if record.message is not None:
        last_step = calls[-1].step if calls else 0
        step = record.diverged_at_step or last_step
        verdict = judge.diverged(step, record.message)
        calls.append(Call(max(step, last_step), verdict.name, verdict.evidence))
    return Replayed(tuple(calls), probed)


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


class SmallKL:
    """Whether the KL was below 0.01 on average over 50 optimizer steps."""

    def __init__(self) -> None:
        self.last: list[Reading] = []

    def __call__(self, reading: Reading) -> bool:
        self.last = [one for one in [*self.last, reading] if one.step > reading.step - SMALL_KL_STEPS]
        return reading.step >= SMALL_KL_STEPS and sum(one.rate for one in self.last) / len(self.last) < SMALL_KL


def has_few_active(reading: Reading) -> bool:
    return reading.active_units is not None and reading.active_units < FEW_ACTIVE * len(reading.kl_per_dim)


JUDGES: dict[str, Callable[[Record, Cadence], Judge]] = {
    "detector": lambda record, cadence: Detector(Thresholds(), cadence.window, record.schedule, can_probe=True),
    "KL < 0.01 over 50 steps": lambda record, cadence: Rule(SmallKL()),
    "AU < 10 %": lambda record, cadence: Rule(has_few_active),
    "always 0 active units": lambda record, cadence: Rule(lambda reading: True),
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

    @property
    def alarms(self) -> list[Call]:
        return [call for call in self.replayed.calls if VERDICTS[call.name].is_alarm]

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
    return Outcome(record.name, truth, replayed, record.total_steps, record.schedule.full_from())


class Score(NamedTuple):
    """Counts, and medians of what the right calls took."""

    runs: int
    sick: int
    """Runs that are collapsed, ignored, not variational or diverged in truth."""
    found: int
    """Sick runs with an alarm in force at the end, of whatever kind."""
    well: int
    false_alarms: int
    """Healthy runs in which any alarm was ever in force."""
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
        false_alarms=sum(bool(one.alarms) for one in well),
        right_kind=sum(one.is_right_at_end for one in scored),
        median_readings=statistics.median(first + 1 for _, first in firsts) if firsts else None,
        median_share=statistics.median(shares) if shares else None,
        dead_at_start=len(dead_at_start),
        most_readings_dead_at_start=_most_readings(dead_at_start),
        annealed=len(annealed),
        most_readings_after_annealing=_most_readings(annealed),
        asked_share=sum(one.replayed.probed for one in scored) / readings if readings else 0.0,
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
