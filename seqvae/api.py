"""x"""

from typing import TYPE_CHECKING

from seqvae.config.training import TrainingSettings

if TYPE_CHECKING:
    from lightning import Callback


def monitors_of(settings: TrainingSettings) -> "list[Callback]":
    """Return the callbacks that watch a run, as closely as its settings say."""
    from seqvae.monitors import PosteriorMetricsMonitor, ThroughputMonitor

    watch, monitoring = settings.watch, settings.monitoring
    if watch is None:
        return []
    monitor = PosteriorMetricsMonitor(
        update_frequency=watch.every_n_steps,
        plot_frequency=watch.plot_every_n_steps,
        window_size=watch.window,
        probe_every_n_readings=watch.probe_every_n_readings,
        on_collapse=monitoring.on_collapse,
        verbose=settings.VERBOSE_WATCH and not monitoring.fast_detection,
    )
    return [monitor, ThroughputMonitor(every_n_steps=settings.run.log_every_n_steps)]
