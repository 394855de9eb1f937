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

# What is fast about it, and how much faster a run of tokens is with it (docs/performance.md, two CPU cores with bf16 units):
#
#   --bucketing true                    3.0 x  sequences of similar length together: little padding is computed
#   --plain_operations false            2.4 x  attention, cross entropy and dropout written out for a CPU
#   --precision 16-mixed                2.2 x  half precision; on a CPU bf16 where it has the units, else 32 bits
#   --batch_size null                   1.7 x  a batch is filled up to a budget of tokens, not of sequences
#   --limit_val_batches 0.1             1.4 x  a fixed tenth on the way; the end of a run is validated on all
#   --val_check_interval 0.1                   ten such validations in an epoch
#   --gradient_accumulation_steps 2            steps of twice the tokens for the memory of one batch
#   --fused_optimizer true                     AdamW in one pass over the weights: it shows on GPUs
#   --use_dynamic_padding true                 each batch is as long as its longest sequence
#
# How closely the posterior is watched stands in callbacks(), without and with --fast_detection.

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.append(str(Path(__file__).parent))  # which python -P leaves out

from seqvae.cli.command_line import parse_command_line
from seqvae.config.training import OptimizedSettings, TrainingSettings
from seqvae.console import set_up_output, share_machine
from seqvae.errors import run_command

if TYPE_CHECKING:
    from lightning import Callback

PROG = "train_optimized.py"


def main() -> None:
    settings = parse_command_line(OptimizedSettings, sys.argv[1:], prog=PROG, description=__doc__ or "")
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
    optimizer, validation, compute, run = settings.optimizer, settings.validation, settings.compute, settings.run

    data = SequenceDataModule(
        settings.source,  # Parquet, which is encoded once into a memory-mapped cache: 1.1 x
        settings.lengths,
        settings.cache,
        settings.batches,  # similar lengths together, up to a budget of tokens
        settings.loading,  # a thread that prefetches, 40 times cheaper than worker processes: 1.06 x
        seed=run.seed,
        accumulate=optimizer.gradient_accumulation_steps,  # a batch knows the tokens of its whole optimizer step
        batches_per_step=optimizer.batches_per_step,  # of all processes, by which small sets are cut
        limit_val_batches=validation.limit_val_batches or 1,  # a tenth, chosen once
        attention_steps=settings.model.attention_steps,  # where --level_cost lets attention cost as much as all else
    )

    torch.manual_seed(run.seed)
    network = build_network(data, settings.model, compute, devices.world)

    cadence = validation_cadence(  # from shares of an epoch to Lightning's batches, always between two optimizer steps
        validation.val_check_interval,
        batches_per_epoch=data.batches_per_epoch(devices.world),
        accumulate=data.accumulate,
    )
    trainer_arguments: dict[str, Any] = {
        "accelerator": devices.accelerator,  # a GPU where there is one
        "devices": devices.per_node,
        "num_nodes": devices.nodes,
        "accumulate_grad_batches": data.accumulate,
        "val_check_interval": cadence.batches or 1.0,
        "check_val_every_n_epoch": cadence.epochs,
        "limit_val_batches": 1.0 if validation.limit_val_batches else 0,  # the data module takes the tenth
        "num_sanity_val_steps": validation.sanity_checks,
        "benchmark": wants_benchmark(settings),  # cuDNN tries algorithms only where shapes repeat
        "deterministic": compute.deterministic,
        "detect_anomaly": compute.detect_anomaly,
        "profiler": NoProfiler(),  # Lightning's own that does nothing takes 30 us per micro-batch
    }

    # fit() adds what a run needs in any case: precision, strategy, checkpoints, progress, resuming, recovery after NaN.
    watching = [*callbacks(settings), *make_pictures(data, settings)]
    fit(settings, watching, network=network, data=data, trainer_arguments=trainer_arguments)


def callbacks(settings: TrainingSettings) -> "list[Callback]":
    """Return the monitors of this recipe: of the posterior, and of where the time goes."""
    from seqvae.monitors import PosteriorMetricsMonitor, ThroughputMonitor
    from seqvae.training.callbacks.rescue import Rescue

    watch = settings.watch
    if watch is None:  # --disable_metrics_monitoring
        return []
    monitors = [
        PosteriorMetricsMonitor(  # values: without, or with --fast_detection
            update_frequency=watch.monitor_every_n_steps,  # 100, or 200 steps between two readings: one device sync each
            plot_frequency=watch.plot_every_n_steps,  # 1000, or 2000: figures are drawn by another process
            window_size=watch.monitor_window,  # 50, or 50 readings that a trend is judged on
            probe_every_n_readings=watch.probe_every_n_readings,  # 4, or None: only to confirm a suspicion
            on_collapse=settings.monitoring.monitor_on_collapse,
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
