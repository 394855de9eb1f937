"""What holds a training back: its speed in, the costliest of what could be changed out, with evidence and flags to try."""

from typing import NamedTuple

from seqvae.config.training import TrainingSettings
from seqvae.reports.performance_report import Bottleneck, Speed, WholeRun
from seqvae.text import measure, percent

NOTABLE = {
    "waiting for data": 0.05,
    "padding": 0.10,
    "clipping and optimizer": 0.15,
    "monitoring and loop": 0.10,
    "validation": 0.10,
    "checkpoints": 0.05,
}
"""Shares of time from which it is worth a change."""

LITTLE_OF_PEAK = 0.3
"""Below it, products of matrices are small, or what stands between them takes longer than they do."""


class Loss(NamedTuple):
    """Time that goes into something else than computing on real steps."""

    name: str
    share: float
    """Of training time; of validation and checkpoints of the whole run's."""
    evidence: str


def bottleneck_of(speed: Speed, settings: TrainingSettings) -> Bottleneck:
    """The largest loss that is notable; where there is none, the products themselves."""
    if speed.recompiles:
        evidence = f"{speed.recompiles} graphs were compiled after warm-up, each of which takes seconds."
        return Bottleneck("recompiling", evidence, ("--no_compile_model",))
    losses = [*_losses_of_training(speed), *_losses_of_run(speed.run)]
    notable = [loss for loss in losses if loss.share > NOTABLE[loss.name]]
    if not notable:
        return _products(speed, settings)
    worst = max(notable, key=lambda loss: loss.share)
    return Bottleneck(worst.name, worst.evidence, _tries(worst.name, settings))


def _losses_of_training(speed: Speed) -> list[Loss]:
    waiting, optimizer = speed.share("data"), speed.share("optimizer")
    padding, around = speed.padding_share * speed.share("forward", "backward"), speed.share("monitoring", "loop")
    return [
        Loss(
            "waiting for data",
            waiting,
            f"{percent(waiting)} of the time goes by until the loader has the next batch.",
        ),
        Loss(
            "padding",
            padding,
            f"{percent(padding)} of the time is spent on padding, {percent(speed.padding_share)} of all that is computed on.",
        ),
        Loss(
            "clipping and optimizer",
            optimizer,
            f"{percent(optimizer)} of the time goes into them: as much for a small batch as for a large one.",
        ),
        Loss(
            "monitoring and loop",
            around,
            f"{percent(around)} of the time goes into callbacks and Lightning's loop: optimizer steps of "
            f"{measure(1000 * speed.seconds_per_step)} ms are short.",
        ),
    ]


def _losses_of_run(run: WholeRun) -> list[Loss]:
    return [
        Loss(
            "validation",
            run.validation_share,
            f"{percent(run.validation_share)} of the whole run goes into {run.validations:,} validations.",
        ),
        Loss(
            "checkpoints",
            run.checkpoint_share,
            f"{percent(run.checkpoint_share)} of the whole run goes into {run.checkpoints:,} checkpoints.",
        ),
    ]


def _products(speed: Speed, settings: TrainingSettings) -> Bottleneck:
    """Nothing around them is notable."""
    are_small = speed.share_of_peak < LITTLE_OF_PEAK
    evidence = (
        f"{percent(speed.share('forward', 'backward'))} of the time goes into forward and backward, at "
        f"{percent(speed.share_of_peak)} of what large products of {speed.peak_dtype} matrices reach here"
    )
    tries = {
        "--precision 16-mixed": settings.compute.precision in ("32", "32-true"),
        _larger_batch(settings): are_small,
    }
    helpful = tuple(phrase for phrase, helps in tries.items() if helps)
    if are_small:
        return Bottleneck("small operations", f"{evidence}: too little at once to fill the machine.", helpful)
    return Bottleneck("the products themselves", f"{evidence}.", helpful)


def _tries(name: str, settings: TrainingSettings) -> tuple[str, ...]:
    """Flags that are not in force already."""
    batches, loading, validation = settings.batches, settings.loading, settings.validation
    more: dict[str, dict[str, bool]] = {
        "waiting for data": {
            "--num_workers 2": loading.num_workers in ("auto", 0, 1),
            "--worker_type process": loading.worker_type == "thread",
            "--cache_data": not settings.cache.cache_data,
        },
        "padding": {
            "--bucketing": not batches.bucketing,
            "--use_dynamic_padding": not batches.use_dynamic_padding,
            "a lower --max_sequence_length": batches.bucketing or not batches.use_dynamic_padding,
        },
        "clipping and optimizer": {
            "--fused_optimizer": not settings.optimizer.fused_optimizer,
            _larger_batch(settings): True,
            "more --gradient_accumulation_steps": True,
        },
        "monitoring and loop": {
            _larger_batch(settings): True,
            "--fast_detection": not settings.monitoring.fast_detection,
        },
        "validation": {
            "--limit_val_batches 0.1": validation.is_on_all,
            "a larger --val_check_interval": True,
        },
        "checkpoints": {"a larger --checkpoint_every_n_steps": True},
    }
    return tuple(phrase for phrase, helps in more[name].items() if helps)


def _larger_batch(settings: TrainingSettings) -> str:
    return "a larger --tokens_per_batch" if settings.batches.batch_size is None else "a larger --batch_size"
