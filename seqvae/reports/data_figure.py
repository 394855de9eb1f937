"""What is known of a data set -> one figure: lengths, names or values, what is missing, and what padding costs.

The colours are told apart by people who do not see all of them and, through their lightness, in print. Text from data is
drawn as it is: no formula is read into a `$`.
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from seqvae.reports.data_numbers import DataNumbers, Heading
from seqvae.reports.histogram import LONG_TAIL, bin_edges
from seqvae.text import clip, percent, size, visible

DARK, MIDDLE, LIGHT = "#00437a", "#d55e00", "#8ecae6"
"""Blue, vermilion and light blue: of lightness 28, 55 and 78."""
SPLIT_STYLES = {"train": (DARK, "-"), "valid": (MIDDLE, "--"), "test": ("#555555", ":")}
GREY = "#6b6b6b"
STYLE = {
    "text.parse_math": False,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.6,
    "xtick.color": "#333333",
    "ytick.color": "#333333",
}
FONTS = ("DejaVu Sans", "Noto Sans CJK JP", "Hiragino Sans", "Yu Gothic", "Microsoft YaHei", "Arial Unicode MS")
"""The first one comes with matplotlib; the others write what it cannot, where they are."""
NAME_WIDTH = 18
MOST_NAMES = 20
LENGTH_BINS = 60
FEW_RANKS = 100
IN_PERCENT = FuncFormatter(lambda share, _: f"{100 * share:g} %")
WHOLE = FuncFormatter(lambda number, _: f"{number:,.0f}")
BAR_COLOURS = (DARK, MIDDLE, LIGHT)
BAR_HATCHES = (None, "////", "....")


class Bars(NamedTuple):
    """A share for each name, from top to bottom."""

    title: str
    names: Sequence[str]
    shares: Mapping[str, Sequence[float]]
    """One or more series by name."""
    labels: Sequence[str] = ()
    """What is written at the end of the bars; only for a single series."""


class Stack(NamedTuple):
    """A whole for each name, of which a share is real."""

    title: str
    names: Sequence[str]
    shares: Sequence[float]
    labels: Sequence[str]


class Boxes(NamedTuple):
    """Quantiles 5, 25, 50, 75 and 95 % for each name, from top to bottom."""

    title: str
    names: Sequence[str]
    quantiles_KQ: np.ndarray


class Coverage(NamedTuple):
    """How much of everything the most frequent names make up."""

    title: str
    counts_U: np.ndarray
    """How often each name occurs, descending."""


Panel = Bars | Stack | Boxes | Coverage


def write_data_figure(path: Path, found: DataNumbers, about: Heading) -> None:
    """A PNG of four panels: lengths, two about names and their values, padding."""
    fonts = [font for font in FONTS if font in font_manager.get_font_names()]
    with matplotlib.rc_context(STYLE | {"font.family": fonts}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a name in a script the font does not have
        figure = Figure(figsize=(12, 8.5), layout="constrained")
        figure.suptitle(visible(f"{about.name}: {about.kind}"), x=0.01, ha="left", fontsize=13, fontweight="bold")
        axes = figure.subplots(2, 2).ravel()
        draw_lengths(axes[0], found.lengths, about.cap)
        for place, panel in zip(axes[1:], panels_of(found, about.kind), strict=True):
            draw_panel(place, panel)
        figure.savefig(path, dpi=120, format="png")


def panels_of(found: DataNumbers, kind: str) -> list[Panel]:
    """Two panels about names and values, and one about padding."""
    rows, names = found.names.rows[:MOST_NAMES], found.names
    few = f"the {len(rows)} most frequent of {names.total:,}" if names.total > len(rows) else "all of them"
    labels = [row.name for row in rows]
    padding = Stack(
        "Batches: real steps and padding",
        [row.batches for row in found.batches],
        [row.efficiency for row in found.batches],
        [
            f"{percent(row.efficiency)} real, {row.sequences:,.1f} sequences, {row.updates:,} updates an epoch, {size(row.memory)}"
            for row in found.batches
        ],
    )
    if kind == "tokens":
        assert names.counts_U is not None
        shares = {"train": [row.share for row in rows]}
        return [
            Bars(f"Tokens, {few}", labels, shares),
            Coverage("Tokens covered by the most frequent", names.counts_U),
            padding,
        ]
    assert names.distributions is not None
    boxes = Boxes(
        "Values after normalisation (train)",
        names.distributions.names[:MOST_NAMES],
        names.distributions.values_KQ[:MOST_NAMES],
    )
    if kind == "vectors":
        missing = {split: shares_K[:MOST_NAMES].tolist() for split, shares_K in names.missing.items()}
        return [boxes, Bars("Missing values", labels, missing), padding]
    per_sequence = [f"{row.seen / found.splits[0].sequences:,.1f} a sequence" for row in rows]
    present = {"train": [row.in_sequences for row in rows]}
    return [boxes, Bars(f"Sequences that have the variable, {few}", labels, present, per_sequence), padding]


def draw_panel(axes: Axes, panel: Panel) -> None:
    axes.set_title(visible(panel.title))
    if isinstance(panel, Bars):
        _draw_bars(axes, panel)
    elif isinstance(panel, Stack):
        _draw_stack(axes, panel)
    elif isinstance(panel, Boxes):
        _draw_boxes(axes, panel)
    else:
        _draw_coverage(axes, panel)


def draw_lengths(axes: Axes, lengths: Mapping[str, np.ndarray], cap: int) -> None:
    """Shares of each split, so that splits of different sizes can be compared."""
    every = np.concatenate(list(lengths.values()))
    edges = bin_edges(every, most=LENGTH_BINS)
    for split, of_split in lengths.items():
        colour, line = SPLIT_STYLES[split]
        shares = np.histogram(of_split, edges)[0] / len(of_split)
        label = f"{split}: {len(of_split):,} (median {np.median(of_split):,.0f})"
        axes.stairs(shares, edges, color=colour, linestyle=line, linewidth=1.5, label=label)
        if split == "train":
            axes.stairs(shares, edges, fill=True, color=LIGHT, alpha=0.5)
    if every.max() > LONG_TAIL * np.median(every):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(WHOLE)
    axes.yaxis.set_major_formatter(IN_PERCENT)
    axes.set_xlim(edges[0], edges[-1])
    if cap < every.max():
        axes.axvline(cap, color="black", linewidth=1.2)
        axes.axvspan(cap, edges[-1], hatch="///", facecolor="none", edgecolor="#cccccc", linewidth=0, zorder=0)
        across = axes.get_xaxis_transform()
        axes.text(cap, 0.98, f"cap {cap:,} ", transform=across, rotation=90, ha="right", va="top", fontsize=8)
    axes.set_title("Lengths of the sequences")
    axes.set_xlabel("steps")
    axes.set_ylabel("share of the split")
    axes.legend(framealpha=0.9, edgecolor="none", fontsize=8)


def _draw_bars(axes: Axes, panel: Bars) -> None:
    places = np.arange(len(panel.names))
    height = 0.75 / len(panel.shares)
    for number, (series, shares) in enumerate(panel.shares.items()):
        offsets = places + (number - (len(panel.shares) - 1) / 2) * height
        axes.barh(
            offsets,
            shares,
            height * 0.92,
            color=BAR_COLOURS[number],
            hatch=BAR_HATCHES[number],
            edgecolor="white",
            label=series,
        )
    highest = max(max(shares) for shares in panel.shares.values())
    for place, label, share in zip(places, panel.labels, next(iter(panel.shares.values())), strict=False):
        inside = share > 0.55 * highest
        axes.annotate(
            f" {label} ",
            (share, place),
            ha="right" if inside else "left",
            va="center",
            fontsize=7.5,
            color="white" if inside else "#222222",
        )
    axes.set_xlim(0, highest * 1.02 or 1)
    if highest == 0:
        axes.annotate("none", (0.5, 0.5), xycoords="axes fraction", ha="center", fontsize=12, color=GREY)
    axes.xaxis.set_major_formatter(IN_PERCENT)
    if len(panel.shares) > 1:
        axes.legend(frameon=False, fontsize=8)
    _name_rows(axes, panel.names)


def _draw_stack(axes: Axes, panel: Stack) -> None:
    places, shares = np.arange(len(panel.names)), np.array(panel.shares)
    axes.barh(places, shares, 0.42, color=DARK, label="real")
    axes.barh(
        places, 1 - shares, 0.42, shares, color="white", edgecolor="#999999", hatch="////", linewidth=0, label="padding"
    )
    for place, label in zip(places, panel.labels, strict=True):
        axes.annotate(label, (0, place - 0.27), xytext=(1, 0), textcoords="offset points", va="bottom", fontsize=8)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(IN_PERCENT)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
    _name_rows(axes, panel.names)


def _draw_boxes(axes: Axes, panel: Boxes) -> None:
    places = np.arange(len(panel.names))
    low_K, left_K, middle_K, right_K, high_K = panel.quantiles_KQ.T
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.hlines(places, low_K, high_K, color=GREY, linewidth=1.2, zorder=1)
    axes.barh(places, right_K - left_K, 0.6, left_K, color=LIGHT, edgecolor=DARK, linewidth=0.8, zorder=2)
    axes.vlines(middle_K, places - 0.38, places + 0.38, color=DARK, linewidth=2, zorder=3)
    axes.set_xlabel("standard deviations from the mean (line: 5-95 %, box: 25-75 %, tick: median)")
    _name_rows(axes, panel.names)


def _draw_coverage(axes: Axes, panel: Coverage) -> None:
    covered_U = np.cumsum(panel.counts_U) / panel.counts_U.sum()
    ranks_U = np.arange(1, len(covered_U) + 1)
    axes.step(ranks_U, covered_U, where="post", color=DARK, linewidth=1.8)
    axes.fill_between(ranks_U, covered_U, step="post", color=LIGHT, alpha=0.4)
    # One label a place: where two shares are reached at once, the larger says it all.
    share_at = {int(np.searchsorted(covered_U, share)) + 1: share for share in (0.5, 0.9, 0.99)}
    for rank, share in share_at.items():
        axes.plot(rank, covered_U[rank - 1], "o", color=MIDDLE, markersize=5)
        label = f"{share:.0%}".replace("%", " %") + f": {rank:,}"
        late = rank > len(ranks_U) / 2
        offset, side = ((-6, 5), "right") if late else ((6, -9), "left")
        point = (rank, covered_U[rank - 1])
        axes.annotate(label, point, xytext=offset, textcoords="offset points", ha=side, fontsize=8)
    if len(ranks_U) > FEW_RANKS:
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(WHOLE)
    axes.yaxis.set_major_formatter(IN_PERCENT)
    axes.set_ylim(0, 1.04)
    axes.set_xlim(1, max(2, len(ranks_U)))
    axes.set_xlabel("most frequent tokens")
    axes.set_ylabel("share of all tokens")


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(np.arange(len(names)), [clip(visible(name), NAME_WIDTH) for name in names], fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
