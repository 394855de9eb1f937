"""Words as typed behind a command -> flags with their texts, not yet converted; and the messages about wrong words.

The grammar: `--name value`, `--name=value`, `--switch`, `--switch false`, `--no_switch`. Hyphens in names stand for
underscores, names are never abbreviated, and a value that begins with `--` needs the form with `=`.
"""

import difflib
from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

from seqvae.config.flags import Flag
from seqvae.exit_codes import UsageError


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
