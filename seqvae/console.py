"""What commands do before anything else: output that cannot harm a terminal, torch that leaves others their share of a machine."""

import io
import logging
import os
import shlex
import sys

from seqvae.errors import harmless


class _Harmless(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))


def set_up_output(*, quiet: bool = False) -> None:
    """What is under way goes to stderr, with nothing in it that a terminal would obey."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Harmless("%(message)s"))
    logging.basicConfig(level=logging.ERROR if quiet else logging.INFO, handlers=[handler])
    for name in ("matplotlib", "lightning.pytorch", "lightning.fabric"):  # what they would say, our header says
        logging.getLogger(name).setLevel(logging.WARNING)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names may hold what the output's encoding does not


def share_machine() -> None:
    """Let torch take no more of a machine than it needs; to be called before torch is imported.

    Its threads sleep soon where they wait for one another. By default they spin: beside one other busy process on two cores, a
    step then takes 12 times as long; on a quiet machine it makes no difference.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def program() -> str:
    """What was typed behind `python`: the command, or `-m` and a module."""
    spec = sys.modules["__main__"].__spec__
    return shell_word(sys.argv[0]) if spec is None else f"-m {spec.name.removesuffix('.__main__')}"


def shell_word(word: object) -> str:
    r"""As a shell reads it, in characters that a terminal shows: whatever it holds, it can be copied and pasted.

    >>> print(shell_word("runs/a b"), shell_word("runs/a\u3000b"))
    'runs/a b' $'runs/a\343\200\200b'
    """
    text = str(word)
    if text.isprintable():
        return shlex.quote(text)
    shown = (
        c if c.isprintable() and c not in "\\'" else "".join(f"\\{byte:03o}" for byte in os.fsencode(c)) for c in text
    )
    return f"$'{''.join(shown)}'"
