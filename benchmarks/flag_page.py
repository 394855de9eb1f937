"""The parsers of all commands -> docs/every_flag.md: each flag once, by theme, with what it takes, its default and its help text.

    python -m benchmarks.flag_page

The commands stand in one table, `COMMANDS`: a new one, or a new subcommand, is a line there. A flag of several commands is one
row where they say the same of it; where only their defaults differ, the row says which has which. It stands among the benchmarks
because it fills a page of docs/, and because nothing of the product may import a command.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from seqvae.cli.inspect_data import InspectSettings
from seqvae.cli.profile import ProfileOptimized
from seqvae.cli.use_model import ACTIONS
from seqvae.config.data import BuildCache, ManageCache
from seqvae.config.flags import PRESETS_DIR, CommandLine
from seqvae.config.inference import Evaluate, FitPrior, Push
from seqvae.config.training import OptimizedSettings, ReferenceSettings
from seqvae.config.tuning import StudySettings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PAGE = Path(__file__).parent.parent / "docs" / "every_flag.md"


class Command(NamedTuple):
    """A command, or a subcommand, at the top level."""

    typed: str
    """The words before the flags: `train_optimized.py`, or `seqvae encode`."""
    schema: "type[DataclassInstance]"
    about: str
    takes_words: bool = False
    """Whether words without a flag (a checkpoint, ids) may come before the flags."""


COMMANDS = (
    Command(
        "train_optimized.py", OptimizedSettings, "the fastest run; also `seqvae train`, and on demo data `seqvae demo`"
    ),
    Command("train_with_collapse_detection.py", ReferenceSettings, "the plain run; also `seqvae train --plain`"),
    Command("seqvae profile", ProfileOptimized, "where a step's time goes; also `analyze_performance.py`"),
    Command("seqvae tune", StudySettings, "search for settings with many runs"),
    Command("seqvae inspect", InspectSettings, "what Parquet files hold"),
    Command("seqvae evaluate", Evaluate, "what a trained model is worth", takes_words=True),
    *(Command(f"seqvae {name}", action.settings, action.summary, takes_words=True) for name, action in ACTIONS.items()),
    Command("seqvae fit-prior", FitPrior, "fit a prior over the codes of a trained model", takes_words=True),
    Command("seqvae push", Push, "put a model onto the Hugging Face Hub", takes_words=True),
    Command("seqvae build-cache", BuildCache, "convert data before they are used, by several processes"),
    Command(
        "seqvae cache", ManageCache, "what the cache of converted data holds, and how to empty it", takes_words=True
    ),
)

Meaning = tuple[str, str, tuple[type, ...], tuple[str, ...], str]
"""Theme, name, types, choices and help text: all of a flag but its default."""

INTRODUCTION = """# Every flag

Written by `python -m benchmarks.flag_page` from the commands' own parsers; `--help` of a command says the same of its flags.

{commands}

- `--latent_size 32`, `--latent_size=32` and `--latent-size 32` are the same. A *switch* is on with `--bucketing`, off with
  `--no_bucketing`.
- `null` unsets a value that may be unset (`--max_epochs null`). Where no default is given, the text says what happens then.
- Flags win over `--config`, `--config` over `--preset`, `--preset` over the defaults, wherever they stand on the line.
- Other tools' words are answered with ours: whoever types the `num_train_epochs` of Hugging Face is told `--max_epochs`.
- `seqvae profile --command reference` has the defaults of `train_with_collapse_detection.py`.
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
    """Return each flag's default by command, in the order of the first command that has the flag."""
    found: dict[Meaning, dict[str, object]] = {}
    for command in commands:
        # presets are of trainings, not of what was trained
        line = CommandLine(command.schema, presets=None if command.takes_words else PRESETS_DIR)
        for flag in [*line.flags.values(), *line.controls.values()]:
            meaning = (flag.theme, flag.name, flag.types, flag.choices, flag.help)
            found.setdefault(meaning, {})[command.typed] = flag.default
    return found


def _section(theme: str, rows: Mapping[Meaning, Mapping[str, object]], commands: int) -> str:
    """Return the section of a theme: the commands that have it, and its flags with the commands of those that not all have."""
    owners = list(dict.fromkeys(command for of in rows.values() for command in of))
    lines = [
        (
            f"`--{name}`",
            takes(types, choices),
            defaults(of),
            _escaped(text) + ("" if len(of) == len(owners) else f" Of {_named(of)}."),
        )
        for (_, name, types, choices, text), of in rows.items()
    ]
    whose = "all commands" if len(owners) == commands else _named(owners)
    return f"## {theme}\n\nOf {whose}.\n\n{_table(('flag', 'takes', 'default', 'what it does'), lines)}\n"


def takes(types: tuple[type, ...], choices: tuple[str, ...]) -> str:
    """Return the kinds of values that a flag takes.

    >>> takes((bool,), ()), takes((int,), ("auto",)), takes((int, float), ())
    ('switch', 'whole number, `auto`', 'whole number, number')
    """
    names = {bool: "switch", int: "whole number", float: "number", str: "text"}
    return ", ".join([*(names[kind] for kind in types), *(f"`{choice}`" for choice in choices)])


def defaults(of: Mapping[str, object]) -> str:
    """Return the default that most commands have, and then those that differ.

    >>> defaults({"a.py": 2, "b.py": 1, "c.py": 2}), defaults({"a.py": None})
    ('`2`; `b.py`: `1`', '')
    """
    written = {command: "" if default is None else f"`{_as_typed(default)}`" for command, default in of.items()}
    usual = Counter(written.values()).most_common(1)[0][0]
    others = [f"`{command}`: {text or 'none'}" for command, text in written.items() if text != usual]
    return "; ".join([usual or "none", *others] if others else [usual])


def _as_typed(default: object) -> str:
    return str(default).lower() if isinstance(default, bool) else str(default)


def _named(commands: Iterable[str]) -> str:
    return ", ".join(f"`{command}`" for command in commands)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<")


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
