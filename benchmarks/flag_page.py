"""Write docs/every_flag.md from the parsers of all commands: each flag once, by theme, with its values, default and help text.

    python -m benchmarks.flag_page

The commands stand in one table, `COMMANDS`: a new one, or a new subcommand, is a line there. A flag of several commands is one
row where it means the same to them; where only their defaults differ, the row names them. This module stands among the benchmarks
because it fills a page of docs/, and because nothing of the product may import a command.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import use_model
from analyze_performance import AnalyzeOptimized
from evaluate import EvaluateCommand
from inspect_data import InspectSettings
from seqvae.cli.command_line import PRESETS_DIR, control_flags
from seqvae.config.flags import flags_of
from train_optimized import OptimizedSettings
from train_with_collapse_detection import ReferenceSettings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PAGE = Path(__file__).parent.parent / "docs" / "every_flag.md"


class Command(NamedTuple):
    """A command, or a subcommand, at the top level."""

    typed: str
    """The command line before the flags: `train_optimized.py`, or `name.py subcommand`."""
    schema: "type[DataclassInstance]"
    about: str
    takes_words: bool = False
    """Whether words without a flag (a checkpoint, ids) may come before the flags."""


COMMANDS = (
    Command("train_optimized.py", OptimizedSettings, "the fastest run"),
    Command("train_with_collapse_detection.py", ReferenceSettings, "the plain run, watched most closely"),
    Command("analyze_performance.py", AnalyzeOptimized, "where a step's time goes"),
    Command("inspect_data.py", InspectSettings, "what Parquet files hold"),
    Command("evaluate.py", EvaluateCommand, "what a trained model is worth", takes_words=True),
    *(
        Command(f"use_model.py {name}", action.settings, action.says, takes_words=True)
        for name, action in use_model.ACTIONS.items()
    ),
)

Meaning = tuple[str, str, tuple[type, ...], tuple[str, ...], str]
"""Theme, name, types, choices and help text: everything of a flag except its default."""

INTRODUCTION = """# Every flag

Written by `python -m benchmarks.flag_page` from the commands' own parsers; `--help` of a command says the same of its flags.

{commands}

- `--latent_size 32`, `--latent_size=32` and `--latent-size 32` are the same. A *switch* is on with `--bucketing`, off with
  `--no_bucketing`.
- `null` unsets a value that may be unset (`--max_epochs null`). Where no default is given, the text says what happens then.
- Flags win over `--config`, `--config` over `--preset`, `--preset` over the defaults, wherever they stand on the line.
- `analyze_performance.py --command reference` has the defaults of `train_with_collapse_detection.py`.
"""


def main() -> None:
    PAGE.write_text(page(COMMANDS), encoding="utf-8")
    print(f"{PAGE.name} rewritten")


def page(commands: Sequence[Command]) -> str:
    table = _table(("command", "for"), ((f"`{one.typed}`", one.about) for one in commands))
    found = defaults_by_meaning(commands)
    themes = list(dict.fromkeys(theme for theme, *_ in found))
    parts = [
        _section(theme, {meaning: of for meaning, of in found.items() if meaning[0] == theme}, len(commands))
        for theme in themes
    ]
    return "\n".join([INTRODUCTION.format(commands=table), *parts])


def defaults_by_meaning(commands: Sequence[Command]) -> dict[Meaning, dict[str, object]]:
    """Return the default of each flag by command; in the order of the first command that has it."""
    presets = tuple(path.stem for path in sorted(PRESETS_DIR.glob("*.yaml")))
    found: dict[Meaning, dict[str, object]] = {}
    for command in commands:
        controls = control_flags(() if command.takes_words else presets)  # presets are of trainings
        for flag in [*flags_of(command.schema).values(), *controls]:
            meaning = (flag.theme, flag.name, flag.types, flag.choices, flag.help)
            found.setdefault(meaning, {})[command.typed] = flag.default
    return found


def _section(theme: str, rows: Mapping[Meaning, Mapping[str, object]], commands: int) -> str:
    """Return a theme: its commands and its flags; a flag that not all of these have names its own."""
    owners = list(dict.fromkeys(command for of in rows.values() for command in of))
    lines = [
        (
            f"`--{name}`",
            takes(types, choices),
            defaults(of),
            text.replace("|", "\\|").replace("<", "\\<") + ("" if len(of) == len(owners) else f" Of {_named(of)}."),
        )
        for (_, name, types, choices, text), of in rows.items()
    ]
    whose = "all commands" if len(owners) == commands else _named(owners)
    return f"## {theme}\n\nOf {whose}.\n\n{_table(('flag', 'takes', 'default', 'what it does'), lines)}\n"


def takes(types: tuple[type, ...], choices: tuple[str, ...]) -> str:
    """Return the types and choices of a flag in words.

    >>> takes((bool,), ()), takes((int,), ("auto",)), takes((int, float), ())
    ('switch', 'whole number, `auto`', 'whole number, number')
    """
    names = {bool: "switch", int: "whole number", float: "number", str: "text"}
    return ", ".join([*(names[kind] for kind in types), *(f"`{choice}`" for choice in choices)])


def defaults(of: Mapping[str, object]) -> str:
    """Return the default of most commands, and then those that differ.

    >>> defaults({"a.py": 2, "b.py": 1, "c.py": 2}), defaults({"a.py": None})
    ('`2`; `b.py`: `1`', '')
    """
    typed = {command: str(one).lower() if isinstance(one, bool) else str(one) for command, one in of.items()}
    written = {command: "" if of[command] is None else f"`{text}`" for command, text in typed.items()}
    usual = Counter(written.values()).most_common(1)[0][0]
    others = [f"`{command}`: {text or 'none'}" for command, text in written.items() if text != usual]
    return "; ".join([usual or "none", *others] if others else [usual])


def _named(commands: Iterable[str]) -> str:
    return ", ".join(f"`{command}`" for command in commands)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
