"""The plan of aggressive training of the encoder (He et al. 2019): readings and losses in, one by one; whether to go on, out.

Before each step of all weights the encoder takes steps alone, until they bring nothing any more. The phase ends when the mutual
information stops rising, or with its budget. Plain Python on numbers: the same readings give the same plan, also across a
checkpoint.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

WINDOW = 10
"""Batches that encoder steps go through again and again before one step of all: their mean loss is compared with that of the round
before, on the same batches, since the scatter from batch to batch is larger than what a round brings."""
MOST_IN_A_ROW = 100
"""Encoder steps before one step of all, as published."""
LEAST_GAIN = 1e-3
"""Share of the loss that a round has to bring, or it was the last."""
RISE = 0.02
"""Nats by which the mutual information has to exceed the highest so far; 1,024 posteriors show as much by chance."""
BEGUN = 0.1
"""Nats from which on it counts when the information no longer rises: before, the latent has not come to life."""
PATIENCE = 3
"""Readings in a row without a rise that end the phase."""
EVERY_N_STEPS = 5
"""Steps of all weights between two readings at most, while the phase lasts."""


class State(NamedTuple):
    """What later decisions depend on, in types of JSON."""

    used_steps: int = 0
    """Encoder steps so far."""
    steps: int = 0
    """Steps of all weights that they came before."""
    seconds: float = 0.0
    highest_information: float = 0.0
    without_rise: int = 0
    ended_because: str | None = None


class AggressivePlan:
    """The plan of one run's aggressive phase."""

    def __init__(self, budget_steps: int) -> None:
        """`budget_steps`: encoder steps that the phase may take in all."""
        self.budget_steps = budget_steps
        self.state = State()
        if budget_steps <= 0:
            self.end("the budget is used up")

    @property
    def is_over(self) -> bool:
        return self.state.ended_because is not None

    def take_step(self) -> bool:
        """Count an encoder step and return True, if there is one left."""
        if self.is_over:
            return False
        self.state = self.state._replace(used_steps=self.state.used_steps + 1)
        return True

    def end_steps(self, seconds: float) -> None:
        """Count a row of encoder steps that has ended."""
        self.state = self.state._replace(steps=self.state.steps + 1, seconds=self.state.seconds + seconds)
        if self.state.used_steps >= self.budget_steps:
            self.end("the budget is used up")

    @property
    def left(self) -> int:
        return self.budget_steps - self.state.used_steps

    def take_in(self, information: float) -> None:
        """Take in a reading of the mutual information; NaN says nothing."""
        state = self.state
        if information > state.highest_information + RISE:
            self.state = state._replace(highest_information=information, without_rise=0)
        elif state.highest_information >= BEGUN and information == information:
            self.state = state = state._replace(without_rise=state.without_rise + 1)
            if state.without_rise >= PATIENCE:
                self.end(f"the mutual information no longer rises above {state.highest_information:.2f} nats")

    def end(self, reason: str) -> None:
        if not self.is_over:
            self.state = self.state._replace(ended_because=reason)

    def describe(self) -> str:
        """Say how the phase ended and what it cost."""
        state = self.state
        return (
            f"the aggressive training of the encoder is over after {state.steps:,} steps: {state.ended_because}; it took "
            f"{state.used_steps:,} of at most {self.budget_steps:,} encoder steps, and {state.seconds:,.1f} seconds"
        )

    def state_dict(self) -> dict[str, Any]:
        return self.state._asdict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = State(**state)


def brings_nothing(loss: float, before: float | None) -> bool:
    """Return whether a round of encoder steps was the last, by its mean loss and that of the round before.

    >>> brings_nothing(50.0, None), brings_nothing(49.0, 50.0), brings_nothing(49.99, 50.0), brings_nothing(-12.0, -11.0)
    (False, False, True, False)
    """
    return before is not None and not before - loss >= LEAST_GAIN * abs(before)
