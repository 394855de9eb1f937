"""What to try after a verdict: the flags of the training commands, in words for people.

The flags are this product's; what each does stands beside it, for those who have others.
"""

from typing import NamedTuple

from seqvae.monitors.detection.findings import VerdictName

_FREE_BITS = "--free_bits 0.25 (the first nats of each dimension are free)"
_CYCLICAL = "--kl_schedule cyclical (the KL weight starts from 0 again and again)"
_WORD_DROPOUT = "--word_dropout 0.3 (what the decoder cannot look up it has to learn from the latent)"
_TARGET = "--target_kl 5 (a controller holds the KL there)"
_WEAKER = "a weaker decoder (--depth 1, a smaller --width, or --decoder parallel)"
_FULL = "--beta 1 (the full weight of the KL)"
_RISING = "--kl_schedule linear (a weight that rises and stays)"
_LOWER_TARGET = "a lower --target_kl (the controller gives the KL more weight)"
_GO_BACK = "--init_from the run's healthy.ckpt (starts from the last healthy checkpoint; with one of these)"

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
    """--target_kl is in force, and --kl_schedule and --beta have no effect."""
    is_cyclical: bool = False
    """The KL weight falls again."""
    kl_weight: float | None = None
    """The last one that is known."""


def advice_on(verdict: VerdictName, situation: Situation, active: int) -> tuple[str, ...]:
    """Return what to try, the most promising first, without what is in force already or would change nothing."""
    if verdict == "partly_collapsed":
        return (f"--latent_size {max(active, 1)} (the number of dimensions that carry something)", _FREE_BITS)
    weight = situation.kl_weight
    if situation.is_steered:
        without_effect = {_TARGET, _CYCLICAL, _RISING, _FULL}
    else:
        without_effect = {_LOWER_TARGET, _CYCLICAL if situation.is_cyclical else _RISING}
        if weight is not None and weight >= 1:
            without_effect.add(_FULL)
    remedies = tuple(remedy for remedy in _REMEDIES.get(verdict, ()) if remedy not in without_effect)
    if verdict in ("collapsing", "collapsed") and weight is not None and weight > HEAVY and not situation.is_steered:
        remedies = (f"--beta 1 (the KL weighs {weight:.3g} now)", *remedies)
    if situation.has_been_healthy and verdict in ("collapsing", "collapsed", "decoder_ignores_z"):
        return (*remedies, _GO_BACK)
    return remedies
