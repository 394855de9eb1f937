"""Settings dataclasses as flags: what is typed, or given as keyword arguments, becomes the settings of a command.

In: a command's settings type, a frozen dataclass whose fields are groups (frozen dataclasses of plain values), and words or
values. Out: the settings, by defaults < preset < config file < flags, or a `UsageError` of one or two lines that names each flag
as it was typed. jsonargparse knows the types, converts values and prints `--help`: a group's docstring is a theme, the string
below a field that flag's help text. Ours are the grammar (`--name value`, `--name=value`, `--switch`, `--switch false`,
`--no_switch`, hyphens as underscores, no abbreviations), the order of precedence, and the messages. Nothing heavy is imported.
"""

import inspect
import re
import shutil
import textwrap
from argparse import Action
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from jsonargparse import ArgumentError, ArgumentParser, DefaultHelpFormatter, set_parsing_settings

from seqvae.config.synonyms import answers_to
from seqvae.config.yaml_files import lasting_values_of, read_settings_file, theme_of, to_flat_dict, values_of
from seqvae.errors import UsageError, did_you_mean
from seqvae.files import is_remote, why_no_path

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Settings = TypeVar("Settings", bound="DataclassInstance")

PRESETS_DIR = Path(__file__).parent / "presets"
MAX_SHOWN = 200
"""Characters of a refused value that a message repeats."""
NEAR = 0.75
"""Share of letters that a misspelled name has in common with the one it is taken for; other tools' words reach 0.67 by chance."""
BOUNDS = {"num_workers": "ray_workers"}
"""Flags that take a number, and those that are meant where bounds stand behind them: `--num_workers 2:8`."""
_EPILOG = (
    "Flags win over --config, --config over --preset, --preset over the defaults, wherever they stand on the line. "
    "Hyphens do as well as underscores (--batch-size=4), and null unsets a value (--batch_size null).\n\n"
    "Exit codes: 0 done, 2 wrong flags, 3 unusable data, 4 diverged, 5 out of memory, 6 disk or permission, 7 posterior "
    "collapsed, 8 a process lost, 130 Ctrl-C, 138 SIGUSR1, 143 SIGTERM."
)
_TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a value"}
_PLAIN_WORD = re.compile(r"[\w.+-]+")
_MENTIONED_FLAG = re.compile(r"--(\w+)")
_MENTIONED_VALUE = re.compile(r"--(\w+)(?: ([\w.:-]+))?")


class Flag(NamedTuple):
    """A setting as the command line sees it."""

    name: str
    types: tuple[type, ...]
    """Those of bool, int, float and str that it takes."""
    choices: tuple[str, ...]
    """The words that it takes by name."""
    optional: bool
    """Whether None is a value, too."""
    default: object
    help: str
    theme: str
    typed_only: bool = False
    """Whether no file may set it."""

    @property
    def is_switch(self) -> bool:
        """Return whether the flag needs no value behind it."""
        return self.types == (bool,) and not self.choices

    @property
    def is_number_or_share(self) -> bool:
        """Return whether a whole number counts something of which a fraction is a share."""
        return int in self.types and float in self.types

    @property
    def expected(self) -> str:
        """Return what the flag takes, in words: `a whole number or auto`."""
        words = [*(_TYPE_NAMES[kind] for kind in self.types), *self.choices]
        if self.is_number_or_share:
            words[self.types.index(float)] = "a fraction"
        return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


class FlagValue(NamedTuple):
    """A value from the command line, a file or a keyword argument; not converted yet."""

    flag: Flag
    text: str | None
    """None stands for null."""
    label: str
    """What messages call it: `--batch-size` as typed, or `run.yaml, line 3: batch_size`."""
    is_in_file: bool = False
    takes_value: bool = True
    """Whether a value may follow it: neither `--no_bucketing` nor `--version` has one."""


@dataclass(frozen=True, kw_only=True)
class _Controls:
    """Presets, files, help"""

    preset: str | None = None
    """Settings that belong together, to start from; none: the bare defaults."""

    config: str | None = None
    """YAML file with lines `name: value`; of several files the later wins."""

    print_config: bool = False
    """Print the settings in force as such a file, and leave."""

    version: bool = False
    """Print the version, and leave."""

    help: bool = False
    """Print this, and leave; also -h."""


def flags_of(schema: "type[DataclassInstance]") -> dict[str, Flag]:
    """Return all settings of a command by name, in the order of its groups."""
    return CommandLine(schema).flags


def set_by_presets(settings: "DataclassInstance") -> set[str]:
    """Return the settings that a preset decides, of those presets that these settings follow in all that they say.

    However they were given: a run that resumes has them from its config.yaml.
    """
    values = {name: None if value is None else str(value).lower() for name, value in to_flat_dict(settings).items()}
    decided: set[str] = set()
    for path in PRESETS_DIR.glob("*.yaml"):
        preset = {name: text for name, text, _ in read_settings_file(path, path.name) if name in values}
        if all(values[name] == text for name, text in preset.items()):
            decided |= preset.keys()
    return decided


def without_flags(words: Sequence[str], names: Collection[str]) -> list[str]:
    """Return the words of a command line without some flags, whatever their spelling, and their values.

    >>> without_flags(["--batch-size=4", "--data_dir", "my data", "--no_bucketing"], {"batch_size", "bucketing"})
    ['--data_dir', 'my data']
    """
    kept: list[str] = []
    is_kept = True
    for word in words:
        if word.startswith("--"):  # no value does
            is_kept = word[2:].partition("=")[0].replace("-", "_").removeprefix("no_") not in names
        if is_kept:
            kept.append(word)
    return kept


class CommandLine(Generic[Settings]):
    """The flags of one command. `schema` is a frozen dataclass of groups, all with defaults."""

    def __init__(
        self,
        schema: type[Settings],
        *,
        prog: str = "",
        description: str = "",
        presets: Path | None = PRESETS_DIR,
    ) -> None:
        set_parsing_settings(docstring_parse_attribute_docstrings=True)
        self._parser = ArgumentParser(
            prog=prog,
            usage=f"{prog} [--flag value ...]",
            description=description,
            epilog=_EPILOG,
            formatter_class=_HelpFormatter,
            add_help=False,
            allow_abbrev=False,
            default_env=False,
            print_config=None,
            exit_on_error=False,
        )
        self._schema = schema
        self._presets = {} if presets is None else {path.stem: path for path in sorted(presets.glob("*.yaml"))}
        self.flags: dict[str, Flag] = {}
        for group in values_of(schema()).values():
            self.flags |= self._add_group(group)
        self.controls = self._add_group(_Controls(), skip=() if self._presets else ("preset",))
        if self._presets:
            preset = self.controls["preset"]
            self.controls["preset"] = preset._replace(types=(), choices=tuple(self._presets))
            (action,) = (one for one in self._parser._actions if one.dest == "preset")
            action.metavar = f"{{{','.join(self._presets)}}}"

    def _add_group(self, group: "DataclassInstance", skip: Collection[str] = ()) -> dict[str, Flag]:
        """Add a flag for each field; the group's values are the defaults."""
        hints, defaults, lasting = get_type_hints(type(group)), values_of(group), lasting_values_of(group)
        alternatives = {name: _alternatives(name, hints[name]) for name in defaults if name not in skip}
        self._parser.add_class_arguments(type(group), default=group, skip=set(skip))
        texts: dict[str, str] = {}
        help_values = getattr(group, "HELP_VALUES", {})  # for the names in braces
        for action in self._parser._actions:
            if action.dest in alternatives:
                action.help = " ".join((action.help or "").split()).format(**help_values)
                texts[action.dest] = action.help
        flags = {
            name: Flag(name, *alternatives[name], defaults[name], texts[name], theme_of(group), name not in lasting)
            for name in alternatives
        }
        for action in self._parser._actions:
            if action.dest in flags and flags[action.dest].is_number_or_share:
                action.metavar = "NUMBER|FRACTION"
        return flags

    def print_help(self) -> None:
        self._parser.print_help()

    def read_words(self, words: Sequence[str]) -> list[FlagValue]:
        """Return the flags in the order in which they were typed."""
        rest = deque(words)
        flag_values: list[FlagValue] = []
        while rest:
            word = rest.popleft()
            typed, equals, text = word.partition("=")
            name = typed[2:].replace("-", "_") if typed.startswith("--") else ""
            flag = self.flags.get(name.removeprefix("no_")) or self.controls.get(name)
            if flag is None or (name != flag.name and not flag.is_switch):
                raise UsageError(self._message_on_unknown(word, flag_values))
            takes_value = not flag.is_switch or (name == flag.name and name in self.flags)
            if not takes_value:
                if equals:
                    raise UsageError(f"{typed} takes no value, got {text!r}")
                text = "true" if name == flag.name else "false"
            elif not equals:
                if rest and not rest[0].startswith("-" if flag.is_switch else "--"):
                    text = rest.popleft()
                elif flag.is_switch:
                    text = "true"
                else:
                    raise UsageError(f"{typed} wants {flag.expected}, but nothing follows it")
            is_null = flag.optional and text.lower() in ("null", "none")
            flag_values.append(FlagValue(flag, None if is_null else text, typed, takes_value=takes_value))
        return flag_values

    def read_values(self, values: Mapping[str, object]) -> list[FlagValue]:
        """Return keyword arguments as flags; a value means what its text means on the command line."""
        flag_values = []
        for name, value in values.items():
            flag = self.flags.get(name) or (self.controls.get(name) if name in ("preset", "config") else None)
            if flag is None:
                raise UsageError(f"{name} is no setting{self._advice_on(name, dashes='')}")
            text = str(value).lower() if isinstance(value, bool) else str(value)
            flag_values.append(FlagValue(flag, None if value is None else text, name))
        return flag_values

    def settings(self, flag_values: Sequence[FlagValue], ignored: Collection[str] = ()) -> Settings:
        """Return the settings in force; of the names in a --config, those in `ignored` belong to another command."""
        layers: list[FlagValue] = []
        for one in flag_values:
            if one.flag.name == "preset" and one.text is not None:
                if one.text not in self._presets:
                    raise UsageError(_refusal(one))
                # Presets serve every command: a name that this one lacks belongs to another (a test checks each name).
                layers += self._read_file(self._presets[one.text], f"preset {one.text}", None)
        for one in flag_values:
            if one.flag.name == "config" and one.text is not None:
                if reason := why_no_path(one.text):
                    raise UsageError(f"--config {reason}")
                layers += self._read_file(Path(one.text).expanduser(), one.text, ignored)
        layers += [one for one in flag_values if one.flag.name in self.flags]
        for place, one in enumerate(layers):
            meant = BOUNDS.get(one.flag.name, "")
            if meant in self.flags and ":" in (one.text or ""):
                layers[place] = one._replace(flag=self.flags[meant])
        values = {name: flag.default for name, flag in self.flags.items()}
        values |= {one.flag.name: self._converted(one) for one in layers}
        if "allow_remote" in self.flags:
            values["allow_remote"] = self._may_fetch(layers, bool(values["allow_remote"]))
        try:
            groups = {
                name: replace(group, **{field: values[field] for field in values_of(group)})
                for name, group in values_of(self._schema()).items()
            }
            return self._schema(**groups)
        except ValueError as error:  # what a group refuses in its `__post_init__`
            raise UsageError(_in_users_spelling(str(error), layers)) from error

    def _may_fetch(self, layers: Sequence[FlagValue], allowed: bool) -> bool:
        """Return whether data may be fetched from a store: where that was said, or where the user typed its URL."""
        last = {one.flag.name: one for one in layers}
        remote = [
            one
            for name in ("data_dir", "cache_dir", "endpoint_url")
            if (one := last.get(name)) and _leads_to_a_store(one)
        ]
        if not allowed and (in_file := [one for one in remote if one.is_in_file]):
            raise UsageError(
                f"{in_file[0].label} leads to a store on the network, and nothing is fetched because a file says so: add "
                f"--allow_remote, if you trust it"
            )
        return allowed or bool(remote)

    def _read_file(self, path: Path, shown_as: str, ignored: Collection[str] | None) -> list[FlagValue]:
        """Return the settings of a file; of other names, `ignored` are passed over; None: all are."""
        flag_values = []
        for name, text, place in read_settings_file(path, shown_as):
            if name in self.flags and self.flags[name].typed_only:
                raise UsageError(f"{place}: {name} is no setting of a file; give --{name} on the command line")
            if name in self.flags:
                flag_values.append(FlagValue(self.flags[name], text, f"{place}: {name}", is_in_file=True))
            elif ignored is not None and name not in ignored:
                positive = self.flags.get(name.removeprefix("no_"))
                if positive is not None and positive.is_switch:
                    raise UsageError(f"{place}: write `{positive.name}: false` instead of {name}")
                if name in self.controls:
                    raise UsageError(f"{place}: {name} is no setting; give --{name} on the command line")
                hint = self._advice_on(name, dashes="") or "; --help lists them"
                raise UsageError(f"{place}: {name} is not a setting here{hint}")
        return flag_values

    def _converted(self, value: FlagValue) -> object:
        flag, text = value.flag, value.text
        if text is None and flag.optional:
            return None
        if text is not None and str in flag.types:
            return text  # untouched: jsonargparse would read "null" and "~" as None
        if text is None or not _PLAIN_WORD.fullmatch(text):  # jsonargparse would read "1:30" as 90 and "4 # 5" as 4
            raise UsageError(_refusal(value))
        try:
            return self._parser.parse_object({flag.name: text}, env=False, defaults=False)[flag.name]
        except ArgumentError as error:
            raise UsageError(_refusal(value)) from error

    def _message_on_unknown(self, word: str, before: Sequence[FlagValue]) -> str:
        """Name either a misspelled flag or a value too many."""
        typed, equals, _ = word.partition("=")
        name = typed.lstrip("-")
        guess = self._advice_on(name.replace("-", "_"))
        if "-" in name:
            guess = _MENTIONED_FLAG.sub(lambda mention: mention[0].replace("_", "-"), guess)
        if word.startswith("-") or (equals and guess):
            return f"{typed} is not a flag{guess or '; --help lists them'}"
        if not before:
            return f"{word!r} is not a flag{guess or ': flags begin with --, values follow them'}"
        last = before[-1]
        if not last.takes_value:
            return f"{last.label} takes no value, got {word!r}"
        return f"{last.label} takes one value, got {last.text!r} and {word!r}: put quotes around spaces and patterns"

    def _advice_on(self, name: str, dashes: str = "--") -> str:
        """Return what to write in place of a name that this command does not have, as `; ...`; empty: there is no telling.

        Either it is another tool's word, also one with a path before it (`trainer.max_epochs`), or a name is misspelled.
        """
        word = name.lower().rpartition(".")[2]
        for answer in () if word in self.flags else answers_to(word):
            if all(self._takes(*mentioned) for mentioned in _MENTIONED_VALUE.findall(answer)):
                return f"; {'use ' if answer.startswith('--') else ''}{answer.replace('--', dashes)}"
        switches_off = [f"no_{flag.name}" for flag in self.flags.values() if flag.is_switch]
        return did_you_mean(word, [*self.flags, *switches_off, *self.controls] if dashes else self.flags, dashes, NEAR)

    def _takes(self, name: str, value: str) -> bool:
        """Return whether there is this flag or control, and, where it has choices, whether the value is one; empty: any value."""
        flag = self.flags.get(name) or self.controls.get(name)
        return flag is not None and (not value or not flag.choices or value in flag.choices)


def _alternatives(name: str, hint: Any) -> tuple[tuple[type, ...], tuple[str, ...], bool]:
    """Return plain types, words, and whether None is allowed. Where any object could stand, YAML could run code: no such hint."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    choices = tuple(word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind))
    types = tuple(kind for kind in kinds if get_origin(kind) is not Literal and kind is not NoneType)
    assert not name.startswith("no_"), f"{name} would read as the negation of a switch"
    assert all(kind in _TYPE_NAMES for kind in types), f"{name}: {hint} is not made of plain types"
    assert all(isinstance(word, str) for word in choices), f"{name}: {hint} has a choice that is not a word"
    assert types or choices, f"{name}: {hint} has no values"
    return types, choices, NoneType in kinds


def _leads_to_a_store(value: FlagValue) -> bool:
    """Return whether a value leads to a store: the URL of data there, or the address of one."""
    return value.text is not None and (value.flag.name == "endpoint_url" or is_remote(value.text))


def _refusal(value: FlagValue) -> str:
    text = "null" if value.text is None else repr(value.text)
    text = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
    return f"{value.label} wants {value.flag.expected}, got {text}{did_you_mean(value.text or '', value.flag.choices)}"


def _in_users_spelling(message: str, flag_values: Sequence[FlagValue]) -> str:
    """Spell the flags in a message as they were typed, and add the places of those that stand in a file."""
    last = {one.flag.name: one for one in flag_values}
    labels = [one.label for one in flag_values if not one.is_in_file]
    typed = {label.lstrip("-").replace("-", "_"): label for label in labels}
    has_hyphens = any("-" in label.lstrip("-") for label in typed.values())
    dashes = "--" if all(label.startswith("-") for label in labels) else ""  # none on keyword arguments

    def spelled(mention: re.Match[str]) -> str:
        untyped = mention[1].replace("_", "-") if has_hyphens else mention[1]
        return typed.get(mention[1], f"{dashes}{untyped}")

    mentioned = set(_MENTIONED_FLAG.findall(message))
    places = [one.label for name, one in last.items() if name in mentioned and one.is_in_file]
    return _MENTIONED_FLAG.sub(spelled, message) + (f" ({'; '.join(places)})" if places else "")


class _HelpFormatter(DefaultHelpFormatter):
    """Each flag on a line of its own and its text below, which reads well at any width; switches as --[no_]name."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=6, width=min(shutil.get_terminal_size().columns, 100))

    def _format_action_invocation(self, action: Action) -> str:
        if action.metavar == "{true,false}":
            return f"--{action.dest}" if action.dest in values_of(_Controls()) else f"--[no_]{action.dest}"
        return str(super()._format_action_invocation(action))

    def _get_help_string(self, action: Action) -> str:
        """Return the help text and the default; where that is None, the text says what happens then."""
        default = str(action.default).lower() if isinstance(action.default, bool) else action.default
        has_default = default is not None and action.dest not in ("print_config", "version", "help")
        return f"{action.help} (default: {default})" if has_default else f"{action.help}"

    def _split_lines(self, text: str, width: int) -> list[str]:
        one_line = " ".join(text.split())
        return textwrap.wrap(one_line, width, break_on_hyphens=False, break_long_words=False)  # flags stay in one piece

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Fill paragraphs; those that are indented (examples) stay as they are."""
        paragraphs = inspect.cleandoc(text).split("\n\n")
        return "\n\n".join(
            part if part.startswith(" ") else "\n".join(self._split_lines(part, width)) for part in paragraphs
        )
