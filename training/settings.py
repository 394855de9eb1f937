"""What a user can say about training, and the settings of a whole run. Imports nothing heavy: `--help` passes through here.

The groups of the data stand in `sequences/settings.py`, that of the model in `models/settings.py`.
"""

from dataclasses import dataclass, field
from typing import Literal

from models.settings import ModelSettings
from sequences.settings import BatchSettings, CacheSettings, LengthSettings, LoadingSettings, SourceSettings


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """Objective"""

    beta: float = 1.0
    """Weight of the KL in the loss; 1: the evidence lower bound itself."""

    kl_warmup: float = 0.2
    """The weight of the KL rises from 0 to --beta over this many optimizer steps, or, below 1, this fraction of the run."""

    free_bits: float = 0.1
    """KL of each latent dimension that costs nothing, in nats, on average over a batch: the room for the latent to come to
    life in. 0: none."""

    def __post_init__(self) -> None:
        for name in ("beta", "kl_warmup", "free_bits"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"--{name} must be 0 or more, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Optimizer"""

    lr: float = 2e-3
    """Highest learning rate, reached after --warmup; from there it falls to 0 along a cosine."""

    warmup: float = 0.02
    """The learning rate rises over this many optimizer steps, or, below 1, this fraction of the run."""

    weight_decay: float = 0.01
    """Pull on the weight matrices towards 0, in units of the learning rate."""

    gradient_clip: float = 1.0
    """Longest gradient; what is longer is shortened to it. 0: never."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"--lr must be above 0, got {self.lr}")
        for name in ("warmup", "weight_decay", "gradient_clip"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"--{name} must be 0 or more, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Run"""

    max_epochs: int | None = None
    """Passes over the training data; default: as --max_steps says, or else enough for 3 million steps of sequences, at least
    3 passes and at most 30."""

    max_steps: int | None = None
    """Optimizer steps; with --max_epochs whichever ends first; default: no limit."""

    gradient_accumulation_steps: int = 1
    """Batches that make up one optimizer step."""

    precision: Literal["32-true", "16-mixed", "bf16-mixed"] = "32-true"
    """Numbers to compute with. A CPU runs 16-mixed as bf16-mixed where it has bf16 units, and as 32-true where not."""

    seed: int = 0
    """Of the weights, the order of the data and the noise: the same seed gives the same run."""

    log_every_n_steps: int = 50
    """Optimizer steps between two lines of progress and of metrics.csv."""

    output_dir: str = "runs"
    """Where the directories of runs are made."""

    run_name: str | None = None
    """Name of the run's directory; default: the kind of sequence and the time."""

    def __post_init__(self) -> None:
        for name in ("max_epochs", "max_steps", "gradient_accumulation_steps", "log_every_n_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be 1 or more, got {value}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"--seed must be 0 or more and below 2^32, got {self.seed}")
        if self.run_name is not None and (not self.run_name.strip(". ") or set(self.run_name) & set("/\\")):
            raise ValueError(f"--run_name must be the name of a directory, not a path, got {self.run_name!r}")


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
    run: RunSettings = field(default_factory=RunSettings)
