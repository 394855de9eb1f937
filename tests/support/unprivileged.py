"""Commands of an unprivileged user: root, as which tests may run, may write anywhere."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
DROP_FROM_BOUNDING_SET = 24
"""Linux' name for this in prctl(2)."""
OF_ROOT = (1, 2, 3)
"""CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH and CAP_FOWNER: without them permissions are in force for root's own files, too."""


def run_unprivileged(
    words: Sequence[object], *, cwd: Path, env: dict[str, str] | None = None, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run a Python command as a user for whom permissions are in force, as they are for its children."""
    if os.name != "posix":
        pytest.skip("other platforms have other permissions")
    if os.getuid() == 0 and sys.platform != "linux":
        pytest.skip("here root cannot give up its privileges and keep its files")
    return subprocess.run(
        [sys.executable, *map(str, words)],
        preexec_fn=_give_up_privileges if os.getuid() == 0 else None,
        capture_output=True,
        text=True,
        cwd=cwd,
        env=dict(os.environ) | {"PYTHONPATH": str(ROOT)} if env is None else env,
        timeout=timeout,
    )


def _give_up_privileges() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for privilege in OF_ROOT:
        if libc.prctl(DROP_FROM_BOUNDING_SET, privilege, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "root may not give up its privileges")
