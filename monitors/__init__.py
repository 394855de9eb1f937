"""Watching a training run: the formulas that a variational posterior is judged by, and the Lightning callback that reads them.

A library of its own: it imports nothing of the application, so any Lightning project can install and use it (as
`posterior_monitors`).
"""

from .callback import PosteriorMetricsMonitor
from .contract import StepOutputs
from .decoder_probe import Probeable
from .reading import Reading
from .readings_file import read_readings

__all__ = ["PosteriorMetricsMonitor", "Probeable", "Reading", "StepOutputs", "read_readings"]
