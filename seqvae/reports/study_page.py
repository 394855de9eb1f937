"""A study of `seqvae tune` -> `study.json` and one HTML page: the front, what each setting did, a table of all trials."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from seqvae.errors import UsageError
from seqvae.files import replace_file
from seqvae.reports.charts import ROUND
from seqvae.reports.figures import DARK, FAINT, GREY, MIDDLE, TICKS, Chart, Medium, page_figure
from seqvae.reports.run_files import REPORT
from seqvae.reports.run_page import render
from seqvae.reports.runs_page import PAGE, STUDY, linked, with_two_decimals
from seqvae.reports.story import moment
from seqvae.text import duration

FINISHED, COLLAPSED, FAILED, UNFINISHED = "finished", "collapsed", "failed", "unfinished"
"""The states of a trial."""
MOST_NAMED = 8
"""Trials of the front whose number stands beside them."""


class TrialRow(NamedTuple):
    """A trial and what it came to."""

    name: str
    """The name of its run's directory."""
    state: str
    verdict: str
    values: Mapping[str, str]
    """What was chosen for it, as it is typed."""
    objectives: tuple[float, ...]
    """None where it came to nothing."""
    is_on_front: bool
    seconds: float | None
    said: str
    """Why it failed."""


class Study(NamedTuple):
    """All trials so far, and what they are about."""

    name: str
    objectives: tuple[str, str]
    """Names of the two that are to be high."""
    space: Mapping[str, Mapping[str, Any]]
    """For each setting low, high and is_whole of its range, or the values to choose from."""
    trials: tuple[TrialRow, ...]
    of_trials: int
    """How many there are to be."""
    common: Mapping[str, Any]
    """The settings that all trials share."""

    @property
    def front(self) -> list[TrialRow]:
        """The trials that no other one surpasses in both objectives, the highest in the first one first."""
        return sorted((one for one in self.trials if one.is_on_front), key=lambda one: -one.objectives[0])


def write_study(directory: Path, study: Study) -> Path:
    """Write `study.json` and the page into the directory of a study, and return the page."""
    content = study._asdict() | {"trials": [one._asdict() for one in study.trials]}
    with replace_file(directory / STUDY) as partial:
        partial.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return write_study_page(directory, study)


def write_study_page(directory: Path, study: Study) -> Path:
    """Write the page of a study into its directory, and return it."""
    with replace_file(directory / PAGE) as partial:
        partial.write_text(study_page(study, time.time()), encoding="utf-8")
    return directory / PAGE


def read_study(directory: Path) -> Study:
    """Read what `write_study` wrote."""
    try:
        content = json.loads((directory / STUDY).read_text(encoding="utf-8"))
        trials = tuple(TrialRow(**one | {"objectives": tuple(one["objectives"])}) for one in content["trials"])
        return Study(**content | {"trials": trials, "objectives": tuple(content["objectives"])})
    except OSError as error:
        raise UsageError(f"{directory}: holds no study ({error.strerror}). `seqvae tune` makes one.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{directory / STUDY}: is damaged ({error}). The same `seqvae tune` writes it again."
        ) from error


def study_page(study: Study, now: float) -> str:
    """Write the page of a study. `now`: seconds since 1970."""
    evaluated = [one for one in study.trials if one.objectives]
    counts = {
        state: sum(one.state == state for one in study.trials) for state in (FINISHED, COLLAPSED, FAILED, UNFINISHED)
    }
    counted_states = [f"{count} {state}" for state, count in counts.items() if count]
    settings = list(study.space)
    rows = [
        [
            _linked(one),
            one.verdict or one.state,
            *(with_two_decimals(value) for value in one.objectives),
            *(("", "") if not one.objectives else ()),
            *(one.values.get(name, "") for name in settings),
            "" if one.seconds is None else duration(one.seconds),
        ]
        for one in sorted(study.trials, key=lambda one: (not one.is_on_front, -max(one.objectives[:1], default=-inf)))
    ]
    by_setting = [
        page_figure(f"{name}_{place}", over_setting, study, name, place) for name in settings for place in range(2)
    ]
    return render(
        "study.html.j2",
        title=f"Study {study.name}",
        study=study,
        state=f"{len(study.trials)} of {study.of_trials} trials: {', '.join(counted_states) or 'none yet'}",
        has_collapsed=counts[COLLAPSED] > 0,
        front=page_figure("front", front_chart, study),
        rows=rows,
        settings=settings,
        by_setting=[one for one in by_setting if one],
        is_begun=bool(evaluated),
        failed=[[one.name, one.said] for one in study.trials if one.state == FAILED],
        common=[[f"--{name}", _shown(value)] for name, value in study.common.items()],
        written=moment(now),
    )


def _shown(value: object) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _linked(trial: TrialRow) -> Markup:
    """Return the name of a trial as a link to its report."""
    return linked(trial.name, REPORT) + (" ★" if trial.is_on_front else "")


# --- Charts ---------------------------------------------------------------------------------------------------------------


def front_chart(medium: Medium, study: Study) -> Chart | str:
    """Draw the trials by their two objectives, and the front that no trial is beyond."""
    first, second = study.objectives
    evaluated = [one for one in study.trials if one.objectives]
    if not evaluated:
        return "no trial has ended"
    chart = Chart(medium, 4.6, f"{first} and {second} of each trial")
    axes = chart.figure.subplots()
    front = study.front[::-1]  # from left to right, as the second objective falls with the first
    places = sorted((one.objectives[1], one.objectives[0]) for one in front)
    if len(places) > 1:
        axes.step(*zip(*places, strict=True), where="pre", color=FAINT, linewidth=1.2)
    _scatter(axes, evaluated, lambda one: one.objectives[1], lambda one: one.objectives[0])
    for one in front[:: max(1, -(-len(front) // MOST_NAMED))]:
        number = one.name.removeprefix("trial-").lstrip("0") or "0"
        axes.annotate(number, (one.objectives[1], one.objectives[0]), (5, 4), textcoords="offset points", color=DARK)
    _leave_out_far_ones(axes, [one.objectives[0] for one in evaluated])
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=ROUND))
    axes.xaxis.set_major_formatter(TICKS)
    axes.set(xlabel=second, ylabel=first)
    chart.legend(axes, columns=3)
    return chart


def over_setting(medium: Medium, study: Study, setting: str, objective: int) -> Chart | str:
    """Draw one of the objectives over what was chosen for a setting."""
    evaluated = [one for one in study.trials if one.objectives and setting in one.values]
    if not evaluated:
        return "no trial has ended"
    space = study.space[setting]
    chart = Chart(medium, 3.0, f"{study.objectives[objective]} over --{setting}")
    axes = chart.figure.subplots()
    values: Sequence[str] = space.get("values", ())
    _scatter(
        axes,
        evaluated,
        lambda one: values.index(one.values[setting]) if one.values[setting] in values else float(one.values[setting]),
        lambda one: one.objectives[objective],
    )
    if values:
        axes.set_xticks(range(len(values)), values)
        axes.set_xlim(-0.5, len(values) - 0.5)
    elif space["low"] > 0 and space["high"] >= 8 * space["low"]:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(
            LogLocator(subs=(1.0, 3.0) if space["high"] > 30 * space["low"] else (1.0, 2.0, 5.0))
        )
        axes.xaxis.set_major_formatter(TICKS)
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=bool(space["is_whole"])))
        axes.xaxis.set_major_formatter(TICKS)
    _leave_out_far_ones(axes, [one.objectives[objective] for one in evaluated])
    axes.set(xlabel=f"--{setting}", ylabel="")
    return chart


def _scatter(
    axes: Axes, trials: Sequence[TrialRow], x_of: Callable[[TrialRow], float], y_of: Callable[[TrialRow], float]
) -> None:
    """Draw a mark for each trial: what is on the front, what is not, and what collapsed."""
    groups = (
        ("no trial is better in both", DARK, "o", lambda one: one.is_on_front),
        ("other trials", GREY, ".", lambda one: not one.is_on_front and one.state != COLLAPSED),
        ("collapsed, and stopped", MIDDLE, "x", lambda one: one.state == COLLAPSED),
    )
    for label, colour, mark, is_in in groups:
        if found := [one for one in trials if is_in(one)]:
            x_N, y_N = [x_of(one) for one in found], [y_of(one) for one in found]
            axes.plot(x_N, y_N, mark, color=colour, linestyle="None", markersize=7.0, label=label)


def _leave_out_far_ones(axes: Axes, values: Sequence[float]) -> None:
    """Let the axis end where trials do that did not go wrong altogether."""
    lower, middle, upper = np.quantile(values, (0.25, 0.5, 0.75))
    reach = 4 * max(upper - lower, 1e-3 * abs(middle), 1e-9)
    low, high = max(min(values), lower - reach), min(max(values), upper + reach)
    room = 0.08 * max(high - low, 1e-3 * abs(middle), 1e-6)
    axes.set_ylim(low - room, high + room)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=ROUND))
    axes.yaxis.set_major_formatter(TICKS)
