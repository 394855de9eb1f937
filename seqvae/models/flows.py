"""An invertible map of latents that depends on their posterior: a draw from a Gaussian in, z and how far it stretched space out.

Coupling layers (Dinh et al. 2017): each moves half of the dimensions by a scale and a shift that a small network makes of the other
half, and of the mean and the log-variance of the Gaussian. Either direction costs the same, and the determinant is a product.

Shapes: Z latent dimensions, K kept and M moved ones of a layer, H hidden; before them anything that broadcasts.
"""

import torch
from torch import Tensor, nn

HIDDEN = 64
"""Numbers between the two linear layers of a coupling."""
LARGEST_LOG_SCALE = 2.0
"""A layer stretches a dimension by exp(-2) to exp(2), so that no step of training makes the map singular."""


class Coupling(nn.Module):
    """One layer: keeps the dimensions before the middle and moves those after it, or the other way around. Begins as identity."""

    def __init__(self, latent_size: int, *, moves_first: bool) -> None:
        super().__init__()
        self.middle, self.moves_first = latent_size // 2, moves_first
        kept = latent_size - self.middle if moves_first else self.middle
        self.of_kept = nn.Linear(kept, HIDDEN, bias=False)
        self.of_posterior = nn.Linear(2 * latent_size, HIDDEN)
        self.out = nn.Linear(HIDDEN, 2 * (latent_size - kept))
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, z: Tensor, posterior: Tensor) -> tuple[Tensor, Tensor]:
        """Move z; return it and log |dz' / dz|. `posterior` is mean and log-variance, one behind the other."""
        kept, moved = self._split(z)
        log_scale, shift = self._made_of(kept, posterior)
        return self._joined(kept, moved * log_scale.exp() + shift), log_scale.sum(dim=-1)

    def inverse(self, z: Tensor, posterior: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `forward` moves to z, and the log |dz' / dz| of that."""
        kept, moved = self._split(z)
        log_scale, shift = self._made_of(kept, posterior)
        kept = kept.expand(*log_scale.shape[:-1], -1)
        return self._joined(kept, (moved - shift) * torch.exp(-log_scale)), log_scale.sum(dim=-1)

    def _made_of(self, kept: Tensor, posterior: Tensor) -> tuple[Tensor, Tensor]:
        raw, shift = self.out(torch.tanh(self.of_kept(kept) + self.of_posterior(posterior))).chunk(2, dim=-1)
        return LARGEST_LOG_SCALE * torch.tanh(raw / LARGEST_LOG_SCALE), shift

    def _split(self, z: Tensor) -> tuple[Tensor, Tensor]:
        first, last = z[..., : self.middle], z[..., self.middle :]
        return (last, first) if self.moves_first else (first, last)

    def _joined(self, kept: Tensor, moved: Tensor) -> Tensor:
        return torch.cat((moved, kept) if self.moves_first else (kept, moved), dim=-1)


class Flow(nn.Module):
    """Coupling layers in turn, in float32 whatever the precision."""

    def __init__(self, layers: int, latent_size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Coupling(latent_size, moves_first=layer % 2 == 1) for layer in range(layers))

    def forward(self, base: Tensor, mean: Tensor, logvar: Tensor) -> tuple[Tensor, Tensor]:
        """Return z and log |dz / dbase| of draws from the Gaussian with these moments."""
        with torch.autocast(base.device.type, enabled=False):
            z, posterior = base, torch.cat((mean, logvar), dim=-1)
            log_det = torch.zeros((), device=base.device)
            for layer in self.layers:
                z, stretched = layer(z, posterior)
                log_det = log_det + stretched
        return z, log_det

    def inverse(self, z: Tensor, mean: Tensor, logvar: Tensor) -> tuple[Tensor, Tensor]:
        """Return the draw that was moved to z, and log |dz / dbase| there; z and moments may broadcast."""
        with torch.autocast(z.device.type, enabled=False):
            base, posterior = z, torch.cat((mean, logvar), dim=-1)
            log_det = torch.zeros((), device=z.device)
            for layer in reversed(self.layers):
                assert isinstance(layer, Coupling)
                base, stretched = layer.inverse(base, posterior)
                log_det = log_det + stretched
        return base, log_det
