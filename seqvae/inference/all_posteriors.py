"""Every posterior of a split, at constant memory: how far the means scatter, and a random choice of the posteriors themselves.

In: means and log-variances, batch after batch. Out: the variance of the means, and no more than so many posteriors, which are all
of them, in their order, where there are not more. The same seed chooses the same.

Shapes: P posteriors of a batch, R rows that are kept, Z latent dimensions.
"""

import torch
from torch import Tensor


class AllPosteriors:
    """On the CPU; `most` is how many are kept."""

    def __init__(self, most: int, seed: int) -> None:
        self._most = most
        self._generator = torch.Generator().manual_seed(seed)
        self._keys_R = torch.empty(0, dtype=torch.float64)
        self._kept_R2Z: Tensor | None = None
        self._count = 0
        self._center_Z = self._squares_Z = torch.zeros(())

    def add(self, mean_PZ: Tensor, logvar_PZ: Tensor) -> None:
        if len(mean_PZ):
            self._add_to_variance(mean_PZ.double())
            self._add_to_choice(torch.stack((mean_PZ, logvar_PZ), dim=1))

    @property
    def variance_of_means_Z(self) -> Tensor:
        """float64; NaN of one posterior."""
        return self._squares_Z / (self._count - 1)

    @property
    def chosen(self) -> tuple[Tensor, Tensor]:
        """Means and log-variances, (R, Z) each."""
        assert self._kept_R2Z is not None, "there was a batch"
        mean_RZ, logvar_RZ = self._kept_R2Z.unbind(dim=1)
        return mean_RZ, logvar_RZ

    def _add_to_variance(self, mean_PZ: Tensor) -> None:
        """Sums of squared deviations, each from the mean of its own part (Chan et al. 1979): large means cancel nothing."""
        count, center_Z = len(mean_PZ), mean_PZ.mean(dim=0)
        moved_Z, total = center_Z - self._center_Z, self._count + count
        squares_Z = (mean_PZ - center_Z).square().sum(dim=0)
        self._squares_Z = self._squares_Z + squares_Z + moved_Z.square() * (self._count * count / total)
        self._center_Z, self._count = self._center_Z + moved_Z * (count / total), total

    def _add_to_choice(self, rows_P2Z: Tensor) -> None:
        """Each gets a random key, and the smallest keys stay; once there are enough, few new ones come in."""
        keys_P = torch.rand(len(rows_P2Z), generator=self._generator, dtype=torch.float64)
        if len(self._keys_R) == self._most:
            enters_P = keys_P < self._keys_R.max()
            rows_P2Z, keys_P = rows_P2Z[enters_P], keys_P[enters_P]
        kept_R2Z = rows_P2Z if self._kept_R2Z is None else torch.cat((self._kept_R2Z, rows_P2Z))
        keys_R = torch.cat((self._keys_R, keys_P))
        if len(keys_R) > self._most:
            stays_R = keys_R.topk(self._most, largest=False).indices.sort().values
            kept_R2Z, keys_R = kept_R2Z[stays_R], keys_R[stays_R]
        self._kept_R2Z, self._keys_R = kept_R2Z, keys_R
