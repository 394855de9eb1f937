"""Small models and random batches of each kind, for the tests of the model and of what uses it.

Shapes: B sequences, T steps, V variables or ids, D features, E events.
"""

from typing import Any

import torch

from seqvae.config.model import ModelSettings
from seqvae.data.batch import Batch, EventBatch, TokenBatch, VectorBatch
from seqvae.data.description import DataDescription
from seqvae.models.vae import SequenceVAE

KINDS = ("tokens", "vectors", "events")
SMALL = ModelSettings(width=16, depth=2, heads=2, latent_size=3, dropout=0.0)
NAMES = ("<unknown>", "heart rate", "pH")
DESCRIPTIONS = {
    "tokens": DataDescription(kind="tokens", vocabulary_size=5),
    "vectors": DataDescription(kind="vectors", names=NAMES, valued=(True, True, True)),
    "events": DataDescription(
        kind="events", names=NAMES, valued=(True, False, True), log_gap_mean=3.6, log_gap_std=1.0, shortest_gap=0.01
    ),
}


def make_batch(kind: str, lengths: list[int], steps: int | None = None, seed: int = 0) -> Any:
    """Return random sequences of these lengths, padded to `steps`; the same seed gives the same first steps.

    Any, because a test knows which kind of batch it requested.
    """
    steps = max(*lengths, 1) if steps is None else steps
    generator = torch.Generator().manual_seed(seed)
    lengths_B = torch.tensor(lengths)
    real_BT = torch.arange(steps) < lengths_B[:, None]
    common: dict[str, Any] = {"lengths_B": lengths_B, "sequences_B": torch.arange(len(lengths)), "labels_B": None}
    common |= {"step_tokens": sum(lengths), "position": 0}
    shape = (len(lengths), 50)
    if kind == "tokens":
        tokens_BT = torch.randint(0, 5, shape, generator=generator)[:, :steps] * real_BT
        return TokenBatch(tokens_BT=tokens_BT, **common)
    if kind == "vectors":
        observed_BTD = (torch.rand(*shape, 3, generator=generator) < 0.7)[:, :steps] & real_BT[..., None]
        values_BTD = torch.randn(*shape, 3, generator=generator)[:, :steps] * observed_BTD
        return VectorBatch(values_BTD=values_BTD, observed_BTD=observed_BTD, **common)
    gaps_BT = torch.rand(shape, generator=generator)[:, :steps] * 100 * real_BT
    gaps_BT[:, 0] = 0
    present_BTV = (torch.rand(*shape, 3, generator=generator) < 0.6)[:, :steps] & real_BT[..., None]
    values_BTV = torch.randn(*shape, 3, generator=generator)[:, :steps]
    rows_E, steps_E, variables_E = present_BTV.nonzero(as_tuple=True)
    has_value_E = variables_E != 1
    return EventBatch(
        gaps_BT=gaps_BT,
        variables_E=variables_E,
        values_E=values_BTV[present_BTV] * has_value_E,
        has_value_E=has_value_E,
        steps_E=rows_E * steps + steps_E,
        **common,
    )


def make_vae(kind: str, **changes: Any) -> SequenceVAE:
    torch.manual_seed(0)
    return SequenceVAE(DESCRIPTIONS[kind], ModelSettings(**{**vars(SMALL), **changes})).eval()


def change_step(batch: Batch, row: int, step: int) -> Batch:
    """Return the batch with everything different at one step of one sequence."""
    match batch:
        case TokenBatch():
            tokens_BT = batch.tokens_BT.clone()
            tokens_BT[row, step] = (tokens_BT[row, step] + 1) % 5
            return batch._replace(tokens_BT=tokens_BT)
        case VectorBatch():
            values_BTD, observed_BTD = batch.values_BTD.clone(), batch.observed_BTD.clone()
            values_BTD[row, step], observed_BTD[row, step] = 9.0, True
            return batch._replace(values_BTD=values_BTD, observed_BTD=observed_BTD)
        case EventBatch():
            gaps_BT = batch.gaps_BT.clone()
            gaps_BT[row, step] += 77.0
            moved_E = batch.steps_E == row * gaps_BT.shape[1] + step
            return batch._replace(
                gaps_BT=gaps_BT,
                values_E=torch.where(moved_E, 9.0, batch.values_E),
                variables_E=torch.where(moved_E, 2 - batch.variables_E, batch.variables_E),
            )
