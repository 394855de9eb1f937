"""Curves of trainings in, tables and rows out: how long each took to the validation ELBO that the slower one ended with."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.measure import median, print_table, spread
from benchmarks.speed.quality_contest import (
    LOOKS,
    Candidate,
    Curve,
    Trial,
    best_elbo,
    seconds_or_never,
    tokens_a_second,
)


class Side(NamedTuple):
    """What one way to train came to, with each seed."""

    candidate: Candidate
    parameters: int
    curves: Sequence[Curve]


class Comparison(NamedTuple):
    """Of a side with ours, seed by seed."""

    targets: list[float]
    """The best ELBO of the other side."""
    theirs: list[float]
    """Seconds."""
    ours: list[float]
    """Seconds; infinite where the target was not reached."""

    @property
    def ratios(self) -> list[float]:
        """How many times as long the other took; 0 where ours did not get there."""
        return [their / our for their, our in zip(self.theirs, self.ours, strict=True)]


def compare(theirs: Sequence[Curve], ours: Sequence[Curve]) -> Comparison:
    targets = [best_elbo(curve) for curve in theirs]
    return Comparison(
        targets,
        [seconds_or_never(curve, target) for curve, target in zip(theirs, targets, strict=True)],
        [seconds_or_never(curve, target) for curve, target in zip(ours, targets, strict=True)],
    )


def report_choice(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    rows = [
        {
            "training": trial.candidate.name,
            "rate": trial.candidate.rate,
            "a step": trial.candidate.batch,
            "seconds": round(trial.curve[-1].seconds, 1),
            "tokens/s": round(tokens_a_second(trial.curve)),
            "best ELBO": round(best_elbo(trial.curve), 2),
            "at the target after s": round(trial.seconds, 1) if math.isfinite(trial.seconds) else "",
        }
        for trial in trials
    ]
    print_table(f"{trials[0].candidate.name}: the first one is taken", rows)
    return rows


def report_race(title: str, sides: Sequence[Side]) -> list[dict[str, Any]]:
    """Ours comes last among the sides; the others are compared with it."""
    *others, ours = sides
    rows = [_row(side) | _compared(side, ours) for side in others]
    rows.append(dict.fromkeys(rows[0], "") | _row(ours))
    print_table(title, rows)
    print_curves(sides)
    return rows


def _row(side: Side) -> dict[str, Any]:
    rates = [tokens_a_second(curve) for curve in side.curves]
    return {
        "training": side.candidate.name,
        "rate": side.candidate.rate,
        "a step": side.candidate.batch,
        "M parameters": round(side.parameters / 1e6, 2),
        "seeds": len(side.curves),
        "tokens/s": round(median(rates)),
        "spread": spread(rates),
        "ELBO at the end": round(median([curve[-1].elbo for curve in side.curves]), 2),
    }


def _compared(side: Side, ours: Side) -> dict[str, Any]:
    found = compare(side.curves, ours.curves)
    rates = [tokens_a_second(our) / tokens_a_second(their) for our, their in zip(ours.curves, side.curves, strict=True)]
    return {
        "best ELBO": round(median(found.targets), 2),
        "after s": round(median(found.theirs), 1),
        "ours after s": round(median(found.ours), 1) if math.isfinite(median(found.ours)) else "never",
        "times as long": round(median(found.ratios), 2),
        "from-to": f"{min(found.ratios):.2f}-{max(found.ratios):.2f}",
        "tokens/s, ours/its": round(median(rates), 2),
    }


def print_curves(sides: Sequence[Side]) -> None:
    """Of the first seed, so that the rows of the table can be believed."""
    print(f"\n  validation ELBO after so many seconds of training, means of {LOOKS} in a row, first seed")
    for side in sides:
        points = "  ".join(f"{point.seconds:.0f}:{point.elbo:.1f}" for point in side.curves[0])
        print(f"  {side.candidate.name}  {points}")
