"""What the measuring process asks of a training process, and what it is told: plain numbers that go through a pipe."""

from typing import NamedTuple

from seqvae.training.schedules import Plan


class Ready(NamedTuple):
    """A run that stands before its first step."""

    parameters: int
    plan: Plan
    """Of the run as it was asked for; while it is measured it does not end."""
    accumulate: int
    precision: str
    """In force."""
    device: str
    seconds: float
    """From the process's start to here; what all runs import is not in it where processes can be forked."""
    is_compiled: bool = False
    """Some of the network, after its trial."""


class Turn(NamedTuple):
    """Train on, until both are done: so many optimizer steps, and so many seconds."""

    steps: int = 1
    seconds: float = 0.0
    lead_steps: int = 2
    """Not counted: caches are somebody else's at first, and the loader has had time to work ahead."""
    by_stage: bool = True
    """Say where the time goes; it takes a tenth of a millisecond a step."""


class Lap(NamedTuple):
    """What a turn came to, without its lead."""

    seconds: float
    """By the clock on the wall; it neither validates nor saves on its own."""
    steps: int
    micro_batches: int
    real_steps: int
    padded_steps: int
    sequences: int
    stages: dict[str, float]
    """Seconds of each of `stages.STAGES`; empty where they were not asked for."""
    cpu_seconds: float
    """Of the process, all its threads."""
    cores: int
    gpu_utilisation: float | None
    peak_memory_gib: float
    """Of the process so far: of the GPU's memory where it trains on one."""
    recompiles: int
    """Graphs compiled in the turn, its lead included."""


class Count(NamedTuple):
    """Count the FLOPs of the next optimizer steps."""

    steps: int = 4


class Work(NamedTuple):
    """FLOPs of some steps, forward and backward, what is computed twice counted twice."""

    flops: int
    real_steps: int
    padded_steps: int


class Validate(NamedTuple):
    """Go through the validation batches that the settings choose, as a validation would."""


class Validation(NamedTuple):
    """Means per sequence in nats."""

    elbo: float
    nll: float
    kl: float
    sequences: int
    seconds: float


class Save(NamedTuple):
    """Save a checkpoint, and remove it."""


class Saved(NamedTuple):
    seconds: float
    bytes: int


class Trace(NamedTuple):
    """Write what torch.profiler sees of so many optimizer steps."""

    path: str
    steps: int = 3


class Traced(NamedTuple):
    bytes: int


class Close(NamedTuple):
    """Be gone."""


class Failed(NamedTuple):
    """Instead of an answer: what went wrong."""

    kind: str
    """Name of the exception's type."""
    said: str
    traceback: str


Request = Turn | Count | Validate | Save | Trace | Close
Answer = Ready | Lap | Work | Validation | Saved | Traced | Failed
