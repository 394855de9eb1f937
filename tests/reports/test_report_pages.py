"""Reports in a real browser: nothing to complain of, nothing outside its column, all figures seen, on a phone and a screen."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from markupsafe import Markup

from seqvae.reports.compare import comparison_page
from seqvae.reports.read_run import read_run
from seqvae.reports.run_page import render, report_page
from seqvae.reports.runs_page import runs_page, summary_of
from tests.support.hostile import NAMES
from tests.support.report_runs import finished, latents, make_run, write_json

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTHS = (390, 1400)
MEASURE = """
const found = [];
for (const frame of document.querySelectorAll("iframe")) {
  const page = frame.contentDocument, width = page.documentElement.clientWidth;
  const say = (what, element) => found.push([frame.id, what, element.outerHTML.slice(0, 200)]);
  if (width !== Number(frame.dataset.width)) say("not as wide as asked", page.body);
  if (page.documentElement.scrollWidth > width) say("scrolls sideways", page.body);
  if (!page.querySelector("h1")) say("no heading", page.body);
  for (const element of page.body.querySelectorAll("*")) {
    const box = element.getBoundingClientRect();
    const inside = element.parentElement.closest(".scroll, svg");
    if (!inside && (box.left < -0.5 || box.right > width + 0.5)) say("outside", element);
    if (element.matches("svg:not(.spark, .sparks), img") && (box.width < 100 || box.height < 60)) say("not seen", element);
    if (element.localName === "img" && !(element.complete && element.naturalWidth)) say("no picture", element);
    if (element.localName === "text") {
      const whole = element.closest("svg").getBoundingClientRect();
      const out = box.left < whole.left - 1 || box.right > whole.right + 1 || box.bottom > whole.bottom + 1;
      if (out) say("cut off", element);
    }
    if (element.localName === "text" && page.defaultView.getComputedStyle(element).fill === "rgb(0, 0, 0)")
      say("without style", element);
  }
  for (const element of page.querySelectorAll(".order .spark")) {
    const box = element.getBoundingClientRect(), line = page.querySelector(element.firstChild.getAttribute("href"));
    const shown = element.closest(".order") === [...page.querySelectorAll(".order")].at(-1);
    if ((box.width > 40 && box.height > 15) !== shown || !line) say("no line", element);
    if (page.defaultView.getComputedStyle(element.firstChild).fill !== "none") say("filled", element);
  }
  found.push([frame.id, "looked at", String(page.querySelectorAll("svg:not(.spark, .sparks), img").length)]);
}
document.body.textContent = "FOUND" + JSON.stringify(found) + "END";
"""


@pytest.fixture(scope="module")
def browser() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"there is no {' or '.join(BROWSERS)} here")
    return found


def look_at(pages: dict[str, str], browser: str, folder: Path) -> tuple[list[list[str]], str]:
    """What measuring found in each page at each width, and what the browser's console said."""
    frames = "".join(
        f'<iframe id="{name} {width}" data-width="{width}" width="{width}" height="900" srcdoc="{html.escape(content)}" '
        'style="border:0"></iframe>'
        for name, content in pages.items()
        for width in WIDTHS
    )
    script = f"<script>addEventListener('load', () => {{{MEASURE}}})</script>"
    wrapper = folder / "wrapper.html"
    wrapper.write_text(f"<!doctype html><body>{frames}{script}</body>", encoding="utf-8")
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--enable-logging=stderr",
    ]
    command += [f"--user-data-dir={folder / 'profile'}", "--hide-scrollbars", "--dump-dom", wrapper.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    told = re.search(r"FOUND(.*)END", html.unescape(done.stdout))
    assert told is not None, done.stdout[:2000]
    found: list[list[str]] = json.loads(told[1])
    console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return found, console


def test_pages_fit_a_phone_and_a_screen_and_the_browser_has_nothing_to_complain_of(tmp_path, browser):
    text = make_run(tmp_path / "text", end=finished())
    hostile = make_run(tmp_path / "hostile", names=NAMES, says="x" * 3000, verdict="collapsed", is_text=False)
    blind = make_run(tmp_path / "blind", monitored=False)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.yaml").touch()
    write_json(text / "latents.json", latents(NAMES, is_text=True))
    write_json(hostile / "latents.json", latents(NAMES, is_text=False))
    runs = {path.name: read_run(path) for path in (text, hostile, blind, tmp_path / "empty")}
    pages = {name: report_page(run, 0.0) for name, run in runs.items()}
    pages["index"] = runs_page("runs", [summary_of(run, 0.0) for run in runs.values()], ["a study"], 0.0)
    pages["comparison"] = comparison_page([*runs.values(), *runs.values()], 0.0)
    found, console = look_at(pages, browser, tmp_path)
    figures = {name: int(number) for name, what, number in found if what == "looked at"}
    assert [one for one in found if one[1] != "looked at"] == []
    assert figures == {
        f"{name} {width}": number
        for name, number in (("text", 10), ("hostile", 13), ("blind", 4), ("empty", 0), ("index", 0), ("comparison", 7))
        for width in WIDTHS
    }
    assert console == ""


def page(content: str) -> str:
    """A page with the style and the content policy of all pages."""
    return render("page.html.j2", title="a", content=Markup(content))


def test_folds_are_open_on_paper(tmp_path, browser):
    lines = "".join(f"<p>{place}</p>" for place in range(200))
    pages = []
    for name, content in (
        ("folded", page(f"<details><summary>All</summary>{lines}</details>")),
        ("empty", page("<details><summary>All</summary><p>1</p></details>")),
    ):
        (tmp_path / f"{name}.html").write_text(content, encoding="utf-8")
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += [f"--user-data-dir={tmp_path / 'profile'}", f"--print-to-pdf={tmp_path / name}.pdf"]
        subprocess.run([*command, (tmp_path / f"{name}.html").as_uri()], capture_output=True, timeout=120, check=True)
        pages.append(len(re.findall(rb"/Type\s*/Page\b", (tmp_path / f"{name}.pdf").read_bytes())))
    assert pages[1] == 1
    assert pages[0] > 3


def test_what_does_not_fit_is_found(tmp_path, browser):
    wide = (
        '<h1>a</h1><p><span class="code">'
        + "x" * 300
        + '</span></p><svg viewBox="0 0 9 9"><text x="8">cut off</text></svg>'
    )
    told = (
        f"{page(wide).replace('overflow-wrap:anywhere', '')}<script>alert(1)</script><img src='http://a.invalid/b.png'>"
    )
    found, console = look_at({"bad": told}, browser, tmp_path)
    whats = {what for name, what, _ in found if name == "bad 390"}
    assert {"scrolls sideways", "outside", "cut off", "no picture"} <= whats
    assert "Content Security Policy" in console
