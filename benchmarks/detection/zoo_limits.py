"""From what was measured of a run's final network to its true name, by limits that are older than any verdict on the scored half.

In: `Measured`, or that the run diverged. Out: `Truth`. What lies between two limits is grey: listed, and not scored.
"""

import math
from typing import NamedTuple

from benchmarks.detection.zoo_truth import Measured
from seqvae.inference.estimates import Estimate
from seqvae.monitors.detection.findings import VerdictName

USED, USED_ERRORS = 0.5, 4.0
"""The decoder listens: half a nat is lost with another sequence's z, and chance would do that once in 30,000 runs."""
UNUSED, UNUSED_ERRORS = 0.1, 2.0
"""It does not: a tenth of a nat a sequence is less than two random seeds differ by."""
RATE_GONE = 0.3
"""Nats; I(x; z) is never more. Half a bit a sequence is nobody's reason to train a latent."""
RATE_KEPT = 0.6
"""Twice that: more than estimates scatter by, so something holds it up."""
INFORMATION_GONE = 0.2
"""Beside the rate, because its estimate from 400 posteriors scatters by some hundredths."""
GAIN, GAIN_ERRORS = 0.3, 2.0
"""Nats by which importance weighting may find the model better than its decoder alone and the latent still be worth nothing, beside
that many errors: that over sequences, and that of training both with other seeds, which is the larger one of few data."""

NARROW, BROAD = 0.015, 0.1
"""Geometric mean of the variances of the active dimensions. A dimension of NARROW costs 1.6 nats at the least, and of BROAD 0.7.
Narrow alone is no trouble: sequences of much information fill such a latent, and the gain shows it."""
LOSS = 1.0
"""Nats by which the model is worse than the decoder alone, and GAIN_ERRORS standard errors: its posteriors are so far from the
prior that the latent costs more than it tells."""

ACTIVE_VARIANCE = 0.01
MOSTLY_DEAD, MOSTLY_ALIVE = 0.4, 0.6
"""Shares of active dimensions; between them, healthy and partly collapsed are both right."""


class Truth(NamedTuple):
    """What a run came to."""

    right: tuple[VerdictName, ...]
    """Verdicts that are right at its end; none: grey."""
    why: str

    @property
    def name(self) -> str:
        return " or ".join(self.right) or "grey"


def truth_of(measured: Measured | None, seed_error: float = 0.0) -> Truth:
    """`measured` is None of a run whose loss or weights became NaN or infinite; `seed_error` is that of the gain in nats."""
    if measured is None:
        return Truth(("diverged",), "loss or weights are not finite")
    numbers = (measured.rate, measured.mutual_information, measured.decoder_use, measured.gain)
    if any(number is None for number in numbers):
        return Truth((), "finite weights, but numbers that are not")
    gain = Estimate(known(measured.gain), math.hypot(known(measured.gain_error), seed_error))
    if is_unused(measured):
        return truth_of_unused(measured, gain)
    if is_used(measured):
        return truth_of_used(measured, gain)
    return Truth((), f"decoder use {measured.decoder_use:.2f} ± {measured.decoder_use_error:.2f}")


def is_used(measured: Measured) -> bool:
    use, error = known(measured.decoder_use), known(measured.decoder_use_error)
    return use >= USED and use >= USED_ERRORS * error


def is_unused(measured: Measured) -> bool:
    return known(measured.decoder_use) < UNUSED + UNUSED_ERRORS * known(measured.decoder_use_error)


def truth_of_unused(measured: Measured, gain: Estimate) -> Truth:
    rate, information = known(measured.rate), known(measured.mutual_information)
    if gain.value > GAIN + GAIN_ERRORS * gain.error:
        return Truth((), f"not used, and yet better by {gain.value:.2f} ± {gain.error:.2f} than without a latent")
    if rate >= RATE_KEPT:
        return Truth(("decoder_ignores_z",), f"rate {rate:.2f}, not used")
    if rate < RATE_GONE and information < INFORMATION_GONE:
        return Truth(("collapsed",), f"rate {rate:.2f}, not used")
    return Truth((), f"not used, rate {rate:.2f}, MI {information:.2f}")


def truth_of_used(measured: Measured, gain: Estimate) -> Truth:
    if known(measured.mutual_information) < INFORMATION_GONE:
        return Truth((), f"used, although it tells only {measured.mutual_information:.2f} nats")
    variance = variance_of_active(measured)
    is_worse = gain.value < -LOSS - GAIN_ERRORS * gain.error
    is_good_enough = gain.value >= -GAIN - GAIN_ERRORS * gain.error
    about = f"variance {variance:.3f}, {gain.value:+.2f} ± {gain.error:.2f} nats better than without a latent"
    if variance < NARROW and is_worse:
        return Truth(("not_variational",), about)
    if variance < BROAD and not is_good_enough:
        return Truth((), about)
    share = active_share(measured)
    about = f"{about}, {share:.0%} of the dimensions active"
    if share <= MOSTLY_DEAD:
        return Truth(("partly_collapsed",), about)
    return Truth(("healthy",) if share >= MOSTLY_ALIVE else ("healthy", "partly_collapsed"), about)


def variance_of_active(measured: Measured) -> float:
    """The geometric mean of the dimensions whose means move; 1 if none does."""
    pairs = zip(measured.variance_of_means, measured.mean_of_variances, strict=True)
    logs = [math.log(known(variance)) for moved, variance in pairs if known(moved) >= ACTIVE_VARIANCE]
    return math.exp(sum(logs) / len(logs)) if logs else 1.0


def active_share(measured: Measured) -> float:
    return measured.active_units / len(measured.variance_of_means)


def known(value: float | None) -> float:
    return math.nan if value is None else value
