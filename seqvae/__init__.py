"""Train variational autoencoders on sequences stored in Parquet, fast, and catch posterior collapse while it happens."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seqvae.api import Run as Run
    from seqvae.api import Study as Study
    from seqvae.api import fit as fit
    from seqvae.api import load as load
    from seqvae.api import tune as tune
    from seqvae.data.datamodule import SequenceDataModule as SequenceDataModule
    from seqvae.embedder import SequenceEmbedder as SequenceEmbedder
    from seqvae.errors import CollapsedError as CollapsedError
    from seqvae.errors import DataError as DataError
    from seqvae.errors import DivergedError as DivergedError
    from seqvae.errors import SeqVAEError as SeqVAEError
    from seqvae.errors import SettingsError as SettingsError
    from seqvae.errors import StorageError as StorageError
    from seqvae.errors import UsageError as UsageError
    from seqvae.inference.model import Model as Model
    from seqvae.models.vae import SequenceVAE as SequenceVAE
    from seqvae.monitors import PosteriorMetricsMonitor as PosteriorMetricsMonitor
    from seqvae.monitors import ThroughputMonitor as ThroughputMonitor

__version__ = "0.1.0"

_MODULES = {
    "seqvae.api": ("fit", "load", "tune", "Run", "Study"),
    "seqvae.embedder": ("SequenceEmbedder",),
    "seqvae.inference.model": ("Model",),
    "seqvae.data.datamodule": ("SequenceDataModule",),
    "seqvae.models.vae": ("SequenceVAE",),
    "seqvae.monitors": ("PosteriorMetricsMonitor", "ThroughputMonitor"),
    "seqvae.errors": (
        *("SeqVAEError", "UsageError", "SettingsError", "DataError", "DivergedError", "StorageError"),
        "CollapsedError",
    ),
}
"""Imported when they are first used: torch and Lightning take seconds."""
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [*sorted(_MODULE_OF), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
