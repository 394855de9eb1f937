"""What a trained model makes of sequences, as Arrow tables in the data's own units: text as text, values in their scale.

    encode         where each sequence lies in the latent space, and how well the model knows it
    reconstruct    each sequence as decoded from its own latent
    sample         new sequences from the prior
    interpolate    what lies between two sequences
    impute         missing values of vectors and events, with how sure the model is

In: a trained model, and opened data where needed. Out: an iterator of tables; data keep their order. A sequence of tokens is a row
with `text` or `tokens`; of vectors, a row per step with a column per feature; of events, a row per event with `time, variable,
value`.

Shapes: B sequences of a batch, N samples, T steps, D features, V variables, E events, R rows, Z latent dimensions.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch.nn import functional

from seqvae.config.inference import DrawingSettings, PathSettings, SampleSettings
from seqvae.data.batch import Batch, EventBatch, TokenBatch, VectorBatch, speaker
from seqvae.data.datamodule import SequenceDataModule
from seqvae.data.dataset import SequenceSet
from seqvae.data.description import DataDescription
from seqvae.errors import UsageError
from seqvae.inference.streaming import SEQUENCE, evaluating, in_order, rows_of
from seqvae.models import imputation, sampling
from seqvae.models.codes import UniformCodes
from seqvae.models.likelihoods import real_steps
from seqvae.models.noise import Noise
from seqvae.models.posteriors import FlowPosterior
from seqvae.models.vae import SequenceVAE, VAEOutput
from seqvae.monitors.formulas import gaussian_kl
from seqvae.training.objective import kl_of

if TYPE_CHECKING:
    from seqvae.inference.model import Model

_log = logging.getLogger(__name__)

SAMPLES_PER_BATCH, STEPS_PER_BATCH = 512, 2**16
"""Most that is sampled at once: a decoder remembers a few kB of each step per layer."""
RATE_DRAWS = 16
"""Latents of each posterior that a rate without a closed form is estimated with."""
RESERVED = ("id", "window", "split", "place", "share", "step")
"""Names of our own columns."""


# --- What the commands write -------------------------------------------------------------------------------------------


def encode(model: "Model", data: SequenceDataModule, splits: Sequence[str]) -> Iterator[pa.Table]:
    """Yield the posterior, the NLL and the rate of each sequence, computed at the posterior's mean. What has no closed form, the
    rate or the variance of a moved latent, is estimated with RATE_DRAWS latents, the same for a sequence whatever its batch.

    Where each step alone has a latent, `mean` and `variance` hold a list for each step; where steps have latents below that of
    their sequence, these are `step_mean` and `step_variance`. Where latents are codes, `codes`
    stand in place of mean and variance.
    """

    def compute(_: SequenceSet, batch: Batch) -> pa.Table:
        output = model.network(batch, at_mean=True)
        columns = {SEQUENCE: array(batch.sequences_B), "steps": array(output.steps_B)}
        if output.codes is None:
            columns |= posterior_columns(*moments_of(model.network, batch, output), output.posterior_mask)
        else:
            columns["codes"] = column_of(output.codes, output.posterior_mask)
        rates = [rate_of(model.network, batch, output) * output.posterior_mask]
        if output.steps is not None:
            of_steps = output.steps.posterior
            columns |= posterior_columns(of_steps.mean, of_steps.logvar.exp(), of_steps.mask, "step_")
            mean, logvar, mask = output.steps.relative
            rates.append(gaussian_kl(mean, logvar).sum(dim=-1) * mask)
        rate_B = torch.stack([rate.sum(dim=1) if rate.dim() == 2 else rate for rate in rates]).sum(dim=0)
        return pa.table(columns | {"nll": array(output.nll_B.float()), "rate": array(rate_B.float())})

    # A latent for each step makes two lists per step; otherwise they are few beside the sequence.
    settings = model.network.settings
    cells = {"sequence": 1, "step": 2 * settings.latent_size, "both": 2 * settings.step_latent_size}
    return rows_of(data, splits, model, compute, cells_per_step=cells[settings.latent_scope], with_origin=True)


def posterior_columns(mean: Tensor, variance: Tensor, mask: Tensor, prefix: str = "") -> dict[str, pa.Array]:
    """Return mean and variance of each sequence's posterior, or lists of those of its steps."""
    columns = {}
    for name, numbers in (("mean", mean), ("variance", variance)):
        columns[prefix + name] = column_of(numbers.float(), mask)
    return columns


def column_of(numbers: Tensor, mask: Tensor) -> pa.Array:
    """Return a row of numbers for each sequence, or a list of rows of its real steps."""
    flat = array(numbers[mask].flatten())
    column = pa.FixedSizeListArray.from_arrays(flat, numbers.shape[-1])
    if numbers.dim() == 2:
        return column
    ends_B = mask.sum(dim=1).cumsum(dim=0).cpu().numpy()
    return pa.ListArray.from_arrays(pa.array(np.concatenate([[0], ends_B]).astype(np.int32)), column)


def moments_of(network: SequenceVAE, batch: Batch, output: VAEOutput) -> tuple[Tensor, Tensor]:
    """Return the latent at the mean of each posterior, and how much the latent varies in each dimension."""
    family, posterior = network.posterior, output.posterior
    if not isinstance(family, FlowPosterior):
        return posterior.mean, posterior.logvar.exp()
    noise, shape = Noise(0, batch.sequences_B), posterior.mean.shape
    z_K = torch.stack([family.draw(posterior, noise.normal(shape)).z for _ in range(RATE_DRAWS)])
    return family.draw(posterior, torch.zeros(shape, device=z_K.device)).z, z_K.var(dim=0)


def rate_of(network: SequenceVAE, batch: Batch, output: VAEOutput) -> Tensor:
    """Return the KL of each posterior in all its dimensions, (B,) or (B, S)."""
    if not output.kl_is_estimated:
        return kl_of(output).sum(dim=-1)
    noise, shape = Noise(0, batch.sequences_B), output.posterior_mean.shape
    total = torch.zeros(shape[:-1], device=output.posterior_mean.device)
    for _ in range(RATE_DRAWS):
        drawn = network.posterior.draw(output.posterior, noise.normal(shape))
        kl = network.prior.kl(output.posterior, drawn)
        assert kl is not None, "it is estimated"
        total = total + kl.sum(dim=-1)
    return total / RATE_DRAWS


def reconstruct(
    model: "Model", data: SequenceDataModule, splits: Sequence[str], drawing: DrawingSettings, seed: int
) -> Iterator[pa.Table]:
    """Yield each sequence as decoded from its own latent. Events keep their times and variables: only values are drawn.

    Tokens stand beside the originals.
    """

    def compute(_: SequenceSet, batch: Batch) -> pa.Table:
        drawn = sampling.reconstruct(
            model.network,
            batch,
            temperature=drawing.temperature,
            noise=Noise(seed, batch.sequences_B),
            values_only=True,
        )
        table = in_own_units(drawn._replace(sequences_B=batch.sequences_B), model.description)
        if not isinstance(batch, TokenBatch):
            return table
        return in_own_units(batch, model.description).append_column("reconstruction", table.column(1))

    # Numbers that stand for a step in the table: features, or the events of a step with several columns each.
    cells = {"vectors": len(data.description.names), "tokens": 1}.get(data.description.kind, 16)
    return rows_of(data, splits, model, compute, cells_per_step=cells)


def sample(model: "Model", settings: SampleSettings, seed: int) -> Iterator[pa.Table]:
    """Yield samples from the prior; `id` counts them. Lengths are those of the training data, or all are of one length."""
    if isinstance(model.network.prior, UniformCodes):
        _log.warning(
            "codes are drawn evenly, as this model has no prior over them: samples hold codes that do not go together. "
            "`seqvae fit-prior` fits one"
        )
    count, quantiles = settings.count, model.stored.data.get("length_quantiles")
    if settings.length is not None:
        lengths_N = np.full(count, settings.length)
    elif model.description.kind == "tokens":  # they find their end themselves, at the latest here
        lengths_N = np.full(count, quantiles[-1] if quantiles else model.settings["max_sequence_length"])
    elif quantiles is not None:
        places_N = np.random.default_rng(seed).uniform(0, len(quantiles) - 1, count)
        lengths_N = np.interp(places_N, np.arange(len(quantiles)), quantiles).round().astype(np.int64)
    else:
        raise UsageError("this checkpoint is from before the lengths of training sequences were kept: give --length")

    def draw(part: slice, noise: Noise) -> Batch:
        lengths_B = torch.from_numpy(lengths_N[part]).to(model.device)
        return sampling.sample_prior(model.network, lengths_B, temperature=settings.temperature, noise=noise)

    with evaluating(model.network, model.autocast):
        yield from _numbered(model, lengths_N, seed, draw)


def interpolate(
    model: "Model",
    data: SequenceDataModule,
    splits: Sequence[str],
    ids: Sequence[str],
    path: PathSettings,
    drawing: DrawingSettings,
    seed: int,
) -> Iterator[pa.Table]:
    """Yield one table: evenly from the posterior mean of one sequence to that of another; `share` is how far along.

    Latents of steps below that of their sequence go evenly, too, in units of the prior that z gives them; where one sequence has
    ended, its steps are at the prior's mean. Lengths go evenly as well, but tokens find their own ends. Events of a later time are
    drawn with times and variables.
    """
    with evaluating(model.network, model.autocast) as device:
        ends = [move_data_to_device(_sequence_with_id(data, splits, one), device) for one in ids]
        if model.network.has_codes:
            raise UsageError(
                "interpolate needs a path between two latents, and nothing lies between this model's codes"
            )
        if model.network.latent_per_step:
            raise UsageError("interpolate needs one latent per sequence, but this model has one for each step")
        share_N = torch.linspace(0, 1, path.steps, device=device)
        lengths = torch.tensor([float(batch.lengths_B[0]) for batch in ends])
        lengths_N = torch.lerp(lengths[0], lengths[1], share_N.cpu()).round().long()
        if model.description.kind == "tokens":
            lengths_N = torch.full((path.steps,), 2 * int(lengths.max()))
        z_N = between(model.network, ends, share_N, int(lengths_N.max()))

        def draw(part: slice, noise: Noise) -> Batch:
            return sampling.sample(
                model.network, z_N[part], lengths_N[part], temperature=drawing.temperature, noise=noise
            )

        table = pa.concat_tables(_numbered(model, lengths_N.numpy(), seed, draw))
    shares = pa.array(share_N.double().cpu().numpy().round(6))
    yield table.rename_columns(["place", *table.column_names[1:]]).add_column(
        1, "share", shares.take(table.column("id").combine_chunks())
    )


def between(network: SequenceVAE, ends: Sequence[Batch], share_N: Tensor, steps: int) -> Tensor:
    """Return what the decoder gets between two sequences, for `steps` steps where steps have latents."""
    first, last = (network.latents(batch, at_mean=True) for batch in ends)
    z_NZ = torch.lerp(first.top_z, last.top_z, share_N[:, None])
    if first.steps is None or last.steps is None:
        return z_NZ
    relative = [
        functional.pad(each.drawn * each.relative.mask[..., None], (0, 0, 0, max(0, steps - each.drawn.shape[1])))[
            :, :steps
        ]
        for each in (first.steps, last.steps)
    ]
    return network.with_steps(z_NZ, torch.lerp(relative[0], relative[1], share_N[:, None, None]))


def impute(
    model: "Model",
    data: SequenceDataModule,
    splits: Sequence[str],
    draws: int,
    variables: Sequence[str] | None,
    seed: int,
) -> Iterator[pa.Table]:
    """Yield the data with missing values filled; `variables`: only these features or variables. The data were opened so that they
    keep their values as read: those that were measured come out to the bit.

    Vectors have each feature beside its deviation (0: the value was there). Events have a row for each variable at each time,
    with `std` and whether the value was `measured`.
    """
    description = model.description
    if description.kind == "tokens":
        raise UsageError("impute is for vectors and events: tokens have no missing values")
    valued = {name: place for place, name in enumerate(description.names) if description.valued[place]}
    for name in variables or ():
        if name not in valued:
            shown = ", ".join(list(valued)[:20])
            raise UsageError(f"--variables: {name!r} is none that training saw values of; there are {shown}")
    places = list(valued.values()) if variables is None else [valued[name] for name in variables]
    names = [description.names[place] for place in places]

    def compute(stored: SequenceSet, batch: Batch) -> pa.Table:
        assert not isinstance(batch, TokenBatch)
        filled = imputation.impute(model.network, batch, draws=draws, noise=Noise(seed, batch.sequences_B))
        batch, filled = (move_data_to_device(each, torch.device("cpu")) for each in (batch, filled))
        mean_P, std_P = (each[places] for each in moments(description))
        value_BTP = filled.mean_BTD[..., places].double() * std_P + mean_P
        measured_BTD = torch.zeros(filled.mean_BTD.shape, dtype=torch.float64)
        as_read = torch.from_numpy(stored.values_as_read(batch.sequences_B.numpy()))
        if isinstance(batch, VectorBatch):
            measured_BTD[real_steps(batch.lengths_B, measured_BTD.shape[1])] = as_read
        else:
            assert isinstance(batch, EventBatch)
            measured_BTD.flatten(0, 1)[batch.steps_E, batch.variables_E] = as_read
        value_BTP = torch.where(filled.observed_BTD[..., places], measured_BTD[..., places], value_BTP)
        deviation_BTP = filled.std_BTD[..., places].double() * std_P
        if isinstance(batch, VectorBatch):
            columns: dict[str, Tensor] = {}
            for number, (value, deviation) in enumerate(free_names(names, ("", "_std"))):
                columns |= {value: value_BTP[..., number], deviation: deviation_BTP[..., number]}
            return step_rows(batch, columns)
        assert isinstance(batch, EventBatch)
        real_BT = real_steps(batch.lengths_B, batch.gaps_BT.shape[1])
        sequence_BT = batch.sequences_B[:, None].expand_as(real_BT)
        time_BT = batch.gaps_BT.double().cumsum(dim=1)
        variable_R = torch.arange(len(names)).repeat(int(real_BT.sum()))
        return pa.table(
            {
                SEQUENCE: array(sequence_BT[real_BT].repeat_interleave(len(names))),
                "time": array(time_BT[real_BT].repeat_interleave(len(names))),
                "variable": pa.array(names, pa.string()).take(array(variable_R)),
                "value": array(value_BTP[real_BT].flatten()),
                "std": array(deviation_BTP[real_BT].flatten()),
                "measured": array(filled.observed_BTD[..., places][real_BT].flatten()),
            }
        )

    return rows_of(data, splits, model, compute, cells_per_step=6 * len(places))


def _numbered(
    model: "Model", lengths_N: np.ndarray, seed: int, draw: Callable[[slice, Noise], Batch]
) -> Iterator[pa.Table]:
    """Yield what `draw` makes of one part of the samples after another, with their numbers as `id`."""
    per_batch = max(1, min(SAMPLES_PER_BATCH, STEPS_PER_BATCH // int(lengths_N.max())))
    for first in range(0, len(lengths_N), per_batch):
        numbers_B = torch.arange(first, min(first + per_batch, len(lengths_N)))
        batch = draw(slice(first, first + per_batch), Noise(seed, numbers_B.to(model.device)))
        table = in_own_units(batch._replace(sequences_B=torch.arange(len(numbers_B))), model.description)
        yield in_order(table, pa.table({"id": array(numbers_B)}))


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


# --- Own units ---------------------------------------------------------------------------------------------------------


def in_own_units(batch: Batch, description: DataDescription) -> pa.Table:
    """Return the rows of a batch in the units of the data; what was not observed is NaN or null.

    The first column, SEQUENCE, holds the number of the sequence in the batch's split.
    """
    batch = move_data_to_device(batch, torch.device("cpu"))
    match batch:
        case TokenBatch():
            decode, lengths = speaker(description), batch.lengths_B.tolist()
            texts = [decode(ids[:length]) for ids, length in zip(batch.tokens_BT.tolist(), lengths, strict=True)]
            if description.tokenizer is None:
                return pa.table({SEQUENCE: array(batch.sequences_B), "tokens": pa.array(texts, pa.list_(pa.int64()))})
            return pa.table({SEQUENCE: array(batch.sequences_B), "text": pa.array(texts, pa.string())})
        case VectorBatch():
            mean_D, std_D = moments(description)
            values_BTD = batch.values_BTD.masked_fill(~batch.observed_BTD, torch.nan).double() * std_D + mean_D
            names = [name for (name,) in free_names(description.names, ("",))]
            return step_rows(batch, dict(zip(names, values_BTD.unbind(dim=2), strict=True)))
        case EventBatch():
            mean_V, std_V = moments(description)
            values_E = batch.values_E.double() * std_V[batch.variables_E] + mean_V[batch.variables_E]
            time_BT = batch.gaps_BT.double().cumsum(dim=1)
            return pa.table(
                {
                    SEQUENCE: array(batch.sequences_B[batch.steps_E // batch.gaps_BT.shape[1]]),
                    "time": array(time_BT.flatten()[batch.steps_E]),
                    "variable": pa.array(description.names, pa.string()).take(array(batch.variables_E)),
                    "value": pa.array(values_E.numpy(), mask=~batch.has_value_E.numpy()),
                }
            )


def free_names(names: Sequence[str], endings: Sequence[str]) -> list[tuple[str, ...]]:
    """Name the columns of each feature after it, with a `_` behind it where that name is taken.

    >>> free_names(["step", "pulse", "pulse_std"], ("", "_std"))
    [('step_', 'step__std'), ('pulse', 'pulse_std'), ('pulse_std_', 'pulse_std__std')]
    """
    taken = set(RESERVED)
    found = []
    for name in names:
        while any(name + ending in taken for ending in endings):
            name += "_"
        taken |= {name + ending for ending in endings}
        found.append(tuple(name + ending for ending in endings))
    return found


def step_rows(batch: VectorBatch, columns_BT: dict[str, Tensor]) -> pa.Table:
    """Return a row for each real step, with its number and these columns."""
    real_BT = real_steps(batch.lengths_B, batch.values_BTD.shape[1])
    sequence_BT, step_BT = torch.broadcast_tensors(batch.sequences_B[:, None], torch.arange(real_BT.shape[1]))
    columns = {SEQUENCE: sequence_BT, "step": step_BT} | columns_BT
    return pa.table({name: array(column_BT[real_BT]) for name, column_BT in columns.items()})


def moments(description: DataDescription) -> tuple[Tensor, Tensor]:
    """Return what normalised values are scaled back by: means and standard deviations, float64."""
    mean, std = (torch.tensor(each, dtype=torch.float64) for each in (description.mean, description.std))
    return mean, std


def array(tensor: Tensor) -> pa.Array:
    """Copy a tensor's numbers into an Arrow array."""
    return pa.array(tensor.cpu().numpy())
