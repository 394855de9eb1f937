"""Files of a run directory that are not metrics: environment.json (what a run ran on), run.json (what it is), events.jsonl.

Environment and facts are written here, events by `seqvae/training/run_directory/records.py`. All are JSON that can be read at any
time. They hold no host or user names, and no paths but those in the command as it was typed.
"""

import json
import os
import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from seqvae.files import parse_rows, replace_file, whole_lines

ENVIRONMENT, EVENTS, FACTS, REPORT = "environment.json", "events.jsonl", "run.json", "report.html"
LATENTS = "latents.json"
"""What the latents look like at the run's end (`seqvae/training/callbacks/latents.py`)."""
BEST, LAST, PREVIOUS, HEALTHY = "best.ckpt", "last.ckpt", "previous.ckpt", "healthy.ckpt"
"""In the folder `checkpoints`."""
RESCUE = "rescue"
"""The event of each move of a rescue."""
PACKAGES = (
    *("torch", "lightning", "torchmetrics", "numpy", "pyarrow", "pandas", "matplotlib", "jsonargparse", "tokenizers"),
    *("tensorboard", "wandb", "mlflow-skinny"),
)
"""Packages whose versions may matter for reproducing the same numbers."""
GIT_SECONDS = 10
"""A checkout on a slow network disk must not keep a run from starting."""


def environment(argv: Sequence[str], **more: Any) -> dict[str, Any]:
    """Describe what this process runs on.

    `argv` is `sys.argv`; `more` is what this module cannot find out, in types of JSON.
    """
    packages = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    return {
        "command": command_line(argv),
        "started": utc_now(),
        "commit": commit_of(Path(__file__).parent.parent.parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "packages": packages,
        **more,
    }


def cpu_name() -> str:
    """Return what this machine calls its processor."""
    with suppress(OSError):  # Linux writes the name as its maker does
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if names := [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]:
            return names[0]
    return platform.processor() or platform.machine()


def write_environment(directory: Path, content: Mapping[str, Any]) -> None:
    """Write environment.json; a reader sees the file before or the new one."""
    _write_json(directory / ENVIRONMENT, content)


def write_facts(directory: Path, content: Mapping[str, Any]) -> None:
    """Write run.json, which describes the run as its newest session began it."""
    _write_json(directory / FACTS, content)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with replace_file(path) as partial:
        partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_events(directory: Path) -> list[dict[str, Any]]:
    """Return all events, oldest first; a line that was cut short, or is no event, is left out."""
    return [row for row in parse_rows(whole_lines(directory / EVENTS)) if isinstance(row.get("event"), str)]


def utc_now() -> str:
    """Return the time as events carry it.

    >>> len(utc_now()), utc_now()[-1]
    (24, 'Z')
    """
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def command_line(argv: Sequence[str]) -> str:
    """Return the command as it was typed, ready to be typed again.

    >>> command_line(["/home/ann/seqvae/train_optimized.py", "--run_name", "first try"])
    "python train_optimized.py --run_name 'first try'"
    >>> command_line(["/usr/bin/seqvae", "train"]), command_line(["/lib/seqvae/__main__.py", "train"])
    ('seqvae train', 'python -m seqvae train')
    """
    program = Path(argv[0])
    if program.name == "__main__.py":
        typed = ["python", "-m", program.parent.name]
    else:
        typed = ["python", program.name] if program.suffix == ".py" else [program.name]
    return shlex.join([*typed, *argv[1:]])


def commit_of(checkout: Path) -> str | None:
    """Return the commit of the code, followed by `-dirty` if it was changed since; None outside of a checkout or without git."""
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
