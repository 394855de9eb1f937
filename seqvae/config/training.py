"""The settings of objective, optimizer and devices, and those of a whole training run with its two recipes.

The groups of the data are in `seqvae/config/data.py`, that of the model in `seqvae/config/model.py`, that of monitoring in
`seqvae/config/monitoring.py`, those of a run's length, validation and place in `seqvae/config/run.py`. Imports nothing heavy,
since `--help` imports it.
"""

import re
from dataclasses import dataclass, field, fields
from functools import partial
from typing import ClassVar, Literal

from seqvae.config.data import BatchSettings, CacheSettings, LengthSettings, LoadingSettings, SourceSettings
from seqvae.config.model import ModelSettings
from seqvae.config.monitoring import (
    OPTIMIZED_FAST_WATCH,
    OPTIMIZED_WATCH,
    REFERENCE_FAST_WATCH,
    REFERENCE_WATCH,
    MonitoringSettings,
    Watch,
)
from seqvae.config.run import RunSettings, ValidationSettings, duration_of, refuse_below
from seqvae.files import refuse_no_paths

RATE_TOKENS = 8_000
"""Tokens of an optimizer step that the default rate is for."""
DEFAULT_RATE = 3e-3
SHARDED = ("fsdp", "fsdp2")
"""Values of --strategy that share the network itself out."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """Objective"""

    beta: float = 1.0
    """Weight of the KL in the loss once --kl_schedule has run its course; 1: the evidence lower bound itself."""

    kl_schedule: Literal["constant", "linear", "sigmoid", "cyclical"] = "linear"
    """How the weight gets to --beta: at once, evenly, along an S, or repeatedly from 0."""

    kl_warmup: float = 0.2
    """The weight rises over this many optimizer steps, or, up to 1, this fraction of the run (cyclical: of each cycle)."""

    kl_cycle: float = 0.25
    """Length of a cycle of --kl_schedule cyclical, in optimizer steps, or, up to 1, as a fraction of the run."""

    free_bits: float | None = None
    """KL of each latent dimension that costs nothing, in nats, on average over a batch: the room for the latent to come to
    life in. 0: none; default: 0.1, with --latent_scope step 0.01, with --target_kl 0."""

    free_bits_by: Literal["dimension", "group", "total"] = "dimension"
    """What has free bits of its own: each dimension, each group of --free_bits_group dimensions, or the latent as a whole. A group
    has those of its dimensions together, whichever of them uses it."""

    free_bits_group: int | None = None
    """Dimensions of a group of --free_bits_by group, neighbours in the latent; the last group may be smaller."""

    step_free_bits: float | None = None
    """--free_bits of the latents of the steps with --latent_scope both; default: 0.01, with --target_kl 0."""

    target_kl: float | None = None
    """KL in nats to steer to: a controller sets the weight in place of --kl_schedule and --beta; default: none."""

    pretrain_autoencoder: int = 0
    """Optimizer steps at the beginning in which the KL weighs nothing; then --kl_schedule and the learning rate begin."""

    reset_decoder: bool = False
    """Let the decoder start from scratch after --pretrain_autoencoder, so that it learns beside an encoder that has something to
    tell."""

    aggressive_encoder: bool = False
    """Let the encoder learn alone before each step of all weights, until that brings nothing; over when the mutual information
    stops rising."""

    aggressive_budget: float = 1.0
    """Steps of the encoder alone in --aggressive_encoder at most, as a share of the run's optimizer steps."""

    contrastive_weight: float = 0.0
    """Weight of the contrastive loss: the nats that it takes to find out which sequence of a batch a latent was drawn for."""

    label_weight: float | None = None
    """Weight of the classification loss, in nats per labelled sequence, where the data have labels; default: 0, so that they are
    shown in the report and train nothing (a run that goes on: as it began)."""

    def __post_init__(self) -> None:
        refuse_below(
            0,
            self,
            "beta",
            "kl_warmup",
            "kl_cycle",
            "free_bits",
            "step_free_bits",
            "label_weight",
            "contrastive_weight",
            "pretrain_autoencoder",
            "aggressive_budget",
        )
        if self.reset_decoder and not self.pretrain_autoencoder:
            raise ValueError("--reset_decoder needs --pretrain_autoencoder, the steps after which it is reset")
        refuse_below(1, self, "free_bits_group")
        if (self.free_bits_by == "group") != (self.free_bits_group is not None):
            raise ValueError("--free_bits_by group and --free_bits_group N, the dimensions of a group, need each other")
        if self.kl_cycle == 0:
            raise ValueError("--kl_cycle must be above 0, got 0")
        if self.kl_schedule == "cyclical" and self.kl_warmup > self.kl_cycle > 1:
            raise ValueError(
                f"--kl_warmup {self.kl_warmup:g} is longer than --kl_cycle {self.kl_cycle:g}: the weight would never reach --beta"
            )
        if self.target_kl is not None and not 0 < self.target_kl < float("inf"):
            raise ValueError(f"--target_kl must be above 0, got {self.target_kl}")

    @property
    def weight_of_labels(self) -> float:
        """Return the weight of the classification loss."""
        return self.label_weight or 0.0

    def free_bits_shared_by(self, dimensions: int) -> int:
        """Return how many dimensions, of so many, have their free bits together; the last ones may be fewer."""
        if self.free_bits_by == "total":
            return dimensions
        return self.free_bits_group or 1


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Optimizer"""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """What moves the weights; muon: Muon for the matrices inside the layers of encoder and decoder, AdamW for all else."""

    lr: float | None = None
    """Highest learning rate, reached after --warmup; default: 3e-3, and less for optimizer steps of fewer than 8,000 tokens
    (1.2e-3 for 200)."""

    scale_lr: bool = False
    """Take --lr for the rate at --lr_base_tokens an optimizer step and scale it in proportion to what a step really holds."""

    lr_base_tokens: int = RATE_TOKENS
    """Tokens, steps of sequences, of the optimizer step that the --lr of --scale_lr was found for; it needs --scale_lr."""

    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the rate goes on after --warmup: down to 0 at the end of the run along a cosine or a line, or not at all."""

    warmup: float = 0.02
    """The learning rate rises over this many optimizer steps, or, up to 1, this fraction of the run."""

    weight_decay: float = 0.01
    """Pull on the weight matrices towards 0, in units of the learning rate."""

    ema: float | None = None
    """Validate, save and export an exponential moving average of the weights with this decay, as 0.999: a mean over about
    1 / (1 - decay) optimizer steps. Training goes on with the weights themselves; default: there is no average."""

    gradient_clip: float = 1.0
    """Longest gradient; what is longer is shortened to it. 0: never."""

    gradient_accumulation_steps: int = 1
    """Batches of each process that make up one optimizer step."""

    batches_per_step: int | None = None
    """Batches that make up one optimizer step, over all processes, however many: --gradient_accumulation_steps becomes this divided
    by their number. Default: --gradient_accumulation_steps times their number; where a run goes on, as it began."""

    fused_optimizer: bool = True
    """AdamW in one pass over the weights instead of one for each operation; the numbers are the same to rounding."""

    def __post_init__(self) -> None:
        if self.lr is not None and not 0 < self.lr < float("inf"):
            raise ValueError(f"--lr must be above 0, got {self.lr}")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"--ema must be above 0 and below 1, got {self.ema}")
        refuse_below(0, self, "warmup", "weight_decay", "gradient_clip")
        refuse_below(1, self, "gradient_accumulation_steps", "batches_per_step", "lr_base_tokens")
        if self.lr_base_tokens != RATE_TOKENS and not self.scale_lr:
            raise ValueError("--lr_base_tokens needs --scale_lr: without it --lr is the rate itself")

    def rate(self, tokens_per_step: float) -> float:
        """Return the highest learning rate in force.

        The default goes with the fourth root of a small step's tokens: sets whose steps are of 80 tokens learnt best at a third of
        what is best for 8,000.
        """
        if self.scale_lr:
            return self.base_rate * tokens_per_step / self.lr_base_tokens
        if self.lr is not None:
            return self.lr
        return DEFAULT_RATE * min(1.0, tokens_per_step / RATE_TOKENS) ** 0.25

    @property
    def base_rate(self) -> float:
        """The rate that --scale_lr scales: --lr, or the default at RATE_TOKENS."""
        return DEFAULT_RATE if self.lr is None else self.lr


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

    devices: int | Literal["auto"] | None = None
    """Processes on each node, one for each device; auto: all GPUs, or one process on a CPU; default: as many as a launcher started,
    or one."""

    num_nodes: int | None = None
    """Machines that train together; default: as a launcher says, or one."""

    launcher: Literal["ray"] | None = None
    """What starts the processes; ray: Ray, which needs the extra ray and --ray_workers; default: --devices, or what started this
    command, as torchrun."""

    ray_workers: str | None = None
    """Processes that Ray starts, as 4, or the fewest and the most, as 2:8: as many as it has room for and as can share
    --batches_per_step evenly. --num_workers 2:8 says the same."""

    max_restarts: int = 10
    """How often Ray starts the processes again where one was lost; then the run ends."""

    storage_path: str | None = None
    """Where Ray keeps a copy of the run and its last checkpoint, for machines without a shared disk: a path that all of them see,
    or s3://bucket/folder and the like; default: nowhere."""

    distributed_timeout: str = "0:10:00"
    """Longest time that processes wait for one of them, as hours:minutes:seconds; then the run ends and names it."""

    strategy: str = "auto"
    """How several processes share the work: auto or ddp, where each holds the whole network; fsdp (or fsdp2), where each holds its
    share of weights, gradients and optimizer, for networks that are too large for one device. Other names go to Lightning as they
    are, as deepspeed does, but for those that fork or spawn, as ddp_spawn, ddp_fork and ddp_notebook do."""

    bucket_megabytes: float = 25.0
    """Gradients that several processes average in one message: less lets the first go sooner, while others are still computed."""

    compress_gradients: Literal["none", "fp16", "bf16"] = "none"
    """Numbers in which gradients go to other processes: half as many bytes, for links that are slower than the computation."""

    sync_batchnorm: bool = False
    """Take the statistics of --posterior batch_norm or du over all processes."""

    compile_model: bool = False
    """Compile the network's layers before the first step, and keep them where that is faster. On a CPU one layer is tried first,
    and the answer remembered for this machine; a run that could not compile, or would be slower, goes on without."""

    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """How hard the compiler tries; max-autotune is for GPUs, and so is reduce-overhead."""

    gradient_checkpointing: bool = False
    """Recompute each layer's inner results in the backward pass: less memory for about a third more time."""

    plain_operations: bool = False
    """Leave attention, cross entropy and dropout to torch, which are written out by hand for a CPU otherwise."""

    cudnn_benchmark: bool | None = None
    """Let a GPU try several algorithms for each new shape; default: where shapes are few (--use_dynamic_padding false)."""

    deterministic: bool = False
    """Refuse operations whose result may differ from run to run; on a CPU all are the same anyway."""

    detect_anomaly: bool = False
    """Stop at the operation that makes a NaN in the backward pass; slow."""

    def __post_init__(self) -> None:
        if self.devices != "auto":
            refuse_below(1, self, "devices")
        refuse_below(1, self, "num_nodes")
        refuse_below(0, self, "max_restarts")
        if self.launcher is None and self.ray_workers is not None:
            raise ValueError(f"--ray_workers {self.ray_workers} needs --launcher ray")
        refuse_no_paths(self, remote="storage_path")
        if self.launcher is None and self.storage_path is not None:
            raise ValueError(f"--storage_path {self.storage_path} needs --launcher ray")
        if self.launcher == "ray":
            if not 1 <= self.ray_bounds[0] <= self.ray_bounds[1]:
                raise ValueError(
                    "--launcher ray needs --ray_workers, a number of processes as 4, or the fewest and the most as 2:8, got "
                    f"{self.ray_workers}"
                )
            if self.devices is not None or self.num_nodes is not None:
                raise ValueError("--launcher ray takes --ray_workers in place of --devices and --num_nodes")
        if not duration_of(self.distributed_timeout):
            raise ValueError(f"--distributed_timeout must be a time like 0:10:00, got {self.distributed_timeout!r}")
        if not 0 < self.initial_loss_scale < float("inf"):
            raise ValueError(f"--initial_loss_scale must be above 0, got {self.initial_loss_scale}")
        if self.strategy in SHARDED and self.compile_model:
            raise ValueError(
                f"--strategy {self.strategy} was not tried with compiled layers: leave out --compile_model"
            )
        if not 0 < self.bucket_megabytes < float("inf"):
            raise ValueError(f"--bucket_megabytes must be above 0, got {self.bucket_megabytes}")
        if self.compress_gradients != "none" and self.strategy not in ("auto", "ddp"):
            raise ValueError(
                f"--compress_gradients {self.compress_gradients} needs --strategy ddp, and {self.strategy} was given"
            )
        if any(way in self.strategy for way in ("spawn", "fork", "notebook")):
            raise ValueError(
                f"--strategy {self.strategy}: processes that are spawned or forked by a running one are not supported. Give "
                "--strategy ddp, which starts the command once for each of --devices, or start it with torchrun"
            )

    @property
    def ray_bounds(self) -> tuple[int, int]:
        """Return the fewest and the most processes of --ray_workers; (0, 0) where it says no numbers."""
        found = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", self.ray_workers or "", re.ASCII)
        return (0, 0) if found is None else (int(found[1]), int(found[2] or found[1]))


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """All settings of a training run, without a recipe."""

    WATCH: ClassVar[Watch | None] = None
    """How closely the recipe watches the posterior where no flag says otherwise; None: not at all."""
    FAST_WATCH: ClassVar[Watch | None] = None
    """The same with --fast_detection."""
    VERBOSE_WATCH: ClassVar[bool] = False
    """Whether each reading is printed without --fast_detection."""

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

    def __post_init__(self) -> None:
        """Refuse settings of different groups that do not go together."""
        if self.objective.aggressive_encoder and self.model.latent_scope == "both":
            raise ValueError(
                "--aggressive_encoder is for one level of latents, and --latent_scope both has two: leave one out"
            )
        if self.objective.aggressive_encoder and self.cache.stream:
            raise ValueError(
                "--aggressive_encoder needs batches from all over the data, and --stream has only some of them at a time: "
                "leave one of them out"
            )
        if self.compute.strategy not in ("auto", "ddp"):
            whole = [
                ("--aggressive_encoder", self.objective.aggressive_encoder),
                ("--optimizer muon", self.optimizer.optimizer == "muon"),
                ("--ema", self.optimizer.ema is not None),
            ]
            if refused := [flag for flag, is_given in whole if is_given]:
                raise ValueError(
                    f"{refused[0]} needs whole weights in each process, and --strategy {self.compute.strategy} shares them out: "
                    "leave one of them out"
                )
        if self.objective.contrastive_weight and self.model.latent_scope == "step":
            raise ValueError(
                "--contrastive_weight tells sequences apart by their latent, and --latent_scope step gives them one for each step: "
                "leave one of them out"
            )
        if self.model.latent_scope == "both" and self.monitoring.on_collapse == "rescue":
            raise ValueError(
                "--on_collapse rescue heals one latent, and --latent_scope both has two: leave it out, or take --on_collapse stop"
            )
        if self.model.is_discrete:
            self._refuse_no_code()

    def _refuse_no_code(self) -> None:
        """Refuse what is for latents with a distribution."""
        for name in ("contrastive_weight", "pretrain_autoencoder", "aggressive_encoder"):
            if getattr(self.objective, name):
                raise ValueError(f"--{name} is for Gaussian latents, and --latent discrete has codes")
        for each in fields(ObjectiveSettings):
            value = getattr(self.objective, each.name)
            is_weight = each.name.startswith(("beta", "kl_", "free_bits", "step_free_bits", "target_kl"))
            if not is_weight or value in (each.default, "constant") or (each.name, value) == ("free_bits", 0):
                continue  # what is in force may be said
            raise ValueError(
                f"--{each.name} {value} has no meaning with --latent discrete: a code costs the logarithm of --codes, however it "
                "is weighed"
            )
        if self.monitoring.on_collapse == "rescue":
            raise ValueError(
                "--on_collapse rescue steers the KL, and --latent discrete has none to steer: give --revive_codes instead"
            )
        if self.compute.strategy in SHARDED:
            raise ValueError(
                f"--strategy {self.compute.strategy} was not tried with --latent discrete: give --strategy ddp"
            )

    @property
    def watch(self) -> Watch | None:
        """Return how closely this run watches its posterior; None: not at all."""
        if self.WATCH is None or self.FAST_WATCH is None:
            return None
        return self.monitoring.watch(self.WATCH, self.FAST_WATCH)


@dataclass(frozen=True, kw_only=True)
class OptimizedSettings(TrainingSettings):
    """The recommended recipe, which train_optimized.py explains: fast, and watched now and then."""

    WATCH, FAST_WATCH = OPTIMIZED_WATCH, OPTIMIZED_FAST_WATCH

    optimizer: OptimizerSettings = field(default_factory=partial(OptimizerSettings, gradient_accumulation_steps=2))
    compute: ComputeSettings = field(default_factory=partial(ComputeSettings, precision="16-mixed"))
    validation: ValidationSettings = field(
        default_factory=partial(ValidationSettings, val_check_interval=0.1, limit_val_batches=0.1)
    )


@dataclass(frozen=True, kw_only=True)
class ReferenceSettings(TrainingSettings):
    """The plain recipe, which train_with_collapse_detection.py explains: without measures for speed, watched closely."""

    WATCH, FAST_WATCH = REFERENCE_WATCH, REFERENCE_FAST_WATCH
    VERBOSE_WATCH = True

    batches: BatchSettings = field(default_factory=partial(BatchSettings, batch_size=4, bucketing=False))
    optimizer: OptimizerSettings = field(default_factory=partial(OptimizerSettings, fused_optimizer=False))
    compute: ComputeSettings = field(default_factory=partial(ComputeSettings, plain_operations=True))
