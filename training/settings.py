"""What a user can say about training, and the settings of a whole run. Imports nothing heavy: `--help` passes through here.

The groups of the data stand in `sequences/settings.py`, that of the model in `models/settings.py`.
"""

import re
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, NamedTuple

from models.settings import ModelSettings
from sequences.local_paths import refuse_no_paths, why_no_path
from sequences.settings import BatchSettings, CacheSettings, LengthSettings, LoadingSettings, SourceSettings

RATE_TOKENS = 8_000
"""Tokens of an optimizer step that --lr is stated for, where --scale_lr scales it."""

DEFAULT_RATE = 3e-3

FEWEST_IN_WINDOW = 12
"""Readings that a trend can be seen in."""

_DURATION = re.compile(r"(?:(\d+):)?(\d+):(\d+):(\d+)")


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """Objective"""

    beta: float = 1.0
    """Weight of the KL in the loss once --kl_schedule has run its course; 1: the evidence lower bound itself."""

    kl_schedule: Literal["constant", "linear", "sigmoid", "cyclical"] = "linear"
    """How the weight gets to --beta: at once, evenly, along an S, or again and again from 0."""

    kl_warmup: float = 0.2
    """The weight rises over this many optimizer steps, or, up to 1, this fraction of the run (cyclical: of each cycle)."""

    kl_cycle: float = 0.25
    """Length of a cycle of --kl_schedule cyclical, in optimizer steps, or, up to 1, as a fraction of the run."""

    free_bits: float | None = None
    """KL of each latent dimension that costs nothing, in nats, on average over a batch: the room for the latent to come to
    life in. 0: none; default: 0.1, with --latent_scope step 0.01, with --target_kl 0."""

    target_kl: float | None = None
    """KL in nats to steer to: a controller sets the weight in place of --kl_schedule and --beta; default: none."""

    label_weight: float = 1.0
    """Weight of the classification loss, in nats per labelled sequence, where the data have labels."""

    def __post_init__(self) -> None:
        for name in ("beta", "kl_warmup", "kl_cycle", "free_bits", "label_weight"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"--{name} must be 0 or more, got {value}")
        if self.kl_cycle == 0:
            raise ValueError("--kl_cycle must be above 0, got 0")
        if self.kl_schedule == "cyclical" and self.kl_warmup > self.kl_cycle > 1:
            raise ValueError(
                f"--kl_warmup {self.kl_warmup:g} is longer than --kl_cycle {self.kl_cycle:g}: the weight would never reach --beta"
            )
        if self.target_kl is not None and not 0 < self.target_kl < float("inf"):
            raise ValueError(f"--target_kl must be above 0, got {self.target_kl}")


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Optimizer"""

    lr: float | None = None
    """Highest learning rate, reached after --warmup; default: 3e-3, and less for optimizer steps of fewer than 8,000 tokens
    (1.2e-3 for 200)."""

    scale_lr: bool = False
    """Take --lr for the rate at 8,000 tokens an optimizer step and scale it in proportion to what a step really holds."""

    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the rate goes on after --warmup: down to 0 at the end of the run along a cosine or a line, or not at all."""

    warmup: float = 0.02
    """The learning rate rises over this many optimizer steps, or, up to 1, this fraction of the run."""

    weight_decay: float = 0.01
    """Pull on the weight matrices towards 0, in units of the learning rate."""

    gradient_clip: float = 1.0
    """Longest gradient; what is longer is shortened to it. 0: never."""

    gradient_accumulation_steps: int = 1
    """Batches that make up one optimizer step."""

    fused_optimizer: bool = True
    """AdamW in one pass over the weights instead of one for each operation; the numbers are the same to rounding."""

    def __post_init__(self) -> None:
        if self.lr is not None and not 0 < self.lr < float("inf"):
            raise ValueError(f"--lr must be above 0, got {self.lr}")
        for name in ("warmup", "weight_decay", "gradient_clip"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"--{name} must be 0 or more, got {getattr(self, name)}")
        _refuse_below(1, self, "gradient_accumulation_steps")

    def rate(self, tokens_per_step: float) -> float:
        """The highest learning rate in force. The default goes with the fourth root of a small step's tokens: sets whose steps
        are of 80 tokens learnt best at a third of what is best for 8,000."""
        share = tokens_per_step / RATE_TOKENS
        if self.scale_lr:
            return (self.lr or DEFAULT_RATE) * share
        return DEFAULT_RATE * min(1.0, share) ** 0.25 if self.lr is None else self.lr


@dataclass(frozen=True, kw_only=True)
class ComputeSettings:
    """Compute"""

    precision: Literal["32-true", "16-mixed", "bf16-mixed", "32", "16", "bf16"] = "32-true"
    """Numbers to compute with; 32, 16 and bf16 are short for the others. A CPU runs 16-mixed as bf16-mixed where it has bf16
    units, and as 32-true where not."""

    initial_loss_scale: float = 65536.0
    """What a 16-mixed run on a GPU multiplies its loss by at first; it halves by itself where that is too much."""

    accelerator: Literal["auto", "cpu", "gpu", "mps"] = "auto"
    """What to compute on; auto: a GPU where there is one."""

    devices: int | Literal["auto"] = 1
    """Processes on each node, one for each device; auto: all GPUs, or one process on a CPU."""

    num_nodes: int = 1
    """Machines that train together; more than one needs --run_name."""

    strategy: str = "auto"
    """How several processes share the work: auto or ddp; other names go to Lightning as they are."""

    sync_batchnorm: bool = False
    """Take the statistics of --posterior batch_norm over all processes."""

    compile_model: bool = False
    """Compile the network's layers and try them before the first step, which takes up to a minute. They are kept where that is
    faster; a run that could not compile, or would be slower, goes on without."""

    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """How hard the compiler tries; max-autotune is for GPUs, and so is reduce-overhead."""

    gradient_checkpointing: bool = False
    """Forget each layer's inner results and compute them anew on the way back: less memory for about a third more time."""

    plain_operations: bool = False
    """Leave attention, cross entropy and dropout to torch, which are written out by hand for a CPU otherwise."""

    cudnn_benchmark: bool | None = None
    """Let a GPU try several algorithms for each new shape; default: where shapes are few (--use_dynamic_padding false)."""

    deterministic: bool = False
    """Refuse operations whose result may differ from run to run; on a CPU all are the same anyway."""

    detect_anomaly: bool = False
    """Stop at the operation that makes a NaN on the way back; slow."""

    def __post_init__(self) -> None:
        if self.devices != "auto":
            _refuse_below(1, self, "devices")
        _refuse_below(1, self, "num_nodes")
        if not 0 < self.initial_loss_scale < float("inf"):
            raise ValueError(f"--initial_loss_scale must be above 0, got {self.initial_loss_scale}")


@dataclass(frozen=True, kw_only=True)
class ValidationSettings:
    """Validation and checkpoints"""

    val_check_interval: int | float = 1.0
    """How often to validate: a fraction of an epoch (0.1, 1.0) or a whole number of optimizer steps (500), which is counted
    from the beginning of each epoch; more than an epoch counts as the nearest number of whole ones."""

    limit_val_batches: int | float = 1.0
    """How much to validate on while training goes on: a fraction (0.1) or a number (10) of the validation batches, chosen
    once at random; 0: not at all. At its end a run validates on all."""

    sanity_checks: int = 0
    """Validation batches to try before the first training step."""

    early_stopping_patience: int | None = None
    """Stop after this many validations without a better ELBO; default: never."""

    checkpoint_every_n_steps: int | None = None
    """Optimizer steps between two checkpoints; default: one after each validation."""

    def __post_init__(self) -> None:
        for name in ("val_check_interval", "limit_val_batches"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"--{name} must be 0 or more, got {value}")
            if isinstance(value, float) and value > 1:
                raise ValueError(f"--{name} is a fraction up to 1.0 or a whole number, got {value}")
        if self.val_check_interval == 0:
            raise ValueError("--val_check_interval must be above 0, got 0; --limit_val_batches 0 validates not at all")
        if self.limit_val_batches == 0 and self.early_stopping_patience is not None:
            raise ValueError("--early_stopping_patience needs validations, but --limit_val_batches is 0")
        _refuse_below(0, self, "sanity_checks")
        _refuse_below(1, self, "early_stopping_patience", "checkpoint_every_n_steps")

    @property
    def is_on_all(self) -> bool:
        """Whether each validation goes through all batches; the whole number 1 is one batch."""
        return isinstance(self.limit_val_batches, float) and self.limit_val_batches == 1


class Watch(NamedTuple):
    """How closely a command's monitor looks where no flag says otherwise."""

    every_n_steps: int
    """Optimizer steps between two readings."""
    plot_every_n_steps: int
    window: int
    """Readings that trends are judged on."""
    probe_every_n_readings: int | None
    """How often the decoder is asked; None: only to confirm a suspicion."""


@dataclass(frozen=True, kw_only=True)
class MonitoringSettings:
    """Monitoring"""

    fast_detection: bool = False
    """Watch the posterior half as often or less, print nothing between verdicts, and ask whether the decoder uses the latent
    only to confirm a suspicion."""

    disable_metrics_monitoring: bool = False
    """Do not watch at all, whatever else is said: a collapse is then neither seen nor named, and nobody tells where the time goes
    (throughput.jsonl)."""

    monitor_every_n_steps: int | None = None
    """Optimizer steps between two readings of the posterior; default: 100, with --fast_detection 200
    (train_with_collapse_detection.py: 20, 50). A short run is read more often, so that it has 50 readings."""

    plot_every_n_steps: int | None = None
    """Optimizer steps between two drawings of the monitor's figures, by a process of their own; default: 1,000, with
    --fast_detection 2,000 (train_with_collapse_detection.py: 200, 500). A run's end is always drawn."""

    monitor_window: int | None = None
    """Readings that trends are judged on, 12 or more; default: 50 (train_with_collapse_detection.py: 100)."""

    on_collapse: Literal["warn", "stop"] = "warn"
    """What happens when the posterior has collapsed, or the decoder ignores it: one line says so, or the run saves a checkpoint
    and ends with exit code 7."""

    def __post_init__(self) -> None:
        _refuse_below(1, self, "monitor_every_n_steps", "plot_every_n_steps")
        _refuse_below(FEWEST_IN_WINDOW, self, "monitor_window")
        if self.disable_metrics_monitoring and self.on_collapse == "stop":
            raise ValueError("--on_collapse stop needs the monitor, which --disable_metrics_monitoring switches off")

    def monitor_arguments(self, watch: Watch, when_fast: Watch) -> dict[str, Any]:
        """What a command's monitor is made with, by the names of its arguments; `watch` and `when_fast` are the command's."""
        mine = when_fast if self.fast_detection else watch
        return {
            "update_frequency": self.monitor_every_n_steps or mine.every_n_steps,
            "plot_frequency": self.plot_every_n_steps or mine.plot_every_n_steps,
            "window_size": self.monitor_window or mine.window,
            "probe_every_n_readings": mine.probe_every_n_readings,
            "on_collapse": self.on_collapse,
        }


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Run"""

    max_epochs: int | None = None
    """Passes over the training data; default: as --max_steps says, or else enough for 3 million steps of sequences, at most
    30 passes."""

    max_steps: int | None = None
    """Optimizer steps; with --max_epochs whichever ends first; default: no limit."""

    max_time: str | None = None
    """Longest time that a run may train, as hours:minutes:seconds or days:hours:minutes:seconds; default: no limit."""

    fast_dev_run: bool = False
    """Two optimizer steps and one validation batch, to see whether everything works."""

    seed: int = 0
    """Of the weights, the order of the data and the noise: the same seed gives the same run."""

    output_dir: str = "runs"
    """Where the directories of runs are made."""

    run_name: str | None = None
    """Name of the run's directory; default: the kind of sequence and the time."""

    resume: str = "auto"
    """auto: a run with this name goes on where it stopped; never: refuse a name that is taken; or the path of the checkpoint
    to go on from."""

    init_from: str | None = None
    """Checkpoint to take the weights from, and nothing else."""

    log_every_n_steps: int = 50
    """Optimizer steps between two lines of progress and of metrics.csv."""

    logger: Literal["csv", "tensorboard", "wandb", "mlflow"] = "csv"
    """Where metrics go; metrics.csv in the run's directory is written in any case."""

    log_dir: str | None = None
    """Directory for what --logger writes; default: the run's directory."""

    def __post_init__(self) -> None:
        _refuse_below(1, self, "max_epochs", "max_steps", "log_every_n_steps")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"--seed must be 0 or more and below 2^32, got {self.seed}")
        if self.run_name is not None and (not self.run_name.strip(". ") or set(self.run_name) & set("/\\\0")):
            raise ValueError(f"--run_name must be the name of a directory, not a path, got {self.run_name!r}")
        if self.run_name is not None and self.run_name[0] in "-~":  # as a path it would be a flag, or somebody's home
            raise ValueError(f"--run_name must not begin with - or ~, got {self.run_name!r}")
        if self.run_name is not None and (reason := why_no_path(self.run_name)):
            raise ValueError(f"--run_name {reason}")
        if self.run_name is not None and len(self.run_name.encode()) > 255:
            raise ValueError("--run_name is longer than the 255 bytes that a directory's name may have")
        refuse_no_paths(self, "output_dir", "resume", "init_from", "log_dir")
        if self.init_from is not None and self.resume not in ("auto", "never"):
            raise ValueError("--init_from and --resume with a path exclude each other: weights alone, or the whole run")
        if self.max_time is not None and not self.time_limit:
            raise ValueError(f"--max_time must be a time like 0:45:00 or 2:12:00:00, got {self.max_time!r}")

    @property
    def time_limit(self) -> timedelta | None:
        """What --max_time says; None also for what is no time."""
        found = _DURATION.fullmatch(self.max_time or "")
        if found is None:
            return None
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """All that a training command can be told."""

    source: SourceSettings = field(default_factory=SourceSettings)
    lengths: LengthSettings = field(default_factory=LengthSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    batches: BatchSettings = field(default_factory=BatchSettings)
    loading: LoadingSettings = field(default_factory=LoadingSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    compute: ComputeSettings = field(default_factory=ComputeSettings)
    validation: ValidationSettings = field(default_factory=ValidationSettings)
    monitoring: MonitoringSettings = field(default_factory=MonitoringSettings)
    run: RunSettings = field(default_factory=RunSettings)


def _refuse_below(least: int, group: object, *names: str) -> None:
    for name in names:
        value = getattr(group, name)
        if value is not None and value < least:
            raise ValueError(f"--{name} must be {least} or more, got {value}")
