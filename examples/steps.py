"""The steps of an example: a heading, the command as a user would type it, and the command itself, in a process of its own.

In: the words behind `python`. Out: the command's own output; where it fails, the example ends with the same exit code.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

from seqvae.console import shell_word
from seqvae.errors import Stopped

ROOT = Path(__file__).parent.parent


def say(text: str) -> None:
    """What comes next, apart from what was before. At once, as the commands write to the same place."""
    print(f"\n{text}", flush=True)


def run(command: str, *words: object) -> None:
    """Show one of the product's commands and run it."""
    if command.endswith(".py"):
        script = os.path.relpath(ROOT / command)  # as it is typed here: the command itself says how to go on with it
        shown, line = f"python {shell_word(script)}", [sys.executable, script]
    else:
        shown, line = command, [sys.executable, "-m", *command.split()]
    print(f"\n$ {' '.join([shown, *map(shell_word, words)])}\n", flush=True)
    with subprocess.Popen([*line, *map(str, words)], env=os.environ | {"PYTHONPATH": str(ROOT)}) as process:
        code = _wait(process)
    if code != 0:
        raise SystemExit(code)


def _wait(process: "subprocess.Popen[bytes]") -> int:
    """Until it ends by itself: a training run that is stopped saves first."""
    try:
        return process.wait()
    except Stopped as stop:
        if stop.number == signal.SIGTERM:  # Ctrl-C reaches both of us
            process.terminate()
        process.wait()
        raise
