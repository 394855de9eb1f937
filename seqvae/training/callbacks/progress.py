"""What a run says of itself while it goes on: a Lightning callback that looks every few steps and only then syncs.

In: what `TrainingModule.training_step` returns. Out: a row every n steps and after each validation, to metrics.csv, to the
loggers and, as text, to whoever watches.
"""

import csv
import io
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, TypedDict, TypeGuard

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from seqvae.data.batch import Batch
from seqvae.files import PatientFile
from seqvae.training.callbacks.nonfinite import NonFiniteError
from seqvae.training.module import Sums, TrainingModule

COLUMNS = (
    *("step", "epoch", "seconds", "loss", "nll_per_step", "kl", "kl_weight", "lr", "gradient_norm", "steps_per_second"),
    *("valid_elbo", "valid_nll", "valid_kl", "valid_nll_per_step", "valid_sequences"),
)
"""Of metrics.csv. Training: means since the last row, in nats, loss and NLL per step of a sequence, KL per sequence, without
micro-batches that came to NaN or infinity (nan, where all did); the KL's
weight, the learning rate and the gradient's norm (before clipping) are those of the row's own step.
`seconds`: of the whole run; only the time between an interruption and its resumption does not count.
`valid_sequences`: how many sequences a validation was on; the last one of a run is on all.
`steps_per_second`: real steps of sequences (tokens), of all processes, in a second of training. Waiting for data counts,
validation does not."""
LABEL_COLUMNS = ("valid_auroc", "valid_auprc")
"""More of them, where the data have labels."""
STATE = "progress"
"""Where a checkpoint has the state. Not among those of `state_dict`, which cannot ask the other processes."""


class Progress(Callback):
    """Stands before whatever saves checkpoints: a row that a checkpoint counts has to be written by then."""

    def __init__(
        self,
        metrics_path: Path,
        *,
        every_n_steps: int,
        total_steps: int,
        unit: str,
        has_labels: bool = False,
        time_limit: timedelta | None = None,
        quiet: bool = False,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`unit`: what a step of a sequence is called. `quiet`: print nothing."""
        self.every_n_steps = every_n_steps
        self.total_steps = total_steps
        self._file = MetricsFile(metrics_path, COLUMNS + LABEL_COLUMNS if has_labels else COLUMNS)
        self._watch = Stopwatch(now)
        display = Display(self._watch, total_steps=total_steps, unit=unit, time_limit=time_limit, now=now)
        self._display = None if quiet else display
        self._since_row: list[Sums] = []
        self._row_step = self._first_step = 0
        self._epoch = 0
        """Of the last step: behind the last one of a run, Lightning counts another."""
        self._validated = (-1, 0)
        """The last row of a validation: its step, and on how many sequences."""
        self._loaded: dict[str, Any] | None = None
        self._has_begun = False

    # --- From the beginning to the end ------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(trainer, pl_module)
        if trainer.is_global_zero and self._display is not None:
            self._display.open()
            self._display.refresh(trainer.global_step, trainer.current_epoch, at_once=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._display is not None:
            self._display.refresh(trainer.global_step, trainer.current_epoch, "training done", at_once=True)
            self._display.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._display is not None:
            self._display.close()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """With the sums of all processes, so that a resumed run writes the very same rows."""
        checkpoint[STATE] = {
            "sums": _of_all_processes(self._since_row, trainer),
            "file": self._file.state(),
            "seconds": self._watch.seconds,
            "lap_seconds": self._watch.lap_seconds,
            "epoch": self._epoch,
            "validated": list(self._validated),
        }
        if trainer.is_global_zero:
            self._file.sync()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == TrainerFn.FITTING:  # and not to validate some other checkpoint
            self._loaded = checkpoint[STATE]
            self._has_begun = False

    def finish(self) -> None:
        """Raise an error where rows still wait that cannot be written."""
        if self._has_begun:
            self._file.finish()

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Once in a session: with training or, where nothing is left to train, with the last validation."""
        if self._has_begun:
            return
        self._has_begun = True
        self._row_step = self._first_step = trainer.global_step
        state, self._loaded = self._loaded, None
        if state is None:
            self._watch.start()
        else:
            self._epoch = state.get("epoch", 0)  # older checkpoints do not tell
            self._validated = tuple(state.get("validated", (-1, 0)))
            self._since_row = _share_of_this_process(state["sums"], trainer, pl_module.device)
            self._watch.start(seconds=state["seconds"], lap_seconds=state["lap_seconds"])
        if not trainer.is_global_zero:
            return
        if state is None:
            self._file.begin()
        else:
            self._file.go_on(state["file"])
        assert isinstance(pl_module, TrainingModule)
        for logger in trainer.loggers:
            logger.log_hyperparams(pl_module.origin["settings"])

    # --- Training ---------------------------------------------------------------------------------------------------

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        self._since_row.append(outputs["sums"])
        step, self._epoch = trainer.global_step, trainer.current_epoch
        if step == self._first_step + 1:
            self._watch.begin_pace(step)
        if self._display is not None:
            self._display.refresh(step, trainer.current_epoch)
        if step == self._row_step or (step % self.every_n_steps and step < self.total_steps):
            return
        assert isinstance(pl_module, TrainingModule)
        row = self._training_row(trainer, outputs["kl_weight"], pl_module.gradient_norm)
        self._since_row.clear()
        self._row_step = step
        if trainer.is_global_zero:
            self._write(trainer, row)
            if self._display is not None:
                self._display.training(step, row)

    def _training_row(self, trainer: Trainer, kl_weight: Tensor | float, gradient_norm: Tensor) -> dict[str, float]:
        sums: Tensor = trainer.strategy.reduce(_sum_of_finite(self._since_row), reduce_op="sum")
        others = [torch.as_tensor(value, dtype=sums.dtype, device=sums.device) for value in (kl_weight, gradient_norm)]
        values = torch.cat((sums, torch.stack(others))).tolist()  # sync: one for each row
        loss, nll, kl, predicted_steps, real_steps, sequences, weight, norm = values
        return {
            "loss": _ratio(loss, predicted_steps),
            "nll_per_step": _ratio(nll, predicted_steps),
            "kl": _ratio(kl, sequences),
            "kl_weight": weight,
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "gradient_norm": norm,
            "steps_per_second": real_steps / self._watch.end_lap(),
        }

    # --- Validation -------------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._watch.pause()

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._display is not None:
            self._display.refresh(trainer.global_step, trainer.current_epoch, f"validation {batch_idx + 1:,}")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._watch.unpause()
        if trainer.sanity_checking:
            return
        self._begin(trainer, pl_module)
        names = [name for name in self._file.columns if name in trainer.callback_metrics]
        values = torch.stack([trainer.callback_metrics[name].float() for name in names])
        row = dict(zip(names, values.tolist(), strict=True))  # sync: one for each validation
        validated = trainer.global_step, int(row.get("valid_sequences", 0))
        if trainer.is_global_zero:
            if validated != self._validated:  # else it is done again by a run that was ended right behind it
                self._write(trainer, row)
            if self._display is not None:
                self._display.validation(trainer.global_step, row)
        self._validated = validated
        if not math.isfinite(row["valid_elbo"]):
            step = trainer.global_step
            raise NonFiniteError(f"step {step:,}: the validation ELBO is {row['valid_elbo']}", first_step=step)

    def _write(self, trainer: Trainer, row: dict[str, float]) -> None:
        place = {"step": trainer.global_step, "epoch": self._epoch, "seconds": f"{self._watch.seconds:.2f}"}
        self._file.append(place | {name: f"{value:.6g}" for name, value in row.items()})
        for logger in trainer.loggers:
            logger.log_metrics(row, step=trainer.global_step)


def _sum_of_finite(parts: list[Sums]) -> Tensor:
    """What came to NaN or infinity was not learnt from, and counts as nothing."""
    parts_N = torch.stack([torch.stack([value.float() for value in part]) for part in parts])
    return torch.where(parts_N.isfinite().all(dim=1, keepdim=True), parts_N, 0.0).sum(dim=0)


def _ratio(value: float, count: float) -> float:
    return value / count if count else math.nan


def _of_all_processes(parts: list[Sums], trainer: Trainer) -> dict[str, Tensor]:
    """Each field of the N sums of W processes, (W, N); nothing where there are none, which is so in all processes alike."""
    if not parts:
        return {}
    fields = {name: torch.stack([getattr(part, name) for part in parts]) for name in Sums._fields}
    gathered = {name: trainer.strategy.all_gather(values_N) for name, values_N in fields.items()}
    return {name: values.reshape(trainer.world_size, -1).cpu() for name, values in gathered.items()}


def _share_of_this_process(fields_WN: dict[str, Tensor], trainer: Trainer, device: torch.device) -> list[Sums]:
    """Everything goes to somebody, also where there are more or fewer processes than there were."""
    if not fields_WN:
        return []
    mine = slice(trainer.global_rank, None, trainer.world_size)
    columns = [fields_WN[name][mine].flatten().to(device).unbind() for name in Sums._fields]
    return [Sums(*values) for values in zip(*columns, strict=True)]


# metrics.csv: one file for a whole run, one header, a row at a time, however often the run is interrupted.
#
# In: rows as mappings from column to value. Out: CSV that another program may read at any time. A checkpoint takes along what
# `state` says; after `go_on` with it the file holds exactly the rows that had been written when the checkpoint was made.


class MetricsState(TypedDict):
    """Where a file stands, in types of JSON."""

    rows: int
    """On the disk."""
    unwritten: list[str]
    """Lines that did not get there."""


class MetricsFile:
    """Appends rows."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self.columns = tuple(columns)
        self._heading = self._lines([dict(zip(columns, columns, strict=True))])
        self._file = PatientFile(path, self._heading)
        self._appended = 0
        """Rows, with those that wait."""

    def begin(self) -> None:
        """A new file with nothing but the header."""
        self._replace([])

    def go_on(self, state: MetricsState) -> None:
        """Keep the rows that the state knows; those written after it will be written once more.

        In a directory without the file a new one begins: a run can go on elsewhere.
        """
        if not self.path.exists():
            self.begin()
            return
        with self.path.open(newline="", encoding="utf-8", errors="replace") as file:
            rows = list(_readable(islice(csv.DictReader(file), state["rows"])))
        self._replace(rows)
        self._file.waiting.extend(state["unwritten"])
        self._appended += len(state["unwritten"])

    def append(self, row: Mapping[str, object]) -> None:
        """Columns that the row lacks stay empty."""
        self._appended += 1
        self._file.append(self._lines([row]))

    def finish(self) -> None:
        """Raise an error where rows still wait that cannot be written."""
        self._file.finish()

    def state(self) -> MetricsState:
        waiting = list(self._file.waiting)
        return {"rows": self._appended - len(waiting), "unwritten": waiting}

    def sync(self) -> None:
        """Make sure that what a checkpoint will count on survives a loss of power, too."""
        with suppress(OSError), self.path.open("rb+") as file:  # the next row says what is wrong
            os.fsync(file.fileno())

    def _replace(self, rows: Sequence[Mapping[str, object]]) -> None:
        """The whole file at once: a reader sees the old one or the new one."""
        beside = self.path.with_name(f"{self.path.name}.new")
        beside.write_bytes((self._heading + self._lines(rows)).encode())
        beside.replace(self.path)
        self._appended = len(rows)
        self._file.waiting.clear()

    def _lines(self, rows: Sequence[Mapping[str, object]]) -> str:
        text = io.StringIO(newline="")
        # A file of another version may have other columns: those it has in common with this one are kept.
        csv.DictWriter(text, self.columns, extrasaction="ignore", lineterminator="\n").writerows(rows)
        return text.getvalue()


def _readable(rows: Iterable[dict[str, str]]) -> Iterator[dict[str, str]]:
    """Up to what is no row of ours: somebody else may have written here."""
    with suppress(csv.Error):
        yield from rows


# How fast a run goes: the time of training alone for its speed, all time for what is left of it.


class Stopwatch:
    """Two clocks that outlive interruptions: one of the whole run, one of the present lap, which can be paused."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        """`now` counts seconds from anywhere, and never backwards."""
        self._now = now
        self._started = self._lap_started = now()
        self._paused_at: float | None = None
        self._anchor: tuple[float, int] | None = None

    def start(self, *, seconds: float = 0.0, lap_seconds: float = 0.0) -> None:
        """Begin, or go on where another stopwatch stood."""
        now = self._now()
        self._started, self._lap_started = now - seconds, now - lap_seconds
        self._paused_at = self._anchor = None

    @property
    def seconds(self) -> float:
        """Of the run, interruptions left out."""
        return self._now() - self._started

    @property
    def lap_seconds(self) -> float:
        """Since the last lap, pauses left out."""
        return (self._now() if self._paused_at is None else self._paused_at) - self._lap_started

    def pause(self) -> None:
        if self._paused_at is None:
            self._paused_at = self._now()

    def unpause(self) -> None:
        if self._paused_at is not None:
            self._lap_started += self._now() - self._paused_at
            self._paused_at = None

    def end_lap(self) -> float:
        """How long the lap was; the next one begins."""
        seconds = self.lap_seconds
        self._lap_started += seconds
        return seconds

    def begin_pace(self, step: int) -> None:
        """From here on the pace counts. The very first step is slow, because everything is new to it."""
        if self._anchor is None:
            self._anchor = (self._now(), step)

    def seconds_left(self, step: int, total_steps: int) -> float | None:
        """At the pace so far of this session, pauses included; None: there is none yet."""
        if self._anchor is None or step == self._anchor[1]:
            return None
        since, first_step = self._anchor
        return (self._now() - since) / (step - first_step) * (total_steps - step)


# How far a run is, for whoever watches: a bar on a terminal, elsewhere a line for each row of metrics.csv.
#
# In: the rows, and at every step the number of it. Out: text on stdout.

LABELS = ("valid_auroc", "valid_auprc")
"""Shown where they are there."""


class Display:
    """Prints; validations are lines on a terminal, too, above the bar."""

    def __init__(
        self,
        watch: Stopwatch,
        *,
        total_steps: int,
        unit: str,
        time_limit: timedelta | None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`watch` says how much time is left, `unit` what a step of a sequence is called."""
        self.watch = watch
        self.total_steps = total_steps
        self.unit = unit
        self.time_limit = time_limit
        self._now = now
        self._bar: ProgressBar | None = None
        self._newest: dict[str, float] = {}

    def open(self) -> None:
        if can_show_bar(sys.stdout, os.environ):
            self._bar = ProgressBar(sys.stdout, self._now)
            self._bar.open()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def refresh(self, step: int, epoch: int, doing: str | None = None, *, at_once: bool = False) -> None:
        """To be called as often as one likes: it costs next to nothing where nothing is due, and never asks the device."""
        if self._bar is None or not (at_once or self._bar.is_due()):
            return
        seconds, newest = self._seconds_left(step), self._newest
        # The most important first: a narrow window shows as many as it can.
        texts = [f"{step:,}/{self.total_steps:,}"]
        texts += [] if seconds is None else [f"{clock(seconds)} left"]
        if "loss" in newest:
            texts += [f"loss {newest['loss']:.4f}", f"{newest['steps_per_second']:,.0f} {self.unit}s/s"]
        texts.append(doing or f"epoch {epoch + 1}")
        if "valid_elbo" in newest:
            texts.append(f"elbo {newest['valid_elbo']:.2f}")
        self._bar.show(step / self.total_steps, texts)

    def training(self, step: int, row: Mapping[str, float]) -> None:
        self._newest |= row
        if self._bar is not None:
            return
        seconds = self._seconds_left(step)
        print(
            f"{self._place(step)}  loss {row['loss']:.4f}  nll/{self.unit} {row['nll_per_step']:.4f}  "
            f"kl {row['kl']:.2f} (weight {row['kl_weight']:.2f})  {row['steps_per_second']:,.0f} {self.unit}s/s"
            + ("" if seconds is None else f"  {clock(seconds)} left"),
            flush=True,
        )

    def validation(self, step: int, row: Mapping[str, float]) -> None:
        self._newest |= row
        labels = "".join(f"  {name.removeprefix('valid_')} {row[name]:.3f}" for name in LABELS if name in row)
        print(
            f"{self._place(step)}  validation on {row['valid_sequences']:,.0f}: elbo {row['valid_elbo']:.3f}  "
            f"nll {row['valid_nll']:.3f}  kl {row['valid_kl']:.2f}  nll/{self.unit} {row['valid_nll_per_step']:.4f}{labels}",
            flush=True,
        )

    def _place(self, step: int) -> str:
        return f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}"

    def _seconds_left(self, step: int) -> float | None:
        seconds = self.watch.seconds_left(step, self.total_steps)
        if seconds is None or self.time_limit is None:
            return seconds
        return min(seconds, max(0.0, self.time_limit.total_seconds() - self.watch.seconds))


def clock(seconds: float) -> str:
    """
    >>> clock(75), clock(3675)
    ('1:15', '1:01:15')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# One line at the bottom of a terminal that says how far a run is; all other output appears above it, undamaged.
#
# In: the share that is done and a few texts. Out: the line, drawn anew at most five times a second. It asks nothing of the
# device: what it shows, somebody else has measured.

REFRESH_SECONDS = 0.2
WIDEST_BAR, NARROWEST_BAR = 30, 8
"""Characters. Below the least, texts are left out, the last ones first."""
EIGHTHS = " ▏▎▍▌▋▊▉█"
CLEAR = "\r\x1b[K"
"""To the first column, and everything to the right of it away."""


def can_show_bar(stream: object, environment: Mapping[str, str]) -> TypeGuard[io.TextIOWrapper]:
    """Whether a line can be drawn over and over: not in a file, a pipe or a notebook."""
    able = environment.get("TERM") != "dumb" and (sys.platform != "win32" or "WT_SESSION" in environment)
    return able and isinstance(stream, io.TextIOWrapper) and stream.isatty()


def compose(share: float, texts: Sequence[str], width: int, *, blocks: bool) -> str:
    """Percentage, bar, and as many of the texts as there is room for.

    >>> compose(0.42, ["84/200", "loss 1.25"], 40, blocks=False)
    ' 42% [######.........] 84/200  loss 1.25'
    """
    percent = f"{int(100 * share):3}%"
    rest = list(texts)
    while rest and width - _width_of(percent, rest) < NARROWEST_BAR:
        rest.pop()
    room = min(width - _width_of(percent, rest), WIDEST_BAR)
    parts = [percent, _bar(share, room, blocks)] if room >= NARROWEST_BAR else [percent]
    return " ".join([*parts, "  ".join(rest)]).rstrip()[:width]


def _width_of(percent: str, texts: Sequence[str]) -> int:
    """Of everything but the bar: the spaces on both its sides and its ends count."""
    return len(percent) + 4 + len("  ".join(texts))


def _bar(share: float, room: int, blocks: bool) -> str:
    if not blocks:
        return f"[{'#' * int(share * room):.<{room}}]"
    whole, eighths = divmod(int(share * room * 8), 8)
    return f"▕{EIGHTHS[8] * whole + EIGHTHS[eighths]:<{room}.{room}}▏"


class ProgressBar:
    """Draws on a terminal. While it is up, `sys.stdout`, `sys.stderr` and the root logger write above it."""

    def __init__(self, stream: io.TextIOWrapper, now: Callable[[], float] = time.perf_counter) -> None:
        self._stream = stream
        self._now = now
        self._blocks = _can_encode(stream, f"{EIGHTHS}▕")
        self._line = ""
        self._next_draw = float("-inf")
        self._foreign_line_open = False
        self._lock = threading.RLock()
        """Figures are drawn and data loaded in threads, which may have something to say."""
        self._redirected = ExitStack()

    def open(self) -> None:
        if isinstance(sys.stdout, _Above):
            return
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.isatty():
            self._redirected.enter_context(redirect_stdout(_Above(sys.stdout, self)))
        if (
            isinstance(sys.stderr, io.TextIOWrapper) and sys.stderr.isatty()
        ):  # else what goes there does not meet the bar
            above = _Above(sys.stderr, self)
            for handler in logging.getLogger().handlers:
                if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
                    self._redirected.callback(handler.setStream, handler.stream)
                    handler.setStream(above)
            self._redirected.enter_context(redirect_stderr(above))

    def is_due(self) -> bool:
        return self._now() >= self._next_draw

    def show(self, share: float, texts: Sequence[str]) -> None:
        self._next_draw = self._now() + REFRESH_SECONDS
        # One column stays free: a line that fills the last one wraps on some terminals.
        self._line = compose(share, texts, _columns(self._stream) - 1, blocks=self._blocks)
        self._draw()

    def close(self) -> None:
        """Leave the bar where it is and go on below it. Closing what is closed does nothing."""
        with self._lock:
            if self._line:
                self._draw()
                self._stream.write("\n")
                self._stream.flush()
                self._line = ""
        self._redirected.close()

    def write_above(self, text: str, write: Callable[[str], int]) -> int:
        """Let somebody else write; the bar comes back when the line is complete."""
        with self._lock:
            if not self._foreign_line_open and self._line:
                self._stream.write(CLEAR)
                self._stream.flush()
            written = write(text)
            if text:
                self._foreign_line_open = not text.endswith("\n")
            self._draw()
            return written

    def _draw(self) -> None:
        with self._lock:
            if self._line and not self._foreign_line_open:
                self._stream.write(f"\r{self._line}\x1b[K")
                self._stream.flush()


class _Above(io.TextIOWrapper):
    """Stands in for a stream while a bar is up; whoever still has it afterwards can go on using it."""

    def __init__(self, stream: io.TextIOWrapper, bar: ProgressBar) -> None:
        stream.flush()
        super().__init__(stream.buffer, encoding=stream.encoding, errors=stream.errors, write_through=True)
        self._bar = bar

    def write(self, text: str) -> int:
        return self._bar.write_above(text, self._write_through)

    def close(self) -> None:
        """The stream below is not ours to close."""

    def _write_through(self, text: str) -> int:
        written = super().write(text)
        self.flush()
        return written


def _columns(stream: io.TextIOWrapper) -> int:
    """Of the window as it is now; a terminal that does not know is taken for 80 wide."""
    return os.get_terminal_size(stream.fileno()).columns or 80


def _can_encode(stream: io.TextIOWrapper, text: str) -> bool:
    try:
        text.encode(stream.encoding)
    except UnicodeEncodeError:
        return False
    return True
