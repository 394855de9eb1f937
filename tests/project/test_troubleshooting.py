"""docs/troubleshooting.md quotes messages that the product really prints, and leads to sections that are there."""

import re

import pytest

from tests.support.documents import PAGES, ROOT, text_of

PAGE = ROOT / "docs" / "troubleshooting.md"
QUOTES = [
    (line, part.strip(" ;:,("))
    for block in re.findall(r"```text\n(.*?)```", text_of(PAGE), flags=re.DOTALL)
    for line in block.splitlines()
    for part in line.split("...")
    if len(part.strip(" ;:,(")) > 2
]


def source_of_product() -> str:
    """Strings that lie on several lines as one, and what is filled in as `...`."""
    text = "\n".join(text_of(path) for path in sorted((ROOT / "seqvae").rglob("*.py")))
    text = re.sub(r"""["']\s*\n\s*f?["']""", "", text)
    for _ in range(2):  # braces within braces
        text = re.sub(r"\{[^{}\n]*\}", "...", text)
    return text


SOURCE = source_of_product()


@pytest.mark.parametrize(("line", "part"), QUOTES)
def test_every_message_quoted_is_one_that_is_printed(line, part):
    assert part in SOURCE, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_section_linked_is_there(page):
    for target, anchor in re.findall(r"\]\(([^)#]*)#([^)]+)\)", text_of(page)):
        headings = re.findall(r"^#+ (.+)$", text_of(page.parent / target if target else page), flags=re.MULTILINE)
        assert anchor in {anchor_of(heading) for heading in headings}, f"{page.name} links {target}#{anchor}"


def anchor_of(heading: str) -> str:
    """
    >>> anchor_of("Compiled, and no faster")
    'compiled-and-no-faster'
    """
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
