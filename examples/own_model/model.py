"""A VAE of your own: any `nn.Module` that turns one of our batches (`seqvae/data/batch.py`) into a `VAEOutput`.

This one is for tokens: a bag of words for an encoder, a GRU for a decoder. Only `forward` is compulsory; with `encode` and
`nll_given_z` the monitor can also measure whether the decoder uses z.

Shapes: B sequences, T steps, S = T + 1 with the end mark, W width, Z latent dimensions, V vocabulary and end mark.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqvae.data.batch import TokenBatch, predicted_steps
from seqvae.models.vae import Posterior, VAEOutput, draw


class BagToGRU(nn.Module):
    """A VAE whose z carries the words of a sequence, but not their order."""

    def __init__(self, vocabulary_size: int, width: int = 64, latent_size: int = 8) -> None:
        super().__init__()
        self.end = vocabulary_size
        self.posterior_layer = nn.Linear(width, 2 * latent_size)
        self.table = nn.Embedding(vocabulary_size + 1, width)  # the end mark's vector begins a sequence
        self.decoder = nn.GRU(width + latent_size, width, batch_first=True)
        self.scores = nn.Linear(width, vocabulary_size + 1)

    def forward(self, batch: TokenBatch) -> VAEOutput:
        posterior = self.encode(batch)
        return VAEOutput(*posterior, self.nll_given_z(batch, draw(posterior)), predicted_steps(batch))

    def encode(self, batch: TokenBatch) -> Posterior:
        real_BT = torch.arange(batch.tokens_BT.shape[1], device=batch.lengths_B.device) < batch.lengths_B[:, None]
        shares_BT = real_BT / batch.lengths_B.clamp(min=1)[:, None]
        bag_BW = (self.table(batch.tokens_BT) * shares_BT[..., None]).sum(dim=1)
        mean_BZ, logvar_BZ = self.posterior_layer(bag_BW).float().chunk(2, dim=-1)
        return Posterior(mean_BZ, logvar_BZ.clamp(-10, 10), batch.lengths_B > 0)

    def nll_given_z(self, batch: TokenBatch, z: Tensor) -> Tensor:
        """Return -log p(x | z) of each sequence: teacher forcing, the end mark predicted as well."""
        steps_S = torch.arange(batch.tokens_BT.shape[1] + 1, device=z.device)
        targets_BS = F.pad(batch.tokens_BT, (0, 1)).masked_fill(steps_S == batch.lengths_B[:, None], self.end)
        before_BS = F.pad(batch.tokens_BT, (1, 0), value=self.end)
        inputs_BSW = torch.cat((self.table(before_BS), z[:, None].expand(-1, len(steps_S), -1)), dim=-1)
        scores_BSV = self.scores(self.decoder(inputs_BSW)[0]).float()
        nll_BS = F.cross_entropy(scores_BSV.flatten(0, 1), targets_BS.flatten(), reduction="none").view_as(targets_BS)
        predicted_BS = steps_S < predicted_steps(batch)[:, None]
        return (nll_BS * predicted_BS).sum(dim=1)
