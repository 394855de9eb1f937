"""Numbers -> places in a drawing: straight scales, and one that is logarithmic but knows 0 and what lies below it."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

LINEAR_BELOW = 0.1
"""Nats. Estimates scatter around 0 by about as much once a posterior has collapsed; what is healthy stands decades above."""


class Scale(NamedTuple):
    """From `low` .. `high` to `start` .. `end`."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False
    """Linear below LINEAR_BELOW."""

    def place(self, value: float) -> float:
        low, high, value = (_bent(x) if self.is_log else x for x in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        return log_ticks(self.low, self.high) if self.is_log else ticks(self.low, self.high, most)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers within a span.

    >>> ticks(0, 10), ticks(0.1, 0.32, 3)
    ([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [0.1, 0.2, 0.3])
    """
    rough = (high - low) / max(1, most)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10, 20) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """
    >>> log_ticks(-0.1, 30.0)
    [-0.1, 0.0, 0.1, 1.0, 10.0]
    """
    decades = [10.0**power for power in range(-1, 13)]
    return [value for value in (*(-one for one in reversed(decades)), 0.0, *decades) if low <= value <= high]


def spanned(values: Iterable[float | None], *, least: float = 0.0, pad: float = 0.06) -> tuple[float, float]:
    """Lowest and highest with some air around them, never the same number twice.

    >>> spanned([1.0, None, 3.0], pad=0.5), spanned([])
    ((0.0, 4.0), (0.0, 1.0))
    """
    seen = [value for value in values if value is not None]
    if not seen:
        return 0.0, 1.0
    low, high = min(seen), max(seen)
    air = max((high - low) * pad, least, abs(high) * 1e-3, 1e-9)
    return low - air, high + air


def robust_span(values: Sequence[float], pad: float = 0.06) -> tuple[float, float]:
    """Without the heights of a run's very beginning, beside which all that follows would be flat.

    >>> robust_span([900.0, *[5.0 - 0.1 * place for place in range(40)]])[1] < 10
    True
    """
    if len(values) < 12:
        return spanned(values, pad=pad)
    tail = values[len(values) // 10 :]
    ordered = sorted(tail)
    low, high = ordered[0], ordered[-1]
    room = (high - low) or abs(high) * 1e-3 or 1.0
    return spanned([max(min(values), low - room), min(max(values), high + room)], pad=pad)


def tick_label(value: float) -> str:
    """
    >>> tick_label(1500.0), tick_label(20000.0), tick_label(0.25), tick_label(2500000.0), tick_label(-0.0)
    ('1,500', '20k', '0.25', '2.5M', '0')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(size, 10_000):
            return f"{value / size:g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value + 0.0:.6g}"


def _bent(value: float) -> float:
    """Straight up to LINEAR_BELOW, which takes as much room as 0.8 decades."""
    if abs(value) <= LINEAR_BELOW:
        return 0.8 * value / LINEAR_BELOW
    return math.copysign(0.8 + math.log10(abs(value) / LINEAR_BELOW), value)
