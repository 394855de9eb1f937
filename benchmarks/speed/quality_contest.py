"""Trainings take turns, are validated in each, and are compared by the seconds of training that a validation ELBO took.

In: trainees, which train when told. Out: a curve for each, and from curves the seconds to an ELBO. Validating is not counted.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from statistics import mean
from typing import NamedTuple, Protocol

CHOOSING_SEED = 1000
"""Of the runs that rates and batches are chosen on; those that are compared have seeds of their own."""
LOOKS = 4
"""Validations in a turn. At a constant rate the ELBO scatters from one to the next: what counts is their mean."""


class Stretch(NamedTuple):
    """Some training."""

    seconds: float
    tokens: int
    """Real ones: neither padding nor marks of beginning and end."""


class Trainee(Protocol):
    """A training under way."""

    @property
    def parameters(self) -> int: ...

    def train(self, seconds: float) -> Stretch:
        """Go on for so long, to the end of the optimizer step."""

    def validate(self) -> float:
        """Mean ELBO of the validation sequences at weight 1, in nats a sequence."""

    def close(self) -> None: ...


class Candidate(NamedTuple):
    """A way to train."""

    name: str
    rate: float
    """Learning rate."""
    batch: str
    start: Callable[[int], Trainee]
    """Begins with a seed."""


class Point(NamedTuple):
    """Where a training stands."""

    seconds: float
    tokens: float
    elbo: float


Curve = Sequence[Point]


class Entrant:
    """A candidate's training, and its curve from the untrained network on."""

    def __init__(self, candidate: Candidate, seed: int) -> None:
        self.candidate = candidate
        self.trainee = candidate.start(seed)
        self.curve: list[Point] = []

    def turn(self, seconds: float) -> None:
        if not self.curve:
            self.curve.append(Point(0.0, 0, self.trainee.validate()))
        for _ in range(LOOKS):
            stretch = self.trainee.train(seconds / LOOKS)
            before = self.curve[-1]
            now = Point(before.seconds + stretch.seconds, before.tokens + stretch.tokens, self.trainee.validate())
            self.curve.append(now)


class Trial(NamedTuple):
    """What a candidate came to before the race, in as much time as the race takes."""

    candidate: Candidate
    curve: Curve
    seconds: float
    """To the target; infinite where it was not reached, or where it is what the trials are to find."""


def try_all(candidates: Sequence[Candidate], turn_seconds: float, rounds: int) -> list[Trial]:
    """Of a side that sets the target, in turns: who comes to the best ELBO comes first."""
    curves, _ = race(candidates, [CHOOSING_SEED], turn_seconds, rounds)
    trials = [Trial(candidate, curve, math.inf) for candidate, (curve,) in zip(candidates, curves, strict=True)]
    return sorted(trials, key=lambda trial: best_elbo(trial.curve), reverse=True)


def try_all_against(candidates: Sequence[Candidate], target: float, turn_seconds: float, rounds: int) -> list[Trial]:
    """Of ours: who comes to the target soonest comes first; of those that do not, who comes closest."""
    curves, _ = race(candidates, [CHOOSING_SEED], turn_seconds, rounds)
    trials = [
        Trial(candidate, curve, seconds_or_never(curve, target))
        for candidate, (curve,) in zip(candidates, curves, strict=True)
    ]
    return sorted(trials, key=lambda trial: (trial.seconds, -best_elbo(trial.curve)))


def race(
    candidates: Sequence[Candidate], seeds: Sequence[int], turn_seconds: float, rounds: int
) -> tuple[list[list[Curve]], list[int]]:
    """Train each candidate with each seed, in turns of equal time: smoothed curves by candidate and seed; parameters of each."""
    with ExitStack() as stack:

        def enter(candidate: Candidate, seed: int) -> Entrant:
            entrant = Entrant(candidate, seed)
            stack.callback(entrant.trainee.close)
            return entrant

        entrants = [[enter(candidate, seed) for seed in seeds] for candidate in candidates]
        in_turns = [entrant for of_one_seed in zip(*entrants, strict=True) for entrant in of_one_seed]
        for _ in range(rounds):
            for entrant in in_turns:
                entrant.turn(turn_seconds)
        parameters = [of_candidate[0].trainee.parameters for of_candidate in entrants]
        return [[smoothed(entrant.curve) for entrant in of_candidate] for of_candidate in entrants], parameters


def best_elbo(curve: Curve) -> float:
    return max((point.elbo for point in curve if math.isfinite(point.elbo)), default=-math.inf)


def smoothed(curve: Curve, looks: int = LOOKS) -> list[Point]:
    """Means over as many points in a row, of everything: a lucky look is not yet there.

    An ELBO rises ever more slowly, so its mean over some time lies below what it is in the middle of it.

    >>> smoothed([Point(0, 0, -90.0), Point(1, 9, -50.0), Point(2, 18, -60.0)], 2)[1]
    Point(seconds=1.5, tokens=13.5, elbo=-55.0)
    """
    return [Point(*map(mean, zip(*curve[end - looks : end], strict=True))) for end in range(looks, len(curve) + 1)]


def seconds_or_never(curve: Curve, elbo: float) -> float:
    seconds = seconds_to(curve, elbo)
    return math.inf if seconds is None else seconds


def seconds_to(curve: Curve, elbo: float) -> float | None:
    """Seconds of training until the ELBO was reached first, on a straight line between two validations; None: not at all.

    A curve that rises ever more slowly lies above that line, so that where validations are far apart the answer is rather too
    late than too early.

    >>> seconds_to([Point(0, 0, -90.0), Point(10, 0, -50.0), Point(20, 0, -40.0)], -45.0)
    15.0
    """
    if curve[0].elbo >= elbo:
        return curve[0].seconds
    for before, after in pairwise(curve):
        if after.elbo >= elbo:
            return before.seconds + (after.seconds - before.seconds) * (elbo - before.elbo) / (after.elbo - before.elbo)
    return None


def tokens_a_second(curve: Curve) -> float:
    """Of a smoothed curve, without the first turn, in which everything is done for the first time."""
    first, last = curve[LOOKS], curve[-1]
    return (last.tokens - first.tokens) / (last.seconds - first.seconds)
