"""The monitor as a Lightning callback: takes in every micro-batch's posteriors, reads them every few optimizer steps, judges them.

    Trainer(callbacks=[PosteriorMetricsMonitor(update_frequency=100)])

In: what `training_step` returns (`contract.py` says what). Out: what `publisher.py` publishes, and `.verdict`. Training itself is
the same with and without it, unless it is told to stop a run that has collapsed.
"""

import math
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from seqvae.monitors.contract import ReadOutputs, StepOutputs, checked, from_training_step
from seqvae.monitors.decoder_use import DecoderProbe, DecoderUse
from seqvae.monitors.detection.detector import FEWEST_IN_WINDOW, Detector
from seqvae.monitors.detection.thresholds import Thresholds
from seqvae.monitors.detection.trends import KLSchedule
from seqvae.monitors.detection.verdict import COLLAPSES, UNHARMED, Verdict
from seqvae.monitors.publish import Publisher
from seqvae.monitors.reading import Reading
from seqvae.monitors.window import Moment, PosteriorWindow, take_reading, with_decoder_use

DRAWING_SECONDS, HURRIED_SECONDS = 30.0, 4.0
"""That a run's end waits for figures; the second where a signal asked it to end, and will not ask twice."""


class PosteriorMetricsMonitor(Callback):
    """Reads and judges the posterior while a model trains.

    Under several processes all see the same reading, made of `posteriors` posteriors of all of them, and the first one writes.
    """

    def __init__(
        self,
        *,
        update_frequency: int = 100,
        plot_frequency: int | None = 1000,
        window_size: int = 50,
        log_dir: str | Path | None = None,
        verbose: bool = False,
        on_collapse: Literal["warn", "stop"] = "warn",
        thresholds: Thresholds | None = None,
        posteriors: int = 1024,
        probe_decoder: bool = True,
        probe_every_n_readings: int | None = 1,
        probe_batch: Any = None,
        read_outputs: ReadOutputs = from_training_step,
    ) -> None:
        """`update_frequency` and `plot_frequency` are in optimizer steps, however many micro-batches make one; `window_size`,
        what trends are judged on, is in readings. The last step is read, too, where it is known beforehand, and a run's end is
        drawn unless `plot_frequency` is None.

        `log_dir` is where posterior.jsonl, events.jsonl and plots/ go, by default the Trainer's default_root_dir. It belongs to
        one run: a run that starts at step 0 starts the files anew.
        `on_collapse="stop"` saves a checkpoint and raises `PosteriorCollapsed`. Whoever goes on from there wants to: such a run
        is stopped again only when another verdict has come between.
        `probe_decoder` reads decoder use, where the module has `nll_given_z`: at every n-th reading, and whenever a suspicion
        has to be confirmed before the verdict changes; `probe_every_n_readings=None`: only then. It is read on `probe_batch`, or
        on a few sequences that are chosen from the first validation batches and then kept.
        """
        counts = (
            ("update_frequency", update_frequency, 1),
            ("plot_frequency", plot_frequency, 1),
            ("window_size", window_size, FEWEST_IN_WINDOW),
            ("posteriors", posteriors, 1),
            ("probe_every_n_readings", probe_every_n_readings, 1),
        )
        for name, value, least in counts:
            if value is not None and value < least:
                raise ValueError(f"{name} must be {least} or more, got {value}")
        if on_collapse not in ("warn", "stop"):
            raise ValueError(f'on_collapse must be "warn" or "stop", got {on_collapse!r}')
        self.update_frequency = update_frequency
        self.plot_frequency = plot_frequency
        self.window_size = window_size
        self.log_dir = log_dir
        self.verbose = verbose
        self.on_collapse = on_collapse
        self.thresholds = thresholds
        self.posteriors = posteriors
        self.probe_decoder = probe_decoder
        self.probe_every_n_readings = probe_every_n_readings
        self.probe_batch = probe_batch
        self.read_outputs = read_outputs
        self.reading: Reading | None = None
        """The latest."""
        self._loaded: dict[str, Any] | None = None
        """A checkpoint's, of the detector."""
        self._publisher: Publisher | None = None
        """In the first process, while a run goes on."""
        self._forget()

    @property
    def verdict(self) -> Verdict:
        """The one in force."""
        return self._detector.verdict

    def is_unharmed(self) -> bool:
        """Whether a checkpoint saved now is worth going back to."""
        return self.verdict.name in UNHARMED

    def describe(self, total_steps: int) -> str:
        """For the header of a run of so many optimizer steps."""
        every = steps_between_readings(self.update_frequency, total_steps)
        steps = "step" if every == 1 else f"{every:,} steps"
        if every < self.update_frequency:
            steps += f" (in place of {self.update_frequency:,}, as the run is short)"
        reading = f"a reading of up to {self.posteriors:,} posteriors every {steps}"
        end = ", stops when the posterior has collapsed" if self.on_collapse == "stop" else ""
        if not self.probe_decoder:
            return f"{reading}, without decoder use{end}"
        nth = {None: "on suspicion", 1: "at each reading"}
        asked = nth.get(
            self.probe_every_n_readings, f"at one reading in {self.probe_every_n_readings} and on suspicion"
        )
        return f"{reading}, decoder use {asked}{end}"

    # --- A run ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # a checkpoint is loaded after this
            self._forget(trainer.world_size)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_step = planned_steps(trainer)
        self._every_n_steps = steps_between_readings(self.update_frequency, self._last_step)
        self._step_read = self._step_drawn = trainer.global_step  # a checkpoint is saved after the reading of its step
        self._asks = self.probe_decoder and self._decoder.can_ask(pl_module)
        self._detector = Detector(
            self.thresholds, self.window_size, schedule_of(pl_module, self._last_step), can_probe=self._asks
        )
        if self._loaded is not None:
            self._detector.load_state_dict(self._loaded)
        if trainer.is_global_zero:
            draws = self.plot_frequency is not None
            self._publisher = Publisher(self._directory(trainer), trainer.loggers, verbose=self.verbose, draws=draws)
            self._publisher.start_after(trainer.global_step, self.verdict.name)
            if self.probe_decoder and not self._asks:
                self._publisher.silence(trainer.global_step, type(pl_module).__name__)
            if self.on_collapse == "stop" and self.verdict.name in COLLAPSES:
                self._publisher.insistence(self.verdict)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not outputs and (pl_module.automatic_optimization or self._window.posteriors.rows_CW is not None):
            return  # training_step left this batch out
        told = checked(pl_module, self.read_outputs(pl_module, outputs, batch))
        self._window.push(told.posterior_mean, told.posterior_logvar, told.posterior_mask, told.nll)
        step = trainer.global_step
        if not is_due(step, self._step_read, self._every_n_steps, self._last_step):
            return
        self._step_read = step
        reading = self._read(trainer, pl_module, batch, told)
        before = self.verdict
        self._detector.judge(reading)
        self.reading = reading
        if self._publisher is not None:
            self._publisher.reading(reading, self.verdict)
            self._tell_of_change(before, step)
            if self.plot_frequency is not None and step - self._step_drawn >= self.plot_frequency:
                self._step_drawn = step
                self._publisher.draw(self._window, step)
        if self.on_collapse == "stop" and self.verdict.name in COLLAPSES and before.name not in COLLAPSES:
            self._stop(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._publisher is not None:
            self._publisher.last(self.verdict if self.reading is not None or self._loaded is not None else None)
            self._publisher.finish_files()
        self._finish()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """A run that ends in NaN may do so before a reading shows it."""
        if self._publisher is None:
            return
        if trainer.strategy.root_device.type != "cpu" and isinstance(exception, RuntimeError):
            self._finish(draws=False)  # a device that failed would fail again: nothing is asked of it
            return
        found = self._what_is_not_finite(pl_module)
        evidence = f"the {found} hold NaN or infinity" if found else None
        if isinstance(exception, FloatingPointError):  # weights that such steps are kept from do not show it
            evidence = evidence or str(exception) or type(exception).__name__
        if evidence:
            before = self.verdict
            self._detector.diverged(trainer.global_step, evidence)
            self._tell_of_change(before, trainer.global_step)
        self._finish(
            seconds=DRAWING_SECONDS if isinstance(exception, PosteriorCollapsed | Exception) else HURRIED_SECONDS
        )

    # --- Checkpoints ------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Store the windows of all processes. All take part in saving anyway: Lightning has a barrier there."""
        if self._publisher is not None:
            self._publisher.try_again()
        windows = {name: gathered(value, trainer) for name, value in self._window.state_dict().items()}
        checkpoint["callbacks"][self.state_key] = {"windows": windows, "detector": self._detector.state_dict()}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Go on with the window of this process; among another number of processes windows begin empty and fill up anew."""
        state = checkpoint["callbacks"].get(self.state_key)
        if state is None:
            return
        self._loaded = state["detector"]
        windows = state["windows"]
        expected = (trainer.world_size, self._window.posteriors.capacity)
        if windows and windows["posteriors"].shape[:2] == expected:
            self._window.load_state_dict({name: value[trainer.global_rank] for name, value in windows.items()})

    # --- Parts ------------------------------------------------------------------------------------------------------

    def _forget(self, world_size: int = 1) -> None:
        """Begin a run. The capacity is shared out, so that N, and with it log N, is the same for any number of processes."""
        self.reading = None
        self._window = PosteriorWindow(-(-self.posteriors // world_size))
        self._decoder = DecoderProbe(self.read_outputs, self.probe_batch)
        self._detector = Detector(self.thresholds, self.window_size)
        self._loaded = None
        self._publisher = None

    def _directory(self, trainer: Trainer) -> Path:
        return Path(self.log_dir or trainer.default_root_dir)

    def _read(self, trainer: Trainer, module: LightningModule, batch: Any, told: StepOutputs) -> Reading:
        def ask() -> DecoderUse:
            return self._decoder.ask(trainer, module, batch, told)

        def gather(own: Tensor) -> Tensor:
            return gathered(own, trainer)

        step, nth = trainer.global_step, self.probe_every_n_readings
        is_due = nth is not None and (step // self._every_n_steps % nth == 0 or step == self._last_step)
        is_due = is_due or not self._detector.has_begun  # a wrong nll_given_z is refused at once
        use = ask() if self._asks and is_due else None
        reading = take_reading(self._window, Moment(step, trainer.current_epoch, told.kl_weight, use), gather)
        if self._asks and use is None and self._detector.wants_decoder_use(reading):
            reading = with_decoder_use(reading, ask(), gather)  # sync: a second one, where there is a suspicion
        return reading

    def _what_is_not_finite(self, module: LightningModule) -> str | None:
        if not self._window.is_finite():
            return "last posteriors"
        weights = [weight for weight in module.parameters() if weight.is_floating_point()]
        return None if all(bool(weight.isfinite().all()) for weight in weights) else "weights"

    def _tell_of_change(self, before: Verdict, step: int) -> None:
        if self._publisher is not None and self.verdict.name != before.name:
            self._publisher.change(self.verdict, before.name, step)

    def _stop(self, trainer: Trainer) -> None:
        """All processes come here at the same step, since all have the same readings."""
        saved = save(trainer, self._directory(trainer))
        if self._publisher is None:
            raise PosteriorCollapsed(self.verdict, code=0)  # another would make a launcher kill the first process
        self._publisher.stopped(self.verdict, trainer.global_step, saved)
        raise PosteriorCollapsed(self.verdict)

    def _finish(self, *, draws: bool = True, seconds: float = DRAWING_SECONDS) -> None:
        """Draw what there is, once; `seconds` is what each of two drawings may take."""
        publisher, self._publisher = self._publisher, None
        if publisher is None:
            return
        publisher.try_again()
        publisher.finish(seconds)  # of figures begun before
        if draws and self.reading is not None:
            publisher.draw(self._window, self.reading.step)
            publisher.finish(seconds)


def gathered(own: Tensor, trainer: Trainer) -> Tensor:
    """Return the tensors of all processes in a new first dimension; all have the same shape.

    As a sum, in which every process fills its own row: Lightning's `all_gather` goes through what torch 2.13 calls deprecated.
    """
    if trainer.world_size == 1:
        return own[None]
    rows = own.new_zeros((trainer.world_size, *own.shape), device=trainer.strategy.root_device)
    rows[trainer.global_rank] = own
    return trainer.strategy.reduce(rows, reduce_op="sum")


# What is known of a run beforehand: how long it is, how many steps lie between two readings, what its KL will weigh.

FEWEST_READINGS = 50
"""Of a run whose length is known: a short one is read more often than asked."""


@runtime_checkable
class KnowsKLSchedule(Protocol):
    """A module that can say beforehand what the KL will weigh; the monitor then knows when to begin to judge."""

    def kl_weight_at(self, step: int) -> float | None:
        """Return the weight in an optimizer step; None: a controller steers it towards some KL."""


def planned_steps(trainer: Trainer) -> int | None:
    """Return the optimizer steps that the whole run will have, where that is known."""
    known = [trainer.max_steps] if trainer.max_steps > 0 else []
    epochs, batches = trainer.max_epochs or -1, trainer.num_training_batches
    if epochs > 0 and math.isfinite(batches):
        known.append(epochs * math.ceil(batches / trainer.accumulate_grad_batches))
    return min(known, default=None)


def steps_between_readings(update_frequency: int, last_step: int | None) -> int:
    """
    >>> steps_between_readings(100, None), steps_between_readings(100, 1_000), steps_between_readings(100, 20)
    (100, 20, 1)
    """
    if last_step is None:
        return update_frequency
    return max(1, min(update_frequency, last_step // FEWEST_READINGS))


def schedule_of(module: LightningModule, total_steps: int | None) -> KLSchedule:
    """What the module knows."""
    if not isinstance(module, KnowsKLSchedule):
        return KLSchedule(total_steps)
    if module.kl_weight_at(0) is None:
        return KLSchedule(total_steps, is_steered=True)
    return KLSchedule(total_steps, lambda step: float(module.kl_weight_at(step) or 0.0))


def is_due(step: int, before: int, every_n_steps: int, last_step: int | None) -> bool:
    """At each multiple, or at the first step behind it that is seen, and at the last: some training steps take two optimizer steps.

    `before` is the step of the last time.

    >>> [step for step in (1, 3, 5, 6, 7, 9) if is_due(step, before=step - 2, every_n_steps=4, last_step=7)]
    [5, 7, 9]
    """
    if step == before:
        return False
    return step // every_n_steps > before // every_n_steps or step == last_step


# on_collapse="stop": a run that has collapsed is saved and ended.
#
# In: a Trainer right behind an optimizer step, in all processes alike. Out: a checkpoint to go on from, and `PosteriorCollapsed`.

COLLAPSED_EXIT_CODE = 7
CHECKPOINT = "collapsed.ckpt"


class PosteriorCollapsed(SystemExit):
    """Raised out of `Trainer.fit` once a checkpoint is saved. Ends a script with exit code 7.

    Processes that a Trainer spawned (`strategy="ddp_spawn"`) end with that code, too, but torch tells it in an exception of its
    own, `ProcessExitedException`.
    """

    def __init__(self, verdict: Verdict, code: int = COLLAPSED_EXIT_CODE) -> None:
        super().__init__(code)
        self.verdict = verdict


@runtime_checkable
class SavesLast(Protocol):
    """A callback that saves runs where they can be resumed from."""

    def save_last(self, trainer: Trainer) -> bool:
        """Whether this state is saved now."""


def save(trainer: Trainer, directory: Path) -> str:
    """By whoever saves this run, or else as a checkpoint of its own; return what became of the step, in words."""
    savers = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, SavesLast)]
    if not savers:
        trainer.save_checkpoint(directory / CHECKPOINT)
        return f"is saved as {directory / CHECKPOINT}"
    saved = [saver.save_last(trainer) for saver in savers]
    return "is saved" if all(saved) else "could not be saved"
