"""Watching a training run: the formulas that a variational posterior is judged by, and the Lightning callbacks that read them.

A library of its own: it imports nothing of the application, so any Lightning project can install and use it (as
`posterior_monitors`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from seqvae.monitors.detection.thresholds import Thresholds
from seqvae.monitors.detection.verdict import Verdict
from seqvae.monitors.reading import Reading, read_readings

if TYPE_CHECKING:
    from seqvae.monitors.callback import PosteriorCollapsed as PosteriorCollapsed
    from seqvae.monitors.callback import PosteriorMetricsMonitor as PosteriorMetricsMonitor
    from seqvae.monitors.contract import StepOutputs as StepOutputs
    from seqvae.monitors.decoder_use import OffersProbeBatches as OffersProbeBatches
    from seqvae.monitors.decoder_use import Probeable as Probeable
    from seqvae.monitors.decoder_use import TellsPosterior as TellsPosterior
    from seqvae.monitors.step_counts import Counts as Counts
    from seqvae.monitors.throughput import Throughput as Throughput
    from seqvae.monitors.throughput import ThroughputMonitor as ThroughputMonitor

_NEED_TORCH = {
    "Counts": ".step_counts",
    "OffersProbeBatches": ".decoder_use",
    "PosteriorCollapsed": ".callback",
    "PosteriorMetricsMonitor": ".callback",
    "Probeable": ".decoder_use",
    "StepOutputs": ".contract",
    "TellsPosterior": ".decoder_use",
    "Throughput": ".throughput",
    "ThroughputMonitor": ".throughput",
}
"""Torch and Lightning take seconds to import; the process that draws figures, and whoever reads a run, does without."""

__all__ = [
    "Counts",
    "OffersProbeBatches",
    "PosteriorCollapsed",
    "PosteriorMetricsMonitor",
    "Probeable",
    "Reading",
    "StepOutputs",
    "TellsPosterior",
    "Thresholds",
    "Throughput",
    "ThroughputMonitor",
    "Verdict",
    "read_readings",
]


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_NEED_TORCH[name], __name__), name)
