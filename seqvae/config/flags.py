"""Settings dataclasses -> flags: names, types, defaults and help texts, and the parser that is made from them.

In: a command's settings type, a frozen dataclass whose fields are groups (frozen dataclasses of plain values). A group's
docstring is a theme of `--help`, the string below a field is that flag's help text.
Out: `{name: Flag}` in one flat namespace, and a jsonargparse parser that converts values and prints `--help`.
"""

import ast
import inspect
import re
import shutil
import sys
import textwrap
from argparse import SUPPRESS, Action, HelpFormatter
from collections.abc import Sequence
from dataclasses import fields
from functools import cache, reduce
from itertools import groupby, pairwise
from operator import or_
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from jsonargparse import ActionYesNo, ArgumentError, ArgumentParser, set_parsing_settings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_IN_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a value"}
_ONE_WORD = re.compile(r"[\w.+-]+")


class Flag(NamedTuple):
    """One setting as the command line sees it."""

    name: str
    types: tuple[type, ...]
    """Of bool, int, float and str those that it can be."""
    choices: tuple[str, ...]
    """The words it takes by name."""
    optional: bool
    """None is a value, too."""
    default: object
    help: str
    theme: str

    @property
    def is_switch(self) -> bool:
        """The flag alone has a meaning, and so has --no_..."""
        return self.types == (bool,) and not self.choices

    @property
    def wanted(self) -> str:
        """What it takes, in words: `a whole number or auto`."""
        words = [*(_IN_WORDS[kind] for kind in self.types), *self.choices]
        return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def flags_of(schema: "type[DataclassInstance]") -> dict[str, Flag]:
    """All settings of a command by name, in the order of its groups."""
    flags: dict[str, Flag] = {}
    for group in values_of(schema()).values():
        for flag in flags_of_group(group):
            assert flag.name not in flags, f"two settings are called {flag.name}"
            flags[flag.name] = flag
    return flags


def flags_of_group(group: "DataclassInstance") -> list[Flag]:
    """One flag a field; the group's values are the defaults."""
    hints, texts = get_type_hints(type(group)), _field_docstrings(type(group))
    flags = []
    for name, default in values_of(group).items():
        assert not name.startswith("no_"), f"{name} would read as the negation of a switch"
        types, choices, optional = _alternatives(name, hints[name])
        flags.append(Flag(name, types, choices, optional, default, texts[name], theme_of(group)))
    return flags


def values_of(settings: "DataclassInstance") -> dict[str, Any]:
    """Field by field what a dataclass holds: of a command's settings the groups, of a group the plain values."""
    return {field.name: getattr(settings, field.name) for field in fields(settings)}


def theme_of(group: "DataclassInstance") -> str:
    """The title of a group: its docstring's first line."""
    return inspect.cleandoc(type(group).__doc__ or "").partition("\n")[0]


def build_parser(
    flags: Sequence[Flag], controls: Sequence[Flag], *, prog: str, description: str, epilog: str
) -> ArgumentParser:
    """The parser of a command: knows the types, prints the help. `controls` are the flags that are no settings."""
    set_parsing_settings(import_path_denylist=["*"])  # plain types import nothing: a second lock on the same door
    parser = ArgumentParser(
        prog=prog,
        usage=f"{prog} [--flag value ...]",
        description=description,
        epilog=epilog,
        formatter_class=_HelpFormatter,
        add_help=False,
        allow_abbrev=False,
        default_env=False,
        print_config=None,
        exit_on_error=False,
    )
    for theme, members in groupby([*flags, *controls], key=lambda flag: flag.theme):
        group = parser.add_argument_group(theme)
        for flag in members:
            option, text = f"--{flag.name}", flag.help.replace("%", "%%")
            if not flag.is_switch:
                group.add_argument(
                    option, type=_type_hint(flag), default=flag.default, metavar=_metavar(flag), help=text
                )
            elif flag in controls:
                group.add_argument(option, action="store_true", default=SUPPRESS, help=text)
            else:
                group.add_argument(option, action=ActionYesNo, default=flag.default, help=text)
    return parser


def convert(parser: ArgumentParser, flag: Flag, text: str) -> object:
    """The value that a text stands for, on the command line as in YAML; ValueError where it fits no type of the flag."""
    if str in flag.types:
        return text  # untouched: jsonargparse would read "null" and "~" as None
    if not _ONE_WORD.fullmatch(text):
        raise ValueError(f"{flag.name} cannot be {text!r}")  # jsonargparse would read "1:30" as 90 and "4 # 5" as 4
    try:
        return parser.parse_object({flag.name: text}, env=False, defaults=False)[flag.name]
    except ArgumentError as error:
        raise ValueError(f"{flag.name} cannot be {text!r}") from error


def _alternatives(name: str, hint: Any) -> tuple[tuple[type, ...], tuple[str, ...], bool]:
    """Plain types, words and whether None is among them. Nothing else: where any object may stand, YAML can run code."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    choices = tuple(word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind))
    types = tuple(kind for kind in kinds if get_origin(kind) is not Literal and kind is not NoneType)
    assert all(kind in _IN_WORDS for kind in types), f"{name}: {hint} is not made of plain types"
    assert all(isinstance(word, str) for word in choices), f"{name}: {hint} has a choice that is not a word"
    assert types or choices, f"{name}: {hint} has no values"
    return types, choices, NoneType in kinds


def _type_hint(flag: Flag) -> Any:
    """The flag's type hint without None, which has no text of its own."""
    kinds: list[Any] = [*flag.types]
    if flag.choices:
        kinds.append(Literal.__getitem__(flag.choices))  # Literal[...] of words that no type checker can know
    return reduce(or_, kinds)


@cache
def _field_docstrings(group: type) -> dict[str, str]:
    """The string below each field of a class, as one line."""
    module = ast.parse(inspect.getsource(sys.modules[group.__module__]))
    body = next(
        node.body for node in ast.walk(module) if isinstance(node, ast.ClassDef) and node.name == group.__name__
    )
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _metavar(flag: Flag) -> str:
    """What stands for the value in --help: `INT`, `{a,b}`, or for text the last word of the flag's name, as in `DIR`."""
    names = {int: "INT", float: "NUMBER", bool: "true,false", str: flag.name.rpartition("_")[2].upper()}
    words = [*(names[kind] for kind in flag.types), *flag.choices]
    return f"{{{','.join(words)}}}" if flag.choices else words[0]


class _HelpFormatter(HelpFormatter):
    """Each flag on a line of its own and its text below, which reads well at any width; switches as --[no_]name."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, 100)
        super().__init__(prog, max_help_position=6, width=width)

    def _format_action_invocation(self, action: Action) -> str:
        if isinstance(action, ActionYesNo):
            return f"--[no_]{action.dest}"
        return super()._format_action_invocation(action)

    def _get_help_string(self, action: Action) -> str:
        """The default behind the help text; where it is None, the text says what happens then."""
        if action.default is None or action.default == SUPPRESS:
            return action.help or ""
        default = str(action.default).lower() if isinstance(action.default, bool) else "%(default)s"
        return f"{action.help} (default: {default})"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _wrap(text, width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Paragraphs are filled; those that are indented (examples) stay as they are."""
        paragraphs = inspect.cleandoc(text).split("\n\n")
        return "\n\n".join(part if part.startswith(" ") else "\n".join(_wrap(part, width)) for part in paragraphs)


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)  # a flag stays in one piece
