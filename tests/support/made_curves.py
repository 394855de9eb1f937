"""Synthetic runs for a detector: curves over the optimizer step, their readings, and the verdict in force after each."""

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

from seqvae.monitors.detector import Detector, KLSchedule
from seqvae.monitors.reading import Reading, Scope
from seqvae.verdicts import VERDICTS, Circumstances, Verdict

STEPS = 1000
"""Optimizer steps of most synthetic runs."""
ALWAYS = KLSchedule(STEPS, lambda step: 1.0)
"""A constant KL weight."""
LINEAR = KLSchedule(STEPS, lambda step: min(1.0, step / 200))
"""Full from step 190."""


class Cadence(NamedTuple):
    """How closely a run is watched."""

    every_n_steps: int
    probe_every_n_readings: int | None
    """None: decoder use is measured only when the detector requests it."""

    @property
    def window(self) -> int:
        return 100 if self.every_n_steps < 10 else 50


CADENCES = [Cadence(every, probe) for every in (2, 4, 10, 20) for probe in (1, 4, None)]
DEFAULT, THROTTLED = Cadence(20, 4), Cadence(20, None)

Curve = Callable[[int], Reading]


def reading(
    step: int,
    *,
    rate: float,
    information: float | None = None,
    use: float | None = 0.0,
    use_error: float = 0.05,
    active: int = 16,
    dimensions: int = 16,
    largest: float | None = None,
    variance: float = 0.4,
    posteriors: int = 1024,
    weight: float | None = 1.0,
    scope: Scope = "sequence",
) -> Reading:
    """Return a reading; the rate is spread evenly unless `largest` is set, and information is the rate up to its cap."""
    cap = math.log(posteriors) if posteriors else math.nan
    information = min(rate, cap) if information is None else information
    first = rate / dimensions if largest is None else largest
    others = (rate - first) / max(1, dimensions - 1)
    return Reading(
        step=step,
        epoch=0,
        scope=scope,
        posteriors=posteriors,
        rate=rate,
        kl_per_dim=(first, *[others] * (dimensions - 1)),
        active_units=active,
        mutual_information=information,
        mutual_information_cap=cap,
        aggregate_kl=rate - information,
        variance_of_means=tuple(1.0 if place < active else 0.0 for place in range(dimensions)),
        mean_of_variances=tuple(variance if place < active else 1.0 for place in range(dimensions)),
        effective_dimensions=float(dimensions),
        kl_weight=weight,
        decoder_use=use,
        decoder_use_error=None if use is None else use_error,
    )


def noise(step: int) -> float:
    """Return a number between -1 and 1, without any order, and the same each time."""
    return 2 * ((math.sin(12.9898 * step) * 43758.5453) % 1) - 1


class Watched(NamedTuple):
    """The verdicts of a detector on a run."""

    detector: Detector
    verdicts: list[tuple[int, Verdict]]
    """(step, the verdict in force after its reading)."""
    probed: list[int]
    """Steps at which the detector requested decoder use."""
    thresholds_read: list[int]
    """Steps at which the detector requested the escape threshold."""
    certain: list[int]
    """Steps at which a collapse was certain enough to end the run."""

    @property
    def last(self) -> Verdict:
        return self.verdicts[-1][1]

    @property
    def changes(self) -> list[tuple[int, str]]:
        """(step, new name)."""
        names = [(step, verdict.name) for step, verdict in self.verdicts]
        befores = [None, *(name for _, name in names)]
        return [(step, name) for (step, name), before in zip(names, befores, strict=False) if name != before]

    @property
    def alarms(self) -> list[tuple[int, str]]:
        return [(step, name) for step, name in self.changes if VERDICTS[name].is_alarm]

    def first(self, name: str) -> int:
        """Return the step of the first such verdict."""
        return next(step for step, verdict in self.verdicts if verdict.name == name)


def offered(curve: Curve, cadence: Cadence, steps: int = STEPS, begin: int = 0) -> Iterator[Reading]:
    """Yield the readings that fall due, with decoder use only where the cadence measures it unrequested."""
    every, nth = cadence
    for number, step in enumerate(range(begin + every, steps + 1, every), start=1):
        due = nth is not None and number % nth == 0
        yield curve(step) if due else curve(step)._replace(decoder_use=None, decoder_use_error=None)


def watch(
    curve: Curve,
    cadence: Cadence = DEFAULT,
    schedule: KLSchedule = ALWAYS,
    *,
    steps: int = STEPS,
    can_probe: bool = True,
    threshold: Callable[[int], float] | None = None,
    ideal: float = math.nan,
    sees_inputs: bool | None = None,
    free_bits: float = 0.0,
) -> Watched:
    """Show a run to a detector; `threshold` is the escape threshold, with an error of a tenth, where it can be read.

    `sees_inputs`: the decoder gets earlier steps beside the latent; None: not known. `free_bits`: nats of each dimension.
    """
    known = None
    if sees_inputs is not None or free_bits:
        known = Circumstances(sees_inputs=sees_inputs is not False, free_bits=free_bits)
    detector = Detector(
        None,
        cadence.window,
        schedule,
        can_probe=can_probe,
        can_read_threshold=threshold is not None,
        advises_flags=True,
        circumstances=known,
    )
    verdicts, probed, thresholds_read, certain = [], [], [], []
    for one in offered(curve, cadence, steps):
        if detector.wants_decoder_use(one):
            one = curve(one.step)
            probed.append(one.step)
        if not can_probe:
            one = one._replace(decoder_use=None, decoder_use_error=None)
        if threshold is not None and detector.wants_escape_threshold(one):
            value = threshold(one.step)
            one = one._replace(escape_threshold=value, escape_threshold_error=value / 10, ideal_escape_threshold=ideal)
            thresholds_read.append(one.step)
        verdicts.append((one.step, detector.judge(one)))
        if detector.is_certain():
            certain.append(one.step)
    return Watched(detector, verdicts, probed, thresholds_read, certain)


# --- Runs --------------------------------------------------------------------------------------------------------------


def healthy(step: int) -> Reading:
    alive = (1 - math.exp(-step / 50)) * (1 + 0.05 * noise(step))
    return reading(step, rate=6 * alive, information=4.5 * alive, use=9 * alive, use_error=0.5)


def dead(step: int) -> Reading:
    return reading(step, rate=0.02 + 0.01 * noise(step), information=0.01, use=0.03 * noise(step), active=0)


def falling(step: int) -> Reading:
    """Fall to a rate of 0.316 at step 441, and to an information of 0.2 at step 476."""
    left = math.exp(-step / 150) * (1 + 0.02 * noise(step))
    return reading(step, rate=6 * left, information=4.8 * left, use=9 * left, use_error=0.1)


def settling(step: int) -> Reading:
    left = 0.25 + 0.75 * math.exp(-step / 80)
    return reading(step, rate=6 * left, information=4.8 * left, use=9 * left, use_error=0.1)


def ignored(step: int) -> Reading:
    """Return a rate that is held up by construction."""
    return reading(step, rate=4 + 0.1 * noise(step), information=0.1 + 0.05 * noise(step), use=0.05 * noise(step))


def partly(step: int) -> Reading:
    return reading(step, rate=3.0, use=5.0, active=4, largest=1.0)


def points(step: int) -> Reading:
    """Return posteriors of almost no variance, which next to no KL weight leads to."""
    return reading(step, rate=20 + step / 20, information=6.9, use=40.0, use_error=1.0, variance=0.001, weight=0.05)


def annealed_to_death(step: int) -> Reading:
    """Return a latent that is alive while the weight is small, and dead when it is full."""
    rate = 0.05 + 6 * math.exp(-step / 30)
    return reading(step, rate=rate, use=1.5 * rate, weight=min(1.0, step / 200), active=0 if rate < 0.3 else 16)


def interpolated(knots: list[tuple[int, float]]) -> Callable[[int], float]:
    """Return a curve through (step, value), straight in the logarithm; values below 0.01 count as 0.01."""

    def at(step: int) -> float:
        for (start, before), (end, after) in pairwise(knots):
            if step <= end:
                share = (step - start) / (end - start)
                return float(max(before, 0.01) ** (1 - share) * max(after, 0.01) ** share)
        return knots[-1][1]

    return at
