"""The escape threshold: the KL weight below which a collapsed posterior is unstable, with a standard error.

At the collapsed point the decoder ignores z. Let z enter it by vectors h (all layers together), and let s = d log p(x | h) / dh at
h = 0. S is the second moment of s over the data; F is that of scores of targets that the decoder itself draws, the conditional
Fisher information. A small posterior mean along w then gains w'S w / (2 beta) - w'F w / 2 nats. So the point is unstable if and
only if the weight beta is below the largest eigenvalue of F^-1/2 S F^-1/2: the *ideal* threshold, of an encoder that can tell the
decoder anything. At the collapsed point the encoder's features get no gradient, and its last layer can only say what is linear in
them. With t = s'w and t^ its ridge regression on the features, the threshold of the encoder *as it is* is
E[t t^]^2 / (E[t^^2] w'F w), never above the ideal one.

The direction w is found on three quarters of the sequences and judged on the rest, in turns: the largest eigenvalue of a sample
would read 3.5 where 1 is true (512 sequences, 128 directions). Scores are centred, as what is common to all sequences is the
decoder's own bias. Dropout is on, as in training, and a product of two scores takes them from different masks.
docs/monitoring.md says what the number does not know; `benchmarks/detection/threshold.py` holds it to closed forms and trainings.

In: scores of a few hundred sequences. Out: `EscapeThreshold`. `ThresholdReader` takes the scores from a module in a run.

Shapes: P passes with different dropout masks, K draws of targets, N sequences (B of a batch), R of them together, M places at which
z enters the decoder, F features of the encoder, Z latent dimensions.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from statistics import fmean, stdev
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from seqvae.errors import is_out_of_memory
from seqvae.monitors.contract import HasLevels, StepOutputs
from seqvae.monitors.decoder_use import (
    NOISE_SEED,
    ComputesPosterior,
    Probeable,
    mask_of,
    posterior_of,
    real_sequences,
    undisturbed,
)

RIDGE = 0.3
"""Ridge on the Fisher information, as a share of its mean eigenvalue. Of 256 sequences and 128 places, 0.003 finds a direction that
holds half as much on other sequences."""
FEATURE_RIDGE = 0.1
"""The same for the second moment of the encoder's features."""
FOLDS = 4
"""A direction is found on three quarters of the sequences and judged on the rest, each in turn."""
TINIEST = 1e-12
FEWEST_SEQUENCES = 32
"""Below, a quarter of the sequences says nothing."""
ENOUGH_SEQUENCES = 256
MOST_BATCHES = 16
"""Validation batches that are looked at for enough sequences, where the DataModule offers none."""
DRAWS = 2
"""Draws of targets, or passes with a draw each where the decoder has dropout. 256 sequences with two cost as much as 6 to 7
micro-batches of training."""


class LatentScores(NamedTuple):
    """Gradients of log p(x | h) by what z adds to the decoder, at h = 0."""

    data_PNM: Tensor
    """Of the data, with a dropout mask of its own in each pass."""
    drawn_KNM: Tensor
    """Of targets that the decoder draws at each step, given the data's own steps before it."""
    features_NF: Tensor
    """What the encoder's last layer gets."""


class EscapeThreshold(NamedTuple):
    """Two lower bounds with their errors; NaN where there are too few sequences, or scores are not finite."""

    value: float
    """With the features that the encoder has now."""
    error: float
    ideal: float
    """With any features."""
    ideal_error: float


UNKNOWN = EscapeThreshold(math.nan, math.nan, math.nan, math.nan)


# --- The estimate -------------------------------------------------------------------------------------------------------


def escape_threshold(scores: LatentScores) -> EscapeThreshold:
    """Estimate the threshold, for the encoder as it is and for an ideal one, on directions that were found on other sequences.

    From few sequences the best direction is not found, and the estimate is a lower bound: white scores of threshold 2 in 128 places
    read 0.8 from 256 sequences. Half of the sequences then find still less; the error includes that difference.
    """
    scores = LatentScores(*(part.cpu().double() for part in scores))
    sequences = scores.data_PNM.shape[1]
    if sequences < FEWEST_SEQUENCES or not all(bool(part.isfinite().all()) for part in scores):
        return UNKNOWN
    if not bool(scores.drawn_KNM.any()):
        return EscapeThreshold(0.0, 0.0, 0.0, 0.0)  # nothing of z reaches the decoder
    order = torch.randperm(sequences, generator=torch.Generator().manual_seed(NOISE_SEED))
    whole, *halves = (_cross_fitted(scores, part) for part in (order, *order.chunk(2)))
    missing = [max(0.0, whole[place] - sum(half[place] for half in halves) / 2) for place in (0, 2)]
    return EscapeThreshold(whole[0], math.hypot(whole[1], missing[0]), whole[2], math.hypot(whole[3], missing[1]))


def _cross_fitted(scores: LatentScores, order: Tensor) -> EscapeThreshold:
    """Estimate the threshold from some of the sequences."""
    data_PNM = scores.data_PNM[:, order]
    data_PNM = data_PNM - data_PNM.mean(dim=1, keepdim=True)
    drawn_KNM, features_NF = scores.drawn_KNM[:, order], scores.features_NF[order]
    features_NF = features_NF - features_NF.mean(dim=0)
    folds = torch.arange(len(order)).chunk(FOLDS)
    of_encoder, ideal = [], []
    for fold, judge in enumerate(folds):
        fit = torch.cat([*folds[:fold], *folds[fold + 1 :]])
        mean_NM, drawn_fit_KNM = data_PNM[:, fit].mean(dim=0), drawn_KNM[:, fit]
        judged = LatentScores(data_PNM[:, judge], drawn_KNM[:, judge], features_NF[judge])
        ideal.append(_quotient(judged, _direction(mean_NM, drawn_fit_KNM)))
        slopes_FM = _slopes(features_NF[fit], mean_NM)
        w_M = _direction(features_NF[fit] @ slopes_FM, drawn_fit_KNM)
        of_encoder.append(_quotient_of_encoder(judged, w_M, slopes_FM @ w_M))
    return EscapeThreshold(*_average(of_encoder), *_average(ideal))


def _direction(rows_NM: Tensor, drawn_KNM: Tensor) -> Tensor:
    """Return the direction along which the rows have most variance for their Fisher information, (M,)."""
    drawn_RM = drawn_KNM.flatten(0, 1)
    fisher_MM = drawn_RM.T @ drawn_RM / len(drawn_RM)
    fisher_MM.diagonal().add_(RIDGE * float(fisher_MM.diagonal().mean()) + TINIEST)
    lower_MM = torch.linalg.cholesky(fisher_MM)
    whitened_MN = torch.linalg.solve_triangular(lower_MM, rows_NM.T, upper=False)
    # By the smaller of two products: where z enters at 768 places, an eigenvector of M x M takes seconds.
    if len(rows_NM) < len(whitened_MN):
        top_M = whitened_MN @ torch.linalg.eigh(whitened_MN.T @ whitened_MN).eigenvectors[:, -1]
    else:
        top_M = torch.linalg.eigh(whitened_MN @ whitened_MN.T).eigenvectors[:, -1]
    return torch.linalg.solve_triangular(lower_MM.T, top_M[:, None], upper=True).squeeze(1)


def _slopes(features_NF: Tensor, scores_NM: Tensor) -> Tensor:
    """Return the ridge regression of the scores on the features, (F, M)."""
    moment_FF = features_NF.T @ features_NF
    moment_FF.diagonal().add_(FEATURE_RIDGE * float(moment_FF.diagonal().mean()) + TINIEST)
    return torch.linalg.solve(moment_FF, features_NF.T @ scores_NM)


def _quotient(scores: LatentScores, w_M: Tensor) -> tuple[float, float]:
    """Return w'S w / w'F w and its standard error, that of a ratio of means."""
    along_PN = scores.data_PNM @ w_M
    passes = len(along_PN)
    above_N = along_PN.square().squeeze(0)
    if passes > 1:  # never a pass with itself: its mask would count as news of the sequence
        above_N = (along_PN.sum(dim=0).square() - along_PN.square().sum(dim=0)) / (passes * (passes - 1))
    below_N = (scores.drawn_KNM @ w_M).square().mean(dim=0)
    value = above_N.mean() / below_N.mean()
    return _with_error(value, (above_N - value * below_N) / below_N.mean())


def _quotient_of_encoder(scores: LatentScores, w_M: Tensor, slopes_F: Tensor) -> tuple[float, float]:
    """Return E[t t^]^2 / (E[t^^2] w'F w) and its standard error, by the derivative in each of the three means."""
    t_N, fitted_N = (scores.data_PNM @ w_M).mean(dim=0), scores.features_NF @ slopes_F
    product_N, square_N, below_N = t_N * fitted_N, fitted_N.square(), (scores.drawn_KNM @ w_M).square().mean(dim=0)
    product, square, below = product_N.mean().clamp(min=0), square_N.mean() + TINIEST, below_N.mean()
    value = product.square() / (square * below)
    influence_N = (2 * product * product_N / square - product.square() * square_N / square.square()) / below
    return _with_error(value, influence_N - value * below_N / below)


def _with_error(value: Tensor, influence_N: Tensor) -> tuple[float, float]:
    return float(value), float(influence_N.std() / math.sqrt(len(influence_N)))


def _average(folds: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Average the folds, whose errors are those of different sequences; the error is no less than their scatter says."""
    values = [value for value, _ in folds]
    own = math.hypot(*(error for _, error in folds)) / len(folds)
    return fmean(values), max(own, stdev(values) / math.sqrt(len(folds)))


# --- In a run -----------------------------------------------------------------------------------------------------------


@runtime_checkable
class OffersScores(Protocol):
    """A module that knows where z enters its decoder, and what its posterior is linear in. Called in eval mode."""

    def latent_scores(self, batch: Any, draws: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the fields of `LatentScores` for a batch, of P passes with `draws` draws of targets in all."""


@runtime_checkable
class DrawsTargets(Protocol):
    """What another module may offer beside `nll_given_z`. Called in eval mode, with gradients."""

    def nll_of_drawn(self, batch: Any, z: Tensor) -> Tensor:
        """Return -log p, (B,), of targets that the decoder draws at each step, given z and the data's own steps before it."""


@runtime_checkable
class OffersScoreBatches(Protocol):
    """What a LightningDataModule may offer: training sequences to read the threshold on."""

    def score_batches(self) -> Sequence[Any]:
        """Return the same batches in every process and after a resume, with some 256 sequences in all."""


def why_unreadable(module: LightningModule, posterior: StepOutputs) -> str | None:
    """Return why the threshold of a module with such posteriors cannot be read; None: it can."""
    name = type(module).__name__
    if posterior.codes is not None:
        return "latents that are codes have no such threshold"
    if posterior.posterior_mean.dim() == 3:
        return "a latent of each step has no such threshold so far"
    if not posterior.prior_mean is posterior.prior_logvar is posterior.kl is None:
        return "it is defined for the prior N(0, I)"
    if isinstance(module, OffersScores):
        return None
    if isinstance(module, HasLevels):
        return "it is defined for one level of latents, and there are more"
    if not (isinstance(module, Probeable) and isinstance(module, DrawsTargets)):
        return f"{name} has no nll_of_drawn(batch, z) beside nll_given_z(batch, z)"
    if not isinstance(module, ComputesPosterior):
        return f"{name} has no posterior_of(batch)"
    return None


def latent_scores(module: LightningModule, batch: Any) -> LatentScores:
    """Take a batch's scores from the module, or make them from what it offers: by its z, so that the estimate is a lower bound."""
    if isinstance(module, OffersScores):
        return LatentScores(*module.latent_scores(batch, DRAWS))
    assert isinstance(module, Probeable)
    assert isinstance(module, DrawsTargets)
    assert isinstance(module, ComputesPosterior)
    posterior = posterior_of(module, batch)
    real_B = real_sequences(mask_of(posterior))
    z_BZ = torch.zeros_like(posterior.posterior_mean, requires_grad=True)

    def gradient(nll: Callable[[Any, Tensor], Tensor]) -> Tensor:
        with torch.enable_grad():
            nll_B = nll(batch, z_BZ) + 0 * z_BZ.sum()  # a decoder may ignore z
            return torch.autograd.grad(-nll_B.sum(), z_BZ)[0][real_B]

    drawn = [gradient(module.nll_of_drawn) for _ in range(DRAWS)]
    return LatentScores(gradient(module.nll_given_z)[None], torch.stack(drawn), posterior.posterior_mean[real_B])


class ThresholdReader:
    """The reader of one run's escape threshold, always on the same sequences."""

    def __init__(self) -> None:
        self._batches: list[Any] = []
        """On the device, chosen at the first reading."""

    def read(self, trainer: Trainer, module: LightningModule) -> EscapeThreshold:
        """Return this process's estimate; all processes have to read, as a module may wait for the others. It leaves no trace.

        Dropout masks and drawn targets follow from the step: two readings do not share them. Without room for it there is none.
        """
        precision = trainer.precision_plugin.forward_context()
        parts: list[LatentScores] = []
        with isolate_rng(include_cuda=False), undisturbed(module, trainer.strategy.root_device, precision):
            torch.manual_seed(NOISE_SEED)  # a loader that shuffles begins alike in a run and in its continuation
            if not self._batches:
                self._batches = list(self._choose(trainer))
            torch.manual_seed(trainer.global_step)
            try:
                for batch in self._batches:
                    parts.append(latent_scores(module, batch))
                    if sum(part.data_PNM.shape[1] for part in parts) >= ENOUGH_SEQUENCES:
                        break
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                return UNKNOWN
        if not parts:
            return UNKNOWN
        data, drawn, features = zip(*parts, strict=True)
        return escape_threshold(LatentScores(torch.cat(data, dim=1), torch.cat(drawn, dim=1), torch.cat(features)))

    def _choose(self, trainer: Trainer) -> Iterator[Any]:
        """Yield batches that may hold enough sequences: what the DataModule offers, or the first of the validation."""
        offering = vars(trainer)["datamodule"]  # set by Lightning, None too, and declared nowhere
        candidates: Iterable[Any] = ()
        if isinstance(offering, OffersScoreBatches):
            candidates = offering.score_batches()
        elif trainer.val_dataloaders is not None:
            candidates = islice(CombinedLoader(trainer.val_dataloaders).flattened[0], MOST_BATCHES)
        for batch in candidates:
            yield trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch))
