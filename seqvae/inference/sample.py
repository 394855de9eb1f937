"""Sequences out of the latent space: from the prior, from the latents of data, and from the way between two of them.

In: a trained model, and data where they are asked for. Out: tables in the data's own units.

Shapes: B sequences, N samples, T steps, Z latent dimensions.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import torch
from lightning.fabric.utilities import move_data_to_device

from seqvae.data.batch import Batch, TokenBatch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.errors import UsageError
from seqvae.inference.model import Trained, at_work
from seqvae.inference.streaming import in_order, rows_of
from seqvae.inference.units import own_units
from seqvae.models.sampling import reconstruct, sample, sample_prior

AT_ONCE, STEPS_AT_ONCE = 512, 2**16
"""Samples in a batch, and steps of all of them: what a decoder remembers of each is a few kB a layer."""


def sampled(trained: Trained, count: int, *, temperature: float, length: int | None, seed: int) -> Iterator[pa.Table]:
    """From the prior; `id` counts them. Lengths are those of the training data, or all are of one length."""
    generator = _generator(trained, seed)
    lengths_N = _lengths(trained, count, length, seed)
    with at_work(trained):
        at_once = _at_once(lengths_N)
        for first in range(0, count, at_once):
            lengths_B = torch.from_numpy(lengths_N[first : first + at_once]).to(trained.device)
            batch = sample_prior(trained.network, lengths_B, temperature=temperature, generator=generator)
            yield _numbered(batch, trained, first)


def reconstructed(
    trained: Trained, data: SequenceDataModule, splits: Sequence[str], *, temperature: float, seed: int
) -> Iterator[pa.Table]:
    """What is left of each sequence on its way through the latent. Events keep their times and variables: values alone are drawn.

    Tokens stand beside the originals.
    """
    generator = _generator(trained, seed)

    def compute(batch: Batch) -> pa.Table:
        drawn = reconstruct(trained.network, batch, temperature=temperature, generator=generator, values_only=True)
        table = own_units(drawn._replace(sequences_B=batch.sequences_B), trained.description)
        if isinstance(batch, TokenBatch):
            original = own_units(batch, trained.description)
            return original.append_column("reconstruction", table.column(1))
        return table

    with at_work(trained):
        for split in splits:
            yield from rows_of(data, split, trained, compute, cells_a_step=cells_a_step(data))


def interpolated(
    trained: Trained,
    data: SequenceDataModule,
    splits: Sequence[str],
    ids: Sequence[str],
    steps: int,
    *,
    temperature: float,
    seed: int,
) -> Iterator[pa.Table]:
    """From the posterior mean of one sequence to that of another, evenly; `share` is how far along. One table.

    Lengths go evenly, too, but tokens find their own ends. Events of a later time are drawn with times and variables.
    """
    with at_work(trained):
        ends = [move_data_to_device(_find(data, splits, one), trained.device) for one in ids]
        means = [trained.network.encode(batch).mean for batch in ends]
        lengths = [int(batch.lengths_B[0]) for batch in ends]
        if means[0].dim() == 3:
            raise UsageError("interpolate is for one latent a sequence, but this model has one for each step")
        share_N = torch.linspace(0, 1, steps, device=trained.device)
        z_NZ = torch.lerp(means[0], means[1], share_N[:, None])
        lengths_N = (
            torch.lerp(torch.tensor(float(lengths[0])), torch.tensor(float(lengths[1])), share_N.cpu()).round().long()
        )
        if trained.description.kind == "tokens":
            lengths_N = torch.full((steps,), 2 * max(lengths))
        generator, at_once = _generator(trained, seed), _at_once(lengths_N.numpy())
        parts = []
        for first in range(0, steps, at_once):
            some = slice(first, first + at_once)
            batch = sample(trained.network, z_NZ[some], lengths_N[some], temperature=temperature, generator=generator)
            parts.append(_numbered(batch, trained, first))
    table = pa.concat_tables(parts)
    shares = pa.array(share_N.double().cpu().numpy().round(6))
    yield table.rename_columns(["place", *table.column_names[1:]]).add_column(
        1, "share", shares.take(table.column("id").combine_chunks())
    )


def _numbered(batch: Batch, trained: Trained, first: int) -> pa.Table:
    """Samples stand in no split: their numbers are their ids."""
    numbers_B = torch.arange(first, first + len(batch.lengths_B))
    table = own_units(batch._replace(sequences_B=numbers_B.to(batch.lengths_B.device)), trained.description)
    return in_order(table, {"id": pa.array(numbers_B.numpy())}, first)


def _at_once(lengths_N: np.ndarray) -> int:
    return max(1, min(AT_ONCE, STEPS_AT_ONCE // int(lengths_N.max())))


def cells_a_step(data: SequenceDataModule) -> int:
    """Numbers that stand for a step of these data in a table: features, or events with their times and names."""
    if data.description.kind == "vectors":
        return len(data.description.names)
    return 1 if data.description.kind == "tokens" else 16  # of events as many as come to a step, several columns each


def _lengths(trained: Trained, count: int, length: int | None, seed: int) -> np.ndarray:
    quantiles = trained.stored.data.get("length_quantiles")
    if length is not None:
        return np.full(count, length)
    if trained.description.kind == "tokens":  # they find their end themselves, here at the latest
        return np.full(count, quantiles[-1] if quantiles else trained.settings["max_sequence_length"])
    if quantiles is None:
        raise UsageError("this checkpoint is from before the lengths of training sequences were kept: give --length")
    places = np.random.default_rng(seed).uniform(0, len(quantiles) - 1, count)
    drawn: np.ndarray = np.interp(places, np.arange(len(quantiles)), quantiles).round().astype(np.int64)
    return drawn


def _find(data: SequenceDataModule, splits: Sequence[str], id_: str) -> Batch:
    """The first sequence with this id, in a batch of its own."""
    for name in splits:
        stored = data.split(name)
        place = stored.place_of(id_)
        if place is not None:
            return stored.gather(np.array([place]))
    some = ", ".join(repr(one) for one in data.split(splits[0]).ids(np.arange(min(3, len(data.split(splits[0]))))))
    raise UsageError(f"no sequence has the id {id_!r}; there are such as {some}")


def _generator(trained: Trained, seed: int) -> torch.Generator:
    return torch.Generator(trained.device).manual_seed(seed)
