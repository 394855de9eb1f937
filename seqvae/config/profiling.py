"""The settings of `seqvae profile`. Imports nothing heavy, since `--help` imports it."""

from dataclasses import dataclass
from typing import Literal

from seqvae.config.run import refuse_below
from seqvae.files import refuse_no_paths
from seqvae.text import parse_size


@dataclass(frozen=True, kw_only=True)
class MeasuringSettings:
    """Measuring"""

    command: Literal["optimized", "reference"] = "optimized"
    """Recipe to measure: that of train_optimized.py or of train_with_collapse_detection.py."""

    num_iterations: int = 100
    """Optimizer steps to measure, in five turns."""

    warmup_iterations: int = 10
    """Optimizer steps before that, not counted: the first ones wait for memory, kernels and compiled layers."""

    compare: str | None = None
    """Recipes to put side by side, taking turns: reference,optimized. Each has its own defaults, and all flags that are given."""

    advise: bool = False
    """Try the changes that may help, each alone and the best together, and report their gains."""

    find_batch: bool = False
    """Measure no time: find the largest --tokens_per_batch that fits, on the worst batch of each length."""

    memory_limit: str | None = None
    """Memory that --find_batch may fill, like 6GB; default: what is available."""

    trace: bool = False
    """Write a trace of a few steps by torch.profiler, too."""

    output: str | None = None
    """Directory for analysis.json, analysis.png and trace.json; default: a new one in --output_dir, named after kind and time."""

    def __post_init__(self) -> None:
        refuse_no_paths(self, "output")
        refuse_below(1, self, "num_iterations", "warmup_iterations")
        names = self.names
        if (
            len(set(names)) < len(names)
            or not set(names) <= {"optimized", "reference"}
            or (self.compare and len(names) < 2)
        ):
            raise ValueError(f"--compare takes the commands optimized,reference, got {self.compare!r}")
        if self.memory_limit is not None:
            if not self.find_batch:
                raise ValueError("--memory_limit needs --find_batch")
            parse_size(self.memory_limit)
        modes = [name for name in ("compare", "advise", "find_batch") if getattr(self, name)]
        if len(modes) > 1:
            raise ValueError(f"--{modes[0]} and --{modes[1]} exclude each other: one after the other")

    @property
    def names(self) -> tuple[str, ...]:
        """The commands to measure."""
        return (self.command,) if self.compare is None else tuple(name.strip() for name in self.compare.split(","))

    @property
    def memory_limit_bytes(self) -> int | None:
        """The memory that --find_batch may fill, or None for what is available."""
        return None if self.memory_limit is None else parse_size(self.memory_limit)
