"""YAML files of settings: `name: value` lines that are read strictly, and written so that they read back the same.

A file is composed but never constructed: what PyYAML hands over is the text of each value and the line where it stands.
So no tag can make an object, and a text means in YAML what it means on the command line.
"""

import inspect
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from seqvae.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "timestamp")}
_NULL_TAG = "tag:yaml.org,2002:null"

MOST_BYTES = 100_000
"""All settings, each with its reason, take a tenth of that."""


class Entry(NamedTuple):
    """One line of a settings file."""

    name: str
    text: str | None
    """The value as it stands there; None for null."""
    place: str
    """File and line, for messages."""


def read_settings_file(path: Path, shown_as: str) -> list[Entry]:
    """Return all entries of a file, which messages call `shown_as`."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise UsageError(f"{shown_as} is no settings file: it is longer than {MOST_BYTES:,} bytes")
        root = yaml.compose(content.decode(), Loader=yaml.SafeLoader)
    except FileNotFoundError as error:
        raise UsageError(f"{shown_as}: there is no such file") from error
    except OSError as error:
        raise UsageError(f"{shown_as} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{shown_as} is not a text file (UTF-8)") from error
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        problem = " ".join(part for part in (error.context, error.problem) if part)
        raise UsageError(f"{shown_as}{line} is not valid YAML: {problem}") from error
    except yaml.reader.ReaderError as error:
        raise UsageError(f"{shown_as} is not valid YAML: it holds the character {chr(error.character)!r}") from error
    except (ValueError, OverflowError) as error:  # a character or a version beyond all that there are
        raise UsageError(f"{shown_as} is not valid YAML: {error}") from error
    except RecursionError as error:
        raise UsageError(f"{shown_as} must hold lines of the form `name: value`, and nests values deeply") from error
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{shown_as} must hold lines of the form `name: value`")
    lines: dict[str, int] = {}
    entries = []
    for key, value in root.value:
        line = key.start_mark.line + 1
        place = f"{shown_as}, line {line}"
        if not isinstance(key, yaml.ScalarNode):
            raise UsageError(f"{place}: a setting's name must be one word")
        name = key.value.replace("-", "_")
        if name in lines:
            raise UsageError(f"{place}: {name} is there twice, first in line {lines[name]}; keep one of them")
        if not isinstance(value, yaml.ScalarNode) or value.tag not in _PLAIN_TAGS:
            raise UsageError(f"{place}: {name} must be one plain value")
        lines[name] = line
        entries.append(Entry(name, None if value.tag == _NULL_TAG else value.value, place))
    return entries


def to_yaml(settings: "DataclassInstance") -> str:
    """Return all settings under their themes, those that are None as well; `--config` makes an equal object of it."""
    parts = []
    for group in values_of(settings).values():
        values = lasting_values_of(group)
        # PyYAML writes control characters and line separators as they are where it may write Unicode, and reads others back.
        is_plain = all(str(value).isprintable() for value in values.values())
        lines = yaml.safe_dump(values, sort_keys=False, allow_unicode=is_plain, width=float("inf"))
        parts.append(f"# {theme_of(group)}\n{lines}")
    return "\n".join(parts)


def to_flat_dict(settings: "DataclassInstance") -> dict[str, object]:
    """Return all settings by name, whatever their group, but for those that only a command line may give."""
    return {name: value for group in values_of(settings).values() for name, value in lasting_values_of(group).items()}


def values_of(settings: "DataclassInstance") -> dict[str, Any]:
    """Return what a dataclass holds, field by field: the groups of a command's settings, or the plain values of a group."""
    return {field.name: getattr(settings, field.name) for field in fields(settings)}


def lasting_values_of(group: "DataclassInstance") -> dict[str, Any]:
    """Return what a group holds without what only a command line may give, which no file keeps."""
    return {one.name: getattr(group, one.name) for one in fields(group) if "typed_only" not in one.metadata}


def theme_of(group: "DataclassInstance") -> str:
    """Return the title of a group: its docstring's first line."""
    return inspect.cleandoc(type(group).__doc__ or "").partition("\n")[0]
