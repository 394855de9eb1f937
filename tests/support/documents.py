"""Commands, modules, flags, files and tables that a page of documentation names. For tests/project/test_documentation.py."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md")), *GUIDES]
OF_EXAMPLES = sorted((ROOT / "examples").rglob("README.md"))
_KNOWN_ENDINGS = "py|md|jsonl|json|yaml|csv|png|ckpt|html|txt|toml|parquet|npz|safetensors|sh"
_FILE = re.compile(rf"(?<![\w/*<>.$-])[\w./-]*\w\.(?:{_KNOWN_ENDINGS})(?![\w/-])")
_FOLDER = re.compile(r"(?<![\w.])`([\w.-]+(?:/[\w.-]+)*)/`")


class Table(NamedTuple):
    """A table on a page."""

    heading: str
    """The last heading before it."""
    lines: list[str]
    is_rendered: bool
    """It stands between the marks of benchmarks/pages.py."""

    @property
    def has_numbers(self) -> bool:
        """Whether there is a digit outside of code."""
        return any(re.search(r"\d", re.sub(r"`[^`]*`", "", line)) for line in self.lines)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def commands(text: str) -> list[list[str]]:
    """Return every line or code span that runs one of the commands, without the interpreter and comments."""
    scripts = re.findall(r"(?:python|torchrun --nproc_per_node \d+) (\w+\.py[^\n`#|]*)", text)
    verbs = re.findall(r"(?:^ *|`)(seqvae (?!report|compare)[a-z]+ (?=[-\w])[^\n`#|]*)", text, flags=re.MULTILINE)
    return [_words(line) for line in [*scripts, *verbs]]


def modules_run(text: str) -> list[list[str]]:
    """Return every `python -m` line: the module and what follows it."""
    return [_words(line) for line in re.findall(r"python -m ([a-z_.]+[^\n`#|]*)", text)]


def _words(line: str) -> list[str]:
    return shlex.split(line.split("...")[0])


def flags_named(text: str) -> set[str]:
    """Return the flags that a text names, without `no_`, with underscores."""
    named = re.findall(r"(?<![\w-])--([a-z][\w-]+)", text)
    return {flag.replace("-", "_").removeprefix("no_") for flag in named}


def make_targets(text: str) -> set[str]:
    """Return the targets of `make` in code spans and blocks."""
    return set(re.findall(r"(?:^|`)make ([a-z-]+)", text, flags=re.MULTILINE))


def files_named(text: str) -> set[str]:
    """Return files by their ending, and folders in backticks by the slash behind them; links, too, are paths."""
    return {*_FILE.findall(_without_urls(text)), *_FOLDER.findall(text)}


def files_written(text: str) -> set[str]:
    """Return the files that the code on a page writes, and those that a reader saves it as."""
    by_calls = re.findall(r"(?:to_parquet|to_csv|savefig)\(\"([\w.]+)\"", text)
    return {
        *by_calls,
        *re.findall(r"--output ([\w.]+\.\w+)", text),
        *re.findall(r"^# (\w+\.py)$", text, flags=re.MULTILINE),
    }


def _without_urls(text: str) -> str:
    return re.sub(r"https?://\S+", "", text)


def tables(text: str) -> Iterator[Table]:
    heading, is_rendered, in_code = "", False, False
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|") and not in_code:
            lines.append(line)
            continue
        if lines:
            yield Table(heading, lines, is_rendered)
            lines = []
        if line.startswith("```"):
            in_code = not in_code
        elif line.startswith("<!-- begin:"):
            is_rendered = True
        elif line.startswith("<!-- end:"):
            is_rendered = False
        elif line.startswith("#") and not in_code:
            heading = line.lstrip("# ")
