"""The words typed behind a command: in, its words; out, its settings, or help, version or settings printed."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import set_parsing_settings

import seqvae
from seqvae.config.flags import PRESETS_DIR, CommandLine, Settings, flags_of
from seqvae.config.yaml_files import to_yaml
from seqvae.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

INFORMATION_FLAGS = {"--help", "-h", "--version", "--print_config", "--print-config"}
"""Flags that print something and end: nothing else has to be typed with them."""


def parse_command_line(
    schema: type[Settings],
    words: Sequence[str],
    *,
    prog: str,
    description: str,
    presets: Path | None = PRESETS_DIR,
    config_of: "type[DataclassInstance] | None" = None,
) -> Settings:
    """Return the settings that the words stand for; `--help`, `--print_config` and `--version` print and end the process.

    Call it inside the `main` of `run_command`, which prints a `UsageError` and exits. A --config may be one of another command,
    whose schema `config_of` is: what only that command knows is ignored.
    """
    set_parsing_settings(import_path_denylist=["*"])  # plain types import nothing: a second lock on the same door
    names = {word.lstrip("-").replace("-", "_") for word in words if word.startswith("-")}
    if "version" in names:
        print(f"seqvae {seqvae.__version__}")
        raise SystemExit(ExitCode.DONE)
    line = CommandLine(schema, prog=prog, description=description, presets=presets)
    if not names.isdisjoint({"help", "h"}):
        line.print_help()
        raise SystemExit(ExitCode.DONE)
    settings = line.settings(line.read_words(words), ignored=flags_of(config_of) if config_of else ())
    if "print_config" in names:
        print(to_yaml(settings), end="")
        raise SystemExit(ExitCode.DONE)
    return settings


def split_positional(words: Sequence[str], names: Sequence[str], example: str) -> tuple[list[str], list[str]]:
    """Return the words that stand before the flags, one for each name, and the flags.

    >>> split_positional(["last.ckpt", "--count", "5"], ["CHECKPOINT"], "sample CHECKPOINT")
    (['last.ckpt'], ['--count', '5'])
    """
    first_flag = next((place for place, word in enumerate(words) if word.startswith("--") or word == "-h"), len(words))
    positional, flags = list(words[:first_flag]), list(words[first_flag:])
    if len(positional) == len(names) or not INFORMATION_FLAGS.isdisjoint(flags):
        return positional, flags
    if len(positional) > len(names):
        raise UsageError(f"{positional[len(names)]!r}: nothing more may stand before the flags. Usage: {example}")
    raise UsageError(f"{names[len(positional)]} is missing, which stands before the flags. Usage: {example}")
