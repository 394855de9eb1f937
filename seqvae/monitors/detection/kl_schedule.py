"""What a detector knows of the KL weight: whether it has its full value, or how long that will take.

In: a schedule that is known beforehand, where there is one, and the weights of the readings. Out: words for why it is too early
to judge, or none. Plain Python.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

FULL_SHARE = 0.95
"""Of the highest weight: from here on the weight counts as full. The last twentieth changes a KL by no more than that."""
LOOKS = 1000
"""At a known schedule, to find where it settles: a thousandth of the run is exact enough."""
STEADY_READINGS = 5
STEADY_SHARE = 0.005
"""A weight whose schedule is not known counts as rising while it grew by more than this share within so many readings."""


class KLSchedule(NamedTuple):
    """Of a run of `total_steps` optimizer steps, where that is known."""

    total_steps: int | None = None
    weight_at: Callable[[int], float] | None = None
    """The weight in an optimizer step, counted from 0; None: not known beforehand. Asked only when a run starts."""
    is_steered: bool = False
    """A controller moves the weight towards some KL: it is in force at all times, whatever its size."""

    def falls(self) -> bool:
        """Whether the weight is known to fall again after it was higher, as in cycles."""
        weights = self._looks()
        return any(later < earlier for (_, earlier), (_, later) in pairwise(weights))

    def full_from(self) -> int | None:
        """The step in which the weight gets to its height for the last time; None: not known beforehand."""
        weights = self._looks()
        if not weights:
            return None
        full = FULL_SHARE * max(weight for _, weight in weights)
        arrivals = [step for (_, before), (step, weight) in pairwise(weights) if before < full <= weight]
        return max(arrivals, default=0)

    def _looks(self) -> list[tuple[int, float]]:
        """Steps and their weights, where they are known."""
        if not self.total_steps or self.weight_at is None:
            return []
        last = self.total_steps - 1
        steps = sorted({round(last * look / LOOKS) for look in range(LOOKS + 1)})
        return [(step, self.weight_at(step)) for step in steps]


def why_not_full(step: int, weights: Sequence[float | None], schedule: KLSchedule, full_from: int | None) -> str | None:
    """Why the weight does not count as full, or None. `weights` are those of the readings so far, as they were told."""
    weight = weights[-1]
    if schedule.is_steered:
        return None
    if full_from is not None:
        now = "" if weight is None else f"is {weight:.3g} and "
        return None if step > full_from else f"the KL weight {now}will be full from step {full_from:,}"
    if weight is None or not math.isfinite(weight):
        return None
    told = [one for one in weights if one is not None and math.isfinite(one)]
    highest = max(told)
    if weight < FULL_SHARE * highest:
        return f"the KL weight is {weight:.3g} and has been {highest:.3g}"
    before = told[-STEADY_READINGS - 1 : -1]
    rises_slowly = len(told) > STEADY_READINGS and sorted(told) == list(told) and told[-2] < weight
    if before and (
        weight > (1 + STEADY_SHARE) * min(before) or (rises_slowly and weight > (1 + STEADY_SHARE) * told[0])
    ):
        return f"the KL weight is {weight:.3g} and still rising"
    return None
