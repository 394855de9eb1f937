"""Train a sequence VAE as fast as this machine allows.

    python train_optimized.py --fast_detection                              # demo data with known truth
    python train_optimized.py --fast_detection --data_dir my_data           # any Parquet of sequences
    python train_optimized.py --data_dir smiles --tokenizer characters      # text
    python train_optimized.py --disable_metrics_monitoring                  # nothing but speed
    torchrun --nproc_per_node 8 train_optimized.py --fast_detection         # or --devices 8

The recommended recipe, on top of the defaults that --help shows: mixed precision, two batches to an optimizer step,
validation ten times an epoch on a tenth of the validation data, and a posterior that is read now and then. The plain recipe
that it is measured against is train_with_collapse_detection.py.
"""

import sys
from typing import TYPE_CHECKING

from seqvae.cli.command_line import parse_command_line
from seqvae.config.run import Watch
from seqvae.config.training import OptimizedSettings as OptimizedSettings
from seqvae.config.training import TrainingSettings
from seqvae.console import set_up_output, share_machine
from seqvae.errors import run_command

if TYPE_CHECKING:
    from lightning import Callback

PROG = "train_optimized.py"
WATCH = Watch(every_n_steps=100, plot_every_n_steps=1000, window=50, probe_every_n_readings=4)
FAST_WATCH = Watch(every_n_steps=200, plot_every_n_steps=2000, window=50, probe_every_n_readings=None)
"""Without and with --fast_detection."""


def main() -> None:
    settings = parse_command_line(OptimizedSettings, sys.argv[1:], prog=PROG, description=__doc__ or "")
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
    monitor = PosteriorMetricsMonitor(**watch.monitor_arguments(WATCH, FAST_WATCH))
    return [monitor, ThroughputMonitor(every_n_steps=settings.run.log_every_n_steps)]


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
