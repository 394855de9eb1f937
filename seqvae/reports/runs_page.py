"""A directory of runs -> `index.html`: what each run came to, how it got there, and the settings in which the runs differ.

Each run keeps what the page needs of it in `summary.json`, written beside its report. So a run that goes on renews the page from a
few kB of every other one, and the files of a long run are read by that run alone. The page stands in one file: it holds the table
once for each order, and a link to an anchor shows one of them, without a script.
"""

import json
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from markupsafe import Markup

from seqvae.errors import UsageError
from seqvae.files import parse_rows, replace_file
from seqvae.reports.read_run import (
    GROWING_FILES,
    Run,
    column,
    is_run_directory,
    number,
    read_run,
    row_in,
    rows_in,
    text,
    whole,
)
from seqvae.reports.run_files import REPORT
from seqvae.reports.run_page import OWN_SETTINGS, render, shown, spark, upto
from seqvae.reports.story import SILENT_SECONDS, end_of, moment, story_of
from seqvae.text import MINUS, duration
from seqvae.verdicts import Tone

PAGE, SUMMARY, STUDY = "index.html", "summary.json", "study.json"
MARK = b'<meta name="generator" content="seqvae report: an index of runs">'
"""In the head of the page: another page of this name is not replaced."""
MOST_MARK_BYTES = 2000
MOST_LISTED = 300
"""Runs on the page, the newest. With 300 of 110 settings, it is 1 MB."""
MOST_POINTS = 40
"""Of a spark line."""
MOST_SUMMARY_BYTES = 200_000
MOST_TRIES = 3
"""Times that the page is written again, where another run's summary changed meanwhile."""


class Summary(NamedTuple):
    """The row that the index of runs, and a comparison of runs' data, take from a run."""

    name: str
    verdict: str
    tone: Tone
    end: str
    """The event that ended it; empty: none was noted."""
    step: int
    total_steps: int | None
    started: str
    last_sign: float | None
    elbo: tuple[tuple[float, float], ...]
    """Step and value of the validations on the same sequences, thinned."""
    rate: tuple[tuple[float, float], ...]
    """Step and rate of each reading; without monitoring, the KL of each validation."""
    information: float | None
    settings: dict[str, str | None]
    kind: str
    splits: tuple[tuple[str, float | None, float | None], ...]
    """Name, sequences and steps of each split."""
    valid_sequences: float | None


def summary_of(run: Run, now: float) -> Summary:
    """Take from a run what the index shows. `now`: seconds since 1970."""
    story, end, data = story_of(run, now), end_of(run.events), row_in(run.facts, "data")
    validations = run.comparable_validations
    last = run.readings[-1] if run.readings else {}
    return Summary(
        name=run.name,
        verdict=story.verdict,
        tone=story.tone,
        end=text(end, "event") if end else "",
        step=run.step,
        total_steps=whole(run.facts, "total_steps"),
        started=text(run.environment, "started"),
        last_sign=run.last_sign,
        elbo=thinned(column(validations, "valid_elbo")),
        rate=thinned(column(run.readings, "rate") or column(validations, "valid_kl")),
        information=number(last, "mutual_information"),
        settings=dict(run.settings),
        kind=text(data, "kind"),
        splits=tuple(
            (text(one, "split"), number(one, "sequences"), number(one, "steps")) for one in rows_in(data, "splits")
        ),
        valid_sequences=number(validations[-1], "valid_sequences") if validations else None,
    )


def thinned(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return at most MOST_POINTS of the points, evenly spread, the first and the last among them.

    >>> len(thinned([(step, 0.0) for step in range(1000)])), thinned([(step, 0.0) for step in range(1000)])[-1]
    (40, (999, 0.0))
    """
    if len(points) <= MOST_POINTS:
        return tuple(points)
    return tuple(points[round(place * (len(points) - 1) / (MOST_POINTS - 1))] for place in range(MOST_POINTS))


def write_summary(run: Run, now: float) -> Summary:
    """Write a run's summary into its directory, if that can be written to, and return it."""
    summary = summary_of(run, now)
    with suppress(OSError), replace_file(run.directory / SUMMARY) as partial:
        partial.write_text(json.dumps(summary._asdict(), ensure_ascii=False) + "\n", encoding="utf-8")
    return summary


def read_summary(directory: Path) -> Summary | None:
    """Read what `write_summary` wrote; None where that cannot be, or is of another version or damaged."""
    try:
        with (directory / SUMMARY).open("rb") as file:
            (content,) = parse_rows([file.read(MOST_SUMMARY_BYTES)])
        points = {name: tuple((float(step), float(y)) for step, y in content[name]) for name in ("elbo", "rate")}
        splits = tuple((str(name), sequences, steps) for name, sequences, steps in content["splits"])
        summary = Summary(**content | points | {"splits": splits, "name": directory.absolute().name})
        numbers = (summary.step, summary.total_steps, summary.last_sign, summary.information, summary.valid_sequences)
        words = (summary.verdict, summary.tone, summary.end, summary.started, summary.kind)
        is_sound = (
            all(one is None or isinstance(one, int | float) for one in numbers)
            and isinstance(summary.step, int)
            and all(isinstance(one, str) for one in words)
            and isinstance(summary.settings, dict)
            and all(one is None or isinstance(one, str) for one in summary.settings.values())
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return summary if is_sound else None


def runs_in(directory: Path) -> list[Path]:
    """Return the run directories in a directory, by name."""
    try:
        return sorted(path for path in directory.iterdir() if path.is_dir() and is_run_directory(path))
    except OSError:
        return []


def studies_in(directory: Path) -> list[str]:
    """Return the names of the directories in a directory that hold a study of `seqvae tune`."""
    return sorted(path.parent.name for path in directory.glob(f"*/{STUDY}"))


# --- Writing the page ---------------------------------------------------------------------------------------------------


def write_runs_page(directory: Path, *, is_renewal: bool = False) -> Path:
    """Write the index of a directory of runs. Summaries that are older than their run are made again, but not for a renewal.

    Runs need no lock for it: the one that writes last has looked again, behind its writing, whether another one's summary changed.
    """
    page = directory / PAGE
    if page.exists() and not is_runs_page(page):
        raise UsageError(f"{page} is no index of runs, and is left as it is: move it away, and the command writes one")
    for _ in range(MOST_TRIES):
        before, now = _stamps(directory), time.time()
        summaries = []
        for run in runs_in(directory):
            summary = None if not is_renewal and _is_older(run) else read_summary(run)
            summaries.append(summary or write_summary(read_run(run), now))
        content = runs_page(directory.absolute().name, summaries, studies_in(directory), now)
        with replace_file(page) as partial:
            partial.write_text(content, encoding="utf-8")
        after = _stamps(directory)
        if after == before or not is_renewal:
            break
    return page


def renew_runs_page(run: Path) -> None:
    """Write the index beside a run's directory again, where there is one; a run is worth more than its place in a list."""
    page = run.absolute().parent / PAGE
    with suppress(OSError, UsageError):
        if is_runs_page(page):
            write_runs_page(page.parent, is_renewal=True)


def is_runs_page(page: Path) -> bool:
    """Return whether a page is an index of runs."""
    try:
        with page.open("rb") as file:
            return MARK in file.read(MOST_MARK_BYTES)
    except OSError:
        return False


def _stamps(directory: Path) -> dict[str, int]:
    """Return when the summary of each run was written."""
    found = {}
    for path in directory.glob(f"*/{SUMMARY}"):
        with suppress(OSError):
            found[path.parent.name] = path.stat().st_mtime_ns
    return found


def _is_older(run: Path) -> bool:
    """Return whether a run wrote something behind its summary."""
    times = {}
    for name in (SUMMARY, *GROWING_FILES):
        with suppress(OSError):
            times[name] = (run / name).stat().st_mtime_ns
    return max(times.values(), default=0) > times.get(SUMMARY, -1)


# --- The page -----------------------------------------------------------------------------------------------------------


class Order(NamedTuple):
    """The table of runs in one order."""

    anchor: str
    column: str
    """The head of the column that it goes by."""
    rows: list[list[Any]]


def runs_page(name: str, summaries: Sequence[Summary], studies: Sequence[str], now: float) -> str:
    """Write the page about the runs of a directory. `now`: seconds since 1970."""
    newest = sorted(summaries, key=lambda one: one.started, reverse=True)
    listed = newest[:MOST_LISTED]
    differing, shared = settings_apart(listed)
    rows = {
        one.name: [
            linked(one.name, REPORT),
            Markup('<span class="word {}">{}</span>').format(one.tone, upto(one.verdict)),
            with_two_decimals(one.elbo[-1][1]) if one.elbo else "",
            spark_link(f"e{place}") if len(one.elbo) > 1 else "",
            with_two_decimals(one.rate[-1][1]) if one.rate else "",
            spark_link(f"r{place}") if len(one.rate) > 1 else "",
            "" if one.information is None else with_two_decimals(one.information),
            state_of(one, now),
            one.started.replace("T", " ").partition(".")[0].removesuffix("Z")[:16],
            Markup("").join(Markup("<code>{}</code> ").format(upto(each, 100)) for each in differing[one.name]),
        ]
        for place, one in enumerate(listed)
    }

    def ordered(key: Any, *, reverse: bool = False) -> list[list[Any]]:
        known = [one for one in listed if key(one) is not None]
        unknown = [one for one in listed if key(one) is None]
        return [rows[one.name] for one in [*sorted(known, key=key, reverse=reverse), *unknown]]

    orders = [
        Order("by-name", "run", ordered(lambda one: one.name)),
        Order("by-verdict", "verdict", ordered(lambda one: one.verdict)),
        Order("by-elbo", "ELBO", ordered(lambda one: one.elbo[-1][1] if one.elbo else None, reverse=True)),
        Order("by-rate", "rate", ordered(lambda one: one.rate[-1][1] if one.rate else None, reverse=True)),
        Order("by-information", "information", ordered(lambda one: one.information, reverse=True)),
        Order(
            "by-start", "started", [rows[one.name] for one in listed]
        ),  # the last is shown where no link was followed
    ]
    return render(
        "runs.html.j2",
        title=f"Runs in {name}",
        name=name,
        mark=Markup(MARK.decode("ascii")),
        orders=orders,
        anchors={order.column: order.anchor for order in orders},
        sparks={
            f"{letter}{place}": points
            for place, one in enumerate(listed)
            for letter, curve in (("e", one.elbo), ("r", one.rate))
            if (points := spark(curve))
        },
        studies=[linked(study, PAGE) for study in studies],
        older=len(newest) - len(listed),
        tones=Counter(one.verdict for one in newest).most_common(),
        different=different_data(listed),
        shared=shared,
        written=moment(now),
    )


def state_of(summary: Summary, now: float) -> str:
    """Say in a few words how far a run got: `finished at 1,000`, `300 of 1,000`."""
    step = f"{summary.step:,}"
    if summary.end:
        return f"{summary.end} at {step}"
    ago = None if summary.last_sign is None else now - summary.last_sign
    place = step + (f" of {summary.total_steps:,}" if summary.total_steps else "")
    return f"{place}, silent for {duration(ago)}" if ago is not None and ago > SILENT_SECONDS else f"{place}, under way"


def settings_apart(summaries: Sequence[Summary]) -> tuple[dict[str, list[str]], list[list[str]]]:
    """Return for each run the settings that set it apart, and name and value of what it shares with most.

    A setting counts where the runs that name it differ. A value that more than half of them have is not repeated for each.
    """
    names = dict.fromkeys(name for one in summaries for name in one.settings if name not in OWN_SETTINGS)
    apart: dict[str, list[str]] = {one.name: [] for one in summaries}
    shared = []
    for name in names:
        values = {one.name: shown(one.settings[name]) for one in summaries if name in one.settings}
        usual, count = Counter(values.values()).most_common(1)[0]
        if count == len(values):
            continue
        if is_usual := count > len(values) / 2:
            shared.append([f"--{name}", usual])
        for run, value in values.items():
            if not (is_usual and value == usual):
                apart[run].append(f"--{name} {value}")
    return apart, shared


def different_data(runs: Sequence[Summary]) -> list[str]:
    """Return the signs that the runs were not validated on the same sequences; none where it is not known."""
    found = [
        f"--{name}"
        for name in ("data_dir", "tokenizer")
        if len({run.settings[name] for run in runs if name in run.settings}) > 1
    ]
    known = [run for run in runs if run.kind or run.splits]
    if len({run.kind for run in known}) > 1:
        found.append("the kind of data")
    if len({run.splits for run in known}) > 1:
        found.append("the number of sequences or of tokens or time steps")
    if len({run.valid_sequences for run in runs if run.elbo}) > 1:
        found.append("how many sequences they were validated on")
    return found


def spark_link(anchor: str) -> Markup:
    """Return the place of a spark line in a table: it is drawn once for all orders."""
    return Markup('<svg class="spark" viewBox="-2 -2 100 28" aria-hidden="true"><use href="#{}"/></svg>').format(anchor)


def linked(name: str, page: str) -> Markup:
    """Return the name of a directory as a link to a page in it."""
    return Markup('<a href="./{}/{}">{}</a>').format(quote(name), page, upto(name))


def with_two_decimals(value: float) -> str:
    """Return a number by which runs can be told apart."""
    return f"{value:,.2f}".replace("-", MINUS)
