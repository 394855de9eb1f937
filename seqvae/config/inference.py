"""The settings of the commands that use a model. Imports nothing heavy, since `--help` imports it."""

from dataclasses import dataclass, field
from typing import Literal

from seqvae.config.data import TYPED_ONLY, refuse_no_endpoint
from seqvae.config.run import refuse_below
from seqvae.files import refuse_no_paths


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """Data to use it on"""

    data_dir: str | None = None
    """Directory, Parquet file or glob with the data, also in a store, read as the model's own were; default: those it was trained
    on."""

    allow_remote: bool = field(default=False, metadata=TYPED_ONLY)
    """Fetch the data that the model was trained on from a store; what is typed as --data_dir is fetched anyway."""

    endpoint_url: str | None = None
    """Address of a store that is not the provider's own, like MinIO: http://localhost:9000; default: as in the training, for the
    training's own data."""

    sequence_column: str | None = None
    """Column that holds one sequence a row, where it is called otherwise than in the training data."""

    id_column: str | None = None
    """Column that names the sequence a row belongs to, where it is called otherwise than in the training data."""

    label_path: str | None = None
    """CSV or Parquet with the sequences' ids and labels; default: a column of the data, or the label file of the training."""

    bad_values: Literal["error", "drop", "missing"] | None = None
    """NaN, infinity, nulls where none may be, empty sequences: refuse, leave out the sequence, take NaN for a missing value;
    default: as in the training."""

    on_bad_files: Literal["error", "skip"] | None = None
    """Files that cannot be read: refuse, or leave them out and count them; default: as in the training."""

    max_sequence_length: int | None = None
    """Longest sequence in steps; default: as in the training."""

    cache_dir: str | None = None
    """Where the converted data lie; default: as in the training."""

    def __post_init__(self) -> None:
        refuse_no_paths(self, "label_path", "cache_dir", remote="data_dir")
        refuse_no_endpoint(self.endpoint_url)
        refuse_below(1, self, "max_sequence_length")


@dataclass(frozen=True, kw_only=True)
class DataChoices(DataSource):
    """Data to use it on"""

    split: str | None = None
    """train, valid or test; pool: data without splits."""


@dataclass(frozen=True, kw_only=True)
class MachineChoices:
    """Machine"""

    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """What to compute on; auto: a GPU of NVIDIA or AMD where there is one. Apple's have no float64."""

    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    """bf16-mixed: half the time where there are bf16 units, and an NLL that is off by up to 0.02 %."""

    seed: int = 0
    """Seed of all random draws: the same seed gives the same result."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"--seed must be 0 or more and below 2^32, got {self.seed}")


@dataclass(frozen=True, kw_only=True)
class OutputSettings:
    """Result"""

    output: str | None = None
    """File to write, CSV where it ends in .csv and else Parquet (export: directory); default: Parquet, named after the action, in
    the current directory."""

    def __post_init__(self) -> None:
        refuse_no_paths(self, "output")


@dataclass(frozen=True, kw_only=True)
class DrawingSettings:
    """Drawing"""

    temperature: float = 0.0
    """1: as the model predicts; lower: closer to the most likely value; 0: the most likely value."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"--temperature must be 0 or more, got {self.temperature}")


@dataclass(frozen=True, kw_only=True)
class SampleSettings:
    """Sampling"""

    temperature: float = 1.0
    """1: as the model predicts; lower: closer to the most likely value; 0: the most likely value."""

    count: int = 1000
    """How many sequences."""

    length: int | None = None
    """Steps of each (tokens: at most); default: as the training sequences. Tokens find their end themselves."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"--temperature must be 0 or more, got {self.temperature}")
        refuse_below(1, self, "count", "length")


@dataclass(frozen=True, kw_only=True)
class PathSettings:
    """Interpolation"""

    steps: int = 8
    """Points on the path, both ends included."""

    def __post_init__(self) -> None:
        refuse_below(2, self, "steps")


@dataclass(frozen=True, kw_only=True)
class ImputeSettings:
    """Imputation"""

    draws: int = 16
    """Latents drawn for each sequence, to average values and deviations over; 0: the posterior's mean alone."""

    variables: str | None = None
    """Only these features or variables, separated by commas; default: all of which training saw values."""

    def __post_init__(self) -> None:
        refuse_below(0, self, "draws")


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings:
    """Evaluation"""

    iw_samples: int | None = None
    """Samples of z for the importance-weighted NLL of each sequence, IW-NLL: the more, the tighter. Published tables have 500;
    default: 16 to 500, as many as bring the error bar of a batch to 0.2 nats; with --compare 500."""

    iw_sequences: int = 1000
    """How many sequences, chosen at random, the IW-NLL is computed of; a sample is a pass of the decoder. 0: none."""

    probe: str | None = None
    """Column with a label, in the data or the --label_path: how well the posterior means tell its classes apart."""

    json: str | None = None
    """File that everything is written to, as JSON."""

    def __post_init__(self) -> None:
        refuse_no_paths(self, "json")
        refuse_below(1, self, "iw_samples")
        refuse_below(0, self, "iw_sequences")
        if self.probe is not None and not self.probe:
            raise ValueError("--probe is empty: give the name of a column")


@dataclass(frozen=True, kw_only=True)
class PriorSettings:
    """Prior over codes"""

    width: int = 128
    """Numbers that it remembers of the codes before."""

    max_epochs: int = 100
    """Passes over the training codes at most; it ends five after the best one, by the validation split."""

    lr: float = 3e-3
    """Learning rate."""

    def __post_init__(self) -> None:
        refuse_below(1, self, "width", "max_epochs")
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"--lr must be above 0, got {self.lr}")


@dataclass(frozen=True, kw_only=True)
class FitPrior:
    """All settings of `seqvae fit-prior`."""

    prior: PriorSettings = field(default_factory=PriorSettings)
    data: DataSource = field(default_factory=DataSource)
    machine: MachineChoices = field(default_factory=MachineChoices)


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """All settings of `seqvae evaluate`."""

    data: DataChoices = field(default_factory=DataChoices)
    evaluation: EvaluateSettings = field(default_factory=EvaluateSettings)
    machine: MachineChoices = field(default_factory=MachineChoices)


@dataclass(frozen=True, kw_only=True)
class Encode:
    """All settings of `seqvae encode`."""

    data: DataChoices = field(default_factory=DataChoices)
    output: OutputSettings = field(default_factory=OutputSettings)
    machine: MachineChoices = field(default_factory=MachineChoices)


@dataclass(frozen=True, kw_only=True)
class Reconstruct(Encode):
    """All settings of `seqvae reconstruct`."""

    drawing: DrawingSettings = field(default_factory=DrawingSettings)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """All settings of `seqvae sample`."""

    sampling: SampleSettings = field(default_factory=SampleSettings)
    output: OutputSettings = field(default_factory=OutputSettings)
    machine: MachineChoices = field(default_factory=MachineChoices)


@dataclass(frozen=True, kw_only=True)
class Interpolate(Encode):
    """All settings of `seqvae interpolate`."""

    path: PathSettings = field(default_factory=PathSettings)
    drawing: DrawingSettings = field(default_factory=DrawingSettings)


@dataclass(frozen=True, kw_only=True)
class Impute(Encode):
    """All settings of `seqvae impute`."""

    imputing: ImputeSettings = field(default_factory=ImputeSettings)


@dataclass(frozen=True, kw_only=True)
class HubSettings:
    """Hub"""

    public: bool = False
    """Make a new model one that everybody may read; one that is there already stays as public as it is."""

    message: str | None = None
    """What the commit says; default: the model's step and the version of seqvae."""


@dataclass(frozen=True, kw_only=True)
class Push:
    """All settings of `seqvae push`."""

    hub: HubSettings = field(default_factory=HubSettings)


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """Export"""

    format: Literal["safetensors", "onnx"] = "safetensors"
    """safetensors: the whole model, which every verb reads back. onnx: encoder and decoder step as ONNX files, for programs without
    torch."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """All settings of `seqvae export`."""

    export: ExportSettings = field(default_factory=ExportSettings)
    output: OutputSettings = field(default_factory=OutputSettings)
