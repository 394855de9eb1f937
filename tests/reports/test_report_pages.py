"""Reports in a browser: nothing outside its column, all figures seen, each word legible; on a phone, in the dark, and on paper."""

import html
import json
import re
import shutil
import subprocess
import unicodedata
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup
from pypdf import PdfReader

from seqvae.reports.compare import comparison_page
from seqvae.reports.read_run import read_run
from seqvae.reports.run_page import render, report_page
from seqvae.reports.runs_page import runs_page, summary_of
from tests.support.hostile import NAMES
from tests.support.report_runs import finished, latents, make_run, write_json

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FRAMES = (
    (390, "light"),
    (1400, "dark"),
)  # what a phone is wide, and a screen; a page is laid out alike in both schemes
KINDS = ("tokens", "vectors", "events")
PREVIEW = (200, 120)
"""The pixels of a preview of vectors or events in `make_run`."""
FIGURES = {"tokens": 10, "vectors": 13, "events": 13, "hostile": 13, "blind": 4}
MEASURE = """
const found = [];
const channels = colour => colour.match(/[0-9.]+/g).map(Number);
function luminance(colour) {
  const linear = value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const [r, g, b] = channels(colour).map(value => linear(value / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function contrast(page, element) {
  const style = one => page.defaultView.getComputedStyle(one);
  let behind = element;
  while (behind.parentElement && channels(style(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
  const own = element.closest("svg") ? style(element).fill : style(element).color;
  const both = [luminance(own), luminance(style(behind).backgroundColor)].sort((a, b) => a - b);
  return (both[1] + 0.05) / (both[0] + 0.05);
}
for (const frame of document.querySelectorAll("iframe")) {
  const page = frame.contentDocument, width = page.documentElement.clientWidth;
  const say = (what, element) => found.push([frame.id, what, element.outerHTML.slice(0, 200)]);
  if (width !== Number(frame.dataset.width)) say("not as wide as asked", page.body);
  if (page.documentElement.scrollWidth > width) say("scrolls sideways", page.body);
  if (!page.querySelector("h1")) say("no heading", page.body);
  const isDark = luminance(page.defaultView.getComputedStyle(page.documentElement).backgroundColor) < 0.1;
  if (isDark !== (frame.style.colorScheme === "dark")) say("not in the scheme asked for", page.body);
  for (const element of page.body.querySelectorAll("*")) {
    const box = element.getBoundingClientRect();
    const inside = element.parentElement.closest(".scroll, svg");
    if (!inside && (box.left < -0.5 || box.right > width + 0.5)) say("outside", element);
    const hasText = [...element.childNodes].some(node => node.nodeType === Node.TEXT_NODE && node.data.trim());
    if (hasText && !element.closest("title") && contrast(page, element) < 4.5) say("too faint", element);
    if (element.matches("svg:not(.spark, .sparks, .sketch), img") && (box.width < 100 || box.height < 60)) say("not seen", element);
    if (element.matches(".sketch") && (box.width < 60 || box.height < 60)) say("not seen", element);
    if (element.localName === "img" && !(element.complete && element.naturalWidth)) say("no picture", element);
    if (element.localName === "text") {
      const whole = element.closest("svg").getBoundingClientRect();
      const out = box.left < whole.left - 1 || box.right > whole.right + 1 || box.bottom > whole.bottom + 1;
      if (out) say("cut off", element);
    }
  }
  for (const element of page.querySelectorAll(".order .spark")) {
    const box = element.getBoundingClientRect(), line = page.querySelector(element.firstChild.getAttribute("href"));
    const shown = element.closest(".order") === [...page.querySelectorAll(".order")].at(-1);
    if ((box.width > 40 && box.height > 15) !== shown || !line) say("no line", element);
    if (page.defaultView.getComputedStyle(element.firstChild).fill !== "none") say("filled", element);
  }
  found.push([frame.id, "looked at", String(page.querySelectorAll("svg:not(.spark, .sparks, .sketch), img").length)]);
}
document.body.textContent = "FOUND" + JSON.stringify(found) + "END";
"""


@pytest.fixture(scope="module")
def browser() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(
            f"no page is opened in a browser: there is neither {' nor '.join(BROWSERS)} here (.ci/run installs one)"
        )
    return found


def browse(browser: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the browser without a window, with a profile of its own."""
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={folder / 'profile'}", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def look_at(pages: dict[str, str], browser: str, folder: Path) -> tuple[list[list[str]], str]:
    """What measuring found in each page at each width, and what the browser's console said."""
    frames = "".join(
        f'<iframe id="{name} {width}" data-width="{width}" width="{width}" height="900" srcdoc="{html.escape(content)}" '
        f'style="border:0;color-scheme:{scheme}"></iframe>'
        for name, content in pages.items()
        for width, scheme in FRAMES
    )
    script = f"<script>addEventListener('load', () => {{{MEASURE}}})</script>"
    wrapper = folder / "wrapper.html"
    wrapper.write_text(f"<!doctype html><body>{frames}{script}</body>", encoding="utf-8")
    done = browse(browser, folder, "--enable-logging=stderr", "--hide-scrollbars", "--dump-dom", wrapper.as_uri())
    told = re.search(r"FOUND(.*)END", html.unescape(done.stdout))
    assert told is not None, done.stdout[:2000]
    found: list[list[str]] = json.loads(told[1])
    console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return found, console


def test_pages_fit_a_phone_and_a_screen_and_the_browser_has_nothing_to_complain_of(tmp_path, browser):
    runs = {kind: tmp_path / kind for kind in KINDS}
    for kind, run in runs.items():
        make_run(run, end=finished(), kind=kind)
        write_json(run / "latents.json", latents(NAMES, is_text=kind == "tokens"))
    runs["hostile"] = make_run(tmp_path / "hostile", names=NAMES, says="x" * 3000, verdict="collapsed", kind="vectors")
    write_json(runs["hostile"] / "latents.json", latents(NAMES, is_text=False))
    runs["blind"] = make_run(tmp_path / "blind", monitored=False)
    runs["empty"] = tmp_path / "empty"
    runs["empty"].mkdir()
    (runs["empty"] / "config.yaml").touch()
    read = {name: read_run(path) for name, path in runs.items()}
    pages = {name: report_page(run, 0.0) for name, run in read.items()}
    pages["index"] = runs_page("runs", [summary_of(run, 0.0) for run in read.values()], ["a study"], 0.0)
    pages["comparison"] = comparison_page([*read.values(), *read.values()], 0.0)
    found, console = look_at(pages, browser, tmp_path)
    figures = {name: int(number) for name, what, number in found if what == "looked at"}
    assert [one for one in found if one[1] != "looked at"] == []
    assert figures == {
        f"{name} {width}": number
        for name, number in {**FIGURES, "empty": 0, "index": 0, "comparison": 7}.items()
        for width, _ in FRAMES
    }
    assert console == ""


def page(content: str) -> str:
    """A page with the style and the content policy of all pages."""
    return render("page.html.j2", title="a", content=Markup(content))


class Words(HTMLParser):
    """Parser that collects the texts of a page's body."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(content[content.index("<body>") :])

    def handle_data(self, data: str) -> None:
        self.found.append(data)


def squeezed(text: str) -> str:
    """Return a text without white space, which a line's end takes the place of, in one case."""
    return re.sub(r"\s", "", unicodedata.normalize("NFKC", text)).casefold()


@pytest.mark.parametrize("kind", KINDS)
def test_on_paper_every_word_is_there_in_dark_ink(tmp_path, browser, kind):
    run = make_run(tmp_path / kind, end=finished(), kind=kind)
    write_json(run / "latents.json", latents(("red", "blue"), is_text=kind == "tokens"))
    content = report_page(read_run(run), 0.0)
    (tmp_path / "page.html").write_text(content, encoding="utf-8")
    dark = "--blink-settings=preferredColorScheme=0"
    browse(browser, tmp_path, dark, f"--print-to-pdf={tmp_path / 'page.pdf'}", (tmp_path / "page.html").as_uri())
    inks: set[tuple[float, ...]] = set()
    states: list[tuple[float, ...]] = [(0.0, 0.0, 0.0)]

    def note(operator: bytes, operands: Any, *_: Any) -> None:
        match operator:
            case b"q":
                states.append(states[-1])
            case b"Q":
                states.pop()
            case b"rg":
                states[-1] = tuple(map(float, operands))
            case b"Tj" | b"TJ":
                inks.add(states[-1])

    pages = PdfReader(tmp_path / "page.pdf").pages
    printed = squeezed("".join(page.extract_text(visitor_operand_before=note) for page in pages))
    words = [word for text in Words(content).found if (word := squeezed(text))]
    assert [word for word in words if word not in printed] == []
    assert "<details>" in content  # whose text is among the words
    assert len(words) > 300
    assert max(sum(ink) / 3 for ink in inks) < 0.5
    pictures = [one.image.size for page in pages for one in page.images if one.image is not None]
    assert pictures.count(PREVIEW) == (kind != "tokens")


def test_what_does_not_fit_is_found(tmp_path, browser):
    wide = (
        '<h1>a</h1><p><span class="code">'
        + "x" * 300
        + '</span></p><p style="color:#888">grey</p><svg viewBox="0 0 9 9"><text x="8">cut off</text></svg>'
    )
    told = (
        f"{page(wide).replace('overflow-wrap:anywhere', '')}<script>alert(1)</script><img src='http://a.invalid/b.png'>"
    )
    found, console = look_at({"bad": told}, browser, tmp_path)
    whats = {what for name, what, _ in found if name == "bad 390"}
    assert {"scrolls sideways", "outside", "cut off", "no picture", "too faint"} <= whats
    assert "Content Security Policy" in console
