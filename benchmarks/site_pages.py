"""Pages of the site that stand elsewhere in the repository (README, changelog, security, examples): a hook of mkdocs.

mkdocs knows only what is below docs/. So that no page is written twice, the others join the site under the names in `joining()`,
links between all of them are rewritten, and a notebook becomes a page with the picture that it ends in. In, a page as it reads in
the repository; out, the same page as it reads on the site.
"""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((?![a-z]+:|#|/)([^()\s#]*)(#[^()\s]*)?\)")


def joining() -> dict[str, str]:
    """Return the names on the site of the pages outside of docs/, by their paths in the repository."""
    pages = {"examples/README.md": "examples/index.md", "examples/own_model/README.md": "examples/own_model.md"}
    pages |= {f"examples/{path.name}": f"examples/{path.stem}.md" for path in notebooks()}
    return {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "SECURITY.md": "security.md", **pages}


def notebooks() -> list[Path]:
    """Return the scripts of examples/ that are notebooks: their cells begin with `# %%`."""
    scripts = sorted((ROOT / "examples").glob("*.py"))
    return [path for path in scripts if path.read_text(encoding="utf-8").startswith("# %%")]


def page_of(script: str) -> str:
    """Return a notebook as Markdown: its prose as it is, and its code in blocks.

    >>> page_of("# %% [markdown]\\n# # Head\\n#\\n# Text.\\n\\n# %%\\nprint(1)\\n")
    '# Head\\n\\nText.\\n\\n```python\\nprint(1)\\n```\\n'
    """
    parts = []
    for kind, body in re.findall(r"^# %%(.*)\n((?:(?!# %%).*\n?)*)", script, flags=re.MULTILINE):
        if kind.strip() == "[markdown]":
            parts.append(re.sub(r"^# ?", "", body.strip(), flags=re.MULTILINE))
        else:
            parts.append(f"```python\n{body.strip()}\n```")
    return "\n\n".join(parts) + "\n"


def relinked(text: str, source: str, repository: str | None = None) -> str:
    """Return the text of a page with its links as they lead on the site.

    `source`: the page's path in the repository. A link to a file that is no page, such as source code, leads into `repository`,
    the address of its files; without an address nothing is left of it but its words.

    >>> relinked("[a](docs/data.md#x), [b](examples/molecules.py), [c](Makefile)", "README.md")
    '[a](data.md#x), [b](examples/molecules.md), c'
    """
    names = joining()
    folder = PurePosixPath(names.get(source, source.removeprefix("docs/"))).parent

    def rewritten(link: re.Match[str]) -> str:
        words, target, heading = link[1], link[2], link[3] or ""
        path = normpath(PurePosixPath(source).parent / target)
        place = names.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if not target or not (ROOT / path).exists():
            return link[0]  # code that looks like a link, or a mistake that mkdocs finds
        if place is not None:
            return f"[{words}]({relpath(place, folder)}{heading})"
        return f"[{words}]({repository}/{path})" if repository else words

    return _LINK.sub(rewritten, text)


# --- What mkdocs calls ------------------------------------------------------------------------------------------------


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    from mkdocs.structure.files import File

    for source, name in joining().items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    sources = {name: source for source, name in joining().items()}
    name = page.file.src_uri
    source = sources.get(name, f"docs/{name}")
    if source.endswith(".py"):
        script = PurePosixPath(source)
        markdown = f"{page_of(markdown)}\n![What its last cell draws](../docs/images/examples/{script.stem}.png)\n"
    repository = f"{config.repo_url.rstrip('/')}/blob/HEAD" if config.repo_url else None
    return relinked(markdown, source, repository)


def on_page_content(html: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Let code in tables wrap where it is too long for a column; docs/site.css keeps the rest of it in one piece."""
    return re.sub(r"<code>(?=[^<]{60})", '<code class="long">', html)
