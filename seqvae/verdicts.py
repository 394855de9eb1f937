"""The table of verdicts on a posterior: all that the package knows of each, and the advice that follows from it.

A verdict is added by an entry in `VERDICTS` and a rule in `seqvae/monitors/rules.py`. The detector takes reason, patience and
remedies from the entry, the report its sentence, and pages and figures choose their colours by its tone.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, NamedTuple

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

FLOOR_NATS: Mapping[Literal["sequence", "step"], float] = {"sequence": 1.5, "step": 0.3}
"""Nats of each posterior that cost nothing: collapsed models used them after 24 to 42 steps, and lost less likelihood by them than
by 0.25 nats in each dimension or a target of 5. Of a step (demo tokens, 16 dimensions): 0.3 and 0.5 cost 1.3 % and 2.7 % of the
NLL; of 0.1 the information stays below the line."""
FLOOR_EFFECTS = {
    "sequence": "a floor of 1.5 nats in all, which healed 4 of 4 collapsed runs, for 0.1 to 0.5 nats of the ELBO",
    "step": "a floor of 0.3 nats for each step, which healed 3 of 3 collapsed runs, for 1 to 2 % of the NLL",
}
LIGHT_BETA = 0.2
"""The KL weight that healed 5 of 5 collapsed runs, where no escape threshold says what it takes."""
LEAST_RATE = 0.3
"""Nats that a latent should carry at least: of one direction with threshold t they take a weight of t * exp(-2 * LEAST_RATE)."""

RESCUE = Remedy("--on_collapse rescue", "", "heals the run while it goes on, and says what that costs")
WAIT = Remedy("waiting", "waiting", "it can come to life by itself")
FREE_BITS = Remedy(
    "--free_bits {floor:.2g}",
    "free bits, {floor:.2g} nats in each dimension",
    "{floor_effect}",
)
WORD_DROPOUT = Remedy(
    "--word_dropout 0.3",
    "less for the decoder to go by beside z, where it gets more than z",
    "what the decoder cannot look up it has to learn from the latent",
)
LIGHTER_WEIGHT = Remedy("--beta {beta:.2g}", "a KL weight of {beta:.2g}", "{why_beta}")
WARM_UP = Remedy(
    "--kl_schedule linear",
    "a KL weight that rises slowly from 0",
    "an encoder of other features could live under this weight: let it find them first",
)
NO_LABELS = Remedy(
    "--label_weight 0", "no loss on labels", "the labels keep the latent going, and the decoder does without it"
)
TARGET_KL = Remedy(
    "--target_kl 5",
    "a KL weight that is steered towards a KL of 5 nats",
    "a controller holds the KL there; healed 5 of 5 collapsed runs, for 2 to 4 nats of the ELBO",
)
LOWER_TARGET_KL = Remedy(
    "a lower --target_kl", "a lower KL to steer towards", "the controller gives the KL more weight"
)
WEAKER_DECODER = Remedy(
    "a weaker decoder (--depth 1, a smaller --width, or --decoder parallel)",
    "a weaker decoder (fewer layers, or narrower ones)",
)
FULL_WEIGHT = Remedy(
    "--beta 1",
    "a larger KL weight, up to 1 where the NLL is summed over all of a sequence as the KL is, and less where it is a mean",
    "the full weight of the KL",
)
NO_MORE_THAN_FULL_WEIGHT = Remedy(
    "--beta 1",
    "a smaller KL weight; 1 is full where the NLL is summed over all of a sequence as the KL is",
    "the KL weighs {kl_weight:.3g} now",
)
RISING = Remedy("--kl_schedule linear", "a KL weight that rises once", "a weight that rises and stays")
ACTIVE_DIMENSIONS = Remedy(
    "--latent_size {active}", "a latent of {active} dimensions", "the number of dimensions that carry something"
)
REVIVE_CODES = Remedy(
    "--revive_codes",
    "giving dead codes the vectors that the encoder has written lately",
    "a code that nothing falls to does not move, and so stays dead",
)
FEWER_CODES = Remedy("--codes {fewer}", "a codebook of {fewer} codes", "about as many as are worth telling apart now")
GRID = Remedy(
    "--latent discrete --codebook fsq",
    "a grid in place of codes that are learned (FSQ)",
    "the encoder reaches all points of a grid",
)
GO_BACK = Remedy(
    "--init_from the run's healthy.ckpt",
    "a checkpoint of when it was healthy, to begin again from",
    "starts from the last healthy checkpoint; with one of these",
)

HEAVY = 1.05
"""A KL that weighs more than in the evidence lower bound is the first suspect."""


class Circumstances(NamedTuple):
    """What in a run holds a rate up, or lets a decoder do without the latent."""

    level: Literal["sequence", "step"] | None = None
    """Which of two levels of latents this is of; None: there is one."""
    free_bits: float = 0.0
    """Nats of each dimension that cost nothing."""
    free_bits_by: Literal["dimension", "group", "total"] = "dimension"
    """What has them together."""
    has_normalised_means: bool = False
    has_contrastive_loss: bool = False
    """The encoder is paid for latents that tell sequences apart."""
    least_rate: float = 0.0
    """Nats that the prior costs every posterior."""
    has_label_loss: bool = False
    """A loss on labels is computed from the latent."""
    sees_inputs: bool = True
    """The decoder gets earlier steps beside the latent."""
    codebook: Literal["vq", "fsq"] | None = None
    """Where the vectors of codes come from; None: latents are no codes."""
    revives_codes: bool = False
    """Dead codes get other vectors."""
    offers_rescue: bool = False
    """--on_collapse rescue would have an effect, and is not in force."""


FREE_BITS_OF = {
    "dimension": "in each dimension",
    "group": "for each dimension of a group",
    "total": "for each dimension, all together,",
}


def why_paid(circumstances: Circumstances | None) -> str:
    """Return what holds a rate up that the decoder does not use; None: it is not known what is in force.

    >>> why_paid(Circumstances(free_bits=0.25, has_label_loss=True))
    'the rate is paid and not used: free bits of 0.25 nats in each dimension and the loss on labels hold it up, and hide a collapse'
    """
    if circumstances is None:
        return VERDICTS["decoder_ignores_z"].reason
    has_free_bits = circumstances.free_bits > 0
    holders = [
        *(
            [f"free bits of {circumstances.free_bits:.2g} nats {FREE_BITS_OF[circumstances.free_bits_by]}"]
            * has_free_bits
        ),
        *(["normalised means"] if circumstances.has_normalised_means else []),
        *(["the contrastive loss"] if circumstances.has_contrastive_loss else []),
        *([f"a prior that costs {circumstances.least_rate:.2g} nats or more"] if circumstances.least_rate else []),
        *(["the loss on labels"] if circumstances.has_label_loss else []),
    ]
    if not holders:
        return "the rate is paid and not used: the decoder has not come to listen to the latent"
    is_one = len(holders) == 1 and holders[0].startswith(("the ", "a "))
    holds = "holds it up, and hides" if is_one else "hold it up, and hide"
    return f"the rate is paid and not used: {' and '.join(holders)} {holds} a collapse"


def advice_on(
    name: str,
    *,
    active: int,
    dimensions: int = 16,
    scope: Literal["sequence", "step"] = "sequence",
    kl_weight: float | None = None,
    threshold: float | None = None,
    ideal_threshold: float | None = None,
    is_steered: bool = False,
    is_cyclical: bool = False,
    has_warm_up: bool = False,
    has_been_healthy: bool = False,
    codes: int | None = None,
    perplexity: float | None = None,
    circumstances: Circumstances | None = None,
    as_flags: bool = True,
) -> tuple[str, ...]:
    """Return what to try, the most promising first, without what is in force already or would change nothing.

    `active`: dimensions that carry something, of `dimensions`. `kl_weight`: the last one that is known, `threshold` and
    `ideal_threshold` the escape thresholds. `is_steered`: --target_kl is in force, and --kl_schedule and --beta have no effect.
    `is_cyclical`: the KL weight falls again; `has_warm_up`: it rises. `codes`: of a codebook, and their `perplexity`; None: latents
    are no codes. `circumstances`: None where they are not known. `as_flags`:
    what to type; else what to do.
    """
    known = circumstances or Circumstances()
    floor = FLOOR_NATS[scope] / max(dimensions, 1)
    beta, why_beta = LIGHT_BETA, "healed 5 of 5 collapsed runs, for up to 3 nats of the ELBO"
    if threshold is not None:
        beta, why_beta = threshold * math.exp(-2 * LEAST_RATE), f"{LEAST_RATE:g} nats, by the escape threshold"
    is_above_ideal = ideal_threshold is not None and kl_weight is not None and kl_weight > ideal_threshold
    is_between = (
        threshold is not None
        and ideal_threshold is not None
        and kl_weight is not None
        and threshold < kl_weight <= ideal_threshold
    )
    is_paid = name == "decoder_ignores_z"
    fewer = 2 ** max(1, math.ceil(math.log2(max(perplexity or 1.0, 1.0))))
    applies = {
        REVIVE_CODES: not known.revives_codes and known.codebook != "fsq",
        FEWER_CODES: codes is not None and fewer < codes,
        GRID: known.codebook != "fsq",
        RESCUE: known.offers_rescue and as_flags,
        FREE_BITS: known.free_bits < floor,
        TARGET_KL: not is_steered and known.level is None,  # it would be for both together
        LOWER_TARGET_KL: is_steered,
        LIGHTER_WEIGHT: codes is None and not is_steered and (kl_weight is None or kl_weight > beta > 0),
        WARM_UP: is_between and not (is_steered or has_warm_up),
        WORD_DROPOUT: known.sees_inputs and (is_paid or is_above_ideal),
        WEAKER_DECODER: is_paid or is_above_ideal,
        NO_LABELS: known.has_label_loss,
        RISING: is_cyclical and not is_steered,
        FULL_WEIGHT: not is_steered and (kl_weight is None or kl_weight < 1),
        NO_MORE_THAN_FULL_WEIGHT: not is_steered and kl_weight is not None and kl_weight > HEAVY,
        GO_BACK: has_been_healthy,
    }
    numbers: dict[str, Any] = {"active": max(active, 1), "kl_weight": kl_weight, "floor": floor, "fewer": fewer}
    numbers |= {"floor_effect": FLOOR_EFFECTS[scope], "beta": beta, "why_beta": why_beta}
    remedies = [remedy for remedy in VERDICTS[name].remedies if applies.get(remedy, True)]
    written = (_written(remedy, as_flags).format(**numbers) for remedy in remedies)
    renamed = FLAGS_OF_STEPS if known.level == "step" else {}
    return tuple(reduce(lambda line, names: line.replace(*names), renamed.items(), line) for line in written)


FLAGS_OF_STEPS = {"--free_bits ": "--step_free_bits ", "--latent_size ": "--step_latent_size "}
"""Flags that go by another name where the latents are those of steps below their sequence's."""


def _written(remedy: Remedy, as_flag: bool) -> str:
    """Return a remedy in one line, what it does in brackets."""
    name = remedy.flag if as_flag else remedy.words
    return f"{name} ({remedy.effect})" if remedy.effect else name


HEALING = (
    *(RESCUE, NO_MORE_THAN_FULL_WEIGHT, FREE_BITS, TARGET_KL, LIGHTER_WEIGHT),
    *(WARM_UP, WORD_DROPOUT, WEAKER_DECODER, GO_BACK),
)
"""What heals a collapse, in the order in which it did. Not among them: a cyclical weight, which healed none of 9 runs, and, but for
decoders that no encoder can beat, word dropout, which healed one."""

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
            remedies=HEALING,
            is_alarm=True,
        ),
        VerdictKind(
            name="asleep",
            tone="fair",
            sentence="The latent is silent, but not dead: it can still come to life by itself",
            reason="the latent is silent, and the KL weight is small enough for it to come to life by itself",
            patience=Patience(1),
            remedies=(WAIT, LIGHTER_WEIGHT),
        ),
        VerdictKind(
            name="collapsed",
            tone="bad",
            sentence="The posterior has collapsed: the decoder does without the latent",
            reason="the decoder models the data without the latent",
            patience=Patience(5, 0.03, share_of_past=0.6, steps=80, under_full_weight=LEAST_TRAINED),
            remedies=HEALING,
            is_alarm=True,
            is_collapse=True,
        ),
        VerdictKind(
            name="decoder_ignores_z",
            tone="bad",
            sentence="The decoder ignores the latent, although its rate is paid",
            reason="the rate is paid and not used: something holds it up (free bits, normalised means, a fixed variance) and "
            "hides a collapse",
            patience=Patience(5, 0.06, share_of_past=1.0, steps=80, under_full_weight=LEAST_TRAINED),
            remedies=(RESCUE, NO_LABELS, LIGHTER_WEIGHT, WORD_DROPOUT, WEAKER_DECODER, GO_BACK),
            is_alarm=True,
            is_collapse=True,
        ),
        VerdictKind(
            name="codebook_collapsed",
            tone="bad",
            sentence="The codebook has collapsed: most codes are never used",
            reason="most codes are dead, so the latent tells less than its codes could",
            patience=Patience(4, 0.05, under_full_weight=LEAST_TRAINED),
            remedies=(REVIVE_CODES, FEWER_CODES, GRID),
            is_alarm=True,
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
