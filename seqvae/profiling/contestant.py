"""A training run in a process of its own that trains only when told, so that several can take turns on one machine.

    with Contestant(Recipe("optimized", settings, train_optimized.callbacks)) as run:
        lap = run.turn(steps=20)

It is the run that the command would have: the real Trainer, the command's callbacks, the loader, a run directory, which is
thrown away. Only the order of its batches differs, unless the recipe says otherwise (every stretch holds long and short
ones alike), and it neither validates nor saves on its own.
"""

import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

from seqvae.config.training import TrainingSettings
from seqvae.errors import DataError, DivergedError, SettingsError, StorageError, UsageError, is_out_of_memory
from seqvae.profiling.messages import (
    Answer,
    Close,
    Count,
    Failed,
    Lap,
    Ready,
    Request,
    Save,
    Saved,
    Trace,
    Traced,
    Turn,
    Validate,
    Validation,
    Work,
)

if TYPE_CHECKING:
    from lightning import Callback

OUTPUT = "output.txt"
LONG_RUN = 1_000_000
"""Optimizer steps of a run that shall not end while it is measured."""
PRELOADED = ["seqvae.training.fit", "seqvae.profiling.baton", "seqvae.monitors.callback", "seqvae.monitors.throughput"]
"""What all runs import: once for all of them, where processes can be forked."""
PATIENCE_SECONDS = 10.0
"""For a run to end when it is told to."""

Wanted = TypeVar("Wanted", bound=Answer)


class Recipe(NamedTuple):
    """What a command would run."""

    name: str
    settings: TrainingSettings
    callbacks: "Callable[[Any], list[Callback]]"
    """Settings -> the command's callbacks; a function that other processes can import."""
    is_spread: bool = True
    """Any stretch of its batches stands for all; False: they come as the command has them, which matters to what is learnt."""


class MeasuredRunError(Exception):
    """A training process failed, or ended, and it is not known to be the user's to mend."""


ENDINGS = (MeasuredRunError, DivergedError, MemoryError)
"""What ends a training process that settings and data did not refuse."""
KILLED = -9
"""The exit code of a process for which the system had no memory left. Not every system has a name for that signal."""


class MeasuredRun:
    """One run. What went wrong there is raised here."""

    def __init__(self, recipe: Recipe) -> None:
        self.name = recipe.name
        self.directory = Path(tempfile.mkdtemp(prefix="seqvae-measured-"))
        """Where it writes, until it is closed."""
        self._connection, theirs = _context().Pipe()
        self._process = _context().Process(target=_run, args=(theirs, recipe, str(self.directory)), daemon=True)
        self._process.start()
        theirs.close()
        self._ready: Ready | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:  # nobody waits for the end of a turn
            self._process.kill()
        self.close()

    @property
    def ready(self) -> Ready:
        """What is known before the first step. Waits for it."""
        if self._ready is None:
            self._ready = self._answer(Ready)
        return self._ready

    def turn(self, steps: int = 1, seconds: float = 0.0, lead_steps: int = 2, *, by_stage: bool = True) -> Lap:
        return self._ask(Turn(steps, seconds, lead_steps, by_stage), Lap)

    def count(self, steps: int = 4) -> Work:
        return self._ask(Count(steps), Work)

    def validate(self) -> Validation:
        return self._ask(Validate(), Validation)

    def save(self) -> Saved:
        return self._ask(Save(), Saved)

    def trace(self, path: Path, steps: int = 3) -> Traced:
        return self._ask(Trace(str(path.absolute()), steps), Traced)

    def close(self) -> None:
        """End the process, whatever it does, and remove its directory."""
        if self._process.is_alive():
            with suppress(BrokenPipeError):  # it is ending already
                self._connection.send(Close())
            self._process.join(PATIENCE_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _ask(self, request: Request, wanted: type[Wanted]) -> Wanted:
        _ = self.ready
        try:
            self._connection.send(request)
        except BrokenPipeError:
            raise self._death() from None
        return self._answer(wanted)

    def _answer(self, wanted: type[Wanted]) -> Wanted:
        try:
            answer: Answer = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._death() from None
        if isinstance(answer, Failed):
            raise _as_raised(self.name, answer)
        assert isinstance(answer, wanted)
        return answer

    def _death(self) -> Exception:
        self._process.join(PATIENCE_SECONDS)
        path = self.directory / OUTPUT
        output = path.read_text(encoding="utf-8", errors="replace").strip().splitlines() if path.exists() else []
        last = f": {output[-1]}" if output else ""
        code = self._process.exitcode
        said = f"{self.name}: its process ended with code {code}{last}"
        return MemoryError(f"({said})") if code == KILLED else MeasuredRunError(said)


def _context() -> Any:
    """Processes that start from one which has imported everything, where the system can fork; or else from nothing."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _as_raised(name: str, failed: Failed) -> Exception:
    """What the user can mend is raised as what it was; the rest with where it happened."""
    for kind in (UsageError, SettingsError, DataError, StorageError):
        if failed.kind == kind.__name__:
            return kind(failed.said)
    if failed.kind == DivergedError.__name__:
        return DivergedError(f"{name}: {failed.said}")
    if failed.kind == MemoryError.__name__:
        return MemoryError(f"({name}: {failed.said})")
    return MeasuredRunError(f"{name}: {failed.kind}: {failed.said}\n{failed.traceback}")


# --- In the other process ----------------------------------------------------------------------------------------------


def _run(connection: Connection, recipe: Recipe, directory: str) -> None:
    """Whatever goes wrong is for the process that asked."""
    started = time.perf_counter()
    # The loader's worker processes (--worker_type process): a daemon may have none, and they shall start as they do in a command.
    multiprocessing.current_process().daemon = False
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    output = os.open(Path(directory, OUTPUT), os.O_WRONLY | os.O_CREAT)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(output, stream.fileno())
    from seqvae.profiling.baton import Closed  # it takes seconds, where nothing was imported beforehand

    try:
        _train(connection, recipe, directory, started)
    except Closed:
        pass
    except BaseException as error:
        kind = MemoryError if is_out_of_memory(error) else type(error)
        connection.send(Failed(kind.__name__, str(error), traceback.format_exc()))


def _train(connection: Connection, recipe: Recipe, directory: str, started: float) -> None:
    from seqvae.console import set_up_output
    from seqvae.profiling.baton import MeasurementCallback
    from seqvae.training.fit import fit, make_data
    from seqvae.training.schedules import plan_run

    set_up_output()
    settings = measurable(recipe.settings, directory)
    asked = plan_run(recipe.settings, make_data(recipe.settings), world=1)
    baton = MeasurementCallback(
        connection, asked, recipe.settings.validation.limit_val_batches, recipe.is_spread, started
    )
    fit(settings, [*recipe.callbacks(settings), baton])


def measurable(settings: TrainingSettings, directory: str) -> TrainingSettings:
    """The same run in another place and on one device, which does not end and does nothing but train."""
    run = replace(settings.run, output_dir=directory, run_name="run", resume="never", fast_dev_run=False)
    return replace(
        settings,
        compute=replace(settings.compute, devices=1, num_nodes=1),
        run=replace(run, max_steps=LONG_RUN, max_epochs=None, max_time=None, logger="csv"),
        validation=replace(
            settings.validation,
            limit_val_batches=0,
            sanity_checks=0,
            early_stopping_patience=None,
            checkpoint_every_n_steps=LONG_RUN,
        ),
    )
