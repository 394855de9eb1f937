"""What anybody can tell of a sequence without a model: simple numbers of its raw steps, for a probe's latents to be measured
against. A batch in, one row of numbers a sequence out; NaN where nothing was measured.

vectors: of each feature mean, deviation, first and last value;  events: of each variable mean, whether it was measured, and how
often (logarithm);  tokens: shares of the most frequent tokens, and the length (logarithm). Values are normalised.

Shapes: B sequences, T steps, D features, V variables or tokens, E events, P numbers.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqvae.data.batches import Batch, EventBatch, TokenBatch, VectorBatch

MOST_TOKENS = 1000


class Summary(NamedTuple):
    means: np.ndarray | None
    """(B, D) of each feature or variable; tokens have none."""
    rest: np.ndarray
    """(B, P), all else that is told."""


class Summarise:
    """`tokens_V`: those whose share is told; `names`: how many variables there are."""

    def __init__(self, names: int, tokens_V: np.ndarray | None = None) -> None:
        self.names, self.tokens_V = names, tokens_V

    def __call__(self, batch: Batch) -> Summary:
        match batch:
            case VectorBatch():
                return _of_vectors(batch)
            case EventBatch():
                return _of_events(batch, self.names)
            case TokenBatch():
                assert self.tokens_V is not None
                return Summary(None, _of_tokens(batch, self.tokens_V))


def frequent_tokens(batches: Iterable[Batch], vocabulary: int) -> np.ndarray:
    """The ids that come most often, ascending."""
    counts_V = np.zeros(vocabulary, np.int64)
    for batch in batches:
        assert isinstance(batch, TokenBatch)
        counts_V += np.bincount(batch.tokens_BT[_real(batch.tokens_BT, batch.lengths_B)].numpy(), minlength=vocabulary)
    return np.sort(np.argsort(-counts_V, kind="stable")[:MOST_TOKENS])


def _of_vectors(batch: VectorBatch) -> Summary:
    known_BTD, values_BTD = batch.observed_BTD, batch.values_BTD.double()
    count_BD = known_BTD.sum(dim=1)
    mean_BD = _ratio((values_BTD * known_BTD).sum(dim=1), count_BD)
    off_BTD = (values_BTD - mean_BD.nan_to_num()[:, None]) * known_BTD
    std_BD = _ratio(off_BTD.square().sum(dim=1), count_BD).sqrt()
    steps = values_BTD.shape[1]
    first_BD = known_BTD.int().argmax(dim=1)
    last_BD = steps - 1 - known_BTD.flip(1).int().argmax(dim=1)
    first, last = (
        values_BTD.gather(1, step_BD[:, None]).squeeze(1).masked_fill(count_BD == 0, torch.nan)
        for step_BD in (first_BD, last_BD)
    )
    return Summary(mean_BD.numpy(), torch.cat((std_BD, first, last), dim=1).numpy())


def _of_events(batch: EventBatch, names: int) -> Summary:
    sequences, steps = batch.gaps_BT.shape
    cell_E = batch.steps_E // steps * names + batch.variables_E

    def added(values_E: Tensor) -> Tensor:
        flat = torch.zeros(sequences * names, dtype=torch.float64).index_add(0, cell_E, values_E.double())
        return flat.view(sequences, names)

    events_BV = added(torch.ones_like(batch.values_E))
    mean_BV = _ratio(added(batch.values_E * batch.has_value_E), added(batch.has_value_E))
    return Summary(mean_BV.numpy(), torch.cat((events_BV > 0, events_BV.log1p()), dim=1).numpy())


def _of_tokens(batch: TokenBatch, tokens_V: np.ndarray) -> np.ndarray:
    shares_BV = np.zeros((len(batch.lengths_B), len(tokens_V)))
    for row_V, ids_T, length in zip(shares_BV, batch.tokens_BT.numpy(), batch.lengths_B.tolist(), strict=True):
        place_T = np.minimum(np.searchsorted(tokens_V, ids_T[:length]), len(tokens_V) - 1)
        np.add.at(row_V, place_T[tokens_V[place_T] == ids_T[:length]], 1 / max(length, 1))
    return np.column_stack((shares_BV, np.log1p(batch.lengths_B.numpy())))


def _ratio(sums: Tensor, counts: Tensor) -> Tensor:
    """NaN of nothing."""
    return torch.where(counts > 0, sums / counts, torch.nan)


def _real(tokens_BT: Tensor, lengths_B: Tensor) -> Tensor:
    return torch.arange(tokens_BT.shape[1]) < lengths_B[:, None]
