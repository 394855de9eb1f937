"""The table of verdicts on a posterior: all that the package knows of each, and the advice that follows from it.

A verdict is added by an entry in `VERDICTS` and a rule in `seqvae/monitors/rules.py`. The detector takes reason, patience and
remedies from the entry, the report its sentence, and pages and figures choose their colours by its tone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

Tone = Literal["open", "good", "fair", "bad"]


class Patience(NamedTuple):
    """How long readings have to point to a verdict before it is in force: all of these together."""

    readings: int
    share_of_run: float = 0.0
    """Where the run's length is known. Readings that follow each other closely are made of the same posteriors."""
    share_of_past: float = 0.0
    """Share of the time under the full weight until readings began to point to it. Some models fall silent while the decoder learns
    the simplest things, and come to life after it: the later that happens, the longer it takes."""
    steps: int = 0
    """However many readings that are; a tenth of a run that is shorter than ten times this."""
    under_full_weight: int = 0
    """Fewest optimizer steps under the full KL weight before it can be in force, however short the run."""


LEAST_TRAINED = 100
"""Optimizer steps under the full KL weight before anything is held against a model: of eight recorded runs whose decoder came to
use its latent, six did so after 20 to 100 steps. What fewer steps show is a model that has not learned yet."""


class Remedy(NamedTuple):
    """Something to try."""

    flag: str
    """What to type, where a training command of ours runs."""
    words: str
    """What to do, in any other module."""
    effect: str = ""
    """What it does, and why that helps."""


@dataclass(frozen=True, kw_only=True)
class VerdictKind:
    """All facets of one verdict."""

    name: str
    """As files hold it."""
    tone: Tone
    """How grave it is."""
    sentence: str
    """The headline of the report."""
    reason: str
    """What the evidence begins with; empty: the rule that finds it words the reason."""
    patience: Patience
    remedies: tuple[Remedy, ...]
    """What to try, the most promising first; `advice_on` leaves out what does not apply."""
    is_alarm: bool = False
    """It needs attention."""
    is_collapse: bool = False
    """The latent carries nothing that is used, whether or not a remedy keeps the rate up: --on_collapse stop ends the run."""
    is_unharmed: bool = False
    """Checkpoints under it are worth going back to."""


# --- Remedies -----------------------------------------------------------------------------------------------------------

FREE_BITS = Remedy(
    "--free_bits 0.25",
    "free bits, 0.25 nats in each dimension",
    "the first nats of each dimension are free",
)
CYCLICAL = Remedy("--kl_schedule cyclical", "a cyclical KL weight", "the KL weight starts from 0 again and again")
WORD_DROPOUT = Remedy(
    "--word_dropout 0.3",
    "less for the decoder to go by beside z, where it gets more than z",
    "what the decoder cannot look up it has to learn from the latent",
)
TARGET_KL = Remedy(
    "--target_kl 5", "a KL weight that is steered towards a KL of 5 nats", "a controller holds the KL there"
)
LOWER_TARGET_KL = Remedy(
    "a lower --target_kl", "a lower KL to steer towards", "the controller gives the KL more weight"
)
WEAKER_DECODER = Remedy(
    "a weaker decoder (--depth 1, a smaller --width, or --decoder parallel)",
    "a weaker decoder (fewer layers, or narrower ones)",
)
FULL_WEIGHT = Remedy("--beta 1", "a KL weight of 1", "the full weight of the KL")
NO_MORE_THAN_FULL_WEIGHT = Remedy("--beta 1", "a KL weight of 1", "the KL weighs {kl_weight:.3g} now")
RISING = Remedy("--kl_schedule linear", "a KL weight that rises once", "a weight that rises and stays")
ACTIVE_DIMENSIONS = Remedy(
    "--latent_size {active}", "a latent of {active} dimensions", "the number of dimensions that carry something"
)
GO_BACK = Remedy(
    "--init_from the run's healthy.ckpt",
    "a checkpoint of when it was healthy, to begin again from",
    "starts from the last healthy checkpoint; with one of these",
)

HEAVY = 1.05
"""A KL that weighs more than in the evidence lower bound is the first suspect."""


def advice_on(
    name: str,
    *,
    active: int,
    kl_weight: float | None = None,
    is_steered: bool = False,
    is_cyclical: bool = False,
    has_been_healthy: bool = False,
    as_flags: bool = True,
) -> tuple[str, ...]:
    """Return what to try, the most promising first, without what is in force already or would change nothing.

    `active`: dimensions that carry something. `kl_weight`: the last one that is known. `is_steered`: --target_kl is in force, and
    --kl_schedule and --beta have no effect. `is_cyclical`: the KL weight falls again. `as_flags`: what to type; else what to do.
    """
    applies = {
        TARGET_KL: not is_steered,
        LOWER_TARGET_KL: is_steered,
        CYCLICAL: not (is_steered or is_cyclical),
        RISING: is_cyclical and not is_steered,
        FULL_WEIGHT: not is_steered and (kl_weight is None or kl_weight < 1),
        NO_MORE_THAN_FULL_WEIGHT: not is_steered and kl_weight is not None and kl_weight > HEAVY,
        GO_BACK: has_been_healthy,
    }
    remedies = [remedy for remedy in VERDICTS[name].remedies if applies.get(remedy, True)]
    return tuple(_written(remedy, as_flags).format(active=max(active, 1), kl_weight=kl_weight) for remedy in remedies)


def _written(remedy: Remedy, as_flag: bool) -> str:
    """Return a remedy in one line, what it does in brackets."""
    name = remedy.flag if as_flag else remedy.words
    return f"{name} ({remedy.effect})" if remedy.effect else name


# --- The table, which figures show in this order ------------------------------------------------------------------------

VERDICTS: Mapping[str, VerdictKind] = {
    kind.name: kind
    for kind in (
        VerdictKind(
            name="cannot_tell",
            tone="open",
            sentence="The readings do not decide yet whether the latent is used",
            reason="",
            patience=Patience(8, 0.08),
            remedies=(),
        ),
        VerdictKind(
            name="warming_up",
            tone="open",
            sentence="Too early to judge: the KL weight is still rising",
            reason="",
            patience=Patience(1),
            remedies=(),
        ),
        VerdictKind(
            name="healthy",
            tone="good",
            sentence="The latent carries something, and the decoder uses it",
            reason="the latent carries something and the decoder uses it",
            patience=Patience(3, 0.02),
            remedies=(),
            is_unharmed=True,
        ),
        VerdictKind(
            name="partly_collapsed",
            tone="fair",
            sentence="Most latent dimensions are dead, and the rest carry everything",
            reason="most dimensions are dead and the rest carry everything, which is often as it should be",
            patience=Patience(3, 0.02, under_full_weight=LEAST_TRAINED),
            remedies=(ACTIVE_DIMENSIONS, FREE_BITS),
            is_unharmed=True,
        ),
        VerdictKind(
            name="collapsing",
            tone="fair",
            sentence="The latent is collapsing: what it carries is going",
            reason="the latent is losing what it carries, and a rescue is cheap now",
            patience=Patience(3, 0.03, under_full_weight=LEAST_TRAINED),
            remedies=(NO_MORE_THAN_FULL_WEIGHT, FREE_BITS, CYCLICAL, WORD_DROPOUT, TARGET_KL, GO_BACK),
            is_alarm=True,
        ),
        VerdictKind(
            name="asleep",
            tone="fair",
            sentence="The latent is silent, but not dead: it can still come to life by itself",
            reason="the latent is silent, and the KL weight is small enough for it to come to life by itself",
            patience=Patience(1),
            remedies=(),
        ),
        VerdictKind(
            name="collapsed",
            tone="bad",
            sentence="The posterior has collapsed: the decoder does without the latent",
            reason="the decoder models the data without the latent",
            patience=Patience(5, 0.03, share_of_past=0.6, steps=80, under_full_weight=LEAST_TRAINED),
            remedies=(NO_MORE_THAN_FULL_WEIGHT, FREE_BITS, CYCLICAL, WORD_DROPOUT, TARGET_KL, GO_BACK),
            is_alarm=True,
            is_collapse=True,
        ),
        VerdictKind(
            name="decoder_ignores_z",
            tone="bad",
            sentence="The decoder ignores the latent, although its rate is paid",
            reason="the rate is paid and not used: something holds it up (free bits, normalised means, a fixed variance) and "
            "hides a collapse",
            patience=Patience(5, 0.06, share_of_past=2.0, steps=80, under_full_weight=LEAST_TRAINED),
            remedies=(WORD_DROPOUT, CYCLICAL, WEAKER_DECODER, GO_BACK),
            is_alarm=True,
            is_collapse=True,
        ),
        VerdictKind(
            name="not_variational",
            tone="bad",
            sentence="The posteriors are next to points: this is no longer a variational model",
            reason="the posteriors are nearly points, so samples from the prior are unlike all that the decoder was trained on",
            patience=Patience(4, 0.05, under_full_weight=LEAST_TRAINED),
            remedies=(FULL_WEIGHT, RISING, LOWER_TARGET_KL, TARGET_KL),
            is_alarm=True,
        ),
        VerdictKind(
            name="diverged",
            tone="bad",
            sentence="Training diverged: it came to NaN or infinity",
            reason="the posteriors hold NaN or infinity",
            patience=Patience(2),
            remedies=(
                Remedy("a lower --lr", "a lower learning rate"),
                Remedy("a longer --warmup", "a longer warm-up of the learning rate"),
                Remedy("a lower --gradient_clip", "gradients that are clipped to a smaller norm"),
                Remedy("--precision 32-true", "float32", "where it is another"),
            ),
            is_alarm=True,
        ),
    )
}

USE_UNKNOWN_SENTENCE = "The latent carries something; whether the decoder uses it is not known for certain"
USE_UNKNOWN_REASON = "the latent carries something, but whether the decoder uses it is not certain"
"""Sentence and reason for healthy where decoder use was not probed, or is not clear."""


def tone_of(name: str) -> Tone:
    """Return the tone of a verdict that a file names; one of another version of this package is open."""
    return VERDICTS[name].tone if name in VERDICTS else "open"


def sentence_of(name: str) -> str:
    """Return the sentence on a verdict that a file names.

    >>> sentence_of("bored")
    'This version of seqvae does not know the verdict "bored"'
    """
    if name not in VERDICTS:
        return f'This version of seqvae does not know the verdict "{readable(name)}"'
    return VERDICTS[name].sentence


def readable(name: str) -> str:
    """
    >>> readable("decoder_ignores_z")
    'decoder ignores z'
    """
    return name.replace("_", " ")


# --- The verdict on a run -----------------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """The judgement in force, from a reading on until the evidence says otherwise."""

    name: str
    """A key of `VERDICTS`."""
    since_step: int
    """The step of the first reading that it was in force after."""
    evidence: str
    """One sentence, with the numbers."""
    advice: tuple[str, ...] = ()
    """What to try, the most promising first: a flag, or in another's module what to do, and in brackets what that does."""
    numbers: Mapping[str, float] = {}
    """What the evidence rests on, by the names of `Reading`."""
    dead_by_step: int | None = None
    """For a run that is collapsing: when nothing will be left if nothing changes."""


def describe_change(verdict: Verdict, before: str | None, step: int) -> str:
    """Describe a change of verdict in one line.

    >>> describe_change(Verdict("collapsing", 90, "the rate fell from 4 to 1", ("--free_bits 0.25 (why)",), {}, 300), "healthy", 90)
    'step 90: collapsing, dead by step 300 (was healthy): the rate fell from 4 to 1. Try --free_bits 0.25'
    """
    dead_by = "" if verdict.dead_by_step is None else f", dead by step {verdict.dead_by_step:,}"
    was = "" if before is None else f" (was {readable(before)})"
    remedies = [remedy.partition(" (")[0] for remedy in verdict.advice]
    advice = f". Try {' or '.join(remedies)}" if remedies else ""
    return f"step {step:,}: {readable(verdict.name)}{dead_by}{was}: {verdict.evidence}{advice}"
