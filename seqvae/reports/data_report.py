"""What is known of a data set, as text and as one figure: whether it would train, what to know before, and the numbers behind it.

In: what `inspect_cache` of `seqvae/data/inspection.py` found, or `survey_files` in data that cannot be used. Rows are named tuples;
in a table a field is a column. Text from data is drawn as it is, never as a formula.
"""

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import matplotlib
import numpy as np
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from seqvae.reports.figures import DARK, FONTS, GREY, LIGHT, MIDDLE, STYLE, TICKS
from seqvae.reports.terminal import LONG_TAIL, Ink, bar, bin_edges, heading, histogram, note, section
from seqvae.text import cells, clip, counted, duration, measure, percent, size, visible

FORMATS = {**dict.fromkeys(("share", "in_sequences", "missing", "unknown", "efficiency"), percent), "memory": size}
WARNING, LEFT_OUT = "warning: ", "left out: "
"""How notes begin that have a place of their own here."""
LABEL_NAMES = ("label", "labels", "target", "class", "outcome", "y")
TITLES = {"tokens": "Tokens", "vectors": "Features", "events": "Variables"}
VALUES = "mean, std, min, max: in own units; far out: values more than 10 std from the mean"
OF_NAMES = {
    "tokens": "Training split. share: of all its tokens.",
    "vectors": f"Training split. missing: steps without a value; {VALUES}.",
    "events": f"Training split. in sequences: those that have it; missing: events without a value; {VALUES}.",
}
OF_BATCHES = (
    "Training split; random: plain batches of 64 and of 4, to compare. updates: optimizer steps of an epoch, {} batches "
    "each; sequences: in a batch, on average; efficiency: real steps / padded steps; largest: padded steps of the largest "
    "batch; memory: bytes of its tensors, without model, gradients and activations."
)
SPLIT_STYLES = {"train": (DARK, "-"), "valid": (MIDDLE, "--"), "test": ("#555555", ":")}
NAME_WIDTH = 18
MOST_NAMES = 20
LENGTH_BINS = 60
FEW_RANKS = 100
IN_PERCENT = FuncFormatter(lambda share, _: f"{100 * share:g} %")
BAR_COLOURS = (DARK, MIDDLE, LIGHT)
BAR_HATCHES = (None, "////", "....")


# --- Text -------------------------------------------------------------------------------------------------------------


def data_page(name: str, found: Any, command: str, risk: str, ink: Ink, most: int) -> list[str]:
    """Return the report on data that would train, with the command that does and its risk.

    Tables have at most `most` rows; 0: all.
    """
    rows = partial(section, ink=ink, most=most, formats=FORMATS)
    columns = sorted(found.columns, key=lambda column: column.part is None)
    like_labels = [row.column for row in columns if row.part is None and row.column.lower() in LABEL_NAMES]
    of_columns = (
        f"Labels are used only where --label_column names them: --label_column {quote(like_labels[0])}."
        if like_labels
        else ""
    )
    of_splits = "mean, median, longest: steps of a sequence."
    if found.time:
        span, gap = (
            duration(60 * value) if found.time.unit == "minutes" else f"{measure(value)} {found.time.unit}"
            for value in (found.time.median_span, found.time.mean_gap)
        )
        of_splits += f" A sequence spans {span} (median), its steps are {gap} apart (mean)."
    warned = [*found.warnings, *(text.removeprefix(WARNING) for text in found.notes if text.startswith(WARNING))]
    with_warnings = f", with {counted(len(warned), 'warning')}" if warned else ""
    lines = [
        ink.bold(visible(f"{name}: {found.kind}")),
        *note(found.layout.removeprefix(f"{found.kind}: "), ink, mark=""),
        *note(f"{counted(found.files, 'file')}, {size(found.bytes)}; cache {found.cache}", ink, mark=""),
        "",
        ink.good("READY to train") + with_warnings,
        f"  {visible(command)}",
        *note(risk, ink),
    ]
    others = [text for text in found.notes if not text.startswith((WARNING, LEFT_OUT))]
    for column, values, is_label in found.candidates:
        if column not in like_labels:
            what = f"a label: --label_column {quote(column)}"
            if not is_label:
                what = f"a group: --id_column {quote(column)} keeps all of a value on one side of a split"
            others.append(f"{column!r}: {values:,} values, perhaps {what}")
    if warned or others:
        lines += heading("Worth knowing", ink)
    lines += [ink.warning(line) for text in warned for line in note(text, ink, mark="!")]
    lines += [line for text in others for line in note(text, ink)]
    if found.bad_files:
        lines += heading(f"Files left out: {len(found.bad_files):,}", ink)
    lines += [line for text in without_advice(found.bad_files) for line in note(text, ink, mark="x")]
    names = found.names
    title = f"{TITLES[found.kind]}: {names.total:,}"
    if found.kind == "tokens" and names.total < names.possible:
        title += f" of {names.possible:,} occur"
    if 0 < most < names.total:
        title += ", those with the most missing values" if found.kind == "vectors" else ", the most frequent"
    table_of_names = rows(title, names.rows, total=names.total, remark=OF_NAMES[found.kind])
    if found.kind == "tokens":  # they have nothing but their share to show, so it is drawn, too
        first = 3  # behind an empty line, the title and the heading
        for number, row in enumerate(names.rows[:most] if most else names.rows, start=first):
            room = ink.width - cells(table_of_names[number]) - 2
            table_of_names[number] += f"  {bar(row.share / names.rows[0].share, room, ink)}".rstrip()
    return [
        *lines,
        *rows("Columns", columns, remark=of_columns),
        *rows("Splits", found.splits, remark=of_splits),
        *heading("Lengths", ink),
        *histogram(found.lengths, found.cap, ink),
        *table_of_names,
        *rows("Labels", found.labels),
        *rows("Batches", found.batches, remark=OF_BATCHES.format(found.accumulate)),
    ]


def refusal_page(name: str, reason: str, files: Any | None, ink: Ink, most: int) -> list[str]:
    """Return what stands in the way of training, every file that cannot be used, and what columns there are."""
    refused = list(files.refused) if files else []
    place = reason.partition(": ")[0]
    known = any(one.startswith(f"{place}: ") for one in refused)
    lines = [ink.bold(visible(name)), "", ink.bad("NOT READY to train")]
    for one in without_advice(refused if known else [reason, *refused]):
        lines += note(one, ink, mark="x")
    if files is None:
        return lines
    remark = f"{files.files - len(files.refused):,} can be used, {len(files.refused):,} cannot"
    if refused:
        remark += "; mend or remove them, or do without them: --on_bad_files skip"
    lines += [*heading(f"Files: {files.files:,}, {size(files.bytes)}", ink), *note(f"{remark}.", ink, mark="")]
    return lines + section("Columns of those that can be read", files.columns, ink, most=most)


def without_advice(messages: Sequence[str]) -> list[str]:
    """Leave the last sentence, the advice, out of several messages: it is much the same in all of them.

    >>> without_advice(["a: is empty. Fill it.", "b: is cut. Write it again."])
    ['a: is empty.', 'b: is cut.']
    """
    if len(messages) == 1:
        return list(messages)
    return [f"{message.rpartition('. ')[0]}." if ". " in message else message for message in messages]


# --- The figure -------------------------------------------------------------------------------------------------------


def write_data_figure(path: Path, name: str, found: Any) -> None:
    """Draw a PNG of four panels: lengths, two about names and their values, padding."""
    names = found.names
    rows = names.rows[:MOST_NAMES]
    labels = [row.name for row in rows]
    few = f"the {len(rows)} most frequent of {names.total:,}" if names.total > len(rows) else "all of them"
    fonts = [font for font in FONTS if font in font_manager.get_font_names()]
    with matplotlib.rc_context(STYLE | {"font.family": fonts}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a name in a script the font does not have
        figure = Figure(figsize=(12, 8.5), layout="constrained")
        figure.suptitle(visible(f"{name}: {found.kind}"), x=0.01, ha="left", fontsize=13, fontweight="bold")
        above, left, right, below = figure.subplots(2, 2).ravel()
        _draw_lengths(above, found.lengths, found.cap)
        if found.kind == "tokens":
            _draw_bars(left, f"Tokens, {few}", labels, {"train": [row.share for row in rows]})
            _draw_coverage(right, names.counts_U)
        else:
            _draw_boxes(left, labels, names.quantiles_KQ)
        if found.kind == "vectors":
            missing = {split: shares_K[:MOST_NAMES].tolist() for split, shares_K in names.missing.items()}
            _draw_bars(right, "Missing values", labels, missing)
        elif found.kind == "events":
            per_sequence = [f"{row.seen / found.splits[0].sequences:,.1f} per sequence" for row in rows]
            present = {"train": [row.in_sequences for row in rows]}
            _draw_bars(right, f"Sequences that have the variable, {few}", labels, present, per_sequence)
        _draw_padding(below, found.batches)
        figure.savefig(path, dpi=120, format="png")


def _draw_lengths(axes: Axes, lengths: Mapping[str, np.ndarray], cap: int) -> None:
    """Draw the share of each split, so that splits of different sizes can be compared."""
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
    axes.xaxis.set_major_formatter(TICKS)
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


def _draw_bars(
    axes: Axes, title: str, names: Sequence[str], series: Mapping[str, Sequence[float]], labels: Sequence[str] = ()
) -> None:
    """Draw a share for each name, from top to bottom. `labels` are written at the end of the bars of a single series."""
    axes.set_title(visible(title))
    places = np.arange(len(names))
    height = 0.75 / len(series)
    for number, (name, shares) in enumerate(series.items()):
        offsets = places + (number - (len(series) - 1) / 2) * height
        axes.barh(
            offsets,
            shares,
            height * 0.92,
            color=BAR_COLOURS[number],
            hatch=BAR_HATCHES[number],
            edgecolor="white",
            label=name,
        )
    highest = max(max(shares) for shares in series.values())
    for place, label, share in zip(places, labels, next(iter(series.values())), strict=False):
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
    if len(series) > 1:
        axes.legend(frameon=False, fontsize=8)
    _name_rows(axes, names)


def _draw_padding(axes: Axes, batches: Sequence[Any]) -> None:
    """Draw which share of a batch is real."""
    axes.set_title("Batches: real steps and padding")
    places, shares = np.arange(len(batches)), np.array([row.efficiency for row in batches])
    axes.barh(places, shares, 0.42, color=DARK, label="real")
    axes.barh(
        places, 1 - shares, 0.42, shares, color="white", edgecolor="#999999", hatch="////", linewidth=0, label="padding"
    )
    for place, row in zip(places, batches, strict=True):
        label = f"{percent(row.efficiency)} real, {row.sequences:,.1f} sequences, {row.updates:,} updates per epoch, "
        label += size(row.memory)
        axes.annotate(label, (0, place - 0.27), xytext=(1, 0), textcoords="offset points", va="bottom", fontsize=8)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(IN_PERCENT)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
    _name_rows(axes, [row.batches for row in batches])


def _draw_boxes(axes: Axes, names: Sequence[str], quantiles_KQ: np.ndarray) -> None:
    """Draw the quantiles 5, 25, 50, 75 and 95 % for each name, from top to bottom."""
    axes.set_title("Values after normalisation (train)")
    places = np.arange(len(names))
    low_K, left_K, middle_K, right_K, high_K = quantiles_KQ.T
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.hlines(places, low_K, high_K, color=GREY, linewidth=1.2, zorder=1)
    axes.barh(places, right_K - left_K, 0.6, left_K, color=LIGHT, edgecolor=DARK, linewidth=0.8, zorder=2)
    axes.vlines(middle_K, places - 0.38, places + 0.38, color=DARK, linewidth=2, zorder=3)
    axes.set_xlabel("standard deviations from the mean (line: 5-95 %, box: 25-75 %, tick: median)")
    _name_rows(axes, names)


def _draw_coverage(axes: Axes, counts_U: np.ndarray) -> None:
    """Draw how much of everything the most frequent names make up; `counts_U` descend."""
    axes.set_title("Tokens covered by the most frequent")
    covered_U = np.cumsum(counts_U) / counts_U.sum()
    ranks_U = np.arange(1, len(covered_U) + 1)
    axes.step(ranks_U, covered_U, where="post", color=DARK, linewidth=1.8)
    axes.fill_between(ranks_U, covered_U, step="post", color=LIGHT, alpha=0.4)
    # One label per place: where two shares are reached at once, the larger says it all.
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
    axes.xaxis.set_major_formatter(TICKS)
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
