"""Lightning callbacks that read a variational posterior, judge it, and measure a run's speed.

Any Lightning project can use them: of the rest of the package they import `files`, `text`, `verdicts` and `errors` alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from seqvae.monitors.reading import Reading, read_readings
from seqvae.monitors.rules import Thresholds
from seqvae.verdicts import Verdict

if TYPE_CHECKING:
    from seqvae.monitors.callback import PosteriorCollapsed as PosteriorCollapsed
    from seqvae.monitors.callback import PosteriorMetricsMonitor as PosteriorMetricsMonitor
    from seqvae.monitors.contract import Counts as Counts
    from seqvae.monitors.contract import StepOutputs as StepOutputs
    from seqvae.monitors.contract import code_outputs as code_outputs
    from seqvae.monitors.decoder_use import ComputesPosterior as ComputesPosterior
    from seqvae.monitors.decoder_use import OffersProbeBatches as OffersProbeBatches
    from seqvae.monitors.decoder_use import Probeable as Probeable
    from seqvae.monitors.throughput import Throughput as Throughput
    from seqvae.monitors.throughput import ThroughputMonitor as ThroughputMonitor

_NEED_TORCH = {
    "ComputesPosterior": ".decoder_use",
    "Counts": ".contract",
    "OffersProbeBatches": ".decoder_use",
    "PosteriorCollapsed": ".callback",
    "PosteriorMetricsMonitor": ".callback",
    "Probeable": ".decoder_use",
    "StepOutputs": ".contract",
    "Throughput": ".throughput",
    "ThroughputMonitor": ".throughput",
    "code_outputs": ".contract",
}
"""Names whose modules import torch and Lightning, which takes seconds: drawing figures and reading a run do without."""

__all__ = [
    "ComputesPosterior",
    "Counts",
    "OffersProbeBatches",
    "PosteriorCollapsed",
    "PosteriorMetricsMonitor",
    "Probeable",
    "Reading",
    "StepOutputs",
    "Thresholds",
    "Throughput",
    "ThroughputMonitor",
    "Verdict",
    "code_outputs",
    "read_readings",
]


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_NEED_TORCH[name], __name__), name)


def __dir__() -> list[str]:
    return __all__
