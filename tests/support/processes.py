"""Processes that tests start: how long one computed."""

import resource
import subprocess
from typing import Any


def timed(command: list[str], **options: Any) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run a command; return how it ended and the seconds that it computed, which other processes on the machine do not lengthen."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=True, **options)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
