"""What a report on speed is made of: plain numbers of a stretch of training, wherever they were measured."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

STAGE_NAMES = {
    "data": "waiting for data",
    "transfer": "to the device",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "clipping and optimizer",
    "monitoring": "logging and monitoring",
    "loop": "Lightning's loop",
}
"""The stages of an optimizer step, in the order in which they come."""


class WholeRun(NamedTuple):
    """What the run that was asked for would come to at the speed measured."""

    steps: int
    """Optimizer steps."""
    epochs: float
    training_seconds: float
    validations: int
    """With the last one, on all validation data."""
    validation_seconds: float
    """Of all of them."""
    checkpoints: int
    checkpoint_seconds: float
    """Of all of them."""

    @property
    def seconds(self) -> float:
        return self.training_seconds + self.validation_seconds + self.checkpoint_seconds

    @property
    def validation_share(self) -> float:
        return self.validation_seconds / self.seconds

    @property
    def checkpoint_share(self) -> float:
        return self.checkpoint_seconds / self.seconds


class Speed(NamedTuple):
    """How fast a command trains, and where its time goes. None: this machine, or this kind of sequence, does not tell."""

    name: str
    """optimized or reference."""
    unit: str
    """What a step of a sequence is called: token or step."""
    device: str
    precision: str
    """In force."""
    parameters: int
    steps: int
    """Optimizer steps measured."""
    seconds: float
    """Of them."""
    stages: Mapping[str, float]
    """Seconds of each of `STAGE_NAMES` in them."""
    real_steps: int
    padded_steps: int
    """Computed on, padding included."""
    sequences: int
    events_per_step: float | None
    """Of a sequence, on average over a sample."""
    turns: Sequence[float]
    """Real steps a second in each turn."""
    start_seconds: float
    """Until the first optimizer step, without imports; where layers are compiled, that is in it."""
    first_step_seconds: float
    """Everything is new to it."""
    cpu_utilisation: float
    """Of the cores that the process may use, by itself."""
    cores: int
    others_cpu_share: float | None
    """Of all the machine's cores, what other programs took meanwhile."""
    gpu_utilisation: float | None
    peak_memory_gib: float
    flops_per_padded_step: float
    """Forward and backward."""
    peak_flops_per_second: float
    """Of a large product of matrices, in between."""
    peak_dtype: str
    recompiles: int
    """Graphs that were compiled after warm-up."""
    run: WholeRun

    @property
    def seconds_per_step(self) -> float:
        """Of the optimizer."""
        return self.seconds / self.steps

    @property
    def real_steps_per_second(self) -> float:
        return self.real_steps / self.seconds

    @property
    def sequences_per_second(self) -> float:
        return self.sequences / self.seconds

    @property
    def events_per_second(self) -> float | None:
        return None if self.events_per_step is None else self.events_per_step * self.real_steps_per_second

    @property
    def padding_share(self) -> float:
        return 1 - self.real_steps / self.padded_steps

    @property
    def flops_per_second(self) -> float:
        """On real steps: what is computed on padding is no work."""
        return self.flops_per_padded_step * self.real_steps_per_second

    @property
    def share_of_peak(self) -> float:
        return self.flops_per_second / self.peak_flops_per_second

    def share(self, *stages: str) -> float:
        """Of training time."""
        return sum(self.stages[stage] for stage in stages) / self.seconds


class Bottleneck(NamedTuple):
    """What costs most, of what could be changed."""

    name: str
    evidence: str
    """A sentence."""
    tries: tuple[str, ...]
    """Flags that may help, none of them measured."""


class Comparison(NamedTuple):
    """How many times as many real steps a second the one makes as the other."""

    faster: str
    slower: str
    ratio: float
    lowest: float
    """Of the turns, like the next."""
    highest: float


def as_dict(speed: Speed, bottleneck: Bottleneck) -> dict[str, Any]:
    """In types of JSON, with what follows from the numbers."""
    run = {**speed.run._asdict(), "seconds": speed.run.seconds}
    shares = {
        "validation_share": speed.run.validation_share,
        "checkpoint_share": speed.run.checkpoint_share,
    }
    rates = {
        "seconds_per_step": speed.seconds_per_step,
        "real_steps_per_second": speed.real_steps_per_second,
        "sequences_per_second": speed.sequences_per_second,
        "events_per_second": speed.events_per_second,
        "padding_share": speed.padding_share,
        "flops_per_second": speed.flops_per_second,
        "share_of_peak": speed.share_of_peak,
    }
    return {**speed._asdict(), **rates, "run": run | shares, "bottleneck": bottleneck._asdict()}
