"""Why a run is as a verdict says, and what to try: words for people, with the flags of the training commands.

The flags are this product's; what each does is said beside it, for those who have others.
"""

from typing import NamedTuple

from seqvae.monitors.detection.verdict import VerdictName

UNHEARD = "the latent carries something, and whether the decoder uses it is not known for certain"
"""In place of the reason for healthy where the decoder could not be asked, or its answer is not clear."""

REASONS: dict[VerdictName, str] = {
    "healthy": "the latent carries something and the decoder uses it",
    "collapsing": "what the latent carries is going, and a rescue is cheap now",
    "collapsed": "the decoder models the data without the latent",
    "decoder_ignores_z": "the rate is paid and not used: something holds it up (free bits, normalised means, a fixed variance) and "
    "hides a collapse",
    "partly_collapsed": "most dimensions are dead and the rest carry everything, which is often as it should be",
    "not_variational": "the posteriors are next to points, so samples from the prior meet a decoder that never saw their like",
    "diverged": "the posteriors hold NaN or infinity",
}

_FREE_BITS = "--free_bits 0.25 (the first nats of each dimension are free)"
_CYCLICAL = "--kl_schedule cyclical (the KL weight starts from 0 again and again)"
_WORD_DROPOUT = "--word_dropout 0.3 (what the decoder cannot look up it has to learn from the latent)"
_TARGET = "--target_kl 5 (a controller holds the KL there)"
_WEAKER = "a weaker decoder (--depth 1, a smaller --width, or --decoder parallel)"
_FULL = "--beta 1 (the full weight of the KL)"
_RISING = "--kl_schedule linear (a weight that rises and stays)"
_LOWER_TARGET = "a lower --target_kl (the controller gives the KL more weight)"
_GO_BACK = "--init_from the run's healthy.ckpt (goes back to when it was well; with one of these)"

_REMEDIES: dict[VerdictName, tuple[str, ...]] = {
    "collapsing": (_FREE_BITS, _CYCLICAL, _WORD_DROPOUT, _TARGET),
    "collapsed": (_FREE_BITS, _CYCLICAL, _WORD_DROPOUT, _TARGET),
    "decoder_ignores_z": (_WORD_DROPOUT, _CYCLICAL, _WEAKER),
    "not_variational": (_FULL, _RISING, _LOWER_TARGET, _TARGET),
    "diverged": (
        "a lower --lr",
        "a longer --warmup",
        "a lower --gradient_clip",
        "--precision 32-true (where it is another)",
    ),
}

HEAVY = 1.05
"""A KL that weighs more than in the evidence lower bound is the first suspect."""


class Situation(NamedTuple):
    """What is known of a run beside its readings."""

    has_been_healthy: bool = False
    is_steered: bool = False
    """--target_kl is in force, and --kl_schedule and --beta have no say."""
    is_cyclical: bool = False
    """The KL weight falls again."""
    kl_weight: float | None = None
    """The one last told."""


def advice_on(verdict: VerdictName, situation: Situation, active: int) -> tuple[str, ...]:
    """What to try, the most promising first, without what is in force already or would change nothing."""
    if verdict == "partly_collapsed":
        return (f"--latent_size {max(active, 1)} (so many dimensions carry something)", _FREE_BITS)
    idle = _idle(situation)
    remedies = tuple(remedy for remedy in _REMEDIES.get(verdict, ()) if remedy not in idle)
    weight = situation.kl_weight
    if verdict in ("collapsing", "collapsed") and weight is not None and weight > HEAVY and not situation.is_steered:
        remedies = (f"--beta 1 (the KL weighs {weight:.3g} now)", *remedies)
    if situation.has_been_healthy and verdict in ("collapsing", "collapsed", "decoder_ignores_z"):
        return (*remedies, _GO_BACK)
    return remedies


def _idle(situation: Situation) -> set[str]:
    """Remedies that would change nothing."""
    if situation.is_steered:
        return {_TARGET, _CYCLICAL, _RISING, _FULL}
    weighs_enough = situation.kl_weight is not None and situation.kl_weight >= 1
    return {
        _LOWER_TARGET,
        _CYCLICAL if situation.is_cyclical else _RISING,
        *([_FULL] if weighs_enough else []),
    }
