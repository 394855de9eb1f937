"""Train a sequence VAE plainly, and watch its posterior as closely as can be.

    python train_with_collapse_detection.py                              # demo data with known truth
    python train_with_collapse_detection.py --data_dir my_data           # any Parquet of sequences
    python train_with_collapse_detection.py --fast_detection             # watched less closely, and quietly

What a careful person would write without any of this package's measures: 32-bit numbers, random batches of four sequences,
plain AdamW, torch's own operations, a full validation after each epoch. It is the reference that train_optimized.py is
measured against, and the run to look at where something seems wrong.
"""

import sys
from typing import TYPE_CHECKING

from seqvae.cli.command_line import parse_command_line
from seqvae.config.run import Watch
from seqvae.config.training import ReferenceSettings as ReferenceSettings
from seqvae.config.training import TrainingSettings
from seqvae.console import set_up_output, share_machine
from seqvae.errors import run_command

if TYPE_CHECKING:
    from lightning import Callback

PROG = "train_with_collapse_detection.py"
WATCH = Watch(every_n_steps=20, plot_every_n_steps=200, window=100, probe_every_n_readings=1)
FAST_WATCH = Watch(every_n_steps=50, plot_every_n_steps=500, window=100, probe_every_n_readings=None)
"""Without and with --fast_detection."""


def main() -> None:
    settings = parse_command_line(ReferenceSettings, sys.argv[1:], prog=PROG, description=__doc__ or "")
    share_machine()

    from seqvae.training.fit import fit  # only now: torch and Lightning take seconds, which --help must not

    set_up_output()  # after Lightning, which sets the levels of its loggers when it is imported
    fit(settings, callbacks(settings))


def callbacks(settings: TrainingSettings) -> "list[Callback]":
    """What watches the run, beside what belongs to every run."""
    from seqvae.monitors import PosteriorMetricsMonitor, ThroughputMonitor

    watch = settings.monitoring
    if watch.disable_metrics_monitoring:
        return []
    monitor = PosteriorMetricsMonitor(**watch.monitor_arguments(WATCH, FAST_WATCH), verbose=not watch.fast_detection)
    return [monitor, ThroughputMonitor(every_n_steps=settings.run.log_every_n_steps)]


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
