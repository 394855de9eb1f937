"""Fake training runs with a clock of their own, for the tests of what measures and compares runs."""

from collections.abc import Callable
from itertools import cycle
from typing import Any, NamedTuple, Self

from seqvae.config.training import TrainingSettings
from seqvae.profiling.measured_run import STAGES, Lap, Ready, Recipe
from seqvae.training.schedules import Plan

TURN_SECONDS = 1.0
STEPS = 10


class Behaviour(NamedTuple):
    """The behaviour of a run under some settings."""

    rates: tuple[float, ...] = (1000.0,)
    """Real steps per second, turn by turn, repeated."""
    start_seconds: float = 0.0
    """Additional seconds until it is ready."""
    fails: Exception | None = None
    """The error at turn number `fails_at`."""
    fails_at: int = 1


class FakeRuns:
    """A starter of runs that knows how many are alive."""

    def __init__(self, behaviour: Callable[[TrainingSettings], Behaviour], total_steps: int = 1000) -> None:
        self.behaviour, self.total_steps = behaviour, total_steps
        self.alive: list[str] = []
        self.most_alive = 0
        self.started: list[TrainingSettings] = []
        self.turns: list[str] = []
        """The name of the run of each turn."""

    def start(self, recipe: Recipe) -> Any:
        self.started.append(recipe.settings)
        self.alive.append(recipe.name)
        self.most_alive = max(self.most_alive, len(self.alive))
        return FakeRun(recipe, self)


class FakeRun:
    def __init__(self, recipe: Recipe, runs: FakeRuns) -> None:
        self.name, self.runs = recipe.name, runs
        self.behaviour = runs.behaviour(recipe.settings)
        self.turns = 0
        self._rates = cycle(self.behaviour.rates)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.runs.alive.remove(self.name)

    @property
    def ready(self) -> Ready:
        plan = Plan(self.runs.total_steps, 100, 100.0, 10.0, 1e-3)
        seconds = 0.5 + self.behaviour.start_seconds
        return Ready(1000, plan, accumulate=1, precision="32-true", device="cpu", seconds=seconds, is_compiled=True)

    def turn(self, steps: int = 1, seconds: float = 0.0, lead_steps: int = 2) -> Lap:
        self.turns += 1
        self.runs.turns.append(self.name)
        if self.behaviour.fails is not None and self.turns == self.behaviour.fails_at:
            raise self.behaviour.fails
        real = round(TURN_SECONDS * (self.behaviour.rates[0] if self.turns == 1 else next(self._rates)))
        return Lap(
            seconds=TURN_SECONDS,
            steps=STEPS,
            micro_batches=STEPS,
            real_steps=real,
            padded_steps=real,
            sequences=STEPS,
            stages=dict.fromkeys(STAGES, TURN_SECONDS / len(STAGES)),
            cpu_seconds=TURN_SECONDS,
            cores=2,
            gpu_utilisation=None,
            peak_memory_gib=1.0,
            recompiles=0,
        )
