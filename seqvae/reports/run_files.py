"""Files of a run directory: environment.json, what a run ran on, run.json, what it is, and events.jsonl, what happened to it.

In: what only the run itself knows (the command), and events as `seqvae/training/run_directory/events.py` writes them.
Out: JSON that anybody can read at any time. No host or user names, and no paths but those in the command as it was typed.
"""

import json
import math
import os
import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ENVIRONMENT, EVENTS, FACTS, REPORT = "environment.json", "events.jsonl", "run.json", "report.html"
PACKAGES = (
    *("torch", "lightning", "torchmetrics", "numpy", "pyarrow", "pandas", "matplotlib", "jsonargparse", "tokenizers"),
    *("tensorboard", "wandb", "mlflow-skinny"),
)
"""Whose versions may matter to somebody who wants to see the same numbers again."""
GIT_SECONDS = 10
"""A checkout on a slow network disk must not keep a run from starting."""


def environment(argv: Sequence[str], **more: Any) -> dict[str, Any]:
    """What this process runs on. `argv` is `sys.argv`, `more` what this module cannot find out, in types of JSON."""
    return {
        "command": command_line(argv),
        "started": utc_now(),
        "commit": commit_of(Path(__file__).parent.parent.parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cpu_count": os.cpu_count(),
        "memory_bytes": memory_bytes(),
        "packages": versions(PACKAGES),
        **more,
    }


def write_environment(directory: Path, content: Mapping[str, Any]) -> None:
    """Replaces what is there, at once."""
    _write(directory / ENVIRONMENT, content)


def write_facts(directory: Path, content: Mapping[str, Any]) -> None:
    """What a session says of the run when it begins; replaces what an earlier one said."""
    _write(directory / FACTS, content)


def read_environment(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / ENVIRONMENT).read_text(encoding="utf-8"))
    return content


def read_events(directory: Path) -> list[dict[str, Any]]:
    """All events, oldest first; nothing where there is no file. What is no event, like a line cut short, is left out."""
    path = directory / EVENTS
    if not path.exists():
        return []
    events = map(_event_of, path.read_bytes()[: _end_of_whole_lines(path)].splitlines())
    return [event for event in events if event is not None]


def utc_now() -> str:
    """
    >>> len(utc_now()), utc_now()[-1]
    (24, 'Z')
    """
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def command_line(argv: Sequence[str]) -> str:
    """As it was typed, ready to be typed again.

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
    """Of the code, with `-dirty` behind it if it was changed since; None outside of a checkout or without git."""
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def cpu_model() -> str:
    """As its maker calls it, where Linux says so."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def memory_bytes() -> int | None:
    """Main memory of the machine; None where the system does not tell."""
    names = ("SC_PHYS_PAGES", "SC_PAGE_SIZE")
    if not set(names) <= set(getattr(os, "sysconf_names", ())):
        return None
    return math.prod(os.sysconf(name) for name in names)


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _write(path: Path, content: Mapping[str, Any]) -> None:
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    beside.replace(path)


def _event_of(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def _end_of_whole_lines(path: Path) -> int:
    """Where the last line ends that was written to its end; a full disk or a kill can leave half of one behind it."""
    return path.read_bytes().rfind(b"\n") + 1
