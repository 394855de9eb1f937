"""The monitors of posteriors and speed, for `from monitors import PosteriorMetricsMonitor`; the code is in `seqvae.monitors`."""

from typing import TYPE_CHECKING, Any

import seqvae.monitors

if TYPE_CHECKING:
    from seqvae.monitors import *  # noqa: F403

__all__ = seqvae.monitors.__all__


def __getattr__(name: str) -> Any:
    return getattr(seqvae.monitors, name)
