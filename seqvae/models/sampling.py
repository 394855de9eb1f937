"""Draws sequences from a SequenceVAE: latents in, a normalised batch of the network's kind out.

    sample(network, z, lengths_B, generator=generator)          what the decoder makes of these latents
    reconstruct(network, batch, generator=generator)            what is left of a batch on its way through the latent
    sample_prior(network, lengths_B, generator=generator)       sequences that nobody has seen

Nothing trains, and the network is left as it was found. T steps cost T steps of decoding (`stepwise.py`).

Shapes: B sequences, T steps (S: with the end mark), W width, Z latent dimensions, V variables, E events.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from seqvae.data.batch import Batch, EventBatch, TokenBatch, VectorBatch
from seqvae.models.backbones import Decoder, Pasts
from seqvae.models.likelihoods import DrawnSet, EventLikelihood, TokenLikelihood, VectorLikelihood
from seqvae.models.vae import SequenceVAE

# Asks a decoder for one step after another, while a sequence is made: the step before in, what it says of the next one out.
#
# An autoregressive decoder remembers what it read, so that T steps cost T steps of decoding instead of the T^2 / 2 of reading all
# so far anew for each. Sequences that have ended are left out of the computation.
#
# Shapes: B sequences, R of them that are still read, T steps, W width, Z latent dimensions.

Reader = Callable[[Tensor, Tensor], Tensor]
"""What the decoder says of the next step, (B, W), told the embedded step before it, (B, W), and which sequences go on, (B,)."""

CROWDED = 0.75
"""While more of the sequences that are read go on, the others are read, too: leaving them out copies what is remembered."""


def reader(decoder: Decoder, begin_W: Tensor, z: Tensor, steps: int) -> Reader:
    """`z` is (B, Z), or (B, T, Z) with a latent for each step. A sequence that has ended stays so; what is said of it means
    nothing."""
    return Stepwise(decoder, z) if decoder.autoregressive else at_once(decoder, begin_W, z, steps)


class Stepwise:
    """For decoders that look at their inputs."""

    def __init__(self, decoder: Decoder, z: Tensor) -> None:
        self.decoder = decoder
        self.step = 0
        self.z = z
        self.pasts: Pasts = ()
        self.rows_R: Tensor | None = None
        """Which sequences are read; None: all."""

    def __call__(self, before_BW: Tensor, going_B: Tensor) -> Tensor:
        self.leave_out(going_B)
        before_RW = before_BW if self.rows_R is None else before_BW[self.rows_R]
        z_RZ = self.z[:, self.step] if self.z.dim() == 3 else self.z
        said_RW, self.pasts = self.decoder.step(before_RW, z_RZ, self.step, self.pasts)
        self.step += 1
        if self.rows_R is None:
            return said_RW
        return said_RW.new_zeros(len(before_BW), said_RW.shape[1]).index_copy(0, self.rows_R, said_RW)

    def leave_out(self, going_B: Tensor) -> None:
        """Those that have ended, once they are enough to be worth it."""
        going_R = going_B if self.rows_R is None else going_B[self.rows_R]
        (kept_R,) = going_R.nonzero(as_tuple=True)  # sync: one for each step
        if not 0 < len(kept_R) < CROWDED * len(going_R):
            return
        self.rows_R = kept_R if self.rows_R is None else self.rows_R[kept_R]
        self.z = self.z[kept_R]
        self.pasts = tuple(tuple(tensor[kept_R] for tensor in past) for past in self.pasts)


def at_once(decoder: Decoder, begin_W: Tensor, z: Tensor, steps: int) -> Reader:
    """For decoders that look at no input but the first: one pass says all there is to say."""
    said_BTW: Tensor = decoder(begin_W.expand(len(z), steps, -1), z if z.dim() == 2 else z[:, :steps])
    said_T = iter(said_BTW.unbind(dim=1))
    return lambda before_BW, going_B: next(said_T)


class Events(NamedTuple):
    """Named and ordered as in an `EventBatch`."""

    variables_E: Tensor
    values_E: Tensor
    has_value_E: Tensor
    steps_E: Tensor


@torch.no_grad()
def sample(
    network: SequenceVAE,
    z: Tensor,
    lengths_B: Tensor,
    *,
    temperature: float = 1.0,
    generator: torch.Generator,
    sets: EventBatch | None = None,
) -> Batch:
    """Draw one sequence for each latent, on the latents' device.

    `z` is (B, Z), or (B, S, Z) with a latent for each step. Vectors and events get as many steps as `lengths_B` says; tokens
    end at their end mark, and there at the latest. All values of a vector are drawn, the first event happens at time 0.
    Temperature 1 is the model's own distribution; 0 takes what is most likely at each step: the first among ids, variables
    more likely present than not, the mean of a value, the median of a gap. The generator must be on the same device.
    Events happen when those of `sets` do and to the same variables, where it is given: then their values alone are drawn.
    """
    lengths_B = lengths_B.to(z.device)
    with evaluating(network):
        read = reader(network.decoder, network.begin_W, z, int(lengths_B.max()))
        match network.likelihood:
            case TokenLikelihood():
                return _tokens(network, read, lengths_B, temperature, generator)
            case VectorLikelihood():
                return _vectors(network, read, lengths_B, temperature, generator)
            case EventLikelihood():
                return _events(network, read, lengths_B, temperature, generator, sets)


@torch.no_grad()
def reconstruct(
    network: SequenceVAE,
    batch: Batch,
    *,
    temperature: float = 0.0,
    generator: torch.Generator,
    values_only: bool = False,
) -> Batch:
    """Draw sequences from the posterior means of a batch: nothing of the originals but that, and their lengths.

    Tokens find their end themselves, at the length of the longest original at the latest, or, with a latent for each step,
    where the latents end. `values_only` leaves events their times and variables, too, so that values can be compared: hardly any
    variable is more likely present than not, and a reconstruction at temperature 0 has few of them.
    """
    with evaluating(network):
        z = network.encode(batch).mean
    free = isinstance(batch, TokenBatch) and not network.latent_per_step
    lengths_B = batch.lengths_B.max().expand(len(z)) if free else batch.lengths_B
    sets = batch if values_only and isinstance(batch, EventBatch) else None
    return sample(network, z, lengths_B, temperature=temperature, generator=generator, sets=sets)


@torch.no_grad()
def sample_prior(
    network: SequenceVAE, lengths_B: Tensor, *, temperature: float = 1.0, generator: torch.Generator
) -> Batch:
    """Draw sequences from latents that are drawn from the standard normal distribution, whatever the temperature."""
    device = network.begin_W.device
    steps = (int(lengths_B.max()) + network.likelihood.extra_steps,) if network.latent_per_step else ()
    shape = (len(lengths_B), *steps, network.decoder.latent.in_features)
    z = torch.randn(shape, generator=generator, device=device)
    return sample(network, z, lengths_B, temperature=temperature, generator=generator)


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Without dropout; each module is put back into the mode it was in. What is compiled runs as it was written: here every step
    has another length, and the first of them would each be compiled for."""
    training = [module for module in network.modules() if module.training]
    network.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in training:
            module.training = True


def _tokens(
    network: SequenceVAE, read: Reader, most_B: Tensor, temperature: float, generator: torch.Generator
) -> TokenBatch:
    likelihood = network.likelihood
    assert isinstance(likelihood, TokenLikelihood)
    tokens_BT = torch.zeros(len(most_B), max(1, int(most_B.max())), dtype=torch.int64, device=most_B.device)
    lengths_B, going_B = torch.zeros_like(most_B), most_B > 0
    batch = TokenBatch(tokens_BT, lengths_B, *_nobodys(most_B))
    before_BW = network.begin_W.expand(len(most_B), -1)
    for step in range(tokens_BT.shape[1]):
        going_B = going_B & (step < most_B)
        if not going_B.any():  # sync: one for each step
            break
        drawn_B = likelihood.sample(read(before_BW, going_B), temperature, generator)
        going_B = going_B & (drawn_B != likelihood.end)
        tokens_BT[:, step] = drawn_B * going_B
        lengths_B += going_B
        before_BW = network.embedding(batch._replace(tokens_BT=tokens_BT[:, step : step + 1]))[:, 0]
    return batch


def _vectors(
    network: SequenceVAE, read: Reader, lengths_B: Tensor, temperature: float, generator: torch.Generator
) -> VectorBatch:
    likelihood = network.likelihood
    assert isinstance(likelihood, VectorLikelihood)
    features = likelihood.moments.out_features // 2
    values_BTD = torch.zeros(len(lengths_B), int(lengths_B.max()), features, device=lengths_B.device)
    observed_BTD = torch.zeros_like(values_BTD, dtype=torch.bool)
    batch = VectorBatch(values_BTD, observed_BTD, lengths_B, *_nobodys(lengths_B))
    before_BW = network.begin_W.expand(len(lengths_B), -1)
    for step in range(values_BTD.shape[1]):
        going_B = step < lengths_B
        # What training saw no value of stays missing: nothing was learnt of it, neither to draw it nor to read it.
        there_BD = going_B[:, None] & likelihood.valued_D
        values_BTD[:, step] = likelihood.sample(read(before_BW, going_B), temperature, generator) * there_BD
        observed_BTD[:, step] = there_BD
        drawn_B1D, observed_B1D = (grid_BTD[:, step : step + 1] for grid_BTD in (values_BTD, observed_BTD))
        before_BW = network.embedding(batch._replace(values_BTD=drawn_B1D, observed_BTD=observed_B1D))[:, 0]
    return batch


def _events(
    network: SequenceVAE,
    read: Reader,
    lengths_B: Tensor,
    temperature: float,
    generator: torch.Generator,
    sets: EventBatch | None,
) -> EventBatch:
    likelihood = network.likelihood
    assert isinstance(likelihood, EventLikelihood)
    gaps_BT = torch.zeros(len(lengths_B), int(lengths_B.max()), device=lengths_B.device)
    before_BW, events = network.begin_W.expand(len(lengths_B), -1), [no_events(lengths_B.device)]
    for step in range(gaps_BT.shape[1]):
        going_B = step < lengths_B
        hidden_BW = read(before_BW, going_B)
        if sets is not None:
            gaps_BT[:, step] = sets.gaps_BT[:, step] * going_B
        elif step > 0:
            gaps_BT[:, step] = likelihood.sample_gap(hidden_BW, temperature, generator) * going_B
        present_BV = None if sets is None else variables_at(sets, step, len(likelihood.valued_V))
        drawn = likelihood.sample(hidden_BW, gaps_BT[:, step], temperature, generator, present_BV)
        one_step = events_of(drawn, going_B)
        events.append(one_step._replace(steps_E=one_step.steps_E * gaps_BT.shape[1] + step))
        gaps_B1, times_B1 = (grid_BT[:, step : step + 1] for grid_BT in (gaps_BT, gaps_BT.cumsum(dim=1)))
        before_BW = network.embedding(event_batch(gaps_B1, lengths_B, one_step), times_B1)[:, 0]
    return event_batch(gaps_BT, lengths_B, in_order(events))


def variables_at(batch: EventBatch, step: int, variables: int) -> Tensor:
    """Which variables are present at a step of each sequence, (B, V)."""
    sequences, length = batch.gaps_BT.shape
    here_E = batch.steps_E % length == step
    present_BV = torch.zeros(sequences, variables, dtype=torch.bool, device=here_E.device)
    present_BV[batch.steps_E[here_E] // length, batch.variables_E[here_E]] = True
    return present_BV


def events_of(drawn: DrawnSet, going_B: Tensor) -> Events:
    """Of one step, as a batch of that step alone has them."""
    rows_E, variables_E = (drawn.present_BV & going_B[:, None]).nonzero(as_tuple=True)
    values_E = drawn.values_BV[rows_E, variables_E]
    return Events(variables_E, values_E.nan_to_num(nan=0.0), ~values_E.isnan(), rows_E)


def no_events(device: torch.device) -> Events:
    none_E = torch.zeros(0, dtype=torch.int64, device=device)
    return Events(none_E, none_E.float(), none_E.bool(), none_E)


def in_order(events: list[Events]) -> Events:
    """The events of several steps, in the order of their steps."""
    together = Events(*(torch.cat(part) for part in zip(*events, strict=True)))
    order_E = together.steps_E.argsort(stable=True)
    return Events(*(part_E[order_E] for part_E in together))


def event_batch(gaps_BT: Tensor, lengths_B: Tensor, events: Events) -> EventBatch:
    return EventBatch(gaps_BT, lengths_B, *events, *_nobodys(lengths_B))


def _nobodys(lengths_B: Tensor) -> tuple[Tensor, None, int, int]:
    """The rest of a batch that stands in no split: sequences_B, labels_B, step_tokens, position."""
    return torch.full_like(lengths_B, -1), None, int(lengths_B.sum()), 0
