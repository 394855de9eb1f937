"""The site of `make docs` holds every page once, its links lead where they do here, and it loads nothing from elsewhere."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.site_pages import joining, relinked
from tests.support.documents import OF_EXAMPLES, PAGES, ROOT, text_of

CONFIG = yaml.safe_load(text_of(ROOT / "mkdocs.yml"))
each_page = pytest.mark.parametrize(
    "page", [*PAGES, *OF_EXAMPLES, ROOT / "CHANGELOG.md"], ids=lambda page: page.relative_to(ROOT).as_posix()
)


def in_menu(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from in_menu(part)


def test_the_menu_leads_to_every_page_once():
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in PAGES if path.parent != ROOT}
    shown = list(in_menu(CONFIG["nav"]))
    assert len(shown) == len(set(shown))
    assert set(shown) == pages | set(joining().values())


@pytest.mark.parametrize(
    ("source", "link", "on_site"),
    [
        ("README.md", "[a](docs/data.md)", "[a](data.md)"),
        ("README.md", "[a](docs/guides/text.md)", "[a](guides/text.md)"),
        ("README.md", "![a [b] c](docs/images/layers.svg)", "![a [b] c](images/layers.svg)"),
        ("README.md", "[a](examples/molecules.py)", "[a](examples/molecules.md)"),
        ("examples/molecules.py", "[a](../docs/results.md)", "[a](../results.md)"),
        ("examples/README.md", "[a](own_model/README.md)", "[a](own_model.md)"),
        ("docs/guides/text.md", "[a](../data.md#the-cache)", "[a](../data.md#the-cache)"),
        ("docs/guides/text.md", "[a](../../README.md)", "[a](../index.md)"),
        ("docs/guides/text.md", "[a](../../examples/own_model/model.py)", "a"),
        ("docs/data.md", "[a](#the-cache), [b](https://x.org/docs/data.md)", "[a](#the-cache), [b](https://x.org/docs/data.md)"),
        ("docs/data.md", "[a](not_there.md)", "[a](not_there.md)"),
        ("docs/data.md", "`layers[0](batch)`", "`layers[0](batch)`"),
    ],
)  # fmt: skip
def test_a_link_leads_to_the_same_page(source, link, on_site):
    assert relinked(link, source) == on_site


def test_where_the_code_is_published_links_lead_into_it():
    assert (
        relinked("[a](../Makefile)", "docs/data.md", "https://x.org/blob/HEAD")
        == "[a](https://x.org/blob/HEAD/Makefile)"
    )


@each_page
def test_lists_are_written_so_that_every_reader_of_markdown_sees_them(page):
    """The site's needs an empty line before a list, and four spaces before code within one; others do with less."""
    before, in_code = "", False
    for number, line in enumerate(text_of(page).splitlines(), start=1):
        where = f"{page.name}, line {number}"
        if line.strip().startswith("```"):
            in_code = not in_code
            assert re.match(r"( {4})*```", line), f"{where}: code in a list, indented by other than four spaces"
        starts_list = not in_code and re.match(r"- |1\. ", line)
        is_within = re.match(r"- |\d+\. |  |$|#|<!--", before)
        assert not starts_list or is_within, f"{where}: a list without an empty line before it"
        before = line


class References(HTMLParser):
    """What a page makes a browser load."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.page = page
        self.loaded: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = dict(attrs)
        if tag in ("script", "img", "iframe", "source"):
            self.loaded.append(of.get("src") or "")
        elif tag == "link":
            self.loaded.append(of.get("href") or "")


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("mkdocs", reason="the site needs the extra docs")
    recipe = subprocess.run(["make", "-n", "docs"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in recipe.splitlines() if "mkdocs" in line]
    words = shlex.split(line)[1:]
    assert "--strict" in words
    command = [sys.executable, "-m", "mkdocs", *words, "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in in_menu(CONFIG["nav"]):
        page = (tmp_path / "site" / name).with_suffix(".html")
        loaded = [place.partition("?")[0] for place in References(page).loaded if place]
        assert loaded
        assert [place for place in loaded if not place.startswith("data:") and not (page.parent / place).exists()] == []
    reference = (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
    for name in ("fit", "Run.verdict", "Model.encode", "SequenceDataModule", "PosteriorMetricsMonitor", "DataError"):
        assert re.search(rf'id="seqvae\.[\w.]*{re.escape(name)}"', reference), f"{name} is not in the reference"
