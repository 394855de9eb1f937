"""The training commands as trainees: flags in, a run in a process of its own out, which trains when told."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import train_optimized
import train_with_collapse_detection
from benchmarks.speed.quality_contest import Candidate, Stretch
from seqvae.cli.command_line import parse_command_line
from seqvae.config.training import OptimizedSettings, ReferenceSettings, TrainingSettings
from seqvae.profiling.measured_run import MeasuredRun, Recipe

RATES = (3e-4, 1e-3, 3e-3)
"""The grid of all sides; 3e-4 is MOSES' own, 3e-3 ours."""
WARMUP_STEPS = 10

PLAIN = ("--kl_schedule", "constant", "--beta", "1", "--lr_schedule", "constant", "--warmup", str(WARMUP_STEPS))
"""What it takes to compare trainings that stop anywhere: nothing depends on how long they go on."""


class OurTrainee:
    def __init__(self, recipe: Recipe) -> None:
        self._run = MeasuredRun(recipe)

    @property
    def parameters(self) -> int:
        return self._run.ready.parameters

    def train(self, seconds: float) -> Stretch:
        lap = self._run.turn(seconds=seconds, lead_steps=0)
        return Stretch(lap.seconds, lap.real_steps)

    def validate(self) -> float:
        return self._run.validate().elbo

    def close(self) -> None:
        self._run.close()


def reference(data: Path, words: Sequence[str], rate: float) -> Candidate:
    """train_with_collapse_detection.py, as it is."""
    start = partial(_start_reference, (*_common(data, rate), *words))
    return Candidate("train_with_collapse_detection.py", rate, "4 sequences", start)


def optimized(data: Path, words: Sequence[str], rate: float, tokens: int) -> Candidate:
    """train_optimized.py --fast_detection, one batch of so many tokens to an optimizer step."""
    batch = ("--tokens_per_batch", str(tokens), "--gradient_accumulation_steps", "1")
    start = partial(_start_optimized, (*_common(data, rate), *batch, *words))
    return Candidate("train_optimized.py", rate, f"{tokens:,} tokens", start)


def settings_of(data: Path, words: Sequence[str], rate: float, seed: int) -> TrainingSettings:
    """What a bare loop takes its network and data from."""
    return _parsed(OptimizedSettings, (*_common(data, rate), *words), seed)


def _common(data: Path, rate: float) -> tuple[str, ...]:
    places = ("--data_dir", str(data), "--cache_dir", str(data / "cache"))
    return (*places, *PLAIN, "--lr", str(rate), "--limit_val_batches", "1.0")


def _start_reference(words: Sequence[str], seed: int) -> OurTrainee:
    settings = _parsed(ReferenceSettings, words, seed)
    return OurTrainee(Recipe("reference", settings, train_with_collapse_detection.callbacks, is_spread=False))


def _start_optimized(words: Sequence[str], seed: int) -> OurTrainee:
    settings = _parsed(OptimizedSettings, (*words, "--fast_detection"), seed)
    return OurTrainee(Recipe("optimized", settings, train_optimized.callbacks, is_spread=False))


def _parsed(kind: type[TrainingSettings], words: Sequence[str], seed: int) -> TrainingSettings:
    return parse_command_line(kind, [*words, "--seed", str(seed)], prog="time_to_quality", description="")
