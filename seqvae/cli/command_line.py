"""The words behind a command -> its settings: defaults < --preset < --config < flags, in whatever order they are typed.

In: a command's settings type and `sys.argv[1:]`. Out: the settings, or a `UsageError` of one or two lines that names the
flag as it was typed. `--help`, `--print_config` and `--version` print and leave. Nothing heavy is imported on this way.
"""

import difflib
import re
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from jsonargparse import ArgumentParser

import seqvae
from seqvae.config.flags import Flag, build_parser, convert, flags_of, flags_of_group, values_of
from seqvae.config.yaml_files import Entry, read_settings_file, to_yaml
from seqvae.errors import ExitCode, UsageError
from seqvae.files import why_no_path

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


# Words as typed behind a command -> flags with their texts, not yet converted; and the messages about wrong words.
#
# The grammar: `--name value`, `--name=value`, `--switch`, `--switch false`, `--no_switch`. Hyphens in names stand for
# underscores, names are never abbreviated, and a value that begins with `--` needs the form with `=`.


class Given(NamedTuple):
    """A flag as it was given, on the command line or in a file."""

    flag: Flag
    text: str | None
    """None stands for null."""
    label: str
    """How to speak of it: `--batch-size` as typed, or `run.yaml, line 3: batch_size`."""
    place: str | None = None
    """File and line; None for the command line."""


class _Spelling(NamedTuple):
    flag: Flag
    text: str | None
    """What the bare word means; None where a value has to follow."""
    takes_value: bool


def read_words(words: Sequence[str], flags: Sequence[Flag], controls: Sequence[Flag]) -> list[Given]:
    """The flags in the order they were typed. `controls` are no settings: their switches are never negated."""
    spellings = _spellings(flags, controls)
    rest = deque(words)
    given: list[Given] = []
    while rest:
        word = rest.popleft()
        typed, equals, text = word.partition("=")
        spelling = spellings.get(typed[2:].replace("-", "_")) if typed.startswith("--") else None
        if spelling is None:
            raise UsageError(_about_unknown(word, given, spellings))
        flag, bare_text, takes_value = spelling
        if equals and not takes_value:
            raise UsageError(f"{typed} takes no value, got {text!r}")
        if not equals and takes_value and rest and not rest[0].startswith("-" if flag.is_switch else "--"):
            text = rest.popleft()
        elif not equals:
            if bare_text is None:
                raise UsageError(f"{typed} wants {flag.wanted}, but nothing follows it")
            text = bare_text
        is_null = flag.optional and text.lower() in ("null", "none")
        given.append(Given(flag, None if is_null else text, typed))
    return given


def did_you_mean(word: str, names: Collection[str], prefix: str = "") -> str:
    """`; did you mean ...?` where one of the names comes close, else nothing."""
    close = difflib.get_close_matches(word.lower(), names, n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


def _spellings(flags: Sequence[Flag], controls: Sequence[Flag]) -> dict[str, _Spelling]:
    spellings = {flag.name: _Spelling(flag, "true" if flag.is_switch else None, True) for flag in flags}
    for flag in flags:
        if flag.is_switch:
            spellings[f"no_{flag.name}"] = _Spelling(flag, "false", False)
    for flag in controls:
        spellings[flag.name] = _Spelling(flag, "true" if flag.is_switch else None, not flag.is_switch)
    return spellings


def _about_unknown(word: str, before: list[Given], spellings: dict[str, _Spelling]) -> str:
    """Either a misspelled flag or a value too many."""
    typed, equals, _ = word.partition("=")
    name = typed.lstrip("-")
    names = [known.replace("_", "-") for known in spellings] if "-" in name else list(spellings)
    guess = did_you_mean(name, names, "--")
    if word.startswith("-") or (equals and guess):
        return f"{typed} is not a flag{guess or '; --help lists them'}"
    if not before:
        return f"{word!r} is not a flag{guess or ': flags begin with --, values follow them'}"
    label, text = before[-1].label, before[-1].text
    if not spellings[label[2:].replace("-", "_")].takes_value:
        return f"{label} takes no value, got {word!r}"
    return f"{label} takes one value, got {text!r} and {word!r}: put quotes around spaces and patterns"


Settings = TypeVar("Settings", bound="DataclassInstance")

PRESETS_DIR = Path(__file__).parent.parent / "config" / "presets"
_ENDING = (
    "Flags win over --config, --config over --preset, --preset over the defaults, wherever they stand on the line. "
    "Hyphens do as well as underscores (--batch-size=4), and null unsets a value (--batch_size null).\n\n"
    "Exit codes: 0 done, 2 wrong flags, 3 unusable data, 4 diverged, 5 out of memory, 6 disk or permission, 7 posterior "
    "collapsed, 130 Ctrl-C, 143 SIGTERM."
)
MOST_SHOWN = 200
"""Characters of a value that is refused."""

_MENTION = re.compile(r"--(\w+)")  # a flag in a message


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


def parse_command_line(
    schema: type[Settings],
    words: Sequence[str],
    *,
    prog: str,
    description: str,
    presets: Path | None = PRESETS_DIR,
    default_preset: str | None = None,
    config_of: type["DataclassInstance"] | None = None,
) -> Settings:
    """The settings of a command. Call it inside the `main` of `run_command`, which prints a `UsageError` and exits.

    `schema` is a frozen dataclass of groups, all with defaults. `default_preset` is in force where none is given. A --config
    may be one of another command, whose schema `config_of` is: what only that command knows is passed over.
    """
    flags = flags_of(schema)
    preset_files = {} if presets is None else {path.stem: path for path in sorted(presets.glob("*.yaml"))}
    controls = control_flags(tuple(preset_files), default_preset)
    assert flags.keys().isdisjoint(control.name for control in controls), "a setting is called like a control"
    all_flags = list(flags.values())
    parser = build_parser(all_flags, controls, prog=prog, description=description, epilog=_ENDING)

    asked = {word.lstrip("-").replace("-", "_") for word in words if word.startswith("-")}
    if "version" in asked:
        print(f"seqvae {seqvae.__version__}")
        raise SystemExit(ExitCode.DONE)
    wants_help = not asked.isdisjoint({"help", "h"})
    passed_over = set(flags_of(config_of)) if config_of else set()
    given = _gather([] if wants_help else words, flags, controls, preset_files, default_preset, passed_over)
    values = {flag.name: flag.default for flag in all_flags} | {g.flag.name: _value(parser, g) for g in given}
    if wants_help:
        parser.set_defaults(values)
        parser.print_help()
        raise SystemExit(ExitCode.DONE)
    settings = _compose(schema, values, given)
    if "print_config" in asked:
        print(to_yaml(settings), end="")
        raise SystemExit(ExitCode.DONE)
    return settings


def control_flags(presets: tuple[str, ...], default_preset: str | None = None) -> list[Flag]:
    """The flags that are no settings; --preset only where there are presets to choose from."""
    preset, *others = flags_of_group(_Controls())
    return [preset._replace(types=(), choices=presets, default=default_preset), *others] if presets else others


def _gather(
    words: Sequence[str],
    flags: dict[str, Flag],
    controls: Sequence[Flag],
    preset_files: dict[str, Path],
    default_preset: str | None,
    passed_over: Collection[str],
) -> list[Given]:
    """All settings that were given, the weakest first."""
    typed = read_words(words, list(flags.values()), controls)
    presets = [_checked_choice(given) for given in typed if given.flag.name == "preset"] or [default_preset]
    configs = [given.text for given in typed if given.flag.name == "config"]
    layers = [_from_preset(name, preset_files[name], flags) for name in presets if name is not None]
    layers += [_from_config(path, flags, controls, passed_over) for path in configs if path is not None]
    layers.append([given for given in typed if given.flag.name in flags])
    return list(chain.from_iterable(layers))


def _from_preset(name: str, path: Path, flags: dict[str, Flag]) -> list[Given]:
    """Presets serve every command: a name that this one lacks belongs to another (a test holds them all to account)."""
    entries = read_settings_file(path, f"preset {name}")
    return [_from_entry(entry, flags[entry.name]) for entry in entries if entry.name in flags]


def _from_config(
    path: str, flags: dict[str, Flag], controls: Sequence[Flag], passed_over: Collection[str]
) -> list[Given]:
    if reason := why_no_path(path):
        raise UsageError(f"--config {reason}")
    given = []
    for entry in read_settings_file(Path(path).expanduser(), path):
        if entry.name in flags:
            given.append(_from_entry(entry, flags[entry.name]))
        elif entry.name not in passed_over:
            raise UsageError(_about_unknown_setting(entry, flags, controls))
    return given


def _from_entry(entry: Entry, flag: Flag) -> Given:
    return Given(flag, entry.text, label=f"{entry.place}: {entry.name}", place=entry.place)


def _about_unknown_setting(entry: Entry, flags: dict[str, Flag], controls: Sequence[Flag]) -> str:
    positive = flags.get(entry.name.removeprefix("no_"))
    if positive is not None and positive.is_switch:
        return f"{entry.place}: write `{positive.name}: false` instead of {entry.name}"
    if entry.name in [control.name for control in controls]:
        return f"{entry.place}: {entry.name} is no setting; give --{entry.name} on the command line"
    return (
        f"{entry.place}: {entry.name} is not a setting here{did_you_mean(entry.name, flags) or '; --help lists them'}"
    )


def _checked_choice(given: Given) -> str | None:
    if given.text is not None and given.text not in given.flag.choices:
        raise UsageError(_refusal(given))
    return given.text


def _value(parser: ArgumentParser, given: Given) -> object:
    if given.text is None:
        if not given.flag.optional:
            raise UsageError(_refusal(given))
        return None
    try:
        return convert(parser, given.flag, given.text)
    except ValueError as error:
        raise UsageError(_refusal(given)) from error


def _refusal(given: Given) -> str:
    got = "null" if given.text is None else repr(given.text)
    got = got if len(got) <= MOST_SHOWN else f"{got[:MOST_SHOWN]}..."
    return f"{given.label} wants {given.flag.wanted}, got {got}{did_you_mean(given.text or '', given.flag.choices)}"


def _compose(schema: type[Settings], values: dict[str, object], given: Sequence[Given]) -> Settings:
    """The settings object. What a group refuses in its `__post_init__` is a usage error, in the user's own spelling."""
    try:
        groups = {
            name: replace(group, **{field: values[field] for field in values_of(group)})
            for name, group in values_of(schema()).items()
        }
        return schema(**groups)
    except ValueError as error:
        raise UsageError(_as_given(str(error), given)) from error


def _as_given(message: str, given: Sequence[Given]) -> str:
    """Flags spelled as they were typed, and the places of those that stand in a file."""
    last = {one.flag.name: one for one in given}
    typed = {one.label[2:].replace("-", "_"): one.label for one in given if one.place is None}
    hyphens = any("-" in label[2:] for label in typed.values())  # the style for flags that were not typed

    def spell(mention: re.Match[str]) -> str:
        return typed.get(mention[1], mention[0].replace("_", "-") if hyphens else mention[0])

    mentioned = set(_MENTION.findall(message))
    places = [one.label for name, one in last.items() if name in mentioned and one.place is not None]
    return _MENTION.sub(spell, message) + (f" ({'; '.join(places)})" if places else "")


# What stands before the flags of a command: `use_model.py encode CHECKPOINT --data_dir my_data`.

ASKS = {"--help", "-h", "--version", "--print_config", "--print-config"}
"""Whoever asks for these need not say what is to be used."""


def leading(words: Sequence[str], names: Sequence[str], example: str) -> tuple[list[str], list[str]]:
    """As many words as there are names, and the flags behind them.

    >>> leading(["last.ckpt", "--count", "5"], ["CHECKPOINT"], "sample CHECKPOINT")
    (['last.ckpt'], ['--count', '5'])
    """
    first_flag = next((place for place, word in enumerate(words) if word.startswith("--") or word == "-h"), len(words))
    given, flags = list(words[:first_flag]), list(words[first_flag:])
    if len(given) == len(names) or not ASKS.isdisjoint(flags):
        return given, flags
    if len(given) > len(names):
        raise UsageError(f"{given[len(names)]!r}: nothing more is wanted before the flags. Wanted: {example}")
    raise UsageError(f"{names[len(given)]} is missing, which stands before the flags. Wanted: {example}")
