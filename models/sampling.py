"""Draws sequences from a SequenceVAE: latents in, a normalised batch of the network's kind out.

    sample(network, z, lengths_B, generator=generator)          what the decoder makes of these latents
    reconstruct(network, batch, generator=generator)            what is left of a batch on its way through the latent
    sample_prior(network, lengths_B, generator=generator)       sequences that nobody has seen

Nothing trains, and the network is left as it was found. An autoregressive decoder reads all steps so far anew for each
further one: T steps cost T^2 / 2 steps of decoding. 6 sequences of 100 steps (width 256, CPU) take about as long as 1.5 training
batches of 4,000 tokens.

Shapes: B sequences, T steps (S: with the end mark), W width, Z latent dimensions, V variables, E events.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from models.likelihoods import DrawnSet, EventLikelihood, TokenLikelihood, VectorLikelihood
from models.sequence_vae import SequenceVAE
from sequences.batches import Batch, EventBatch, TokenBatch, VectorBatch

Reader = Callable[[Batch, int], Tensor]
"""What the decoder says of a step, (B, W), knowing those before it."""


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
        read = reader(network, z, int(lengths_B.max()))
        match network.likelihood:
            case TokenLikelihood():
                return _tokens(network.likelihood, read, lengths_B, temperature, generator)
            case VectorLikelihood():
                return _vectors(network.likelihood, read, lengths_B, temperature, generator)
            case EventLikelihood():
                return _events(network.likelihood, read, lengths_B, temperature, generator, sets)


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


def reader(network: SequenceVAE, z: Tensor, steps: int) -> Reader:
    begin_B1W = network.begin_W.expand(len(z), 1, -1)
    if not network.decoder.autoregressive:  # it looks at no input but the first: one pass says all there is to say
        hidden_BTW = network.decoder(begin_B1W.expand(-1, steps, -1), z if z.dim() == 2 else z[:, :steps])
        return lambda batch, step: hidden_BTW[:, step]

    def read(batch: Batch, step: int) -> Tensor:
        inputs_BTW = torch.cat((begin_B1W, network.embedding(batch)[:, :step]), dim=1)
        hidden_BTW: Tensor = network.decoder(inputs_BTW, z if z.dim() == 2 else z[:, : step + 1])
        return hidden_BTW[:, step]

    return read


def _tokens(
    likelihood: TokenLikelihood, read: Reader, most_B: Tensor, temperature: float, generator: torch.Generator
) -> TokenBatch:
    tokens_BT = torch.zeros(len(most_B), max(1, int(most_B.max())), dtype=torch.int64, device=most_B.device)
    batch = TokenBatch(tokens_BT, torch.zeros_like(most_B), *_nobodys(most_B))
    going_B = most_B > 0
    for step in range(tokens_BT.shape[1]):
        drawn_B = likelihood.sample(read(batch, step), temperature, generator)
        going_B &= (drawn_B != likelihood.end) & (step < most_B)
        if not going_B.any():
            break
        tokens_BT[:, step] = drawn_B * going_B
        batch = batch._replace(lengths_B=batch.lengths_B + going_B)
    return batch


def _vectors(
    likelihood: VectorLikelihood, read: Reader, lengths_B: Tensor, temperature: float, generator: torch.Generator
) -> VectorBatch:
    features = likelihood.moments.out_features // 2
    values_BTD = torch.zeros(len(lengths_B), int(lengths_B.max()), features, device=lengths_B.device)
    observed_BTD = torch.zeros_like(values_BTD, dtype=torch.bool)
    batch = VectorBatch(values_BTD, observed_BTD, lengths_B, *_nobodys(lengths_B))
    for step in range(values_BTD.shape[1]):
        real_B1 = (step < lengths_B)[:, None]
        values_BTD[:, step] = likelihood.sample(read(batch, step), temperature, generator) * real_B1
        observed_BTD[:, step] = real_B1
    return batch


def _events(
    likelihood: EventLikelihood,
    read: Reader,
    lengths_B: Tensor,
    temperature: float,
    generator: torch.Generator,
    sets: EventBatch | None,
) -> EventBatch:
    device = lengths_B.device
    gaps_BT = torch.zeros(len(lengths_B), int(lengths_B.max()), device=device)
    none_E = torch.zeros(0, dtype=torch.int64, device=device)
    events = (none_E, torch.zeros(0, device=device), none_E.bool(), none_E)
    batch = EventBatch(gaps_BT, lengths_B, *events, *_nobodys(lengths_B))
    for step in range(gaps_BT.shape[1]):
        hidden_BW, real_B = read(batch, step), step < lengths_B
        if sets is not None:
            gaps_B = sets.gaps_BT[:, step]
        elif step > 0:
            gaps_B = likelihood.sample_gap(hidden_BW, temperature, generator)
        else:
            gaps_B = gaps_BT[:, 0]
        gaps_BT[:, step] = gaps_B * real_B
        present_BV = None if sets is None else variables_at(sets, step, len(likelihood.valued_V))
        drawn = likelihood.sample(hidden_BW, gaps_BT[:, step], temperature, generator, present_BV)
        batch = with_step(batch, step, drawn._replace(present_BV=drawn.present_BV & real_B[:, None]))
    return batch


def variables_at(batch: EventBatch, step: int, variables: int) -> Tensor:
    """Which variables are present at a step of each sequence, (B, V)."""
    sequences, length = batch.gaps_BT.shape
    here_E = batch.steps_E % length == step
    present_BV = torch.zeros(sequences, variables, dtype=torch.bool, device=here_E.device)
    present_BV[batch.steps_E[here_E] // length, batch.variables_E[here_E]] = True
    return present_BV


def with_step(batch: EventBatch, step: int, drawn: DrawnSet) -> EventBatch:
    """The batch and the events of one step more, in the order of their steps."""
    rows_E, variables_E = drawn.present_BV.nonzero(as_tuple=True)
    values_E = drawn.values_BV[rows_E, variables_E]
    steps_E = torch.cat((batch.steps_E, rows_E * batch.gaps_BT.shape[1] + step))
    order_E = steps_E.argsort()
    return batch._replace(
        variables_E=torch.cat((batch.variables_E, variables_E))[order_E],
        values_E=torch.cat((batch.values_E, values_E.nan_to_num(nan=0.0)))[order_E],
        has_value_E=torch.cat((batch.has_value_E, ~values_E.isnan()))[order_E],
        steps_E=steps_E[order_E],
    )


def _nobodys(lengths_B: Tensor) -> tuple[Tensor, None, int, int]:
    """The rest of a batch that stands in no split: sequences_B, labels_B, step_tokens, position."""
    return torch.full_like(lengths_B, -1), None, int(lengths_B.sum()), 0
