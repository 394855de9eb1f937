"""A model of your own in the same pipeline: data, batches, objective, monitors, checkpoints and resume stay as they are.

python -m examples.own_model                        # demo data
python -m examples.own_model --data_dir my_data     # tokens or text, with the flags of the training commands
"""

import sys

import torch
from lightning import Callback

from examples.own_model.model import BagToGRU
from seqvae.cli.command_line import parse_command_line
from seqvae.config.monitoring import OPTIMIZED_WATCH
from seqvae.config.training import TrainingSettings
from seqvae.console import set_up_output
from seqvae.errors import UsageError, run_command
from seqvae.monitors import PosteriorMetricsMonitor
from seqvae.training.callbacks.rescue import Rescue
from seqvae.training.fit import fit, make_data

PROG = "python -m examples.own_model"


def main() -> None:
    settings = parse_command_line(TrainingSettings, sys.argv[1:], prog=PROG, description=__doc__ or "")
    set_up_output()
    description = make_data(settings).description
    if description.kind != "tokens":
        raise UsageError(f"BagToGRU is a model of tokens, but these are {description.kind}: choose other data")
    torch.manual_seed(settings.run.seed)  # the network is drawn here, not in fit
    network = BagToGRU(description.vocabulary_size)
    monitors: list[Callback] = []
    watch = settings.monitoring.watch(OPTIMIZED_WATCH, when_fast=OPTIMIZED_WATCH)
    if watch is not None:  # else --disable_metrics_monitoring
        on_collapse = settings.monitoring.monitor_on_collapse
        monitor = PosteriorMetricsMonitor(**watch.monitor_arguments(), on_collapse=on_collapse)
        monitors = [monitor]
        if settings.monitoring.on_collapse == "rescue":
            monitors.append(Rescue(monitor, settings.monitoring.rescue_budget))
    fit(settings, monitors, network=network)


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
