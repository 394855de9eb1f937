"""Fill what is missing in a batch of vectors or events: the values that came, and what the network expects of the others.

    impute(network, batch, draws=16, noise=noise) -> mean, standard deviation, and which values came

A sequence is encoded with its gaps, K latents are drawn from its posterior, and for each of them the decoder goes along the steps
as they came. A missing value of a step is then predicted from all that came before it, and from what the latent holds of the
rest: what comes later, and what else came at the same step. The K Gaussians form a mixture of equal parts.

Shapes: B sequences, T steps, D features or V variables, Z latent dimensions, W width, E events of the whole batch.
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from seqvae.data.batch import EventBatch, VectorBatch
from seqvae.models.likelihoods import EventLikelihood, VectorLikelihood, real_steps
from seqvae.models.noise import Noise
from seqvae.models.sampling import evaluating
from seqvae.models.vae import SequenceVAE


class Imputed(NamedTuple):
    """Normalised values of D features or variables at T steps. Padded steps are 0 and not observed."""

    mean_BTD: Tensor
    """The observed value where there is one, else the predictive mean; NaN where training never saw a value of the feature."""
    std_BTD: Tensor
    """0 where observed; NaN as above."""
    observed_BTD: Tensor
    """bool"""


@torch.no_grad()
def impute(network: SequenceVAE, batch: VectorBatch | EventBatch, *, draws: int = 16, noise: Noise) -> Imputed:
    """Fill with `draws` latents of each sequence, or for 0 with the posterior mean alone, which is a little too sure.

    More draws from the same noise begin with the same ones. The noise must be on the network's device; mode and random
    numbers of the caller are left as they are.

    Mean and deviation are those of the Gaussians, without the thin heavy tail beside them: the tail is there for mistakes in the
    data, which should not be filled in, it has the same mean, and its variance is infinite.

    Of events the answer is dense: each variable at each step. The network predicts the values of all variables whichever of them
    are present, so this is the value that a measurement would show, by what was learned where one was made. Where the decision
    to measure hangs on the value itself, values that were not measured are different, and such data cannot show by how much.
    """
    if draws < 0:
        raise ValueError(f"draws must be 0 or more, got {draws}")
    with evaluating(network):
        mean_BTD, variance_BTD = mixture(predictions(network, batch, draws, noise))
    likelihood = network.likelihood
    if isinstance(batch, VectorBatch):
        assert isinstance(likelihood, VectorLikelihood)
        values_BTD, observed_BTD, was_learned_D = batch.values_BTD, batch.observed_BTD, likelihood.valued_D
    else:
        assert isinstance(likelihood, EventLikelihood)
        was_learned_D = likelihood.valued_V
        values_BTD, observed_BTD = torch.zeros_like(mean_BTD), torch.zeros_like(mean_BTD, dtype=torch.bool)
        values_BTD.flatten(0, 1)[batch.steps_E, batch.variables_E] = batch.values_E
        observed_BTD.flatten(0, 1)[batch.steps_E, batch.variables_E] = batch.has_value_E
    predicted_BTD = real_steps(batch.lengths_B, mean_BTD.shape[1])[..., None] & ~observed_BTD
    unknown_BTD = predicted_BTD & ~was_learned_D
    return Imputed(
        torch.where(predicted_BTD, mean_BTD, values_BTD).masked_fill(unknown_BTD, math.nan),
        (variance_BTD.sqrt() * predicted_BTD).masked_fill(unknown_BTD, math.nan),
        observed_BTD,
    )


def predictions(
    network: SequenceVAE, batch: VectorBatch | EventBatch, draws: int, noise: Noise
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each latent mean and variance of all features or variables at each step."""
    draws = min(draws, 1) if network.has_codes else draws  # which are the same each time
    likelihood, steps_BTW = network.likelihood, network.embedding(batch)
    encoding = network.encoding(batch, steps_BTW)
    for _ in range(max(draws, 1)):
        z = network.draw(encoding, noise.normal if draws else encoding.posterior.mean.new_zeros).z
        hidden_BTW = network.decode_hidden(steps_BTW, z)
        if isinstance(likelihood, VectorLikelihood) and isinstance(batch, VectorBatch):
            mean_BTD, logvar_BTD = likelihood.predict(hidden_BTW)
        elif isinstance(likelihood, EventLikelihood) and isinstance(batch, EventBatch):
            mean_BTD, logvar_BTD = likelihood.predict_values(likelihood.condition_on_gaps(hidden_BTW, batch.gaps_BT))
        else:
            raise ValueError(f"{type(likelihood).__name__} cannot fill a {type(batch).__name__}")
        yield mean_BTD, logvar_BTD.exp()


def mixture(parts: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return mean and variance of equally likely parts, from theirs: the mean of the means, and the mean of the variances plus
    the variance of the means.

    One part at a time, each compared with the mean so far: a difference of large sums would lose small variances.
    """
    number, mean_BTD, inside_BTD, between_BTD = 0, torch.zeros(()), torch.zeros(()), torch.zeros(())
    for number, (part_mean_BTD, part_variance_BTD) in enumerate(parts, start=1):
        away_BTD = part_mean_BTD - mean_BTD
        mean_BTD = mean_BTD + away_BTD / number
        between_BTD = between_BTD + away_BTD * (part_mean_BTD - mean_BTD)
        inside_BTD = inside_BTD + part_variance_BTD
    return mean_BTD, (inside_BTD + between_BTD) / number
