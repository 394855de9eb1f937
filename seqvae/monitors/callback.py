"""The monitor as a Lightning callback: takes in every micro-batch's posteriors, reads them every few optimizer steps, judges them.

    Trainer(callbacks=[PosteriorMetricsMonitor(update_frequency=100)])

In: what `training_step` returns (see `contract.py`). Out: what `publish.py` publishes, and `.verdict`. Training itself is
the same with and without it, unless the monitor is to stop a run that has collapsed.
"""

import math
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from torch import Tensor
from torch.distributed.tensor import DTensor

from seqvae.monitors.codes import CodeWindow
from seqvae.monitors.contract import (
    HasLevels,
    MovesLatents,
    ReadLevel,
    ReadOutputs,
    StepOutputs,
    check_step_outputs,
    describe_loss,
    seen_from_prior,
    step_outputs_of,
)
from seqvae.monitors.decoder_use import DecoderProbe, Probeable, level_of
from seqvae.monitors.detector import FEWEST_IN_WINDOW, Detector, KLSchedule
from seqvae.monitors.escape import ThresholdReader, why_unreadable
from seqvae.monitors.publish import Publisher
from seqvae.monitors.reading import Reading
from seqvae.monitors.rules import Thresholds
from seqvae.monitors.window import PosteriorWindow, take_reading, with_decoder_use, with_escape_threshold
from seqvae.verdicts import Circumstances, Verdict

DRAWING_SECONDS, HURRIED_SECONDS = 30.0, 10.0
"""How long a run's end waits for figures; the second where a signal ended it, and will not be sent twice."""
FEWEST_READINGS = 50
"""Readings of a run whose length is known: a short one is read more often than `update_frequency` says."""
FIRST_OF_TIMED = 20
"""The step at which a run that ends by the clock is first read: its pace says then how long it will be."""
DOUBTED_READINGS = 3
"""The first readings, at which a module's loss is compared with what it hands over."""
UPPERMOST = "sequence"
"""Name of the uppermost of several levels of latents."""
COLLAPSED_EXIT_CODE = 7
CHECKPOINT = "collapsed.ckpt"


class PosteriorCollapsed(SystemExit):
    """The end of a run whose posterior collapsed, raised once a checkpoint is saved: a script ends with exit code 7.

    Processes that a Trainer spawned (`strategy="ddp_spawn"`) end with that code, too, but torch reports it in an exception of its
    own, `ProcessExitedException`.
    """

    def __init__(self, verdict: Verdict, code: int = COLLAPSED_EXIT_CODE) -> None:
        super().__init__(code)
        self.verdict = verdict


@runtime_checkable
class KnowsKLSchedule(Protocol):
    """A module that knows beforehand what the KL will weigh; the monitor then knows when to begin to judge."""

    def kl_weight_at(self, step: int) -> float | None:
        """Return the weight in an optimizer step; None: a controller steers it towards some KL."""


@runtime_checkable
class KnowsFlags(Protocol):
    """A module that may be trained by a command of ours; advice then names its flags."""

    def takes_flags(self) -> bool:
        """Return whether all flags of the training commands have an effect on it."""


@runtime_checkable
class KnowsCircumstances(Protocol):
    """A module that knows what holds its rate up; evidence and advice then name that alone."""

    def circumstances(self) -> Circumstances | None:
        """Return what is in force; None: that is not known."""


@runtime_checkable
class LimitsTime(Protocol):
    """A callback that ends runs by the clock."""

    def seconds_left(self) -> float:
        """Return how long the run may still take."""


@runtime_checkable
class SavesLast(Protocol):
    """A callback that saves runs where they can be resumed from."""

    def save_last(self, trainer: Trainer) -> bool:
        """Save this state; return whether it is saved now."""


class PosteriorMetricsMonitor(Callback):
    """The callback that reads and judges the posterior while a model trains.

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
        read_outputs: ReadOutputs | None = None,
        level: str | None = None,
    ) -> None:
        """`update_frequency` and `plot_frequency` are in optimizer steps, however many micro-batches make one; `window_size`,
        what trends are judged on, is in readings. The last step is read, too, where it is known beforehand, and a run's end is
        drawn unless `plot_frequency` is None.

        `log_dir` is where posterior.jsonl, events.jsonl and plots/ go, by default the Trainer's default_root_dir. It belongs to
        one run: a run that starts at step 0 begins new files.
        `on_collapse="stop"` saves a checkpoint and raises `PosteriorCollapsed` once a collapse is certain: the escape threshold
        confirms it, or the verdict has been in force for a quarter of the run, a tenth if the latent had been alive. A run that is
        resumed from there is meant to go on: it is stopped again only when another verdict has come between.
        `probe_decoder` reads decoder use, where the module has `nll_given_z`: at every n-th reading, and whenever a suspicion
        has to be confirmed before the verdict changes; `probe_every_n_readings=None`: only then. It is read on `probe_batch`, or
        on a few sequences that are chosen from the first validation batches and then kept.
        `level` names one of several levels of latents, for a monitor of its own (`HasLevels` in `contract.py`); without it the
        uppermost is read. Its files go below `log_dir` into a folder, as `step_level`.
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
        self.level = level
        if read_outputs is None:
            read_outputs = step_outputs_of if level is None else ReadLevel(level)
        self.read_outputs = read_outputs
        self._begin(world_size=1)

    def _begin(self, world_size: int) -> None:
        """Begin a run. The capacity is shared out, so that N, and with it log N, is the same for any number of processes."""
        self.reading: Reading | None = None
        """The latest."""
        self._at_least_every: int | None = None
        self._window: PosteriorWindow | CodeWindow = PosteriorWindow(-(-self.posteriors // world_size))
        self._decoder = DecoderProbe(self.read_outputs, self.probe_batch, self.level)
        self._escape = ThresholdReader()
        self._detector = Detector(self.thresholds, self.window_size)
        self._loaded: dict[str, Any] | None = None
        """The detector's state in a checkpoint."""
        self._moves: MovesLatents | None = None
        self._publisher: Publisher | None = None
        """In the first process, while a run goes on."""

    @property
    def state_key(self) -> str:
        """Return the name of this monitor's state in a checkpoint."""
        return super().state_key if self.level is None else self._generate_state_key(level=self.level)

    @property
    def verdict(self) -> Verdict:
        """The verdict in force."""
        return self._detector.verdict

    @property
    def expected_steps(self) -> int | None:
        """The steps of the run, where that is known: those planned, or those that it will reach before the clock ends it."""
        return self._detector.schedule.total_steps

    def is_unharmed(self) -> bool:
        """Return whether a checkpoint saved now is worth going back to."""
        return self._detector.is_unharmed()

    def describe(self, total_steps: int) -> str:
        """Describe the monitor for the header of a run of `total_steps` optimizer steps."""
        every = steps_between_readings(self.update_frequency, total_steps)
        steps = "step" if every == 1 else f"{every:,} steps"
        if every < self.update_frequency:
            steps += f" (in place of {self.update_frequency:,}, as the run is short)"
        reading = f"a reading of up to {self.posteriors:,} posteriors every {steps}"
        end = ", stops when the posterior has collapsed" if self.on_collapse == "stop" else ""
        if self.level is not None:
            return f"the same of {self.level} latents"
        if not self.probe_decoder:
            return f"{reading}, without decoder use{end}"
        nth = self.probe_every_n_readings
        probed = {None: "on suspicion", 1: "at each reading"}.get(nth, f"at one reading in {nth} and on suspicion")
        return f"{reading}, decoder use {probed}{end}"

    # --- A run ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # a checkpoint is loaded after this
            self._begin(trainer.world_size)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._directory = Path(self.log_dir or trainer.default_root_dir)
        if self.level is not None:
            self._directory /= f"{self.level}_level"
        self._probed = level_of(pl_module, self.level)
        """The module, or what it offers of the level that is read."""
        self._step_read = self._step_drawn = steps_done(trainer)  # a checkpoint is saved after the reading of its step
        self._every_n_steps = self.update_frequency
        self._probes = self.probe_decoder and isinstance(self._probed, Probeable)
        self._begin_to_judge(trainer, pl_module)
        if self._loaded is not None:
            self._detector.load_state_dict(self._loaded)
        if trainer.is_global_zero:
            draws = self.plot_frequency is not None
            self._publisher = Publisher(
                self._directory,
                trainer.loggers,
                verbose=self.verbose,
                draws=draws,
                level=read_level(pl_module, self.level),
            )
            unprobed = type(pl_module).__name__ if self.probe_decoder and not self._probes else None
            stops = self.on_collapse == "stop" and self._detector.is_certain()
            self._publisher.start_after(steps_done(trainer), self.verdict, unprobed=unprobed, stops=stops)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not outputs and (pl_module.automatic_optimization or not self._window.is_empty):
            return  # training_step left this batch out
        step_outputs = check_step_outputs(pl_module, self.read_outputs(pl_module, outputs, batch))
        self._take_in(step_outputs)
        step = steps_done(trainer)
        every_n_steps = min(self._every_n_steps, self._at_least_every or self._every_n_steps)
        if not is_due(step, self._step_read, every_n_steps, self._last_step):
            return
        self._step_read = step
        self._expect_length(trainer, step)
        is_foreign = self.level is None and not isinstance(self._probed, KnowsCircumstances)
        if is_foreign and self._publisher is not None and len(self._detector.points) < DOUBTED_READINGS:
            name = type(pl_module).__name__
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
            if isinstance(loss, Tensor):  # sync: a few a run
                whole = loss * trainer.accumulate_grad_batches  # Lightning has divided it
                if (doubt := describe_loss(whole, step_outputs)) is not None:
                    self._publisher.remark(f"{name}: {doubt}", step)
            if (
                step_outputs.prior_mean is step_outputs.kl is step_outputs.codes is None
                and not self._detector.points
                and self._loaded is None
            ):
                self._publisher.assumed(f"{name} hands over no prior_mean: the prior is taken to be N(0, I)")
        gather, nth = partial(gathered, trainer=trainer), self.probe_every_n_readings
        probes_now = self._probes and (
            not self._is_judging
            or (nth is not None and (step // self._every_n_steps % nth == 0 or step == self._last_step))
            or not self._detector.points  # a wrong nll_given_z is refused at once
        )
        use = self._decoder.probe(trainer, pl_module, batch, step_outputs) if probes_now else None
        taken = (step, trainer.current_epoch, step_outputs.kl_weight, use, gather)
        window = self._window
        moves = self._moves = self._probed if isinstance(self._probed, MovesLatents) else None
        if isinstance(window, CodeWindow):
            reading = window.take_reading(*taken)
        else:
            reading = take_reading(window, *taken, moves)
        if self._probes and not probes_now and self._detector.wants_decoder_use(reading):
            use = self._decoder.probe(trainer, pl_module, batch, step_outputs)
            reading = with_decoder_use(reading, use, gather)  # sync: a second one, where there is a suspicion
        closely = self._probes and self._is_judging and self._detector.wants_closer_look(reading)
        if closely:
            use = self._decoder.probe(trainer, pl_module, batch, step_outputs, closely=True)
            reading = with_decoder_use(reading, use, gather)  # sync: and a third, where few sequences do not decide it
        unreadable = why_unreadable(self._probed, step_outputs)
        self._detector.can_read_threshold = self.probe_decoder and unreadable is None
        if self._is_judging and self._detector.wants_escape_threshold(reading):
            threshold = self._escape.read(trainer, pl_module)  # sync: one for each batch that it is read on
            reading = with_escape_threshold(reading, threshold, gather)
        before, was_certain = self.verdict.name, self._detector.is_certain()
        verdict = self._detector.judge(reading, looked_closely=closely) if self._is_judging else self.verdict
        self.reading = reading
        if self._publisher is not None:
            self._publisher.reading(reading, verdict)
            self._publisher.change(verdict, before, step)
            if verdict.name == "collapsed" and unreadable is not None:
                self._publisher.remark(f"whether it could come to life is judged by time alone: {unreadable}", step)
            if self.plot_frequency is not None and step - self._step_drawn >= self.plot_frequency:
                self._step_drawn = step
                self._publisher.draw(self._window, step, moves)
        if self.on_collapse == "stop" and self._detector.is_certain() and not was_certain:
            self._stop(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._publisher is not None:
            self._publisher.end(self.verdict if self.reading is not None or self._loaded is not None else None)
        self._finish()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Judge a run that ends in NaN before a reading shows it."""
        if self._publisher is None:
            return
        if trainer.strategy.root_device.type != "cpu" and isinstance(exception, RuntimeError):
            self._finish(draws=False)  # a device that failed would fail again: it is left alone
            return
        evidence = None
        weights = (own_part(weight) for weight in pl_module.parameters() if weight.is_floating_point())
        if isinstance(self._window, PosteriorWindow) and not self._window.is_finite():
            evidence = "the last posteriors hold NaN or infinity"
        elif not all(bool(weight.isfinite().all()) for weight in weights):
            evidence = "the weights hold NaN or infinity"
        elif isinstance(exception, FloatingPointError):  # weights that such steps are kept from do not show it
            evidence = str(exception) or type(exception).__name__
        if evidence:
            before = self.verdict.name
            step = steps_done(trainer)
            self._publisher.change(self._detector.diverged(step, evidence), before, step)
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
        """Go on with the window of this process; among another number of processes windows begin empty."""
        state = checkpoint["callbacks"].get(self.state_key)
        if state is None:
            return
        self._loaded = state["detector"]
        windows = state["windows"]
        expected = (trainer.world_size, self._window.capacity)
        if windows and windows["posteriors"].shape[:2] == expected:
            if "counts" in windows:
                self._window = CodeWindow(self._window.capacity)
            self._window.load_state_dict({name: value[trainer.global_rank] for name, value in windows.items()})

    # --- A rescue ---------------------------------------------------------------------------------------------------

    def read_at_least_every(self, n_steps: int | None) -> None:
        """Read this often, where that is more often, until it is None: a remedy goes by the readings."""
        self._at_least_every = n_steps

    def stop_judging(self, every_n_steps: int) -> None:
        """Read, with decoder use, at least this often from now on, and judge nothing: a rescue that tries objectives does so."""
        self._is_judging = False
        self._every_n_steps = min(self._every_n_steps, every_n_steps)

    def start_over(self, trainer: Trainer, pl_module: LightningModule, why: str) -> None:
        """Forget all posteriors and readings, as another objective is trained from now on, and judge by its schedule."""
        before, self._window = self._detector, type(self._window)(self._window.capacity)
        self._begin_to_judge(trainer, pl_module)
        self._detector.start_at(trainer.global_step, why, has_been_healthy=before.has_been_healthy)
        if self._publisher is not None:
            self._publisher.change(self.verdict, before.verdict.name, trainer.global_step)

    def _take_in(self, outputs: StepOutputs) -> None:
        """Keep what later readings are made of, without a wait for the device."""
        if outputs.codes is None:
            if isinstance(self._window, CodeWindow):
                raise ValueError("training_step returned codes before, and now none: return the same at every step")
            posteriors = (*seen_from_prior(outputs), outputs.posterior_mask, outputs.nll, outputs.kl)
            self._window.push(*posteriors, kl_is_estimated=outputs.kl_is_estimated)
            return
        if isinstance(self._window, PosteriorWindow):
            self._window = CodeWindow(self._window.capacity)
        assert outputs.codebook_size is not None
        self._window.push(outputs.codes, outputs.codebook_size, outputs.posterior_mask, outputs.nll)

    # --- Parts ------------------------------------------------------------------------------------------------------

    def _expect_length(self, trainer: Trainer, step: int) -> None:
        """Plan readings and patience for the steps that a run will reach which ends by the clock; all processes for the same."""
        (since, first_step), left = self._pace_from, seconds_left(trainer) if self._has_clock else None
        if left is None or step <= first_step or not self._is_judging:
            return
        pace = (time.monotonic() - since) / (step - first_step)
        reached = step + max(0, round(left / max(pace, 1e-9)))
        reached = trainer.strategy.broadcast(min(reached, self._last_step or reached))
        self._every_n_steps = steps_between_readings(self.update_frequency, reached)
        self._detector.expect(reached)

    def _begin_to_judge(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take a detector that knows the run's length and the schedule of its KL weight."""
        self._is_judging = True
        """False while a rescue goes on."""
        self._last_step = planned_steps(trainer, optimizers_in_turn(trainer))
        self._every_n_steps = steps_between_readings(self.update_frequency, self._last_step)
        self._pace_from = time.monotonic(), steps_done(trainer)
        self._has_clock = seconds_left(trainer) is not None
        """Whether the run may end before its last step, by time."""
        if self._has_clock:  # how many steps that is, is known once there is a pace
            self._every_n_steps = min(self._every_n_steps, FIRST_OF_TIMED)
        schedule = KLSchedule(self._last_step)
        probed = level_of(pl_module, self.level)
        if isinstance(pl_module, KnowsKLSchedule):
            is_steered = pl_module.kl_weight_at(0) is None
            weight_at = None if is_steered else lambda step: float(pl_module.kl_weight_at(step) or 0.0)
            schedule = KLSchedule(self._last_step, weight_at, is_steered)
        self._detector = Detector(
            self.thresholds,
            self.window_size,
            schedule,
            can_probe=self._probes,
            advises_flags=isinstance(pl_module, KnowsFlags) and pl_module.takes_flags(),
            circumstances=probed.circumstances() if isinstance(probed, KnowsCircumstances) else None,
        )

    def _stop(self, trainer: Trainer) -> None:
        """Save and end the run. All processes come here at the same step, since all have the same readings."""
        savers = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, SavesLast)]
        if savers:
            are_saved = [saver.save_last(trainer) for saver in savers]
            saved = "is saved" if all(are_saved) else "could not be saved"
        else:
            path = self._directory / CHECKPOINT
            trainer.save_checkpoint(path)
            saved = f"is saved as {path}"
        if self._publisher is None:
            raise PosteriorCollapsed(self.verdict, code=0)  # another would make a launcher kill the first process
        self._publisher.stopped(self.verdict, steps_done(trainer), saved)
        raise PosteriorCollapsed(self.verdict)

    def _finish(self, *, draws: bool = True, seconds: float = DRAWING_SECONDS) -> None:
        """Draw what there is, once; `seconds` is what it may take."""
        publisher, self._publisher = self._publisher, None
        if publisher is None:
            return
        publisher.try_again()
        if draws and self.reading is not None and not self._window.is_empty:  # a rescue may have just emptied it
            publisher.draw(self._window, self.reading.step, self._moves, is_urgent=True)
        publisher.finish(seconds)


def read_level(module: LightningModule, level: str | None) -> str | None:
    """Return the name of the level that is read of a module's latents; None: there is one level."""
    return UPPERMOST if level is None and isinstance(module, HasLevels) else level


def gathered(own: Tensor, trainer: Trainer) -> Tensor:
    """Return the tensors of all processes in a new first dimension; all have the same shape.

    As a sum, in which every process fills its own row: Lightning's `all_gather` goes through what torch 2.13 calls deprecated.
    """
    if trainer.world_size == 1:
        return own[None]
    rows = own.new_zeros((trainer.world_size, *own.shape), device=trainer.strategy.root_device)
    rows[trainer.global_rank] = own
    return trainer.strategy.reduce(rows, reduce_op="sum")


def own_part(weight: Tensor) -> Tensor:
    """Return what this process holds of a weight that may be shared out, without waiting for the others."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def optimizers_in_turn(trainer: Trainer) -> int:
    """Return how many optimizers make one step of training: Lightning counts each of several that a module steps by hand."""
    return 1 if trainer.lightning_module.automatic_optimization else max(1, len(trainer.optimizers))


def steps_done(trainer: Trainer) -> int:
    """Return the steps that are done, one for all optimizers together."""
    return trainer.global_step // optimizers_in_turn(trainer)


def planned_steps(trainer: Trainer, optimizers: int = 1) -> int | None:
    """Return the steps that the whole run will have, where that is known; so many optimizers make one of them."""
    known = [trainer.max_steps // optimizers] if trainer.max_steps > 0 else []
    epochs, batches = trainer.max_epochs or -1, trainer.num_training_batches
    if epochs > 0 and math.isfinite(batches):
        known.append(epochs * math.ceil(batches / trainer.accumulate_grad_batches))
    return min(known, default=None)


def seconds_left(trainer: Trainer) -> float | None:
    """Return how long a run may still take that ends by the clock; None: none does."""
    callbacks = vars(trainer)["callbacks"]  # set by Lightning, and declared nowhere
    left = [callback.seconds_left() for callback in callbacks if isinstance(callback, LimitsTime)]
    timers = [callback.time_remaining() for callback in callbacks if isinstance(callback, Timer)]
    return min([*left, *(seconds for seconds in timers if seconds is not None)], default=None)


def steps_between_readings(update_frequency: int, last_step: int | None) -> int:
    """Return `update_frequency`, or less where a run is short.

    >>> steps_between_readings(100, None), steps_between_readings(100, 1_000), steps_between_readings(100, 20)
    (100, 20, 1)
    """
    if last_step is None:
        return update_frequency
    return max(1, min(update_frequency, last_step // FEWEST_READINGS))


def is_due(step: int, before: int, every_n_steps: int, last_step: int | None) -> bool:
    """Return whether `step` is the first one at or behind a multiple, or the last: some training steps take two optimizer steps.

    `before` is the step of the last time.

    >>> [step for step in (3, 5, 6, 7, 9) if is_due(step, before=step - 2, every_n_steps=4, last_step=7)]
    [5, 7, 9]
    """
    return step != before and (step // every_n_steps > before // every_n_steps or step == last_step)
