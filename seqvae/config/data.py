"""The settings of data: the flags of the themes Data, Sequences, Cache, Batches and Loading.

One frozen dataclass per theme. A field is a flag, its docstring the help text; `__post_init__` refuses values, in the words of the
flags. Imports nothing heavy, since `--help` imports it.
"""

import re
from dataclasses import dataclass, field
from typing import Literal

from seqvae.config.run import refuse_below
from seqvae.files import refuse_no_paths
from seqvae.text import parse_size

TYPED_ONLY = {"typed_only": True}
"""Of a field that is set by the command line or the arguments of a call alone, and neither read from a file nor written to one."""
LONGEST_WAIT = 1_000_000_000
"""Seconds: no queue can wait for much longer."""


def refuse_no_endpoint(url: str | None) -> None:
    """Raise ValueError where --endpoint_url is no plain address; what may be a password is not repeated."""
    if url is not None and not re.fullmatch(r"https?://[\w.-]+(:\d+)?/?|https?://\[[0-9a-fA-F:]+\](:\d+)?/?", url):
        raise ValueError("--endpoint_url must be an address like http://localhost:9000, without path, user or password")


@dataclass(frozen=True, kw_only=True)
class SourceSettings:
    """Data"""

    data_dir: str | None = None
    """Directory (or a glob of directories, in quotes) with train/, valid/, test/ or one pool of Parquet files, on this machine or
    in a store (s3://, gs://, abfs://, hf://datasets/); or a single file, which may be .csv, .tsv, .jsonl or .txt (a text a line).
    Without it: demo data with known truth."""

    allow_remote: bool = field(default=False, metadata=TYPED_ONLY)
    """Fetch data from a store that a file or a trained model names; what is typed (--data_dir, --cache_dir) is fetched anyway."""

    endpoint_url: str | None = None
    """Address of a store that is not the provider's own, like MinIO: http://localhost:9000."""

    kind: Literal["auto", "tokens", "vectors", "events"] = "auto"
    """What a step of a sequence is; auto: detected from the schema."""

    sequence_column: str | None = None
    """Column that holds one sequence a row: list<int>, text, list<float> or list<list<float>>."""

    id_column: str | None = None
    """Column that names the sequence a row belongs to; none: no column does, whatever it is called."""

    time_column: str | None = None
    """Column with the time of a row in a long table."""

    variable_column: str | None = None
    """Column with the variable's name in a long table of events."""

    value_column: str | None = None
    """Column with the variable's value in a long table of events."""

    feature_columns: str | None = None
    """Columns that make up the vector in a long table, separated by commas."""

    tokenizer: str | None = None
    """How a text column becomes tokens: words, characters, bytes, or the path of a tokenizer.json."""

    minimum_count: int = 1
    """Words, characters or variables seen fewer times than this in the training split become <unknown>."""

    vocabulary_size: int | None = None
    """Number of token ids; default: the largest id of the training split plus one."""

    validation_fraction: float = 0.1
    """Share of a pool without splits that validates, chosen by a hash of the sequence's id."""

    test_fraction: float = 0.0
    """Share of a pool without splits that is kept for testing, chosen by the same hash."""

    label_path: str | None = None
    """CSV or Parquet with the sequences' ids and labels."""

    label_column: str | None = None
    """Column with the label, in the label file or in the data."""

    allow_missing_labels: bool = False
    """Accept sequences without a label."""

    params_map_path: str | None = None
    """CSV with the columns variable, mean, std to normalise by, instead of the training split's own moments."""

    robust_scaling: bool = True
    """Scale features and variables with heavy tails by the values between their 1 % and 99 % quantiles; off: all by all values."""

    missing_values: str | None = None
    """Numbers that mean that nothing was measured, separated by commas: -9999 or -9999,-1. They become missing values."""

    variable_embeddings_path: str | None = None
    """CSV whose first column names a variable and whose other columns are the vector its embedding starts from."""

    freeze_variable_embeddings: bool = False
    """Keep the embeddings given with --variable_embeddings_path as they are."""

    bad_values: Literal["error", "drop", "missing"] = "error"
    """NaN, infinity, nulls where none may be, empty sequences: refuse; drop: leave out the sequence; missing: NaN and infinity
    become missing values, the rest is refused."""

    on_bad_files: Literal["error", "skip"] = "error"
    """Files that cannot be read: refuse, or leave them out and count them."""

    unsorted: Literal["sort", "error"] = "sort"
    """Long tables whose rows are not together by id or not in order of time: sort (and say so), or refuse."""

    def __post_init__(self) -> None:
        others = ("tokenizer", "label_path", "params_map_path", "variable_embeddings_path")
        refuse_no_paths(self, *others, remote="data_dir")
        refuse_no_endpoint(self.endpoint_url)
        refuse_below(1, self, "minimum_count", "vocabulary_size")
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"--validation_fraction must lie between 0 and 1, got {self.validation_fraction}")
        if not 0 <= self.test_fraction < 1:
            raise ValueError(f"--test_fraction must be 0 or more and below 1, got {self.test_fraction}")
        _ = self.codes_for_missing
        if self.validation_fraction + self.test_fraction >= 1:
            raise ValueError("--validation_fraction and --test_fraction leave nothing to train on")
        if self.freeze_variable_embeddings and self.variable_embeddings_path is None:
            raise ValueError("--freeze_variable_embeddings needs --variable_embeddings_path")

    @property
    def codes_for_missing(self) -> tuple[float, ...]:
        """The numbers of --missing_values."""
        try:
            return tuple(float(number) for number in (self.missing_values or "").split(",") if number.strip())
        except ValueError as error:
            raise ValueError(
                f"--missing_values must be numbers separated by commas, got {self.missing_values!r}"
            ) from error


@dataclass(frozen=True, kw_only=True)
class LengthSettings:
    """Sequences"""

    max_sequence_length: int = 1000
    """Longest sequence in steps; what is longer is cut as --long_sequences says."""

    long_sequences: Literal["truncate", "keep_last", "split", "drop"] = "truncate"
    """Sequences over the cap: keep their beginning, keep their end, cut them into windows, or leave them out."""

    window_stride: int | None = None
    """Steps between the starts of two windows of --long_sequences split; default: the cap, so that windows do not overlap."""

    def __post_init__(self) -> None:
        refuse_below(1, self, "max_sequence_length")
        if self.window_stride is None:
            return
        if self.long_sequences != "split":
            raise ValueError("--window_stride needs --long_sequences split")
        if not 1 <= self.window_stride <= self.max_sequence_length:
            raise ValueError(
                f"--window_stride must lie between 1 and --max_sequence_length {self.max_sequence_length}, "
                f"got {self.window_stride}"
            )


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """Cache"""

    cache_dir: str | None = None
    """Where the converted data lie; default: seqvae in the user's cache directory. In a store (s3://bucket/caches), machines share
    what one of them has built, and fetch it."""

    cache_data: bool = False
    """Hold the cache in memory instead of mapping it from disk."""

    stream: bool = False
    """Train on a cache that need not fit this disk: its parts are fetched from --cache_dir ahead of use and given up behind it."""

    local_limit: str = "20GB"
    """Room on this disk, of each process, that --stream may take."""

    def __post_init__(self) -> None:
        refuse_no_paths(self, remote="cache_dir")
        _ = self.local_limit_bytes
        if self.stream and self.cache_data:
            raise ValueError(
                "--stream is for data that do not fit this machine, --cache_data for those that fit its memory"
            )

    @property
    def local_limit_bytes(self) -> int:
        return parse_size(self.local_limit, "--local_limit")


@dataclass(frozen=True, kw_only=True)
class CacheChoices:
    """Cache"""

    cache_dir: str | None = None
    """Where the converted data lie; default: seqvae in the user's cache directory."""

    def __post_init__(self) -> None:
        refuse_no_paths(self, "cache_dir")


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """Batches"""

    batch_size: int | None = None
    """At most this many sequences in a batch; default: no limit but --tokens_per_batch."""

    tokens_per_batch: int | None = None
    """At most this many steps in a batch, padding included; default: 4 times --max_sequence_length, less for small sets."""

    use_dynamic_padding: bool = True
    """Pad to the longest sequence of the batch; off: always to --max_sequence_length, one shape for all batches."""

    bucketing: bool = True
    """Put sequences of similar length together; off: plain random batches."""

    drop_last: bool = False
    """Leave out the last batch of an epoch where it is not full."""

    level_cost: bool = False
    """Count what attention costs, which grows with the square of a sequence's length: batches of long sequences then hold fewer
    steps, and all batches take about as long."""

    pad_grid: int | None = None
    """Pad batches to at most this many shapes, lengths and numbers of sequences, and one more for a last batch that is not full:
    libraries prepare themselves for each. 0: any shape; default: 32 where a CPU computes in bf16, 8 for a GPU with
    --compile_model --compile_mode reduce-overhead, else any."""

    def __post_init__(self) -> None:
        refuse_below(0, self, "pad_grid")
        refuse_below(1, self, "batch_size", "tokens_per_batch")
        if self.pad_grid and not (self.use_dynamic_padding and self.bucketing):
            raise ValueError(
                "--pad_grid needs --use_dynamic_padding and --bucketing: the batches of a shape are of one length"
            )


@dataclass(frozen=True, kw_only=True)
class LoadingSettings:
    """Loading"""

    worker_type: Literal["thread", "process"] = "thread"
    """What prepares batches ahead of the training step; threads cost less once the data lie in the cache."""

    num_workers: int | Literal["auto"] = "auto"
    """How many of them; auto: one thread; 0: none, batches are made when they are needed."""

    prefetch_factor: int | None = None
    """Batches that each worker keeps ready at most; default: 8 for a thread, for a process as many as there are, at least 2."""

    persistent_workers: bool = True
    """Keep worker processes from one epoch to the next."""

    pin_memory: bool = True
    """Page-locked batches, which copy to a GPU while it computes; without a GPU this changes nothing."""

    loader_timeout_seconds: float = 300
    """How long to wait for one batch: when none comes, what prepares them is restarted there, and after three such waits
    the run ends. 0: wait forever."""

    def __post_init__(self) -> None:
        if self.num_workers != "auto" and self.num_workers < 0:
            raise ValueError(f"--num_workers must be auto, 0 or more, got {self.num_workers}")
        refuse_below(1, self, "prefetch_factor")
        if not 0 <= self.loader_timeout_seconds <= LONGEST_WAIT:
            raise ValueError(
                f"--loader_timeout_seconds must be 0 (wait forever) or more, at most {LONGEST_WAIT:,}, "
                f"got {self.loader_timeout_seconds}"
            )


@dataclass(frozen=True, kw_only=True)
class ManageCache:
    """All settings of `seqvae cache`."""

    cache: CacheChoices = field(default_factory=CacheChoices)


@dataclass(frozen=True, kw_only=True)
class BuildingSettings:
    """Cache"""

    cache_dir: str | None = None
    """Where the converted data lie; default: seqvae in the user's cache directory. In a store (s3://bucket/caches), other machines
    fetch them from there, or train on them part by part (--stream)."""

    workers: int | Literal["auto"] = "auto"
    """Processes that convert the data side by side; auto: one for each core. The cache is the same, however many."""

    launcher: Literal["ray"] | None = None
    """What starts them; ray: Ray, on all machines of a cluster. These have to see the same directories; with --cache_dir in a store
    the cache is built there, and they need no disk in common. Needs the extra ray."""

    def __post_init__(self) -> None:
        refuse_no_paths(self, remote="cache_dir")
        if self.workers != "auto":
            refuse_below(1, self, "workers")
            if self.launcher == "ray":
                raise ValueError(
                    f"--workers {self.workers}: with --launcher ray there is one for each core of the cluster"
                )


@dataclass(frozen=True, kw_only=True)
class BuildCache:
    """All settings of `seqvae build-cache`."""

    source: SourceSettings = field(default_factory=SourceSettings)
    building: BuildingSettings = field(default_factory=BuildingSettings)
