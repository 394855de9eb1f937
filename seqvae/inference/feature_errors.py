"""How far off the model is, feature by feature, in the data's own units: each value against its mean under the model, told the
posterior's mean for z and all steps before it (one step ahead, by teacher forcing).

In: a trained model and batches of vectors or events. Out: for each feature or variable RMSE and MAE over all measured values, with
standard errors over sequences, and beside them the RMSE of the training mean, which knows nothing.

Shapes: B sequences, T steps, D features or variables, E events.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from seqvae.data.batches import Batch, EventBatch, TokenBatch, VectorBatch
from seqvae.inference.trained import Trained, at_work
from seqvae.models.likelihoods import EventLikelihood, VectorLikelihood
from seqvae.models.sequence_vae import SequenceVAE


class FeatureError(NamedTuple):
    """Of one feature or variable, in its own units."""

    name: str
    values: int
    """Values that were measured."""
    rmse: float
    rmse_error: float
    mae: float
    mae_error: float
    rmse_of_mean: float
    """Of the training mean in place of the model."""


def feature_errors(trained: Trained, batches: Iterable[Batch]) -> list[FeatureError]:
    """Of those that were measured at least once; tokens have none."""
    if trained.description.kind == "tokens":
        return []
    sums = None
    with at_work(trained):
        for batch in batches:
            found = _sums_of(*_per_sequence(trained.network, move_data_to_device(batch, trained.device)))
            sums = found if sums is None else sums + found
    assert sums is not None, "there is a batch"
    return _in_own_units(sums, trained)


class _PerSequence(NamedTuple):
    """(B, D) each, float64."""

    counts: Tensor
    squares: Tensor
    absolutes: Tensor
    plain_squares: Tensor
    """Of the values themselves, normalised: the training mean is 0 there."""


def _per_sequence(network: SequenceVAE, batch: Batch) -> _PerSequence:
    assert not isinstance(batch, TokenBatch)
    hidden_BTW = network.decoder_says(network.embedding(batch), network.encode(batch).mean)
    if isinstance(batch, VectorBatch):
        assert isinstance(network.likelihood, VectorLikelihood)
        known_BTD = batch.observed_BTD.double()
        values_BTD = batch.values_BTD.double()
        off_BTD = (values_BTD - network.likelihood.predict(hidden_BTW)[0].double()) * known_BTD
        kinds = (known_BTD, off_BTD.square(), off_BTD.abs(), values_BTD.square() * known_BTD)
        return _PerSequence(*(kind.sum(dim=1) for kind in kinds))
    assert isinstance(network.likelihood, EventLikelihood)
    return _of_events(
        batch, network.likelihood.event_means(hidden_BTW, batch).double(), len(network.likelihood.valued_V)
    )


def _of_events(batch: EventBatch, means_E: Tensor, variables: int) -> _PerSequence:
    known_E, values_E = batch.has_value_E.double(), batch.values_E.double()
    off_E = (values_E - means_E) * known_E
    sequences, steps = batch.gaps_BT.shape
    cell_E = batch.steps_E // steps * variables + batch.variables_E

    def added(values_E: Tensor) -> Tensor:
        flat = values_E.new_zeros(sequences * variables).index_add(0, cell_E, values_E)
        return flat.view(sequences, variables)

    return _PerSequence(*map(added, (known_E, off_E.square(), off_E.abs(), values_E.square() * known_E)))


def _sums_of(counts: Tensor, squares: Tensor, absolutes: Tensor, plain_squares: Tensor) -> np.ndarray:
    """What means and their standard errors take, (10, D): a sum over sequences each, so that batches add up."""
    parts = (
        *(torch.ones_like(counts), counts, squares, absolutes, plain_squares),
        *(counts.square(), squares.square(), absolutes.square(), squares * counts, absolutes * counts),
    )
    return torch.stack([part.sum(dim=0) for part in parts]).cpu().numpy()


def _in_own_units(sums: np.ndarray, trained: Trained) -> list[FeatureError]:
    found = []
    for name, std, column in zip(trained.description.names, trained.description.std, sums.T, strict=True):
        sequences, count, squares, absolutes, plain, counts2, squares2, absolutes2, crossed, crossed_absolutes = column
        if count == 0:
            continue
        mse, mae = squares / count, absolutes / count
        mse_error = _error(sequences, count, mse, squares2, crossed, counts2)
        mae_error = _error(sequences, count, mae, absolutes2, crossed_absolutes, counts2)
        rmse = float(np.sqrt(mse))
        rmse_error = mse_error / (2 * rmse) if rmse > 0 else 0.0  # the slope of the root
        numbers = (rmse, rmse_error, mae, mae_error, np.sqrt(plain / count))
        found.append(FeatureError(name, int(count), *(float(number * std) for number in numbers)))
    return found


def _error(sequences: float, count: float, ratio: float, squared: float, crossed: float, counts2: float) -> float:
    """The standard error of a ratio of sums over sequences, as `seqvae.inference.evaluation.mean_of` has it."""
    if sequences < 2:
        return float("inf")
    scatter = max(0.0, squared - 2 * ratio * crossed + ratio**2 * counts2)
    return float(np.sqrt(scatter * sequences / (sequences - 1)) / count)
