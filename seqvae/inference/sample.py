"""Sequences decoded from the latent space: from the prior, from the latents of data, and from the path between two of them.

In: a trained model, and data where needed. Out: tables in the data's own units.

Shapes: B sequences, N samples, T steps, Z latent dimensions.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import torch
from lightning.fabric.utilities import move_data_to_device

from seqvae.data.batch import Batch, TokenBatch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.errors import UsageError
from seqvae.inference.streaming import evaluating, in_order, rows_of
from seqvae.inference.units import own_units
from seqvae.models.sampling import reconstruct, sample, sample_prior

if TYPE_CHECKING:
    from seqvae.inference.model import Model

SAMPLES_PER_BATCH, STEPS_PER_BATCH = 512, 2**16
"""What a decoder remembers of each step is a few kB per layer."""


def sampled(model: "Model", count: int, *, temperature: float, length: int | None, seed: int) -> Iterator[pa.Table]:
    """Yield samples from the prior; `id` counts them. Lengths are those of the training data, or all are of one length."""
    generator = torch.Generator(model.device).manual_seed(seed)
    quantiles = model.stored.data.get("length_quantiles")
    if length is not None:
        lengths_N = np.full(count, length)
    elif model.description.kind == "tokens":  # they find their end themselves, at the latest here
        lengths_N = np.full(count, quantiles[-1] if quantiles else model.settings["max_sequence_length"])
    elif quantiles is not None:
        places_N = np.random.default_rng(seed).uniform(0, len(quantiles) - 1, count)
        lengths_N = np.interp(places_N, np.arange(len(quantiles)), quantiles).round().astype(np.int64)
    else:
        raise UsageError("this checkpoint is from before the lengths of training sequences were kept: give --length")
    with evaluating(model):
        per_batch = _samples_per_batch(lengths_N)
        for first in range(0, count, per_batch):
            lengths_B = torch.from_numpy(lengths_N[first : first + per_batch]).to(model.device)
            batch = sample_prior(model.network, lengths_B, temperature=temperature, generator=generator)
            yield _numbered(batch, model, first)


def reconstructed(
    model: "Model", data: SequenceDataModule, splits: Sequence[str], *, temperature: float, seed: int
) -> Iterator[pa.Table]:
    """Yield each sequence as decoded from its own latent. Events keep their times and variables: values alone are drawn.

    Tokens stand beside the originals.
    """
    generator = torch.Generator(model.device).manual_seed(seed)

    def compute(batch: Batch) -> pa.Table:
        drawn = reconstruct(model.network, batch, temperature=temperature, generator=generator, values_only=True)
        table = own_units(drawn._replace(sequences_B=batch.sequences_B), model.description)
        if isinstance(batch, TokenBatch):
            original = own_units(batch, model.description)
            return original.append_column("reconstruction", table.column(1))
        return table

    # Numbers that stand for a step in the table: features, or the events of a step with several columns each.
    cells = {"vectors": len(data.description.names), "tokens": 1}.get(data.description.kind, 16)
    return rows_of(data, splits, model, compute, cells_per_step=cells)


def interpolated(
    model: "Model",
    data: SequenceDataModule,
    splits: Sequence[str],
    ids: Sequence[str],
    steps: int,
    *,
    temperature: float,
    seed: int,
) -> Iterator[pa.Table]:
    """Yield one table: evenly from the posterior mean of one sequence to that of another; `share` is how far along.

    Lengths go evenly as well, but tokens find their own ends. Events of a later time are drawn with times and variables.
    """
    with evaluating(model):
        ends = [move_data_to_device(_sequence_with_id(data, splits, one), model.device) for one in ids]
        means = [model.network.encode(batch).mean for batch in ends]
        if means[0].dim() == 3:
            raise UsageError("interpolate needs one latent per sequence, but this model has one for each step")
        share_N = torch.linspace(0, 1, steps, device=model.device)
        z_NZ = torch.lerp(means[0], means[1], share_N[:, None])
        lengths = torch.tensor([float(batch.lengths_B[0]) for batch in ends])
        lengths_N = torch.lerp(lengths[0], lengths[1], share_N.cpu()).round().long()
        if model.description.kind == "tokens":
            lengths_N = torch.full((steps,), 2 * int(lengths.max()))
        generator, per_batch = torch.Generator(model.device).manual_seed(seed), _samples_per_batch(lengths_N.numpy())
        parts = []
        for first in range(0, steps, per_batch):
            part = slice(first, first + per_batch)
            batch = sample(model.network, z_NZ[part], lengths_N[part], temperature=temperature, generator=generator)
            parts.append(_numbered(batch, model, first))
    table = pa.concat_tables(parts)
    shares = pa.array(share_N.double().cpu().numpy().round(6))
    yield table.rename_columns(["place", *table.column_names[1:]]).add_column(
        1, "share", shares.take(table.column("id").combine_chunks())
    )


def _numbered(batch: Batch, model: "Model", first: int) -> pa.Table:
    """Return samples in own units, with their numbers as ids."""
    numbers_B = torch.arange(first, first + len(batch.lengths_B))
    table = own_units(batch._replace(sequences_B=numbers_B), model.description)
    return in_order(table, {"id": pa.array(numbers_B.numpy())}, first)


def _samples_per_batch(lengths_N: np.ndarray) -> int:
    return max(1, min(SAMPLES_PER_BATCH, STEPS_PER_BATCH // int(lengths_N.max())))


def _sequence_with_id(data: SequenceDataModule, splits: Sequence[str], id_: str) -> Batch:
    """Return the first sequence with this id, in a batch of its own."""
    for name in splits:
        stored = data.split(name)
        place = stored.sequence_of(id_)
        if place is not None:
            return stored.gather(np.array([place]))
    first = data.split(splits[0])
    examples = ", ".join(repr(one) for one in first.ids(np.arange(min(3, len(first)))))
    raise UsageError(f"no sequence has the id {id_!r}; there are such as {examples}")
