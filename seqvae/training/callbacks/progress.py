"""Rows of figures while a run goes on: a Lightning callback that looks every few steps and only then syncs.

In: what `TrainingModule.training_step` returns. Out: a row every n steps and after each validation, to metrics.csv, to the loggers
and to the console: a bar on a terminal with the validations as lines above it, elsewhere a line for each row.
"""

import csv
import io
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, TypeGuard

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from rich import progress_bar
from rich.console import Console
from rich.live import Live
from rich.segment import Segment, Segments
from torch import Tensor

from seqvae.files import PatientFile, replace_file
from seqvae.text import cells, clock, window_width
from seqvae.training.callbacks.nonfinite import NonFiniteError
from seqvae.training.module import Sums, TrainingModule

COLUMNS = (
    *("step", "epoch", "seconds", "loss", "nll_per_step", "kl", "kl_weight", "lr", "gradient_norm", "steps_per_second"),
    *("valid_elbo", "valid_nll", "valid_kl", "valid_nll_per_step", "valid_sequences"),
)
"""Columns of metrics.csv. Training: means since the last row, in nats, loss and NLL per step of a sequence, KL per sequence,
without micro-batches that came to NaN or infinity (nan, where all did); the KL's weight, the learning rate and the gradient's norm
(before clipping) are those of the row's own step.
`seconds`: of the whole run; only the time between an interruption and its resumption does not count.
`valid_sequences`: how many sequences a validation was on; the last one of a run is on all.
`steps_per_second`: real steps of sequences (tokens), of all processes, in a second of training. Waiting for data counts,
validation does not."""
LABEL_COLUMNS = ("valid_auroc", "valid_auprc")
"""More columns, where the data have labels."""
ON_ALL = "_on_all"
"""Behind the names that loggers get for the last validation of a run, where the others were on a part of the sequences."""
STATE = "progress"
"""Key of the state in a checkpoint. It is not in `state_dict`, which cannot communicate with the other processes."""

REFRESH_SECONDS = 0.2
WIDEST_BAR, NARROWEST_BAR = 30, 8
"""Characters. Where there is room for less, texts are left out, the last ones first."""


class Progress(Callback):
    """Callback that writes the rows and shows how far a run is.

    It stands before what saves checkpoints: a row that a checkpoint counts has to be written by then.
    """

    def __init__(
        self,
        metrics_path: Path,
        *,
        every_n_steps: int,
        total_steps: int,
        unit: str,
        valid_sequences: int = 0,
        has_labels: bool = False,
        time_limit: timedelta | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`unit`: the name of a step of a sequence; `valid_sequences`: how many there are to validate on, where that is known."""
        self.every_n_steps = every_n_steps
        self.total_steps = total_steps
        self.unit = unit
        self.valid_sequences = valid_sequences
        self.time_limit = time_limit
        self._file = MetricsFile(metrics_path, COLUMNS + LABEL_COLUMNS if has_labels else COLUMNS)
        self._now = now
        self._watch = Stopwatch(now)
        self._bar: ProgressBar | None = None
        self._next_refresh = -math.inf
        self._newest: dict[str, float] = {}
        """The last figures of each kind, for the bar."""
        self._since_row: list[Sums] = []
        self._row_step = self._first_step = 0
        self._pace_from: tuple[float, int] | None = None
        """The time and the step that the pace of the session is counted from."""
        self._epoch = 0
        """The epoch of the last step: behind the last one of a run, Lightning counts another."""
        self._validated = (-1, 0)
        """The last row of a validation: its step, and its number of sequences."""
        self._loaded: dict[str, Any] | None = None
        self._has_begun = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(trainer, pl_module)
        if trainer.is_global_zero and can_show_bar(sys.stdout):
            self._bar = ProgressBar(sys.stdout)
            self._refresh(trainer, at_once=True)

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        self._refresh(trainer, "training done", at_once=True)
        self._close_bar()

    def on_exception(self, *_: Any) -> None:
        self._close_bar()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the sums of all W processes, (W, N) of each field, so that a resumed run writes the very same rows."""
        sums: dict[str, Tensor] = {}
        if self._since_row:  # so in all processes alike
            for name, values in zip(Sums._fields, zip(*self._since_row, strict=True), strict=True):
                sums[name] = trainer.strategy.all_gather(torch.stack(values)).reshape(trainer.world_size, -1).cpu()
        checkpoint[STATE] = {
            "sums": sums,
            "file": self._file.state(),
            "seconds": self._watch.seconds,
            "lap_seconds": self._watch.lap_seconds,
            "epoch": self._epoch,
            "validated": list(self._validated),
        }
        if trainer.is_global_zero:
            # The rows that a checkpoint counts survive a loss of power, too; what is wrong the next row reports.
            with suppress(OSError), self._file.path.open("rb+") as file:
                os.fsync(file.fileno())

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == TrainerFn.FITTING:  # and not to validate some other checkpoint
            self._loaded = checkpoint[STATE]
            self._has_begun = False

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self._since_row.append(outputs["sums"])
        step, self._epoch = trainer.global_step, trainer.current_epoch
        if (
            step == self._first_step + 1 and self._pace_from is None
        ):  # the first step is slow, as everything is new to it
            self._pace_from = self._now(), step
        self._refresh(trainer)
        if step == self._row_step or (step % self.every_n_steps and step < self.total_steps):
            return
        assert isinstance(pl_module, TrainingModule)
        parts_N = torch.stack([torch.stack([value.float() for value in part]) for part in self._since_row])
        # What came to NaN or infinity was not learned from, and counts as nothing.
        finite = torch.where(parts_N.isfinite().all(dim=1, keepdim=True), parts_N, 0.0).sum(dim=0)
        sums: Tensor = trainer.strategy.reduce(finite, reduce_op="sum")
        of_step = (outputs["kl_weight"], pl_module.gradient_norm)
        others = [torch.as_tensor(value, dtype=sums.dtype, device=sums.device) for value in of_step]
        values = torch.cat((sums, torch.stack(others))).tolist()  # sync: one for each row
        loss, nll, kl, predicted_steps, real_steps, sequences, weight, norm = values
        row = {
            "loss": loss / predicted_steps if predicted_steps else math.nan,
            "nll_per_step": nll / predicted_steps if predicted_steps else math.nan,
            "kl": kl / sequences if sequences else math.nan,
            "kl_weight": weight,
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "gradient_norm": norm,
            "steps_per_second": real_steps / self._watch.end_lap(),
        }
        self._since_row.clear()
        self._row_step = step
        if not trainer.is_global_zero:
            return
        self._newest |= row
        self._write(trainer, row)
        if self._bar is None:
            left = self._time_left(step)
            texts = [f"loss {row['loss']:.4f}", f"nll/{self.unit} {row['nll_per_step']:.4f}"]
            texts += [f"kl {row['kl']:.2f} (weight {row['kl_weight']:.2f})"]
            texts += [f"{row['steps_per_second']:,.0f} {self.unit}s/s", left]
            self._print(texts, step)

    def on_validation_start(self, *_: Any) -> None:
        self._watch.pause()

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        self._refresh(trainer, f"validation {batch_idx + 1:,}")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._watch.unpause()
        if trainer.sanity_checking:
            return
        self._begin(trainer, pl_module)
        step = trainer.global_step
        names = [name for name in self._file.columns if name in trainer.callback_metrics]
        values = torch.stack([trainer.callback_metrics[name].float() for name in names])
        row = dict(zip(names, values.tolist(), strict=True))  # sync: one for each validation
        validated = step, int(row.get("valid_sequences", 0))
        if trainer.is_global_zero:
            is_another_set = self._validated[0] >= 0 and validated[1] != self._validated[1]
            ends_run = trainer.state.fn == TrainerFn.VALIDATING
            if validated != self._validated:  # else a run that was ended right behind it makes it again
                self._write(trainer, row, ON_ALL if is_another_set and ends_run else "")
            self._newest |= row
            total = self.valid_sequences
            on = f"all {total:,}" if validated[1] == total else f"{validated[1]:,}{f' of {total:,}' if total else ''}"
            texts = [f"validation on {on}: elbo {row['valid_elbo']:.3f}"]
            texts += [f"nll {row['valid_nll']:.3f}", f"kl {row['valid_kl']:.2f}"]
            texts += [f"{name.removeprefix('valid_')} {row[name]:.3f}" for name in LABEL_COLUMNS if name in row]
            texts += [f"nll/{self.unit} {row['valid_nll_per_step']:.4f}"]
            self._print(texts, step)
        self._validated = validated
        if not math.isfinite(row["valid_elbo"]):
            raise NonFiniteError(f"step {step:,}: the validation ELBO is {row['valid_elbo']}", first_step=step)

    def finish(self) -> None:
        """Raise an error where rows still wait that cannot be written."""
        self._file.finish()

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a session once: with training or, where nothing is left to train, with the last validation."""
        if self._has_begun:
            return
        self._has_begun = True
        self._row_step = self._first_step = trainer.global_step
        self._pace_from = None
        state, self._loaded = self._loaded, None
        if state is None:
            self._watch = Stopwatch(self._now)
        else:
            self._watch = Stopwatch(self._now, seconds=state["seconds"], lap_seconds=state["lap_seconds"])
            self._epoch = state.get("epoch", 0)  # older checkpoints have none
            self._validated = tuple(state.get("validated", (-1, 0)))
            self._since_row = []
            if state["sums"]:  # all of them are dealt out, also to more or fewer processes than there were
                own = slice(trainer.global_rank, None, trainer.world_size)
                columns = [state["sums"][name][own].flatten().to(pl_module.device).unbind() for name in Sums._fields]
                self._since_row = [Sums(*values) for values in zip(*columns, strict=True)]
        if trainer.is_global_zero:
            self._file.begin(None if state is None else state["file"])
            assert isinstance(pl_module, TrainingModule)
            for logger in trainer.loggers:
                logger.log_hyperparams(pl_module.origin["settings"])

    def _write(self, trainer: Trainer, row: dict[str, float], suffix: str = "") -> None:
        """Add a row to metrics.csv and to the loggers, in whose curves `suffix` sets a row apart that cannot be compared."""
        place = {"step": trainer.global_step, "epoch": self._epoch, "seconds": f"{self._watch.seconds:.2f}"}
        self._file.append(place | {name: f"{value:.6g}" for name, value in row.items()})
        for logger in trainer.loggers:
            logger.log_metrics({name + suffix: value for name, value in row.items()}, step=trainer.global_step)

    def _refresh(self, trainer: Trainer, doing: str | None = None, *, at_once: bool = False) -> None:
        """Draw the bar, at most five times a second unless `at_once`. Never waits for the device."""
        if self._bar is None or not (at_once or self._now() >= self._next_refresh):
            return
        self._next_refresh = self._now() + REFRESH_SECONDS
        step, newest = trainer.global_step, self._newest
        # The most important first: a narrow window shows as many as it can.
        texts = [f"{step:,}/{self.total_steps:,}", self._time_left(step)]
        if "loss" in newest:
            texts += [f"loss {newest['loss']:.4f}", f"{newest['steps_per_second']:,.0f} {self.unit}s/s"]
        texts.append(doing or f"epoch {trainer.current_epoch + 1}")
        if "valid_elbo" in newest:
            texts.append(f"elbo {newest['valid_elbo']:.2f}")
        self._bar.show(step / self.total_steps, [text for text in texts if text])

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _print(self, texts: Sequence[str], step: int) -> None:
        """Print a line: on a terminal as many of the texts as it has columns for, elsewhere all."""
        shown = [f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}", *(text for text in texts if text)]
        width = window_width(sys.stdout)
        while width is not None and len(shown) > 2 and cells("  ".join(shown)) > width:
            shown.pop()
        print("  ".join(shown), flush=True)

    def _time_left(self, step: int) -> str:
        """Return how long the run will still take at this session's pace, validations included, within --max_time.

        Empty: there is no pace yet.
        """
        if self._pace_from is None or step == self._pace_from[1]:
            return ""
        since, first_step = self._pace_from
        seconds = (self._now() - since) / (step - first_step) * (self.total_steps - step)
        if self.time_limit is not None:
            seconds = min(seconds, max(0.0, self.time_limit.total_seconds() - self._watch.seconds))
        return f"{clock(seconds)} left"


class MetricsFile:
    """metrics.csv: one file for a whole run, one header, a row at a time, however often the run is interrupted.

    Another program may read it at any time. A checkpoint holds `state`; after `begin` with it the file holds exactly the rows that
    had been written when the checkpoint was made.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self.columns = tuple(columns)
        self._heading = self._lines([dict(zip(columns, columns, strict=True))])
        self._file = PatientFile(path, self._heading)
        self._appended = 0
        """Rows, with those that wait."""

    def begin(self, state: Mapping[str, Any] | None = None) -> None:
        """Write the header and the rows that the state of a checkpoint knows; those written after it will be written once more.

        In a directory without the file a new one begins: a run can go on elsewhere.
        """
        rows: list[Mapping[str, object]] = []
        self._file.unwritten.clear()
        if state is not None and self.path.exists():
            self._file.unwritten.extend(state["unwritten"])
            # Someone else may have written here: what comes before is kept.
            with suppress(csv.Error), self.path.open(newline="", encoding="utf-8", errors="replace") as file:
                rows.extend(islice(csv.DictReader(file), state["rows"]))
        with replace_file(self.path) as partial:
            partial.write_bytes((self._heading + self._lines(rows)).encode())
        self._appended = len(rows) + len(self._file.unwritten)

    def append(self, row: Mapping[str, object]) -> None:
        """Add a row; columns that it lacks stay empty."""
        self._appended += 1
        self._file.append(self._lines([row]))

    def finish(self) -> None:
        """Raise an error where rows still wait that cannot be written."""
        self._file.finish()

    def state(self) -> dict[str, Any]:
        """Return the number of rows on the disk, and the lines that did not get there."""
        waiting = list(self._file.unwritten)
        return {"rows": self._appended - len(waiting), "unwritten": waiting}

    def _lines(self, rows: Sequence[Mapping[str, object]]) -> str:
        text = io.StringIO(newline="")
        # A file of another version may have other columns: those it has in common with this one are kept.
        csv.DictWriter(text, self.columns, extrasaction="ignore", lineterminator="\n").writerows(rows)
        return text.getvalue()


class Stopwatch:
    """Two clocks that outlive interruptions, of the whole run and of the present lap, which can be paused."""

    def __init__(self, now: Callable[[], float], *, seconds: float = 0.0, lap_seconds: float = 0.0) -> None:
        """`now` counts seconds from anywhere, and never backwards; `seconds` and `lap_seconds` are where an earlier watch stood."""
        self._now = now
        self._started, self._lap_started = now() - seconds, now() - lap_seconds
        self._paused_at: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds of the run, interruptions left out."""
        return self._now() - self._started

    @property
    def lap_seconds(self) -> float:
        """Seconds since the last lap, pauses left out."""
        return (self._now() if self._paused_at is None else self._paused_at) - self._lap_started

    def pause(self) -> None:
        if self._paused_at is None:
            self._paused_at = self._now()

    def unpause(self) -> None:
        if self._paused_at is not None:
            self._lap_started += self._now() - self._paused_at
            self._paused_at = None

    def end_lap(self) -> float:
        """Return the seconds of the lap, and begin the next one."""
        seconds = self.lap_seconds
        self._lap_started += seconds
        return seconds


def can_show_bar(stream: object) -> TypeGuard[io.TextIOWrapper]:
    """Return whether a line can be drawn over and over: not in a file, a pipe or a notebook."""
    is_able = os.environ.get("TERM") != "dumb" and (sys.platform != "win32" or "WT_SESSION" in os.environ)
    return is_able and isinstance(stream, io.TextIOWrapper) and stream.isatty()


class ProgressBar:
    """One line at the bottom of a terminal, by the library rich; all other output appears above it, undamaged.

    While it is up, `sys.stdout`, `sys.stderr` and the handlers of the root logger write through it, where they are terminals.
    """

    def __init__(self, stream: io.TextIOWrapper) -> None:
        self._stream = stream
        self._console = _Console(file=stream, soft_wrap=True, markup=False, emoji=False, highlight=False)
        self._live: Live | None = None
        self._handlers_back = ExitStack()

    def show(self, share: float, texts: Sequence[str]) -> None:
        """Draw the bar of the share that is done, and as many of the texts as the window has room for."""
        # Of the window as it is now; a terminal that does not know is taken for 80 wide.
        columns, rows = os.get_terminal_size(self._stream.fileno())
        self._console.size = columns or 80, rows or 25
        if self._live is None:
            stderr_before = sys.stderr
            out, err = (isinstance(s, io.TextIOWrapper) and s.isatty() for s in (sys.stdout, sys.stderr))
            self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=out, redirect_stderr=err)
            self._live.start()
            for handler in logging.getLogger().handlers if err else ():
                if isinstance(handler, logging.StreamHandler) and handler.stream is stderr_before:
                    self._handlers_back.callback(handler.setStream, handler.stream)
                    handler.setStream(sys.stderr)
        self._live.update(bar_line(self._console, share, texts), refresh=True)

    def close(self) -> None:
        """Leave the bar where it is and go on below it. Closing what is closed does nothing."""
        if self._live is not None:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()  # the beginning of a line that waits for its end
            self._live.stop()
            self._live = None
        self._handlers_back.close()


class _Console(Console):
    """A console that leaves the cursor alone: a run that is killed would leave the terminal without it."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


def bar_line(console: Console, share: float, texts: Sequence[str]) -> Segments:
    """Return percentage, bar, and as many of the texts as the console has room for, the first ones first."""
    width = console.width - 1  # a line that fills the last column wraps on some terminals
    percent = f"{int(100 * share):3}%"
    for shown in range(len(texts), -1, -1):
        text = "  ".join(texts[:shown])
        room = width - cells(f"{percent}  {text}")
        if room >= NARROWEST_BAR:
            bar = progress_bar.ProgressBar(total=1.0, completed=share, width=min(room, WIDEST_BAR))
            return Segments([Segment(f"{percent} "), *console.render(bar), Segment(f" {text}".rstrip())])
    return Segments([Segment(percent[: max(0, width)])])
