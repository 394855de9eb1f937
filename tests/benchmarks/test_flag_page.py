"""docs/every_flag.md equals what the parsers hold."""

from dataclasses import dataclass, field
from functools import partial

from benchmarks.flag_page import COMMANDS, PAGE, Command, page
from seqvae.cli.main import VERBS


@dataclass(frozen=True, kw_only=True)
class Thing:
    """Things"""

    size: int = 1
    """How large; a<b or c|d."""

    is_round: bool = True
    """Whether it rolls."""


@dataclass(frozen=True, kw_only=True)
class One:
    thing: Thing = field(default_factory=Thing)


@dataclass(frozen=True, kw_only=True)
class Large:
    thing: Thing = field(default_factory=partial(Thing, size=9))


@dataclass(frozen=True, kw_only=True)
class OtherThing:
    """Things"""

    size: int = 1
    """How heavy."""


@dataclass(frozen=True, kw_only=True)
class Other:
    thing: OtherThing = field(default_factory=OtherThing)


def rows(*schemas: type) -> list[str]:
    made = page([Command(f"{schema.__name__.lower()}.py", schema, "") for schema in schemas])
    return [line for line in made.splitlines() if line.startswith(("| `--size`", "| `--is_round`"))]


def test_the_page_equals_what_is_made_from_the_parsers():
    assert PAGE.read_text(encoding="utf-8") == page(COMMANDS), "write it with python -m benchmarks.flag_page"


def test_every_command_with_flags_of_its_own_is_on_the_page():
    scripts = {"train_optimized.py", "train_with_collapse_detection.py"}
    verbs = {f"seqvae {verb}" for verb in VERBS.keys() - {"train", "demo", "report", "compare"}}
    assert {command.typed for command in COMMANDS} == scripts | verbs


def test_a_flag_of_several_commands_is_one_row_that_says_whose_default_differs():
    assert rows(One, Large) == [
        "| `--size` | whole number | `1`; `large.py`: `9` | How large; a\\<b or c\\|d. |",
        "| `--is_round` | switch | `true` | Whether it rolls. |",
    ]


def test_a_flag_that_means_something_else_elsewhere_is_two_rows():
    assert rows(One, Other) == [
        "| `--size` | whole number | `1` | How large; a\\<b or c\\|d. Of `one.py`. |",
        "| `--is_round` | switch | `true` | Whether it rolls. Of `one.py`. |",
        "| `--size` | whole number | `1` | How heavy. Of `other.py`. |",
    ]
