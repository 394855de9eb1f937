"""Shows the records of the zoo to whoever judges, at the cadences of the product: the detector, and the rules it is measured by.

In: a record of `zoo_runs.py`. Out: the verdict in force after each reading. No torch.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from seqvae.config.training import ObjectiveSettings
from seqvae.monitors.detection.detector import Detector
from seqvae.monitors.detection.findings import Verdict, VerdictName
from seqvae.monitors.detection.thresholds import Thresholds
from seqvae.monitors.detection.trends import KLSchedule
from seqvae.monitors.reading import Reading, from_row
from seqvae.training.schedules import scheduled_kl_weight


class Cadence(NamedTuple):
    """How closely a run of 1,000 steps is watched."""

    every_n_steps: int
    window: int
    probe_every_n_readings: int | None
    """None: the decoder is asked only when the judge wants it."""


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
"""What the two commands do, each without and with --fast_detection, in a run so short that all of them read it 50 times. The
others are runs of which somebody asks for more."""


class Judge(Protocol):
    """The detector, or a rule."""

    def wants_decoder_use(self, reading: Reading) -> bool: ...

    def judge(self, reading: Reading) -> Verdict: ...

    def diverged(self, step: int, said: str) -> Verdict: ...


class Record(NamedTuple):
    """One run, as it was recorded."""

    name: str
    total_steps: int
    objective: ObjectiveSettings
    readings: tuple[Reading, ...]
    """Each with decoder use."""
    diverged_at_step: int | None
    said: str | None
    """What a run said that ended because of it."""


class Call(NamedTuple):
    """The verdict in force after a reading."""

    step: int
    name: VerdictName
    evidence: str


class Replayed(NamedTuple):
    """What a judge said of a run."""

    calls: tuple[Call, ...]
    """One for each reading, and one more where the run's end had to say that it diverged."""
    asked: int
    """Readings with decoder use."""


def record_from(stored: Mapping[str, Any]) -> Record:
    return Record(
        name=stored["name"],
        total_steps=stored["total_steps"],
        objective=ObjectiveSettings(**stored["objective"]),
        readings=tuple(from_row(row) for row in stored["readings"]),
        diverged_at_step=stored["diverged_at_step"],
        said=stored["said"],
    )


def replay(record: Record, cadence: Cadence, judge: Judge) -> Replayed:
    calls, asked = [], 0
    for reading in offered(record, cadence):
        if reading.decoder_use is None and judge.wants_decoder_use(reading):
            reading = with_recorded_use(record, reading)
        asked += reading.decoder_use is not None
        verdict = judge.judge(reading)
        calls.append(Call(reading.step, verdict.name, verdict.evidence))
    if record.said is not None:
        step = record.diverged_at_step or (calls[-1].step if calls else 0)
        verdict = judge.diverged(step, record.said)
        calls.append(Call(max(step, calls[-1].step if calls else 0), verdict.name, verdict.evidence))
    return Replayed(tuple(calls), asked)


def offered(record: Record, cadence: Cadence) -> Iterator[Reading]:
    """The readings that fall due, without decoder use where nobody would have asked unbidden; the last step is due, too."""
    due = [one for one in record.readings if one.step % cadence.every_n_steps == 0 or one.step == record.total_steps]
    nth = cadence.probe_every_n_readings
    for reading in due:
        number = reading.step // cadence.every_n_steps
        is_probed = nth is not None and (number % nth == 0 or reading.step == record.total_steps)
        yield reading if is_probed else reading._replace(decoder_use=None, decoder_use_error=None)


def with_recorded_use(record: Record, reading: Reading) -> Reading:
    return next(one for one in record.readings if one.step == reading.step)


def schedule_of(record: Record) -> KLSchedule:
    """What a run knows of its KL weight beforehand."""
    if record.objective.target_kl is not None:
        return KLSchedule(record.total_steps, is_steered=True)
    return KLSchedule(record.total_steps, lambda step: scheduled_kl_weight(step, record.total_steps, record.objective))


# --- The judges -------------------------------------------------------------------------------------------------------


class Rule:
    """A rule of one number, which is never unsure, asks nobody and does not know what NaN means."""

    def __init__(self, is_collapsed: Callable[[Reading], bool]) -> None:
        self.is_collapsed = is_collapsed
        self.verdict = Verdict("healthy", 0, "a rule of one number")

    def wants_decoder_use(self, reading: Reading) -> bool:
        return False

    def judge(self, reading: Reading) -> Verdict:
        name: VerdictName = "collapsed" if self.is_collapsed(reading) else "healthy"
        self.verdict = self.verdict._replace(name=name, since_step=reading.step)
        return self.verdict

    def diverged(self, step: int, said: str) -> Verdict:
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


MakeJudge = Callable[[Record, Cadence], Judge]

JUDGES: dict[str, MakeJudge] = {
    "detector": lambda record, cadence: Detector(Thresholds(), cadence.window, schedule_of(record), can_probe=True),
    "KL < 0.01 over 50 steps": lambda record, cadence: Rule(SmallKL()),
    "AU < 10 %": lambda record, cadence: Rule(has_few_active),
    "always 0 active units": lambda record, cadence: Rule(lambda reading: True),
}
