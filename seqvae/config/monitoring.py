"""How closely a run watches its posterior: the flags, and what each recipe does where no flag says otherwise.

Imports nothing heavy, since `--help` imports it.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from seqvae.config.run import refuse_below

FEWEST_IN_WINDOW = 12
"""Fewest readings in which a trend can be seen."""


class Watch(NamedTuple):
    """The settings of the monitors of a run; what has a flag is named as the flag."""

    monitor_every_n_steps: int
    """Optimizer steps between two readings."""
    plot_every_n_steps: int
    monitor_window: int
    """Readings that trends are judged on."""
    probe_every_n_readings: int | None
    """How often the decoder is probed; None: only to confirm a suspicion."""

    def monitor_arguments(self) -> dict[str, Any]:
        """Return the arguments of a `PosteriorMetricsMonitor` that watches this closely."""
        return {
            "update_frequency": self.monitor_every_n_steps,
            "plot_frequency": self.plot_every_n_steps,
            "window_size": self.monitor_window,
            "probe_every_n_readings": self.probe_every_n_readings,
        }


# What the recipes do, without and with --fast_detection.
OPTIMIZED_WATCH = Watch(monitor_every_n_steps=100, plot_every_n_steps=1000, monitor_window=50, probe_every_n_readings=4)
OPTIMIZED_FAST_WATCH = OPTIMIZED_WATCH._replace(
    monitor_every_n_steps=200, plot_every_n_steps=2000, probe_every_n_readings=None
)
REFERENCE_WATCH = Watch(monitor_every_n_steps=20, plot_every_n_steps=200, monitor_window=100, probe_every_n_readings=1)
REFERENCE_FAST_WATCH = REFERENCE_WATCH._replace(
    monitor_every_n_steps=50, plot_every_n_steps=500, probe_every_n_readings=None
)


def _default(name: str) -> str:
    """Return the values of all recipes in words, for the help of a flag."""
    watches = (OPTIMIZED_WATCH, OPTIMIZED_FAST_WATCH, REFERENCE_WATCH, REFERENCE_FAST_WATCH)
    plain, fast, reference, reference_fast = (f"{getattr(watch, name):,}" for watch in watches)
    if (plain, reference) == (fast, reference_fast):
        return f"{plain} (train_with_collapse_detection.py: {reference})"
    return f"{plain}, with --fast_detection {fast} (train_with_collapse_detection.py: {reference}, {reference_fast})"


@dataclass(frozen=True, kw_only=True)
class MonitoringSettings:
    """Monitoring"""

    HELP_VALUES: ClassVar[dict[str, object]] = {
        "fewest": FEWEST_IN_WINDOW,
        "monitor_every_n_steps": _default("monitor_every_n_steps"),
        "plot_every_n_steps": _default("plot_every_n_steps"),
        "monitor_window": _default("monitor_window"),
    }
    """What stands for the names in braces in the help texts below."""

    fast_detection: bool = False
    """Watch the posterior half as often or less, print nothing between verdicts, and probe whether the decoder uses the latent
    only to confirm a suspicion."""

    disable_metrics_monitoring: bool = False
    """Do not watch at all, whatever the other flags say: a collapse is then neither seen nor named, and throughput.jsonl is not
    written."""

    monitor_every_n_steps: int | None = None
    """Optimizer steps between two readings of the posterior; default: {monitor_every_n_steps}. A short run is read more often, so
    that it has 50 readings."""

    plot_every_n_steps: int | None = None
    """Optimizer steps between two drawings of the monitor's figures, by a process of their own; default: {plot_every_n_steps}. A
    run's end is always drawn."""

    monitor_window: int | None = None
    """Readings that trends are judged on, {fewest} or more; default: {monitor_window}."""

    on_collapse: Literal["warn", "stop", "rescue"] = "warn"
    """What happens when the posterior has collapsed, or the decoder ignores it: one line says so; or the run saves a checkpoint
    and ends with exit code 7; or the run rescues itself, also from a collapse under way."""

    rescue_budget: float = 0.3
    """Share of the run's optimizer steps that all rescues of --on_collapse rescue may take together. Where fewer are left when one
    begins, the run becomes longer, by this share at most."""

    def __post_init__(self) -> None:
        refuse_below(1, self, "monitor_every_n_steps", "plot_every_n_steps")
        refuse_below(FEWEST_IN_WINDOW, self, "monitor_window")
        if not 0 < self.rescue_budget <= 1:
            raise ValueError(f"--rescue_budget must be above 0 and 1 at most, got {self.rescue_budget:g}")
        if self.disable_metrics_monitoring and self.on_collapse != "warn":
            raise ValueError(
                f"--on_collapse {self.on_collapse} needs the monitor, which --disable_metrics_monitoring switches off"
            )

    @property
    def monitor_on_collapse(self) -> Literal["warn", "stop"]:
        """Return what the monitor itself does; a rescue is the work of another callback."""
        return "stop" if self.on_collapse == "stop" else "warn"

    def watch(self, recipe: Watch, when_fast: Watch) -> Watch | None:
        """Return how closely to watch, by the flags and else by the recipe, without or with --fast_detection; None: not at all."""
        if self.disable_metrics_monitoring:
            return None
        watch = when_fast if self.fast_detection else recipe
        return watch._replace(
            monitor_every_n_steps=self.monitor_every_n_steps or watch.monitor_every_n_steps,
            plot_every_n_steps=self.plot_every_n_steps or watch.plot_every_n_steps,
            monitor_window=self.monitor_window or watch.monitor_window,
        )
