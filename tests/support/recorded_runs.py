"""Runs that were recorded, and what a detector says of them. The records stand in recorded_runs.json."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from seqvae.config.training import ObjectiveSettings
from seqvae.monitors.detector import KLSchedule
from seqvae.monitors.reading import Reading
from seqvae.training.schedules import scheduled_kl_weight
from tests.support.made_curves import Cadence, Curve, Watched, reading, watch


class Recorded(NamedTuple):
    """A run of `benchmarks.detection.collapse_zoo`, from its tuning half; the last: a healthy one, continued at a KL weight of 6.

    Each tenth step, numbers of three digits, what a detector remembers of a reading, and the truth that was measured at the end
    apart from all readings.
    """

    name: str
    truth: list[str]
    total_steps: int
    objective: dict[str, Any]
    """Where it is not the default."""
    dimensions: int
    said: str | None
    """By a run that ended because it had diverged."""
    diverged_at_step: int | None
    readings: dict[str, list[Any]]
    """Columns; null: NaN, or not known."""

    def curve(self) -> Curve:
        columns = [self.readings[name] for name in ("step", "rate", "information", "use", "use_error", "active")]
        more = [self.readings[name] for name in ("largest", "variance", "posteriors", "weight")]
        made = [self._reading(*row) for row in zip(*columns, *more, strict=True)]
        return {one.step: one for one in made}.__getitem__

    def _reading(
        self, step, rate, information, use, use_error, active, largest, variance, posteriors, weight
    ) -> Reading:
        return reading(
            step,
            rate=math.nan if rate is None else rate,
            information=math.nan if information is None else information,
            use=math.nan if use is None else use,
            use_error=math.nan if use_error is None else use_error,
            active=active,
            dimensions=self.dimensions,
            largest=math.nan if largest is None else largest,
            variance=1.0 if variance is None else variance,
            posteriors=posteriors,
            weight=weight,
        )

    def schedule(self) -> KLSchedule:
        objective = ObjectiveSettings(**self.objective)
        if objective.target_kl is not None:
            return KLSchedule(self.total_steps, is_steered=True)
        return KLSchedule(self.total_steps, lambda step: scheduled_kl_weight(step, self.total_steps, objective))

    def watched(self, cadence: Cadence) -> Watched:
        last = max(self.readings["step"])
        watched = watch(self.curve(), cadence, self.schedule(), steps=last)
        if self.said is not None:
            step = self.diverged_at_step or last
            watched.verdicts.append((step, watched.detector.diverged(step, self.said)))
        return watched


RECORDED = [Recorded(**row) for row in json.loads(Path(__file__).with_name("recorded_runs.json").read_text("utf-8"))]
