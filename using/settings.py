"""What a user can say about using a model: which data, which part of them, on what. Imports nothing heavy."""

from dataclasses import dataclass
from typing import Literal

from sequences.local_paths import refuse_no_paths


@dataclass(frozen=True, kw_only=True)
class DataChoices:
    """Data"""

    data_dir: str | None = None
    """Directory, Parquet file or glob with the data, read as the model's own were; default: those it was trained on."""

    split: str | None = None
    """train, valid or test; pool: data without splits."""

    sequence_column: str | None = None
    """Column that holds one sequence a row, where it is called otherwise than in the training data."""

    id_column: str | None = None
    """Column that names the sequence a row belongs to, where it is called otherwise than in the training data."""

    label_path: str | None = None
    """CSV or Parquet with the sequences' ids and labels; default: that of the training, if it had one."""

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
        refuse_no_paths(self, "data_dir", "label_path", "cache_dir")
        if self.max_sequence_length is not None and self.max_sequence_length < 1:
            raise ValueError(f"--max_sequence_length must be 1 or more, got {self.max_sequence_length}")


@dataclass(frozen=True, kw_only=True)
class MachineChoices:
    """Compute"""

    accelerator: Literal["auto", "cpu", "gpu", "mps"] = "auto"
    """What to compute on; auto: a GPU where there is one."""

    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    """bf16-mixed: half the time where there are bf16 units, and an NLL that is off by up to 0.02 %."""

    seed: int = 0
    """Of all that is drawn: the same seed gives the same result."""
