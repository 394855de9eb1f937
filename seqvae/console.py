"""What every command does first: name itself, make its output harmless, share the machine with others."""

import io
import logging
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from seqvae.errors import harmless
from seqvae.text import folded, window_width

CHATTY_LOGGERS = ("matplotlib", "lightning.pytorch", "lightning.fabric")
"""Loggers that are quietened: a run's header reports what they would."""
_command: str | None = None


@contextmanager
def named_command(typed: str) -> Iterator[None]:
    """Let `program` return this, where `sys.argv` does not say it: `seqvae train --plain`, or a function that was called."""
    global _command
    before, _command = _command, typed
    try:
        yield
    finally:
        _command = before


def program() -> str:
    """Return what to type to run this command again, up to its flags: `python train_optimized.py`, `seqvae train`."""
    if _command is not None:
        return _command
    spec = sys.modules["__main__"].__spec__
    return f"python {shell_word(sys.argv[0])}" if spec is None else f"python -m {spec.name.removesuffix('.__main__')}"


def say(line: str) -> None:
    """Print on stderr what is under way."""
    print(harmless(line), file=sys.stderr, flush=True)


class _HarmlessFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return folded(harmless(super().format(record)), window_width(sys.stderr))


def _harmless_handler() -> logging.Handler:
    handler = logging.StreamHandler()
    handler.setFormatter(_HarmlessFormatter("%(message)s"))
    return handler


def set_up_output(*, quiet: bool = False) -> None:
    """Send log messages to stderr, without anything that a terminal would obey."""
    logging.basicConfig(level=logging.ERROR if quiet else logging.INFO, handlers=[_harmless_handler()])
    for name in CHATTY_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names may hold what the output's encoding does not


@contextmanager
def library_output() -> Iterator[None]:
    """Let a call show what is under way as a command does; the program's own logging stays as it is."""
    ours, levels = logging.getLogger("seqvae"), {}
    handler = _harmless_handler()
    if not logging.getLogger().handlers:
        ours.addHandler(handler)
    for name, level in {"seqvae": logging.INFO, **dict.fromkeys(CHATTY_LOGGERS, logging.WARNING)}.items():
        levels[name] = logging.getLogger(name).level
        logging.getLogger(name).setLevel(level)
    try:
        yield
    finally:
        ours.removeHandler(handler)
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def share_machine() -> None:
    """Let torch take no more of a machine than it needs; to be called before torch is imported.

    Its threads sleep soon where they wait for one another. By default they spin: beside one other busy process on two cores, a
    step then takes 12 times as long; on a quiet machine it makes no difference.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def shell_word(word: object) -> str:
    r"""Return a word as a shell reads it, in characters that a terminal shows, so that it can be copied and pasted.

    >>> print(shell_word("runs/a b"), shell_word("runs/a\u3000b"))
    'runs/a b' $'runs/a\343\200\200b'
    """
    text = str(word)
    if text.isprintable():
        return shlex.quote(text)
    shown = ""
    for character in text:
        if character.isprintable() and character not in "\\'":
            shown += character
        else:
            shown += "".join(f"\\{byte:03o}" for byte in os.fsencode(character))
    return f"$'{shown}'"
