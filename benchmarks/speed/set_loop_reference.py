"""A set-sequence VAE that goes through its data as SeqSetVAE does: patient by patient, and within a patient set by set.

For comparison only, written from a description of that method: the size and the order of its work are the same, the code is
our own. In: an `EventBatch`, as the loader makes it. Out: the loss of a training step.

    for each patient
        for each set of events at one time:  vectors of its events -> induced set attention -> posterior -> own reconstruction
        all of the patient's sets            -> causal transformer over their latents
        for each set:                        state -> as many vectors as it has events -> Chamfer distances to its events

SeqSetVAE also does what its loss hardly needs: it reconstructs each set from its own latent and uses nothing of it, computes
each set's vectors twice, divides five weights by their spectral norms, and materialises attention weights that are never read.
`lean` leaves that out. Both leave out its Python loop over the events of a batch that looks vectors up and
normalises values.

Shapes: E events of one set, S sets of one patient, W width, G width of the given vectors, M induced points, V variables.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from seqvae.data.batch import EventBatch

GIVEN_WIDTH = 768
"""Width of the vectors that stand for variables: those of a language model."""
WIDTH, HEADS, LEVELS, INDUCED, HISTORY_LAYERS = 256, 2, 2, 16, 2
FREE_BITS, KL_WEIGHT = 0.1, 0.1


class Attention(nn.Module):
    """Attention of queries to keys, then a feed-forward network, each followed by a normalisation."""

    def __init__(self, *, lean: bool) -> None:
        super().__init__()
        self.lean = lean
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.feed_forward_norm = nn.LayerNorm(WIDTH)

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        attended, _ = self.attention(queries, keys, keys, need_weights=not self.lean)
        hidden = self.attention_norm(queries + attended)
        return self.feed_forward_norm(hidden + self.feed_forward(hidden))


class InducedAttention(nn.Module):
    """Attention of a few learned points to the set, and of the set to them: linear in the size of the set."""

    def __init__(self, *, lean: bool) -> None:
        super().__init__()
        self.points_1MW = nn.Parameter(torch.randn(1, INDUCED, WIDTH))
        self.gather, self.spread = Attention(lean=lean), Attention(lean=lean)

    def forward(self, set_1EW: Tensor) -> Tensor:
        return self.spread(set_1EW, self.gather(self.points_1MW, set_1EW))


class NoisePooling(nn.Module):
    """Attention of noise to the set, which gives a requested number of vectors."""

    def __init__(self, *, lean: bool) -> None:
        super().__init__()
        self.projection = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))
        self.attention = Attention(lean=lean)
        self.dropout = nn.Dropout(0.1)

    def forward(self, set_1EW: Tensor, count: int) -> Tensor:
        noise_1EW = torch.randn(1, count, WIDTH, device=set_1EW.device)
        return self.dropout(self.attention(noise_1EW, self.projection(set_1EW)) + noise_1EW)


class SetDecoder(nn.Module):
    """One vector -> a set of vectors, through LEVELS layers of induced attention and pooling."""

    def __init__(self, *, lean: bool) -> None:
        super().__init__()
        self.induced = nn.ModuleList(InducedAttention(lean=lean) for _ in range(LEVELS))
        self.pooling = nn.ModuleList(NoisePooling(lean=lean) for _ in range(LEVELS))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, state_1W: Tensor, count: int) -> Tensor:
        set_1EW = state_1W[:, None]
        for induced, pooling in zip(self.induced, self.pooling, strict=True):
            set_1EW = set_1EW + pooling(induced(set_1EW), count)
        return self.out(set_1EW)


class SetPosterior(NamedTuple):
    """Posterior of the latent of one set."""

    mean_1W: Tensor
    logvar_1W: Tensor


class SetVAE(nn.Module):
    """A set's events -> the posterior of its latent; on the side, the set reconstructed from that latent."""

    def __init__(self, *, lean: bool) -> None:
        super().__init__()
        self.lean = lean
        self.lift = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(InducedAttention(lean=lean) for _ in range(LEVELS))
        self.pool = NoisePooling(lean=lean)
        self.moments = nn.Sequential(
            *(nn.Linear(WIDTH, 2 * WIDTH), nn.LayerNorm(2 * WIDTH), nn.GELU(), nn.Dropout(0.1)),
            nn.Linear(2 * WIDTH, 2 * WIDTH),
        )
        self.decoder = SetDecoder(lean=lean)
        if not lean:
            for layer in (self.lift, *self.moments, self.decoder.out):
                if isinstance(layer, nn.Linear):
                    spectral_norm(layer)

    def forward(self, events_1EW: Tensor) -> SetPosterior:
        lifted_1EW = hidden_1EW = self.lift(events_1EW)
        posteriors = []
        for layer in self.layers:
            hidden_1EW = layer(hidden_1EW) + hidden_1EW + lifted_1EW
            mean_1W, logvar_1W = self.moments(self.pool(hidden_1EW, 1)[:, 0]).chunk(2, dim=-1)
            posteriors.append(SetPosterior(mean_1W, logvar_1W.clamp(-10, 10)))
        last = posteriors[-1]
        if not self.lean:
            z_1W = last.mean_1W + torch.exp(0.5 * last.logvar_1W) * torch.randn_like(last.mean_1W)
            self.decoder(z_1W, events_1EW.shape[1])
        return last


class SetLoopVAE(nn.Module):
    """The model: sets, patients, loss."""

    given_VG: Tensor

    def __init__(self, variables: int, *, lean: bool) -> None:
        super().__init__()
        self.lean = lean
        self.register_buffer("given_VG", torch.randn(variables, GIVEN_WIDTH))
        self.reduce = nn.Linear(GIVEN_WIDTH, WIDTH)
        if not lean:
            spectral_norm(self.reduce)
        self.set_vae = SetVAE(lean=lean)
        layer = nn.TransformerEncoderLayer(
            *(WIDTH, HEADS, WIDTH), dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.history = nn.TransformerEncoder(layer, HISTORY_LAYERS, enable_nested_tensor=False)
        self.decoder = SetDecoder(lean=lean)

    def forward(self, batch: EventBatch) -> Tensor:
        steps_E, counts_S = torch.unique_consecutive(batch.steps_E, return_counts=True)
        sets = counts_S.tolist()
        variables, values = batch.variables_E.split(sets), batch.values_E.split(sets)
        of_patient = torch.div(steps_E, batch.gaps_BT.shape[1], rounding_mode="floor").bincount().tolist()
        times_BT, losses, first = batch.gaps_BT.cumsum(dim=1), [], 0
        for patient, count in enumerate(of_patient):
            own = slice(first, first + count)
            losses.append(self.patient_loss(variables[own], values[own], times_BT[patient, :count]))
            first += count
        return torch.stack(losses).mean()

    def patient_loss(self, variables: tuple[Tensor, ...], values: tuple[Tensor, ...], times_S: Tensor) -> Tensor:
        targets, means, kl = [], [], torch.zeros(())
        for variables_E, values_E in zip(variables, values, strict=True):
            target_1EW = self.embed(variables_E, values_E)[None]
            posterior = self.set_vae(target_1EW)
            targets.append(target_1EW)
            means.append(posterior.mean_1W)
            kl_1W = 0.5 * (posterior.mean_1W.square() + posterior.logvar_1W.exp() - 1 - posterior.logvar_1W)
            kl = kl + kl_1W.sum().clamp(min=FREE_BITS * WIDTH)
        states_1SW = self.add_history(torch.stack(means, dim=1), times_S)
        distance = torch.zeros(())
        for number, target_1EW in enumerate(targets):
            if not self.lean:
                target_1EW = self.embed(variables[number], values[number])[None]
            distance = distance + chamfer(self.decoder(states_1SW[:, number], target_1EW.shape[1]), target_1EW)
        return (distance + KL_WEIGHT * kl) / len(targets)

    def embed(self, variables_E: Tensor, values_E: Tensor) -> Tensor:
        """Return a direction for the variable, as long as the value."""
        return F.normalize(self.reduce(self.given_VG[variables_E]), dim=-1) * values_E[:, None]

    def add_history(self, latents_1SW: Tensor, times_S: Tensor) -> Tensor:
        latents_1SW = F.layer_norm(latents_1SW + waves(times_S), (WIDTH,))
        hidden = torch.ones(len(times_S), len(times_S), dtype=torch.bool).triu(diagonal=1)
        return self.history(latents_1SW, mask=hidden)


def waves(times_S: Tensor) -> Tensor:
    """Return the logarithm of each time as sines and cosines, (S, W)."""
    angles_SH = torch.log1p(times_S)[:, None] * torch.logspace(-1, 2, WIDTH // 2)
    return torch.cat((angles_SH.sin(), angles_SH.cos()), dim=-1)


def chamfer(made_1EW: Tensor, target_1EW: Tensor) -> Tensor:
    """Sum the distances of directions, of lengths and of whole vectors, each vector's to its nearest on the other side."""
    made_EW, target_EW = made_1EW[0], target_1EW[0]
    directions = 1 - F.normalize(made_EW, dim=-1) @ F.normalize(target_EW, dim=-1).T
    lengths = (made_EW.norm(dim=-1)[:, None] - target_EW.norm(dim=-1)).abs()
    whole = (made_EW[:, None] - target_EW).square().sum(dim=-1)
    nearest = [0.5 * (pairs.amin(dim=0).mean() + pairs.amin(dim=1).mean()) for pairs in (directions, lengths, whole)]
    return nearest[0] + nearest[1] + 3 * nearest[2]
