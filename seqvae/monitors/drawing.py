"""Figures of a run that goes on: drawn by a process of their own, so that training waits for nothing but its start.

In: what the figures need, put where they look for it. Out: figures in the run's plots/, or a reason why there are none. That
there are none is no reason for a run to end.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np

from seqvae.monitors.figure_data import PLOTS, POSTERIORS

REASON_WIDTH = 300
LEAST_URGENT = 19
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


FIGURES = f"{__package__}.figures"


class Drawing:
    """Draws one set of figures at a time."""

    def __init__(self, module: str = FIGURES) -> None:
        """`module` is what draws: `python -m module DIR`."""
        self._module = module
        self._process: subprocess.Popen[str] | None = None
        self._directory = ""
        self._reason: str | None = None
        self._told: set[str] = set()

    def start(self, directory: str | Path, *, is_urgent: bool = False) -> bool:
        """Begin to draw what stands in a run directory; False: it cannot begin, or the drawing before is not yet done.

        `is_urgent`: somebody waits for it. Else it takes what training, and whatever else the machine does, leaves over.
        """
        if self._is_busy():
            return False
        self._directory = str(directory)
        try:
            self._process = begin(Path(directory).absolute(), self._module, is_urgent=is_urgent)
        except OSError as error:
            self._reason = str(error)
        return self._process is not None

    def finish(self, timeout_seconds: float = 30.0) -> None:
        """Wait for a drawing that goes on, and end it if it takes longer."""
        if self._process is None:
            return
        try:
            self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            self._is_busy()
            self._reason = (
                f"ended after {timeout_seconds:g} s, as other programs or a slow disk held it up; "
                f"`python -m {self._module} {_quoted(self._directory)}` does it anew"
            )
        self._is_busy()

    def failure(self) -> str | None:
        """Why the last drawing that ended left no figures. Each reason is told once: the next drawing often meets it again."""
        self._is_busy()
        reason, self._reason = self._reason, None
        if reason is None or reason in self._told:
            return None
        self._told.add(reason)
        return reason

    def _is_busy(self) -> bool:
        if self._process is None:
            return False
        code = self._process.poll()
        if code is None:
            return True
        with self._process as ended:
            said = ended.stderr.read() if ended.stderr else ""
        self._process = None
        self._reason = reason_of(code, said)
        return False


def begin(directory: Path, module: str = FIGURES, *, is_urgent: bool = False) -> subprocess.Popen[str]:
    """Start a process that draws.

    A process group of its own, so that Ctrl-C, or a signal to the run's group, goes by; not a session of its own, since Linux
    may weigh a session as a whole and would take no notice that it is less urgent than training.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-W", "ignore", "-m", module, str(directory)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment(),
        process_group=0,
    )
    if sys.platform != "win32" and not is_urgent:
        os.setpriority(os.PRIO_PROCESS, process.pid, LEAST_URGENT)
    return process


def environment() -> dict[str, str]:
    """This process's, but: modules are found where this one finds them, one thread, no window and no GPU."""
    return {
        **os.environ,
        **dict.fromkeys(THREADS, "1"),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONIOENCODING": "utf-8",
        "MPLBACKEND": "Agg",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _quoted(directory: str) -> str:
    return shlex.quote(directory) if directory.isprintable() else ascii(directory)


def reason_of(exit_code: int, said: str) -> str | None:
    """The last line that a process said before it failed.

    >>> reason_of(1, "Traceback\\nOSError: no space left\\n"), reason_of(-9, ""), reason_of(0, "careful")
    ('OSError: no space left', 'it ended with exit code -9', None)
    """
    if exit_code == 0:
        return None
    lines = said.split("\n")
    return next(
        (line.strip()[:REASON_WIDTH] for line in reversed(lines) if line.strip()),
        f"it ended with exit code {exit_code}",
    )


def save_posteriors(directory: str | Path, mean_NZ: np.ndarray, logvar_NZ: np.ndarray, step: int) -> None:
    """Put the posteriors, real ones only, where the figures look for them. They replace those before at once."""
    path = Path(directory) / PLOTS / POSTERIORS
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    try:
        with beside.open("wb") as file:
            np.savez(file, mean_NZ=mean_NZ.astype(np.float32), logvar_NZ=logvar_NZ.astype(np.float32), step=step)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
