"""Draw sequences from a SequenceVAE: latents in, a normalised batch of the network's kind out.

    sample(network, z, lengths_B, noise=noise)          what the decoder makes of these latents
    reconstruct(network, batch, noise=noise)            what is left of a batch on its way through the latent
    sample_prior(network, lengths_B, noise=noise)       new sequences

Nothing trains, and the network is left as it was found. T steps cost T steps of decoding.

Shapes: B sequences, R of them that are still read, T steps (S: with the end mark), W width, Z latent dimensions, V variables,
E events.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from seqvae.data.batch import Batch, EventBatch, TokenBatch, VectorBatch, end_marks
from seqvae.models.backbones import Decoder, Pasts
from seqvae.models.codes import CodePosterior, CodePrior
from seqvae.models.likelihoods import EventLikelihood, TokenLikelihood, VectorLikelihood
from seqvae.models.noise import Noise
from seqvae.models.vae import SequenceVAE, latents_of

ROOM_TO_END = 8
"""Steps that the reconstruction of the shortest sequence may take to find its end."""
CROWDED = 0.75
"""While more of the sequences that are read go on, the others are read, too: leaving them out copies what is remembered."""


class Stepwise:
    """A decoder that is called for one step after another, while a sequence is made.

    An autoregressive decoder remembers what it read, so that T steps cost T steps of decoding instead of the T^2 / 2 of reading all
    so far again for each. Sequences that have ended are left out of the computation. The parallel decoder, which looks at no input
    but the first, decodes all steps in the beginning.
    """

    def __init__(self, decoder: Decoder, begin_W: Tensor, z: Tensor, steps: int) -> None:
        """`z` is (B, Z), or (B, T, Z) with a latent for each step."""
        self.decoder = decoder
        self.step = 0
        self.z = z
        self.pasts: Pasts = ()
        self.rows_R: Tensor | None = None
        """Which sequences are read; None: all."""
        self.all_steps: tuple[Tensor, ...] = ()
        if not decoder.autoregressive:
            inputs_BTW = begin_W.expand(len(z), steps, -1)
            self.all_steps = decoder(inputs_BTW, z if z.dim() == 2 else z[:, :steps]).unbind(dim=1)

    def __call__(self, before_BW: Tensor, going_B: Tensor) -> Tensor:
        """Return the decoder's vectors of the next step, (B, W), from the embedded step before it, where `going_B` has which go on.

        A sequence that has ended stays so; its vectors mean nothing.
        """
        self.step += 1
        if self.all_steps:
            return self.all_steps[self.step - 1]
        going_R = going_B if self.rows_R is None else going_B[self.rows_R]
        (kept_R,) = going_R.nonzero(as_tuple=True)  # sync: one for each step
        if 0 < len(kept_R) < CROWDED * len(going_R):
            self.rows_R = kept_R if self.rows_R is None else self.rows_R[kept_R]
            self.z = self.z[kept_R]
            self.pasts = tuple(tuple(tensor[kept_R] for tensor in past) for past in self.pasts)
        before_RW = before_BW if self.rows_R is None else before_BW[self.rows_R]
        z_RZ = self.z[:, self.step - 1] if self.z.dim() == 3 else self.z
        hidden_RW, self.pasts = self.decoder.step(before_RW, z_RZ, self.step - 1, self.pasts)
        if self.rows_R is None:
            return hidden_RW
        return hidden_RW.new_zeros(len(before_BW), hidden_RW.shape[1]).index_copy(0, self.rows_R, hidden_RW)


@torch.no_grad()
def sample(
    network: SequenceVAE,
    z: Tensor,
    lengths_B: Tensor,
    *,
    temperature: float = 1.0,
    noise: Noise,
    sets: EventBatch | None = None,
) -> Batch:
    """Draw one sequence for each latent, on the latents' device.

    `z` is what the decoder gets, (B, Z), or (B, S, Z) where steps have latents. Vectors and events get `lengths_B` steps; tokens
    end at their end mark, or are cut off there. All values of a vector are drawn, the first event happens at time 0.
    Temperature 1 is the model's own distribution; 0 takes what is most likely at each step: the first among ids, variables
    more likely present than not, the mean of a value, the median of a gap. The noise must be on the same device.
    With `sets`, events happen when those do and to the same variables: their values alone are drawn.
    """
    lengths_B = lengths_B.to(z.device)
    with evaluating(network):
        read = Stepwise(network.decoder, network.begin_W, z, int(lengths_B.max()))
        match network.likelihood:
            case TokenLikelihood() as likelihood:
                return _tokens(network, likelihood, read, lengths_B, temperature, noise)
            case VectorLikelihood() as likelihood:
                return _vectors(network, likelihood, read, lengths_B, temperature, noise)
            case EventLikelihood() as likelihood:
                return _events(network, likelihood, read, lengths_B, temperature, noise, sets)


@torch.no_grad()
def reconstruct(
    network: SequenceVAE,
    batch: Batch,
    *,
    temperature: float = 0.0,
    noise: Noise,
    values_only: bool = False,
) -> Batch:
    """Draw sequences from the posterior means of a batch: nothing of the originals but that, and their lengths.

    Tokens find their end themselves, or are cut off: after twice their original's length and ROOM_TO_END steps, and where the
    original was cut off or steps have latents, at its length. What else is in the batch has no say in it. `values_only` leaves
    events their times and variables, too, so that values can be compared: hardly any variable is more likely present than not,
    and a reconstruction at temperature 0 has few of them.
    """
    with evaluating(network):
        z = network.latent_at_mean(batch)
    lengths_B = batch.lengths_B
    if isinstance(batch, TokenBatch) and not network.has_step_latents:
        lengths_B = torch.where(end_marks(batch), 2 * lengths_B + ROOM_TO_END, lengths_B)
    sets = batch if values_only and isinstance(batch, EventBatch) else None
    return sample(network, z, lengths_B, temperature=temperature, noise=noise, sets=sets)


@torch.no_grad()
def sample_prior(network: SequenceVAE, lengths_B: Tensor, *, temperature: float = 1.0, noise: Noise) -> Batch:
    """Draw sequences from latents that are drawn from the prior itself, whatever the temperature."""
    sequences, settings = len(lengths_B), network.settings
    steps = int(lengths_B.max()) + network.likelihood.extra_steps
    with evaluating(network):
        shape = (sequences, *((steps,) if network.latent_per_step else ()))
        if isinstance(network.posterior, CodePosterior):
            assert isinstance(network.prior, CodePrior)
            z = network.posterior.vectors_of(network.prior.sample_codes(shape, noise))
        else:
            z = network.prior.sample((*shape, settings.latent_size), noise)
        if network.step_level is not None:
            z = network.with_steps(z, noise.normal((sequences, steps, settings.step_latent_size)))
    return sample(network, z, lengths_B, temperature=temperature, noise=noise)


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Switch dropout off; each module is put back into the mode it was in. What is compiled runs as it was written: here every
    step has another length, and the first of them would each be compiled for."""
    training = [module for module in network.modules() if module.training]
    network.eval()
    try:
        with torch.compiler.set_stance("force_eager"), latents_of(network)[1].fixed():
            yield
    finally:
        for module in training:
            module.training = True


def _tokens(
    network: SequenceVAE,
    likelihood: TokenLikelihood,
    read: Stepwise,
    most_B: Tensor,
    temperature: float,
    noise: Noise,
) -> TokenBatch:
    tokens_BT = torch.zeros(len(most_B), max(1, int(most_B.max())), dtype=torch.int64, device=most_B.device)
    lengths_B, going_B = torch.zeros_like(most_B), most_B > 0
    batch = TokenBatch(tokens_BT, lengths_B, **_outside_of_splits(most_B))
    before_BW = network.begin_W.expand(len(most_B), -1)
    for step in range(tokens_BT.shape[1]):
        going_B = going_B & (step < most_B)
        if not going_B.any():  # sync: one for each step
            break
        drawn_B = likelihood.sample(read(before_BW, going_B), temperature, noise)
        going_B = going_B & (drawn_B != likelihood.end)
        tokens_BT[:, step] = drawn_B * going_B
        lengths_B += going_B
        before_BW = network.embedding(batch._replace(tokens_BT=tokens_BT[:, step : step + 1]))[:, 0]
    return batch._replace(ends_B=lengths_B < most_B)


def _vectors(
    network: SequenceVAE,
    likelihood: VectorLikelihood,
    read: Stepwise,
    lengths_B: Tensor,
    temperature: float,
    noise: Noise,
) -> VectorBatch:
    features = likelihood.moments.out_features // 2
    values_BTD = torch.zeros(len(lengths_B), int(lengths_B.max()), features, device=lengths_B.device)
    observed_BTD = torch.zeros_like(values_BTD, dtype=torch.bool)
    batch = VectorBatch(values_BTD, observed_BTD, lengths_B, **_outside_of_splits(lengths_B))
    before_BW = network.begin_W.expand(len(lengths_B), -1)
    for step in range(values_BTD.shape[1]):
        going_B = step < lengths_B
        # What training saw no value of stays missing: neither drawing nor reading it was learned.
        there_BD = going_B[:, None] & likelihood.valued_D
        values_BTD[:, step] = likelihood.sample(read(before_BW, going_B), temperature, noise) * there_BD
        observed_BTD[:, step] = there_BD
        latest = batch._replace(
            values_BTD=values_BTD[:, step : step + 1], observed_BTD=observed_BTD[:, step : step + 1]
        )
        before_BW = network.embedding(latest)[:, 0]
    return batch


def _events(
    network: SequenceVAE,
    likelihood: EventLikelihood,
    read: Stepwise,
    lengths_B: Tensor,
    temperature: float,
    noise: Noise,
    sets: EventBatch | None,
) -> EventBatch:
    device, sequences, length = lengths_B.device, len(lengths_B), int(lengths_B.max())
    gaps_BT = torch.zeros(sequences, length, device=device)
    none_E = torch.zeros(0, dtype=torch.int64, device=device)
    events: list[tuple[Tensor, ...]] = [(none_E, none_E.float(), none_E.bool(), none_E)]
    rest = _outside_of_splits(lengths_B)
    before_BW = network.begin_W.expand(sequences, -1)
    for step in range(length):
        going_B = step < lengths_B
        hidden_BW = read(before_BW, going_B)
        present_BV = None
        if sets is not None:
            gaps_BT[:, step] = sets.gaps_BT[:, step] * going_B
            width = sets.gaps_BT.shape[1]
            here_E = sets.steps_E % width == step
            present_BV = torch.zeros(sequences, len(likelihood.valued_V), dtype=torch.bool, device=device)
            present_BV[sets.steps_E[here_E] // width, sets.variables_E[here_E]] = True
        elif step > 0:
            gaps_BT[:, step] = likelihood.sample_gap(hidden_BW, temperature, noise) * going_B
        present_BV, values_BV = likelihood.sample(hidden_BW, gaps_BT[:, step], temperature, noise, present_BV)
        rows_E, variables_E = (present_BV & going_B[:, None]).nonzero(as_tuple=True)
        values_E = values_BV[rows_E, variables_E]
        of_step = (variables_E, values_E.nan_to_num(nan=0.0), ~values_E.isnan())
        events.append((*of_step, rows_E * length + step))
        gaps_B1, times_B1 = gaps_BT[:, step : step + 1], gaps_BT.cumsum(dim=1)[:, step : step + 1]
        before_BW = network.embedding(EventBatch(gaps_B1, lengths_B, *of_step, rows_E, **rest), times_B1)[:, 0]
    variables_E, values_E, has_value_E, steps_E = (torch.cat(parts) for parts in zip(*events, strict=True))
    order_E = steps_E.argsort(stable=True)
    of_all = (variables_E[order_E], values_E[order_E], has_value_E[order_E], steps_E[order_E])
    return EventBatch(gaps_BT, lengths_B, *of_all, **rest)


def _outside_of_splits(lengths_B: Tensor) -> dict[str, Any]:
    """Return the last fields of a batch that stands in no split."""
    sequences_B = torch.full_like(lengths_B, -1)
    return {"sequences_B": sequences_B, "labels_B": None, "step_tokens": int(lengths_B.sum()), "position": 0}
