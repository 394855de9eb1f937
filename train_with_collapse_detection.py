"""Train a sequence VAE plainly, and watch its posterior as closely as can be.

    python train_with_collapse_detection.py                              # demo data with known truth
    python train_with_collapse_detection.py --data_dir my_data           # any Parquet of sequences
    python train_with_collapse_detection.py --fast_detection             # watched less closely, and quietly

What a careful person would write without any of this package's measures: 32-bit numbers, random batches of four sequences,
plain AdamW, torch's own operations, a full validation after each epoch. It is the reference that train_optimized.py is
measured against, and the run to look at where something seems wrong.
"""

# What is plain about it:
#
#   --batch_size 4                      sequences, whatever their lengths
#   --bucketing false                   random batches, in which long sequences pad short ones
#   --precision 32-true                 no rounding to half precision to wonder about
#   --plain_operations true             torch's own attention, cross entropy and dropout
#   --fused_optimizer false             torch's default AdamW
#   --gradient_accumulation_steps 1     a batch is a step
#   --val_check_interval 1.0            a validation after each epoch
#   --limit_val_batches 1.0             on all of the validation data

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.append(str(Path(__file__).parent))  # which python -P leaves out

from seqvae.cli.command_line import parse_command_line
from seqvae.config.training import ReferenceSettings, TrainingSettings
from seqvae.console import set_up_output, share_machine
from seqvae.errors import run_command

if TYPE_CHECKING:
    from lightning import Callback

PROG = "train_with_collapse_detection.py"


def main() -> None:
    settings = parse_command_line(ReferenceSettings, sys.argv[1:], prog=PROG, description=__doc__ or "")
    share_machine()  # before torch is imported; that takes seconds, so --help comes first

    import torch

    from seqvae.data.datamodule import SequenceDataModule
    from seqvae.training.distributed import resolve_devices
    from seqvae.training.fit import fit, prepare_settings
    from seqvae.training.network import build_network
    from seqvae.training.trainer import NoProfiler, make_pictures, validation_cadence, wants_benchmark

    set_up_output()  # after Lightning, which sets the levels of its loggers when it is imported
    settings = prepare_settings(settings)  # what depends on this machine; refuses before data are read
    devices = resolve_devices(settings.compute)
    validation, compute, run = settings.validation, settings.compute, settings.run

    data = SequenceDataModule(
        *(settings.source, settings.lengths, settings.cache, settings.batches, settings.loading),
        seed=run.seed,
        accumulate=settings.optimizer.gradient_accumulation_steps,
        batches_per_step=settings.optimizer.batches_per_step,
        limit_val_batches=validation.limit_val_batches or 1,
        attention_steps=settings.model.attention_steps,
    )

    torch.manual_seed(run.seed)
    network = build_network(data, settings.model, compute, devices.world)  # fit() gives it torch's own operations

    cadence = validation_cadence(
        validation.val_check_interval,
        batches_per_epoch=data.batches_per_epoch(devices.world),
        accumulate=data.accumulate,
    )
    trainer_arguments: dict[str, Any] = {
        "accelerator": devices.accelerator,
        "devices": devices.per_node,
        "num_nodes": devices.nodes,
        "accumulate_grad_batches": data.accumulate,
        "val_check_interval": cadence.batches or 1.0,
        "check_val_every_n_epoch": cadence.epochs,
        "limit_val_batches": 1.0 if validation.limit_val_batches else 0,
        "num_sanity_val_steps": validation.sanity_checks,
        "benchmark": wants_benchmark(settings),
        "deterministic": compute.deterministic,
        "detect_anomaly": compute.detect_anomaly,
        "profiler": NoProfiler(),
    }

    # fit() adds what a run needs in any case: precision, strategy, checkpoints, progress, resuming, recovery after NaN.
    watching = [*callbacks(settings), *make_pictures(data, settings)]
    fit(settings, watching, network=network, data=data, trainer_arguments=trainer_arguments)


def callbacks(settings: TrainingSettings) -> "list[Callback]":
    """Return the monitors of this recipe, which read as often as can be."""
    from seqvae.monitors import PosteriorMetricsMonitor, ThroughputMonitor
    from seqvae.training.callbacks.rescue import Rescue

    watch = settings.watch
    if watch is None:  # --disable_metrics_monitoring
        return []
    monitors = [
        PosteriorMetricsMonitor(  # values: without, or with --fast_detection
            update_frequency=watch.monitor_every_n_steps,  # 20, or 50 steps between two readings
            plot_frequency=watch.plot_every_n_steps,  # 200, or 500: figures are drawn by another process
            window_size=watch.monitor_window,  # 100, or 100 readings that a trend is judged on
            probe_every_n_readings=watch.probe_every_n_readings,  # 1, or None: at each reading, or only to confirm a suspicion
            on_collapse=settings.monitoring.monitor_on_collapse,
            verbose=not settings.monitoring.fast_detection,  # print each reading
            level=level,  # one monitor for each level of latents: with --latent_scope both a second one, of the steps
        )
        for level in settings.model.watched_levels
    ]
    speed = ThroughputMonitor(every_n_steps=settings.run.log_every_n_steps)
    if (
        settings.monitoring.on_collapse == "rescue"
    ):  # another objective and a fresh optimizer, where the monitor finds a collapse
        return [*monitors, Rescue(monitors[0], settings.monitoring.rescue_budget), speed]
    return [*monitors, speed]


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
