"""Fills what is missing in a batch of vectors or events: the values that came, and what the network expects of the others.

    impute(network, batch, draws=16, generator=generator) -> mean, standard deviation, and which values came

A sequence is encoded with its gaps, K latents are drawn from its posterior, and for each of them the decoder goes along the steps
as they came. A value that is missing at a step is then known by all that came before it, and by what the latent has to say of the
rest: what comes later, and what else came at the same step. The K Gaussians are taken for a mixture of equal parts.

Shapes: B sequences, T steps, D features or V variables, Z latent dimensions, W width, E events of the whole batch.
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from seqvae.data.batch import EventBatch, VectorBatch
from seqvae.models.likelihoods import EventLikelihood, TokenLikelihood, VectorLikelihood
from seqvae.models.posteriors import Posterior
from seqvae.models.sampling import evaluating
from seqvae.models.vae import SequenceVAE


class Imputed(NamedTuple):
    """Normalised; T steps, D features or variables. Padded steps are 0 and not observed."""

    mean_BTD: Tensor
    """The observed value where there is one, else the predictive mean; NaN where training never saw a value of the feature."""
    std_BTD: Tensor
    """0 where observed; NaN as above."""
    observed_BTD: Tensor
    """bool"""


class Prediction(NamedTuple):
    mean_BTD: Tensor
    variance_BTD: Tensor


@torch.no_grad()
def impute(
    network: SequenceVAE, batch: VectorBatch | EventBatch, *, draws: int = 16, generator: torch.Generator
) -> Imputed:
    """Draw `draws` latents of each sequence, or take the posterior mean alone for 0: its answers are a little surer than they
    should be. The generator must be on the network's device; mode and random numbers of the caller are left as they are.

    Mean and deviation are those of the Gaussians, without the thin heavy tail beside them: the tail is there for mistakes in the
    data, which nobody wants to see filled in, it has the same mean, and its variance is infinite.

    Of events the answer is dense: each variable at each step. The network predicts the values of all variables whichever of them
    are present, so this is the value that a measurement would show, by what was learned where one was made. Where the decision
    to measure hangs on the value itself, values that nobody measured are different, and no such data could tell by how much.
    """
    if draws < 0:
        raise ValueError(f"draws must be 0 or more, got {draws}")
    with evaluating(network):
        steps_BTW, posterior = network.embedding(batch), network.encode(batch)
        said = (network.decoder_says(steps_BTW, z) for z in latents(posterior, draws, generator))
        mean_BTD, variance_BTD = mixture(predict(network, batch, hidden_BTW) for hidden_BTW in said)
    values_BTD, observed_BTD = what_came(batch, mean_BTD.shape[-1])
    real_BT1 = (torch.arange(mean_BTD.shape[1], device=mean_BTD.device) < batch.lengths_B[:, None])[..., None]
    predicted_BTD = real_BT1 & ~observed_BTD
    unknown_BTD = predicted_BTD & ~valued(network)
    return Imputed(
        torch.where(predicted_BTD, mean_BTD, values_BTD).masked_fill(unknown_BTD, math.nan),
        (variance_BTD.sqrt() * predicted_BTD).masked_fill(unknown_BTD, math.nan),
        observed_BTD,
    )


def latents(posterior: Posterior, draws: int, generator: torch.Generator) -> Iterator[Tensor]:
    """More draws from the same generator begin with the same ones."""
    if draws == 0:
        yield posterior.mean
    for _ in range(draws):
        noise = torch.randn(posterior.mean.shape, generator=generator, device=posterior.mean.device)
        yield posterior.mean + torch.exp(0.5 * posterior.logvar) * noise


def predict(network: SequenceVAE, batch: VectorBatch | EventBatch, hidden_BTW: Tensor) -> Prediction:
    """Of all features or variables at each step, for one latent."""
    match network.likelihood, batch:
        case VectorLikelihood() as likelihood, VectorBatch():
            mean_BTD, logvar_BTD = likelihood.predict(hidden_BTW)
        case EventLikelihood() as likelihood, EventBatch():
            mean_BTD, logvar_BTD = likelihood.predict_values(likelihood.knowing_gaps(hidden_BTW, batch.gaps_BT))
        case _:
            raise ValueError(f"{type(network.likelihood).__name__} cannot fill a {type(batch).__name__}")
    return Prediction(mean_BTD, logvar_BTD.exp())


def mixture(parts: Iterable[Prediction]) -> Prediction:
    """Of equally likely parts: the mean of their means, and the mean of their variances plus the variance of their means.

    One part at a time, each compared with the mean so far: a difference of large sums would lose small variances.
    """
    number, mean_BTD, inside_BTD, between_BTD = 0, torch.zeros(()), torch.zeros(()), torch.zeros(())
    for number, part in enumerate(parts, start=1):
        away_BTD = part.mean_BTD - mean_BTD
        mean_BTD = mean_BTD + away_BTD / number
        between_BTD = between_BTD + away_BTD * (part.mean_BTD - mean_BTD)
        inside_BTD = inside_BTD + part.variance_BTD
    return Prediction(mean_BTD, (inside_BTD + between_BTD) / number)


def what_came(batch: VectorBatch | EventBatch, features: int) -> tuple[Tensor, Tensor]:
    """Values, 0 where there is none, and where there are some: (B, T, D) each."""
    if isinstance(batch, VectorBatch):
        return batch.values_BTD, batch.observed_BTD
    shape = (*batch.gaps_BT.shape, features)
    values_BTV = torch.zeros(shape, device=batch.gaps_BT.device)
    observed_BTV = torch.zeros_like(values_BTV, dtype=torch.bool)
    values_BTV.flatten(0, 1)[batch.steps_E, batch.variables_E] = batch.values_E
    observed_BTV.flatten(0, 1)[batch.steps_E, batch.variables_E] = batch.has_value_E
    return values_BTV, observed_BTV


def valued(network: SequenceVAE) -> Tensor:
    """(D,): which features or variables had values in training. Of others the network says something that it never learned."""
    likelihood = network.likelihood
    assert not isinstance(likelihood, TokenLikelihood)
    return likelihood.valued_V if isinstance(likelihood, EventLikelihood) else likelihood.valued_D
