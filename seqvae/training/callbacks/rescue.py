"""The rescue of a collapsed posterior while the run goes on: a callback that does what `seqvae/training/rescue.py` decides.

In: the monitor's readings and verdicts, which are the same in all processes. Out: another objective, an optimizer that starts over,
if need be a longer run; and for each move a line on the console and an event. Training without an alarm is untouched, to the bit.
"""

from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from torch.optim.lr_scheduler import LambdaLR

from seqvae.monitors import PosteriorMetricsMonitor
from seqvae.reports.run_files import HEALTHY, RESCUE
from seqvae.training.callbacks.checkpoint import is_between_steps
from seqvae.training.callbacks.pretraining import forget_what_was_best, start_decoder_over
from seqvae.training.callbacks.progress import Progress
from seqvae.training.module import TrainingModule
from seqvae.training.network import read_network
from seqvae.training.processes import shared_file
from seqvae.training.rescue import Move, RescuePlan
from seqvae.training.run_directory.checkpoint_file import damage_of, misfits
from seqvae.training.schedules import Steering
from seqvae.training.sharding import load_whole


class Rescue(Callback):
    """Callback that rescues a run whenever the monitor, which stands before it, calls a collapse."""

    def __init__(self, monitor: PosteriorMetricsMonitor, budget: float = 0.3) -> None:
        """`budget`: the share of the run's steps that all rescues may take together."""
        self.monitor = monitor
        self.budget = budget
        self._plan: RescuePlan | None = None
        self._loaded: dict[str, Any] | None = None
        self._step_seen = 0

    @property
    def is_active(self) -> bool:
        """Whether a rescue is under way."""
        return self._plan is not None and self._plan.is_active

    def describe(self, total_steps: int) -> str:
        """Describe the rescue for the header of a run."""
        steps = int(self.budget * total_steps)
        return f"a collapse is rescued, within {steps:,} steps in all (--rescue_budget {self.budget:g})"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # a checkpoint is loaded after this
            self._plan = self._loaded = None

    def state_dict(self) -> dict[str, Any]:
        assert self._plan is not None
        return {"plan": self._plan.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        self._step_seen = trainer.global_step
        self._plan = RescuePlan(pl_module.own_objective, pl_module.planned_steps, self.budget)
        if self._loaded is not None:
            self._plan.load_state_dict(self._loaded["plan"])
        self._plan.expect(pl_module.planned_steps)
        if pl_module.events is not None:
            pl_module.events.start_after(RESCUE, trainer.global_step)
        if self.is_active:
            self.monitor.stop_judging(self._plan.every_n_steps)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        assert isinstance(pl_module, TrainingModule)
        assert self._plan is not None
        reading, step = self.monitor.reading, trainer.global_step
        if reading is None or reading.step != step or step == self._step_seen or not is_between_steps(trainer):
            return
        self._step_seen = step
        self._plan.expect(self.monitor.expected_steps or pl_module.planned_steps)
        if (move := self._plan.take_in(reading, self.monitor.verdict.name)) is not None:
            self._make(move, len(reading.kl_per_dim), trainer, pl_module)

    def _make(self, move: Move, dimensions: int, trainer: Trainer, module: TrainingModule) -> None:
        assert self._plan is not None
        step, course, before = trainer.global_step, move.course, module.steering
        if move.revives_decoder:
            revive_decoder(trainer, module)
            if module.average is not None:
                module.average.start_over()
        since_step = step if before is None or move.resets_optimizer else before.since_step
        steering = Steering(course.kl_weight, course.floor / dimensions, course.target_kl, since_step, move.added_steps)
        module.steer(steering)
        trainer.fit_loop.epoch_loop.max_steps = module.total_steps
        if move.resets_optimizer:
            for optimizer in trainer.optimizers:
                optimizer.state.clear()
        set_learning_rate(trainer)
        forget_what_was_best(trainer)
        callbacks: list[Callback] = vars(trainer)["callbacks"]  # set by Lightning, and declared nowhere
        for callback in callbacks:
            if isinstance(callback, Progress):
                callback.total_steps = trainer.max_steps
        if module.events is not None:
            details = {"phase": move.phase, "course": move.name, "outcome": move.outcome, **course._asdict()}
            lengths = {
                "last_step": trainer.max_steps,
                "used_steps": move.used_steps,
                "budget_steps": self._plan.budget_steps,
            }
            module.events.survived(RESCUE, step, move.message, **details, **lengths)
        self.monitor.start_over(trainer, module, "a rescue is under way" if self.is_active else "a rescue has ended")
        if self.is_active:
            self.monitor.stop_judging(self._plan.every_n_steps)


def set_learning_rate(trainer: Trainer) -> None:
    """Put the rate of the next step in force: the schedule has set it already, by what was in force before."""
    for config in trainer.lr_scheduler_configs:
        schedule = config.scheduler
        assert isinstance(schedule, LambdaLR)
        rates = [
            rate * factor(schedule.last_epoch)
            for rate, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
        ]
        for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        schedule._last_lr = rates


def revive_decoder(trainer: Trainer, module: TrainingModule) -> None:
    """Take the weights of the last healthy checkpoint; without one, let the decoder start from scratch.

    All processes do alike. A network that is not ours keeps its decoder, where it has no such checkpoint.
    """
    path, network = Path(trainer.default_root_dir) / "checkpoints" / HEALTHY, module.network
    if trainer.strategy.broadcast(path.exists() and damage_of(path) is None):
        weights = read_network(shared_file(path)).weights
        if not misfits(network.state_dict(), weights):
            load_whole(network, weights)
            return
    start_decoder_over(trainer, module)
