"""Figures and reports of a run that goes on: made by a process of their own, so that training waits for nothing but its start.

In: a run directory, and posteriors, put where that process finds them. Out: what it makes, or a reason why it made nothing, which
is no reason for a run to end. What is made is the process's own affair: nothing of it is imported here.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np

PLOTS = "plots"
"""The folder of figures in a run directory."""
POSTERIORS = "posteriors.npz"
"""In that folder: the posteriors of the last reading that was drawn."""
FIGURES = "seqvae.reports.draw"
"""The module that draws a run's figures; it needs neither torch nor Lightning."""
REASON_WIDTH = 300
LEAST_URGENT = 19
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


class Drawing:
    """One process at a time that draws a run directory, at the lowest priority."""

    def __init__(self, module: str = FIGURES) -> None:
        """`module` is what draws: `python -m module DIR`."""
        self._module = module
        self._process: subprocess.Popen[str] | None = None
        self._directory = ""
        self._reason: str | None = None
        self._has_drawn = False
        self._reported: set[str] = set()

    def start(self, directory: str | Path, *, is_urgent: bool = False) -> bool:
        """Begin to draw a run directory; False: it cannot begin, or the drawing before is not yet done.

        `is_urgent`: the run ends and waits for it, so that it takes the place of one under way, which is out of date, and may take
        long at its low priority. Else it takes what training, and whatever else the machine does, leaves over.
        """
        if self._is_busy():
            if not is_urgent:
                return False
            self._kill()
            self._reason = None
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
            self._kill()
            directory = shlex.quote(self._directory) if self._directory.isprintable() else ascii(self._directory)
            self._reason = (
                f"ended after {timeout_seconds:g} s, as other programs or a slow disk held it up; "
                f"`python -m {self._module} {directory}` does it again"
            )
        self._is_busy()

    def has_drawn(self) -> bool:
        """Return whether a drawing has ended well since the last call."""
        self._is_busy()
        has_drawn, self._has_drawn = self._has_drawn, False
        return has_drawn

    def failure(self) -> str | None:
        """Return why the last drawing that ended made nothing; each reason once, as the next drawing often meets it again."""
        self._is_busy()
        reason, self._reason = self._reason, None
        if reason is None or reason in self._reported:
            return None
        self._reported.add(reason)
        return reason

    def _kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._is_busy()

    def _is_busy(self) -> bool:
        """Return whether a drawing goes on. Keeps the last line of one that has failed as the reason."""
        if self._process is None:
            return False
        code = self._process.poll()
        if code is None:
            return True
        with self._process as ended:
            output = ended.stderr.read() if ended.stderr else ""
        self._process = None
        self._reason = None
        self._has_drawn = code == 0
        if code != 0:
            lines = [line.strip() for line in output.split("\n") if line.strip()]
            self._reason = lines[-1][:REASON_WIDTH] if lines else f"it ended with exit code {code}"
        return False


def begin(directory: Path, module: str = FIGURES, *, is_urgent: bool = False) -> subprocess.Popen[str]:
    """Start a process that draws.

    A process group of its own, so that Ctrl-C, or a signal to the run's group, goes by; not a session of its own, since Linux
    may weigh a session as a whole and would take no notice that it is less urgent than training.
    """
    environment = {
        **os.environ,
        **dict.fromkeys(THREADS, "1"),
        "PYTHONPATH": os.pathsep.join(sys.path),  # modules are found where this process finds them
        "PYTHONIOENCODING": "utf-8",
        "MPLBACKEND": "Agg",
        "CUDA_VISIBLE_DEVICES": "",
    }
    process = subprocess.Popen(
        [sys.executable, "-P", "-W", "ignore", "-m", module, str(directory)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
        process_group=0,
    )
    if sys.platform != "win32" and not is_urgent:
        os.setpriority(os.PRIO_PROCESS, process.pid, LEAST_URGENT)
    return process


def save_posteriors(directory: str | Path, mean_NZ: np.ndarray, logvar_NZ: np.ndarray, step: int) -> None:
    """Write posteriors, without padding, where `seqvae/reports/read_run.py` finds them. They replace those before at once."""
    path = Path(directory) / PLOTS / POSTERIORS
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    try:
        with beside.open("wb") as file:
            np.savez(file, mean_NZ=mean_NZ.astype(np.float32), logvar_NZ=logvar_NZ.astype(np.float32), step=step)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
