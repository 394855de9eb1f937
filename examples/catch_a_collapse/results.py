"""The last verdict on a run, and a picture of two runs: what their latents carried, step by step, and when the monitor caught it.

In: the directories of a run that collapsed and of the same run with the advised flag. Out: a PNG to be read at 800 pixels.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from seqvae.errors import UsageError
from seqvae.monitors.reading import NAME
from seqvae.reports.charts import LOOKS, bands_of
from seqvae.reports.figures import DARK, INK, LOST, MIDDLE, count_steps, new_figure
from seqvae.reports.read_run import History, read_history
from seqvae.reports.run_files import EVENTS, read_events
from seqvae.verdicts import tone_of

# --- Verdicts -----------------------------------------------------------------------------------------------------------


class LastVerdict(NamedTuple):
    """The last verdict in a run's events.jsonl."""

    name: str
    step: int
    """Of the reading that it is based on."""
    evidence: str
    advice: tuple[str, ...]
    """The most promising first: a flag, and in brackets what it does."""


def last_verdict(run: Path) -> LastVerdict:
    events = [event for event in read_events(run) if event["event"] == "verdict"]
    if not events:
        raise UsageError(f"{run / EVENTS} holds no verdict: was the run watched, and did it come to a reading?")
    last = events[-1]
    return LastVerdict(last["verdict"], last["step"], last["evidence"], tuple(last["advice"]))


def flag_of(advice: str) -> tuple[str, str]:
    """Return flag and value of an advice.

    >>> flag_of("--free_bits 0.25 (the first nats of each dimension are free)")
    ('--free_bits', '0.25')
    """
    flag, value = advice.partition(" (")[0].split()
    return flag, value


def with_flag(words: Sequence[str], flag: str, value: str) -> list[str]:
    """Return the words of a command with one flag changed, or added.

    >>> with_flag(["--depth", "1", "--free_bits", "0"], "--free_bits", "0.25")
    ['--depth', '1', '--free_bits', '0.25']
    """
    if flag not in words:
        return [*words, flag, value]
    place = words.index(flag) + 1
    return [*words[:place], value, *words[place + 1 :]]


# --- The picture --------------------------------------------------------------------------------------------------------


WIDTH, HEIGHT, DOTS_PER_INCH = 8.0, 3.7, 180
"""Shown 800 pixels wide on a page: a point is then as large there as in print."""
CHARACTER = 0.0165
"""Width of a character of a verdict's name, in widths of the axes; a band too narrow for its name has none."""


class Curve(NamedTuple):
    """One of the three readings, the same in both runs."""

    name: str
    x: np.ndarray
    y: np.ndarray
    look: dict[str, Any]


def draw(path: Path, first: Path, second: Path, advised: str) -> None:
    """Draw both runs side by side; `advised` is what the second run has and the first has not."""
    collapsed, healed = _history_of(first), _history_of(second)
    top = 1.08 * max(np.nanmax(curve.y) for history in (collapsed, healed) for curve in _curves_of(history))
    with new_figure(path, WIDTH, HEIGHT) as figure:
        figure.set_dpi(DOTS_PER_INCH)
        figure.set_layout_engine("constrained", w_pad=0.09, h_pad=0.04)
        panels = figure.subplots(2, 2, sharex="col", sharey="row", height_ratios=(1, 0.07))
        for (axes, strip), history in zip(panels.T, (collapsed, healed), strict=True):
            _draw_curves(axes, history, top)
            _draw_strip(strip, history)
        (left, right), _ = panels
        left.set_ylabel("nats per sequence")
        left.set_title("A posterior collapses …", color=LOST, fontsize=12)
        right.set_title(f"… and with {advised} it lives", color=DARK, fontsize=12)
        _mark_verdict(left, last_verdict(first), advised, top)
        _name_curves(right, _curves_of(healed), top)


def _history_of(run: Path) -> History:
    history = read_history(run / NAME)
    if history is None:
        raise UsageError(f"{run / NAME} holds no reading: was the run watched?")
    return history


def _curves_of(history: History) -> Sequence[Curve]:
    probed = {
        "color": INK,
        "marker": "o",
        "markersize": 3.2,
        "markerfacecolor": "white",
        "linewidth": 0.8,
        "clip_on": False,
    }
    return (
        Curve("decoder use", history.probed_steps_P, history.decoder_use_P, probed),
        Curve("rate (KL)", history.steps_R, history.rate_R, {"color": DARK, "linewidth": 2.2}),
        Curve(
            "information",
            history.steps_R,
            history.mutual_information_R,
            {"color": MIDDLE, "linewidth": 1.8, "linestyle": "--"},
        ),
    )


def _draw_curves(axes: Axes, history: History, top: float) -> None:
    axes.fill_between(history.steps_R, history.rate_R, color=DARK, alpha=0.08, linewidth=0)
    for curve in _curves_of(history):
        axes.plot(curve.x, curve.y, label=curve.name, **curve.look)
    axes.set_ylim(min(-0.03 * top, *(float(np.nanmin(curve.y)) for curve in _curves_of(history))), top)
    axes.set_xlim(0, float(history.steps_R[-1]))
    axes.tick_params(labelbottom=False, length=0)
    axes.grid(visible=False, axis="x")


def _draw_strip(axes: Axes, history: History) -> None:
    """Draw the verdicts as bands, with their names where they fit."""
    right = axes.get_xlim()[1]
    for band in bands_of(history.steps_R, history.verdicts):
        end = min(band.end, right)
        colour = LOOKS[tone_of(band.verdict)].bar
        axes.axvspan(band.start, end, color=colour, linewidth=0)
        name, middle = band.verdict.replace("_", " "), (band.start + end) / 2
        if (end - band.start) / right > CHARACTER * len(name):
            ink = "white" if colour == LOST else INK
            axes.text(middle, 0.46, name, color=ink, ha="center", va="center", fontsize=8.5)
    axes.set(yticks=[], ylim=(0, 1))
    axes.grid(visible=False)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)
    count_steps(axes)


def _mark_verdict(axes: Axes, verdict: LastVerdict, advised: str, top: float) -> None:
    """Draw a flag on a pole: the pole stands at the reading, the flag where a dead latent leaves room."""
    axes.plot((verdict.step, verdict.step), (0, 0.93 * top), color=LOST, linewidth=1.6)
    text = f"caught at step {verdict.step}:\n{verdict.name.replace('_', ' ')}. Advice:\n{advised}"
    look = {"boxstyle": "square,pad=0.45", "facecolor": LOST, "edgecolor": LOST}
    is_early = verdict.step < 0.55 * axes.get_xlim()[1]
    axes.annotate(
        text,
        (verdict.step, 0.93 * top),
        (4.5 if is_early else -4.5, -4.5),
        textcoords="offset points",
        color="white",
        fontsize=9.5,
        fontweight="bold",
        linespacing=1.4,
        ha="left" if is_early else "right",
        va="top",
        bbox=look,
    )


def _name_curves(axes: Axes, curves: Sequence[Curve], top: float) -> None:
    """Write the names behind the ends of the curves, from the lowest up, none on top of another."""
    lowest = -np.inf
    for curve in sorted(curves, key=lambda curve: float(curve.y[-1])):
        height = max(float(curve.y[-1]), lowest + 0.07 * top)
        lowest = height
        axes.text(
            1.02,
            height,
            curve.name,
            color=curve.look["color"],
            transform=axes.get_yaxis_transform(),
            va="center",
            fontsize=10,
        )
