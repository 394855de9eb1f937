"""The charts of a run: what its readings, posteriors, validations and speed look like.

Each is a function `chart(medium, data) -> Chart`, which `figures.py` turns into a file in plots/ or a part of a page; where there
is nothing to draw it returns the reason instead.

Shapes: R readings, P of them at which the decoder was probed, E at which the escape threshold was read, N posteriors,
Z latent dimensions, D dimensions shown, G rows or places on an axis, K principal components.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.patches import Circle
from matplotlib.ticker import MaxNLocator, NullLocator, SymmetricalLogLocator

from seqvae.reports.figures import (
    COLOUR_MAP,
    DARK,
    FAINT,
    GREY,
    INK,
    LIGHT,
    LOST,
    LOST_BEHIND,
    MIDDLE,
    MORE_COLOURS,
    RULE,
    THREATENED,
    THREATENED_BEHIND,
    TICKS,
    Chart,
    Key,
    Medium,
    count_steps,
)
from seqvae.reports.read_run import (
    History,
    Latents,
    Moved,
    Posteriors,
    Run,
    column,
    numbers,
    row_in,
    whole,
)
from seqvae.text import MINUS, brief, clip, counted, percent, visible
from seqvae.verdicts import VERDICTS, Tone, tone_of

LINEAR_BELOW = 0.1
"""Nats. Estimates scatter around 0 by about as much once a posterior has collapsed; what is healthy stands decades above."""
LEAST_BOTTOM, LEAST_TOP, MOST_TOP = -0.02, 10.0, 1e5
"""Limits of the axis of nats: figures of different runs can be compared, and one that explodes still shows how it began."""
FEW_PROBES, MARKS = 60, 24
"""Up to FEW_PROBES probes are marked one by one, of more about MARKS."""
MOST_BANDS = 200
"""Probes whose errors make up the band around the decoder use, where there are many."""
MOST_OF_WEIGHT = 3.0
"""Times the highest KL weight that an escape threshold is shown up to: far above it nothing has to be told apart."""
NAME_WIDTH = 24
OF_THE_LAST = "numbers: the last reading"
NO_DIMENSIONS = "codes cost the same, whichever they are"


class Look(NamedTuple):
    """The bar of verdicts of one tone, its hatch, and the band behind the curves where there is trouble; darker is worse."""

    bar: str
    hatch: str | None
    behind: str | None


LOOKS: dict[Tone, Look] = {
    "open": Look(RULE, None, None),
    "good": Look(LIGHT, None, None),
    "fair": Look(THREATENED, "///", THREATENED_BEHIND),
    "bad": Look(LOST, None, LOST_BEHIND),
}


# --- timeline.png -----------------------------------------------------------------------------------------------------


class Band(NamedTuple):
    """A stretch of the run under one verdict."""

    verdict: str
    start: float
    end: float


def timeline(medium: Medium, history: History) -> Chart:
    """Draw rate, mutual information and decoder use; below them the verdicts, and the KL weight beside the escape threshold."""
    bands = bands_of(history.steps_R, history.verdicts)
    met = dict.fromkeys(band.verdict for band in bands)
    rows = [*(name for name in VERDICTS if name in met), *(name for name in met if name not in VERDICTS)]
    is_probed, is_weighted = len(history.probed_steps_P) > 0, bool(np.isfinite(history.kl_weight_R).any())
    heights = [3.4 if medium.has_words else 3.6]
    if rows:
        heights.append(medium.row * len(rows) + 0.08)
    if is_weighted:
        heights.append(0.75 if medium.has_words else 1.0)
    title = "Rate, mutual information and decoder use" if is_probed else "Rate and mutual information"
    notes = (_readings_drawn(history), OF_THE_LAST, "±: standard error" if is_probed else "")
    chart = Chart(medium, sum(heights) + 1.1, f"{title} over the run", *notes)
    places = chart.figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]

    axes, *below = places
    right = _over_steps(axes, history)
    for band in bands:
        behind = LOOKS[tone_of(band.verdict)].behind
        if behind:
            axes.axvspan(band.start, min(band.end, right), color=behind, linewidth=0, zorder=0)
    steps_R, rate_R, information_R = history.steps_R, history.rate_R, history.mutual_information_R
    mark = "o" if len(steps_R) == 1 else None
    label = f"rate (KL): {_legend_number(rate_R[-1])}"
    axes.plot(steps_R, rate_R, color=DARK, linewidth=1.8, marker=mark, label=label)
    label = f"mutual information: {_legend_number(information_R[-1])}"
    axes.plot(steps_R, information_R, "--", color=MIDDLE, linewidth=1.6, marker=mark, label=label)
    label = f"its cap, log N: {_legend_number(history.cap_R[-1])}"
    axes.plot(steps_R, history.cap_R, ":", color=MIDDLE, linewidth=1.1, label=label)
    if is_probed:
        steps_P, use_P, error_P = history.probed_steps_P, history.decoder_use_P, history.decoder_use_error_P
        few = len(steps_P) <= FEW_PROBES
        label = f"decoder use: {_legend_number(use_P[-1])} ± {_legend_number(error_P[-1], '.2g')}"
        (line,) = axes.plot(steps_P, use_P, "-o", color=INK, linewidth=0.9, markersize=4.5, zorder=3, label=label)
        line.set(markerfacecolor="white", markevery=1 if few else len(steps_P) // MARKS)
        if few:
            sizes_P = np.maximum(np.nan_to_num(error_P), 0.0)
            axes.errorbar(steps_P, use_P, sizes_P, fmt="none", ecolor=INK, elinewidth=0.8, capsize=2)
        else:
            shown = slice(None, None, -(-len(steps_P) // MOST_BANDS))
            low_P, high_P = (use_P - error_P)[shown], (use_P + error_P)[shown]
            axes.fill_between(steps_P[shown], low_P, high_P, color=INK, alpha=0.18, linewidth=0)
    if np.isfinite(history.threshold_E).any():  # its marks stand beside the KL weight
        label = f"escape threshold: {_legend_number(history.threshold_E[-1])}"
        label += f" ± {_legend_number(history.threshold_error_E[-1], '.2g')}"
        axes.plot([], [], "o", color=LOST, markersize=3.5, label=label)
    _make_log(axes, (rate_R, information_R, history.decoder_use_P))
    axes.set_ylabel(f"nats, logarithmic\n(linear below {LINEAR_BELOW:g})")
    chart.legend(axes, columns=3 if len(history.threshold_E) else 4)

    if rows:  # one for each verdict, under its name, so that the shortest stretch can be read
        stretches = below.pop(0)
        for place, name in enumerate(rows):
            look = LOOKS[tone_of(name)]
            spans = [(band.start, min(band.end, right) - band.start) for band in bands if band.verdict == name]
            stretches.broken_barh(
                spans, (place - 0.36, 0.72), facecolor=look.bar, edgecolor=GREY, linewidth=0.5, hatch=look.hatch
            )
        stretches.set_yticks(range(len(rows)), [clip(visible(name.replace("_", " ")), NAME_WIDTH) for name in rows])
        stretches.set_ylim(len(rows) - 0.4, -0.6)
        stretches.tick_params(axis="y", length=0)
        stretches.grid(visible=False, axis="y")
    if is_weighted:
        weight, weight_R = below.pop(0), history.kl_weight_R
        weight.fill_between(steps_R, weight_R, color=RULE, linewidth=0)
        weight.plot(steps_R, weight_R, color=GREY, linewidth=1.2, marker=mark)
        highest = float(np.nanmax(weight_R)) or 1.0
        top = highest
        if np.isfinite(history.threshold_E).any():
            top = max(highest, min(float(np.nanmax(history.threshold_E)), MOST_OF_WEIGHT * highest))
            thresholds = (history.threshold_steps_E, history.threshold_E, history.threshold_error_E)
            weight.errorbar(*thresholds, fmt="o", color=LOST, markersize=3.5, elinewidth=0.8)
        weight.set_ylim(0, 1.12 * top)
        weight.set_yticks((0.0, highest), ("0", brief(highest)))
        weight.set_ylabel("KL weight")
    places[0].set_xlabel("")
    places[-1].set_xlabel("optimizer step")
    return chart


def bands_of(steps_R: np.ndarray, verdicts: Sequence[str | None]) -> list[Band]:
    """Return how long each verdict was in force: from its reading to the next one, the last one to the end of the axis.

    >>> bands_of(np.array([10.0, 20.0, 30.0]), ["healthy", "healthy", "collapsed"])
    [Band(verdict='healthy', start=10.0, end=30.0), Band(verdict='collapsed', start=30.0, end=inf)]
    """
    ends = [*steps_R[1:].tolist(), np.inf]
    bands = []
    for name, group in groupby(zip(verdicts, steps_R.tolist(), ends, strict=True), key=lambda row: row[0]):
        rows = list(group)
        if name is not None:
            bands.append(Band(name, rows[0][1], rows[-1][2]))
    return bands


def _make_log(axes: Axes, curves: Iterable[np.ndarray]) -> None:
    """Make an axis of nats logarithmic, linear around 0. Error bars may leave it: wide ones would take half of the figure."""
    seen = np.concatenate([np.ravel(curve) for curve in curves])
    seen = seen[np.isfinite(seen)]
    bottom = max(min(LEAST_BOTTOM, 1.6 * seen.min(initial=0.0)), -MOST_TOP)
    axes.set_yscale("symlog", linthresh=LINEAR_BELOW, linscale=0.8)
    axes.set_ylim(bottom, min(max(LEAST_TOP, 1.6 * seen.max(initial=0.0)), MOST_TOP))
    axes.yaxis.set_major_locator(SymmetricalLogLocator(linthresh=LINEAR_BELOW, base=10))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(TICKS)


def _over_steps(axes: Axes, history: History) -> float:
    """Set the axis of optimizer steps, with room behind the last reading for its verdict to be seen. Return its end."""
    left, last = history.starts_at, float(history.steps_R[-1])
    right = last + 0.02 * max(last - left, 1.0)
    axes.set_xlim(left, right)
    count_steps(axes)
    return right


def _readings_drawn(history: History) -> str:
    drawn, readings = len(history.steps_R), counted(history.readings_taken, "reading")
    return readings if drawn == history.readings_taken else f"{drawn:,} of {readings}"


def _legend_number(value: float, form: str = ".3g") -> str:
    return format(value, form) if math.isfinite(value) else "NaN"


# --- kl_per_dim.png and active_units.png ------------------------------------------------------------------------------

KL_FLOOR, KL_LEAST_TOP, KL_MOST_TOP = 1e-4, 1.0, 1e3
"""Limits of the scale of colours in nats: all below is dead, and a dimension that lives is always far above."""
MOST_ROWS, COLUMNS = 400, 1000
"""Of the picture: as many as it has pixels for."""
NAMED_ROWS = 32
MANY_DIMENSIONS = 64
"""Above this number the axis that counts dimensions is logarithmic."""


class HeatMap(NamedTuple):
    """KL of groups of dimensions, the greatest last KL first."""

    kl_GR: np.ndarray
    last_kl_Z: np.ndarray
    order_Z: np.ndarray
    per_row: int


def kl_per_dim_chart(medium: Medium, history: History) -> Chart | str:
    """Draw the KL of each dimension as a picture whose columns are as wide as the steps that a reading stands for."""
    if history.codes:
        return NO_DIMENSIONS
    found = heat_map(history.kl_RZ, MOST_ROWS if medium.has_words else MOST_ROWS // 4)
    dimensions, last = len(found.order_Z), float(history.steps_R[-1])
    mean_of = f"each row the mean of up to {found.per_row} neighbours" if found.per_row > 1 else ""
    alive = f"{percent(float(np.mean(np.nan_to_num(found.last_kl_Z) >= 0.03)))} above 0.03 nats"
    height = float(np.clip(0.19 * dimensions, 1.6, 4.8)) if medium.has_words else 2.7
    title = "KL of each latent dimension, sorted by its last value"
    chart = Chart(
        medium, height + 1.35, title, counted(dimensions, "dimension"), alive, mean_of, _readings_drawn(history)
    )
    if medium.has_words:
        axes, profile, scale = chart.figure.subplots(1, 3, width_ratios=(6, 1, 0.22))
        profile.sharey(axes)
    else:
        axes, scale = chart.figure.subplots(1, 2, width_ratios=(6, 0.22))

    columns = COLUMNS if medium.has_words else COLUMNS // 4
    kl_GC = found.kl_GR[:, columns_of(history.steps_R, history.starts_at, columns)]
    finite = kl_GC[np.isfinite(kl_GC)]
    top = float(min(finite.max(initial=KL_LEAST_TOP), KL_MOST_TOP))
    norm = LogNorm(KL_FLOOR, top)
    axes.patch.set(facecolor="white", hatch="xxx", edgecolor=FAINT)
    axes.imshow(
        np.ma.masked_invalid(np.maximum(kl_GC, KL_FLOOR)),
        cmap=colormaps[COLOUR_MAP],
        norm=norm,
        aspect="auto",
        interpolation="none",
        extent=(history.starts_at, last, found.per_row * len(kl_GC), 0),
    )
    axes.set_ylim(dimensions, 0)
    if len(finite) < kl_GC.size:
        axes.plot([], [], "s", color=FAINT, label="crosshatched: not a number")
        if medium.has_words:
            axes.legend(loc="lower right", bbox_to_anchor=(1, 1), handlelength=1, borderaxespad=0.2)
        else:
            chart.legend(axes, columns=1)
    count_steps(axes)
    axes.grid(visible=False)
    if dimensions > NAMED_ROWS:
        axes.yaxis.set_major_formatter(TICKS)
        axes.set_ylabel("rank by last KL")
    else:
        apart = 1 if medium.has_words else -(-dimensions // 10)
        names = [str(dimension) for dimension in found.order_Z[::apart]]
        axes.set_yticks(np.arange(dimensions)[::apart] + 0.5, names, fontsize=medium.font_size - 1)
        axes.tick_params(axis="y", length=0)
        axes.set_ylabel("dimension")

    if medium.has_words:  # the numbers behind the last column, which the page shows as bars
        edges = np.arange(dimensions + 1)
        shown_Z = np.maximum(np.nan_to_num(found.last_kl_Z, nan=KL_FLOOR), KL_FLOOR)
        profile.stairs(shown_Z, edges, baseline=KL_FLOOR, orientation="horizontal", fill=True, color=RULE)
        profile.stairs(shown_Z, edges, baseline=KL_FLOOR, orientation="horizontal", color=DARK, linewidth=1.2)
        profile.set_xscale("log")
        profile.set_xticks([0.001, 0.1, 10.0])
        profile.xaxis.set_major_formatter(TICKS)
        profile.set_xlim(KL_FLOOR, 2 * max(KL_LEAST_TOP, shown_Z.max()))
        profile.set_xlabel("last KL, nats")
        profile.tick_params(axis="y", length=0, labelleft=False)
        profile.grid(visible=False, axis="y")
    levels = np.geomspace(KL_FLOOR, top, 129)
    scale.pcolormesh([0, 1], levels, levels[:-1, None], norm=norm, cmap=colormaps[COLOUR_MAP], rasterized=True)
    scale.set_yscale("log")
    scale.set_xticks([])
    scale.yaxis.tick_right()
    scale.yaxis.set_label_position("right")
    scale.yaxis.set_minor_locator(NullLocator())
    scale.yaxis.set_major_formatter(TICKS)
    scale.set_ylabel(f"KL in nats\n(darkest: {KL_FLOOR:g} and less)" if medium.has_words else "nats")
    return chart


def heat_map(kl_RZ: np.ndarray, most_rows: int = MOST_ROWS) -> HeatMap:
    """Sort dimensions by their last KL that is a number, and where there are too many take the mean of neighbours.

    >>> heat_map(np.array([[3.0, 2.0, 1.0], [0.0, 5.0, np.nan]])).order_Z
    array([1, 2, 0])
    """
    last_kl_Z = np.full(kl_RZ.shape[1], np.nan)
    for kl_Z in kl_RZ:
        last_kl_Z = np.where(np.isfinite(kl_Z), kl_Z, last_kl_Z)
    order_Z = np.argsort(-np.nan_to_num(last_kl_Z, nan=-np.inf), kind="stable")
    per_row = -(-len(order_Z) // most_rows)
    starts_G = np.arange(0, len(order_Z), per_row)
    sizes_G = np.diff([*starts_G, len(order_Z)])
    kl_GR = np.add.reduceat(kl_RZ[:, order_Z], starts_G, axis=1).T / sizes_G[:, None]
    return HeatMap(kl_GR, last_kl_Z[order_Z], order_Z, per_row)


def columns_of(steps_R: np.ndarray, starts_at: float, columns: int = COLUMNS) -> np.ndarray:
    """Return the index of the reading of each column of pixels: the first at or after the middle of the column.

    >>> columns_of(np.array([1.0, 2.0, 4.0]), 0.0, columns=4)
    array([0, 1, 2, 2])
    """
    middles_C = starts_at + (np.arange(columns) + 0.5) / columns * (steps_R[-1] - starts_at)
    return np.searchsorted(steps_R, middles_C)


def active_units(medium: Medium, history: History) -> Chart:
    """Draw how many dimensions are active, and over how many the rate is spread; of codes, how many are in use."""
    if history.codes:
        return code_use(medium, history)
    dimensions = history.kl_RZ.shape[1]
    counts_R, effective_R, steps_R = history.active_units_R, history.effective_dimensions_R, history.steps_R
    mark = "o" if len(steps_R) == 1 else None
    chart = Chart(medium, 3.4, f"Active units, of {dimensions:,}", _readings_drawn(history), OF_THE_LAST)
    axes = chart.figure.subplots()
    _over_steps(axes, history)
    label = f"active units (whose mean moves with the input): {_legend_number(counts_R[-1], ',.0f')}"
    axes.plot(steps_R, counts_R, color=DARK, linewidth=1.8, drawstyle="steps-post", marker=mark, label=label)
    label = f"effective dimensions (that share the rate, however small): {_legend_number(effective_R[-1], ',.1f')}"
    axes.plot(steps_R, effective_R, "--", color=MIDDLE, linewidth=1.4, marker=mark, label=label)
    axes.axhline(dimensions, color=GREY, linewidth=1, linestyle=":")
    if dimensions > MANY_DIMENSIONS:
        axes.set_yscale("symlog", linthresh=1, linscale=0.4)
        axes.set_ylim(-0.1, 1.5 * dimensions)
        axes.set_ylabel("dimensions, logarithmic")
    else:
        axes.set_ylim(-0.02 * dimensions, 1.06 * dimensions)
        axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.set_ylabel("dimensions")
    axes.yaxis.set_major_formatter(TICKS)
    chart.legend(axes, columns=2)
    return chart


def code_use(medium: Medium, history: History) -> Chart:
    """Draw the share of the codes in use, and what the perplexity is as a share of them."""
    steps_R, in_use_R, perplexity_R = history.steps_R, history.codes_in_use_R, history.code_perplexity_R
    mark = "o" if len(steps_R) == 1 else None
    chart = Chart(medium, 3.4, f"Codes in use, of {history.codes:,}", _readings_drawn(history), OF_THE_LAST)
    axes = chart.figure.subplots()
    _over_steps(axes, history)
    label = f"in use: {percent(float(in_use_R[-1]))}"
    axes.plot(steps_R, 100 * in_use_R, color=DARK, linewidth=1.8, marker=mark, label=label)
    label = f"perplexity (as many, equally used, would tell as much): {_legend_number(perplexity_R[-1], ',.0f')}"
    axes.plot(steps_R, 100 * perplexity_R / history.codes, "--", color=MIDDLE, linewidth=1.4, marker=mark, label=label)
    axes.set_ylim(-2, 106)
    axes.set_ylabel("% of the codes")
    chart.legend(axes, columns=2)
    return chart


# --- posterior_means.png and posterior_pca.png ------------------------------------------------------------------------

MOST_DIMENSIONS = 12
PER_LINE = 4
BINS = 41
LEAST_REACH = 4.0
"""Standard deviations of the prior to both sides of 0."""
HIGHEST = 1.25
"""Three times the prior's density at 0. A posterior that is the prior has all its means in one bar, which is cut here."""
MOST_COMPONENTS = 16
LEAST_VARIANCE = 1e-6
MOST_DOTS = 400
"""Posterior means drawn on a page."""
NONE_FINITE = "no posterior is finite"


class Components(NamedTuple):
    """Principal components; the prior's mean stays at 0."""

    places_N2: np.ndarray
    variances_K: np.ndarray
    """Variance of the means along each component, the largest first."""
    prior_variances_K: np.ndarray
    """The same of as many draws from the prior: the first ones are above 1, since they are the largest of many."""


def posterior_means(medium: Medium, posteriors: Posteriors) -> Chart | str:
    """Draw the posterior means of the dimensions with the largest KL beside the prior."""
    mean_NZ, logvar_NZ = posteriors.mean_NZ, posteriors.logvar_NZ
    if not mean_NZ.size:
        return NONE_FINITE
    kl_Z = kl_per_dim(mean_NZ, logvar_NZ)
    largest_D = np.argsort(-kl_Z, kind="stable")[:MOST_DIMENSIONS]
    lines, columns = math.ceil(len(largest_D) / PER_LINE), min(PER_LINE, len(largest_D))
    are_some = len(kl_Z) > MOST_DIMENSIONS
    few = f"the {MOST_DIMENSIONS} with the largest KL of {len(kl_Z):,} dimensions" if are_some else ""
    height = 1.55 * lines + (1.9 if lines == 1 else 1.2)
    when = "" if posteriors.step is None else f", at step {posteriors.step:,}"
    chart = Chart(medium, height, f"Posterior means beside the prior{when}", *posteriors.notes, few)
    places = chart.figure.subplots(lines, columns, sharey=True, squeeze=False).ravel()
    highest = 0.0
    for axes, place in zip(places, largest_D, strict=False):
        mean_N = mean_NZ[:, place]
        reach = max(LEAST_REACH, 1.05 * float(np.abs(mean_N).max()))
        density, edges = np.histogram(mean_N, BINS, (-reach, reach), density=True)
        places_G = np.linspace(-reach, reach, 4 * BINS + 1)
        prior_G = np.exp(-0.5 * places_G**2) / math.sqrt(2 * math.pi)
        all_G = aggregate_density(mean_N, logvar_NZ[:, place], places_G)
        axes.stairs(density, edges, fill=True, color=LIGHT, label="means")
        axes.stairs(density, edges, color=DARK, linewidth=0.7)
        axes.plot(places_G, prior_G, color=INK, linewidth=1.1, label="prior N(0, 1)")
        label = "all posteriors together, with their variances"
        axes.plot(places_G, all_G, "--", color=MIDDLE, linewidth=1.5, label=label)
        bar = int(density.argmax())
        if density[bar] > HIGHEST:
            at, text = (edges[bar : bar + 2].mean(), HIGHEST), f"bar up to {density[bar]:.2g}"
            axes.annotate(text, at, (6, -2), textcoords="offset points", va="top", fontsize=8, color=DARK)
        axes.set_xlim(-reach, reach)
        axes.xaxis.set_major_formatter(TICKS)
        axes.grid(visible=False)
        name = posteriors.dimensions_Z[place]
        axes.set_title(f"dimension {name}: KL {kl_Z[place]:.3g}", fontsize=9, fontweight="normal")
        highest = max(highest, density.max(), all_G.max(), prior_G.max())
    for axes in places[len(largest_D) :]:
        axes.set_visible(False)
    for axes in places[::columns]:
        axes.set_ylabel("density")
    places[0].set_ylim(0, min(1.1 * highest, HIGHEST))
    chart.figure.legend(*places[0].get_legend_handles_labels(), loc="outside lower left", ncols=3, handlelength=3)
    return chart


def posterior_pca(medium: Medium, posteriors: Posteriors) -> Chart | str:
    """Draw the posterior means in the plane in which they differ most, and how far they spread along each component."""
    mean_NZ = posteriors.mean_NZ
    if not mean_NZ.size:
        return NONE_FINITE
    for count, noun in zip(mean_NZ.shape, ("posteriors", "dimensions"), strict=True):
        if count < 2:
            return f"it takes two {noun} that are finite, and there is 1"
    found = principal_components(mean_NZ)
    when = "" if posteriors.step is None else f", at step {posteriors.step:,}"
    title = f"Principal components of the posterior means{when}"
    apart = 1 if medium.has_words else -(-len(mean_NZ) // MOST_DOTS)
    if medium.has_words:
        chart = Chart(medium, 5.2, title, *posteriors.notes)
        plane, spectrum = chart.figure.subplots(1, 2, width_ratios=(1.25, 1))
    else:
        few = f"one in {apart} is drawn" if apart > 1 else ""
        chart = Chart(medium, 7.6, title, *posteriors.notes, few, "in brackets: share of the variance")
        plane, spectrum = chart.figure.subplots(2, 1, height_ratios=(1.9, 1))

    x_N, y_N = found.places_N2[::apart].T
    for radius, stroke in ((1, "-"), (2, "--")):
        label = f"prior, {radius} sd" if medium.has_words else f"prior, {counted(radius, 'standard deviation')}"
        plane.add_patch(Circle((0, 0), radius, fill=False, edgecolor=INK, linewidth=1.1, linestyle=stroke, label=label))
    plane.plot(0, 0, "+", color=INK, markersize=9)
    plane.plot(x_N, y_N, "o", markersize=3.2, color=DARK, alpha=0.45, markeredgewidth=0, label="posterior mean")
    reach = max(2.3, 1.05 * float(np.abs(found.places_N2).max()))
    plane.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
    total = found.variances_K.sum()
    of = " of the variance" if medium.has_words else ""
    shares = [f" ({100 * part / total:.3g} %{of})" if total > 0 else "" for part in found.variances_K[:2]]
    plane.set_xlabel(f"first component{shares[0]}")
    plane.set_ylabel(f"second component{shares[1]}")
    plane.xaxis.set_major_formatter(TICKS)
    plane.yaxis.set_major_formatter(TICKS)
    chart.legend(plane, columns=3)

    variances_K, prior_variances_K = found.variances_K[:MOST_COMPONENTS], found.prior_variances_K[:MOST_COMPONENTS]
    numbers_K = np.arange(1, len(variances_K) + 1)
    floor = np.clip(variances_K.min() / 3, LEAST_VARIANCE, 0.01)
    what = "" if medium.has_words else "variance of "  # on a page both legends are one
    (line,) = spectrum.plot(numbers_K, np.maximum(variances_K, floor), "o-", color=DARK, linewidth=1, markersize=5)
    line.set(clip_on=False, label=f"{what}posterior means")
    label = f"{what}as many draws from the prior"
    spectrum.plot(numbers_K, prior_variances_K, "--", color=INK, linewidth=1.1, label=label)
    spectrum.set_yscale("log")
    spectrum.set_ylim(floor, 3 * max(1.0, variances_K.max(), prior_variances_K.max()))
    spectrum.yaxis.set_minor_locator(NullLocator())
    spectrum.set_xlim(0.4, max(len(numbers_K), 4) + 0.6)
    spectrum.set_xticks(numbers_K[:: 1 if len(numbers_K) < 12 else 3])
    spectrum.yaxis.set_major_formatter(TICKS)
    of = f" (of {len(found.variances_K):,})" if len(found.variances_K) > len(numbers_K) else ""
    spectrum.set_xlabel(f"component{of}")
    spectrum.set_ylabel("variance along it")
    spectrum.grid(visible=False, axis="x")
    chart.legend(spectrum, columns=2)
    return chart


GROUP_LOOKS = (
    *((DARK, "o"), (MIDDLE, "^"), (MORE_COLOURS[0], "s"), (MORE_COLOURS[1], "D"), (MORE_COLOURS[2], "v")),
    *((INK, "P"), (LIGHT, "X"), (MIDDLE, "p")),
)
"""Colour and mark of the groups of sequences; the rest is grey."""


MOST_OF_OTHER = 4.0
"""Times as far as the other way that sequences lie apart before the axes get scales of their own: one scale would draw a line."""


def latent_places(medium: Medium, latents: Latents, unit: str, label: str = "class") -> Chart | str:
    """Draw where sequences lie in the plane in which their latents differ most, by their class (`label`) or their length."""
    if len(latents.places) < 2:
        return "no sequences, or no plane"
    label = clip(visible(label), NAME_WIDTH)
    by = label if latents.are_classes else f"length in {unit}s"
    title = f"Validation sequences in the latent space, by {by}"
    shown = counted(len(latents.places), "sequence")
    if latents.of is not None and latents.of > len(latents.places):
        shown = f"{len(latents.places):,} of {counted(latents.of, 'sequence')}, drawn at random: with {latents.steps:,} {unit}s as "
        shown += "many as are encoded here, to take little time"
    spans_2 = np.ptp(np.array(latents.places), axis=0)
    is_thin = spans_2.max() > MOST_OF_OTHER * spans_2.min() > 0
    scales = "the axes have scales of their own" if is_thin else ""
    chart = Chart(medium, 5.6, title, f"at step {latents.step:,}", shown, scales)
    axes = chart.figure.subplots()
    names = Counter(latents.groups)
    rest = [name for name in ("other", "none") if name in names]
    order = sorted((name for name in names if name not in rest), key=lambda name: _first_number(name, names[name]))
    for place, name in enumerate([*order, *rest]):
        colour, mark = GROUP_LOOKS[place] if place < min(len(order), len(GROUP_LOOKS)) else (GREY, ".")
        x_N, y_N = np.transpose([at for at, of in zip(latents.places, latents.groups, strict=True) if of == name])
        shown_name = clip(visible(name), NAME_WIDTH)
        axes.plot(
            x_N,
            y_N,
            mark,
            color=colour,
            markersize=4.5,
            alpha=0.7,
            markeredgewidth=0,
            linestyle="None",
            label=shown_name,
        )
    if not is_thin:
        axes.set_aspect("equal", adjustable="datalim")
    if latents.shares:
        shares = [f" ({percent(share)} of the variance)" for share in latents.shares]
        axes.set_xlabel(f"first component{shares[0]}")
        axes.set_ylabel("second component" + (shares[-1] if medium.has_words else ""))
    else:
        axes.set_xlabel("direction in which the classes differ most")
        axes.set_ylabel("second such direction")
    axes.xaxis.set_major_formatter(TICKS)
    axes.yaxis.set_major_formatter(TICKS)
    chart.legend(axes, columns=4)
    if latents.are_classes:
        chart.keys.insert(0, Key("", f"{label}:"))
    return chart


def _first_number(name: str, count: int) -> tuple[float, int]:
    """Return what groups are ordered by: lengths by themselves, classes by how many sequences they have."""
    first = name.split(" to ")[0].replace(",", "")
    return (float(first), 0) if first.isdecimal() and " to " in name else (math.inf, -count)


MOVE_LOOKS = ((MIDDLE, "--"), (MORE_COLOURS[2], "--"), (INK, "-"), (MORE_COLOURS[0], "-."), (DARK, "-."))


def moved_dimension(medium: Medium, moved: Moved, time_label: str) -> Chart | str:
    """Draw what a feature of a decoded sequence becomes while one dimension of the latent is moved."""
    lines = [
        Curve(move_name(move), shown.points, colour, stroke, has_value=False)
        for move, shown, (colour, stroke) in zip(moved.moves, moved.decoded, MOVE_LOOKS, strict=False)
    ]
    values = [value for line in lines for _, value in line.points]
    if not values:
        return "no values"
    title = f"Dimension {moved.dimension}: {clip(visible(moved.name), NAME_WIDTH)}"
    room = 0.08 * (max(values) - min(values)) or 1.0
    limits = (min(values) - room, max(values) + room)
    left = min(time for line in lines for time, _ in line.points)
    right = max(time for line in lines for time, _ in line.points)
    label = clip(visible(time_label), 2 * NAME_WIDTH)
    return curves(medium, title, lines, y_label="", y=limits, x=(left, right), x_label=label)


def move_name(move: float) -> str:
    """Return how far a dimension is moved.

    >>> move_name(1.0), move_name(0.0)
    ('+1 sd', 'mean')
    """
    return "mean" if move == 0 else f"{move:+g} sd".replace("-", MINUS)


def kl_per_dim(mean_NZ: np.ndarray, logvar_NZ: np.ndarray) -> np.ndarray:
    """Return the KL of each dimension from N(0, 1); the formula of `monitors/formulas.py`, which needs torch.

    >>> kl_per_dim(np.array([[0.0, 2.0]]), np.zeros((1, 2)))
    array([0., 2.])
    """
    with np.errstate(over="ignore"):
        return (0.5 * (mean_NZ**2 + np.expm1(logvar_NZ) - logvar_NZ)).mean(axis=0)


def principal_components(mean_NZ: np.ndarray) -> Components:
    """Find the directions in which posterior means differ most."""

    count, dimensions = mean_NZ.shape
    is_wide = dimensions > count
    centred_NZ = mean_NZ - mean_NZ.mean(axis=0)
    drawn_NZ = np.random.default_rng(0).standard_normal(mean_NZ.shape)
    drawn_NZ = drawn_NZ - drawn_NZ.mean(axis=0)
    if is_wide:  # apart from zeros, N x N and Z x Z have the same eigenvalues: take the smaller
        product, prior_product = centred_NZ @ centred_NZ.T, drawn_NZ @ drawn_NZ.T
    else:
        product, prior_product = centred_NZ.T @ centred_NZ, drawn_NZ.T @ drawn_NZ
    values, vectors = np.linalg.eigh(product)
    prior_values = np.linalg.eigvalsh(prior_product)
    directions_Z2 = vectors[:, :-3:-1]
    if is_wide:
        directions_Z2 = np.linalg.qr(centred_NZ.T @ directions_Z2)[0]
    largest_12 = np.abs(directions_Z2).argmax(axis=0)[None]
    signs_12 = np.sign(np.take_along_axis(directions_Z2, largest_12, axis=0))  # not mirrored the next time
    variances_K, prior_variances_K = (np.maximum(both[::-1], 0) / (count - 1) for both in (values, prior_values))
    return Components(mean_NZ @ (directions_Z2 * signs_12), variances_K, prior_variances_K)


def aggregate_density(mean_N: np.ndarray, logvar_N: np.ndarray, places_G: np.ndarray) -> np.ndarray:
    """Return the mean of the N posteriors' densities; each is made as wide as the places are apart, so that none falls between."""
    apart = places_G[1] - places_G[0]
    variance_N = np.exp(np.minimum(logvar_N, 50.0)) + apart**2
    distance_GN = places_G[:, None] - mean_N
    return (np.exp(-0.5 * distance_GN**2 / variance_N) / np.sqrt(2 * math.pi * variance_N)).mean(axis=1)


# --- Charts of pages alone --------------------------------------------------------------------------------------------

MOST_BARS = 64
ROUND = (1, 2, 2.5, 5, 10)
"""Steps between the ticks of an axis, times a power of ten."""


class Curve(NamedTuple):
    """A line of a chart; `name` is what its legend says, the value of its last point added."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str = DARK
    stroke: str = "-"
    marks: str = ""
    """ends: a ring at its last point; all: at each point."""
    has_value: bool = True
    opacity: float = 1.0


def curves(
    medium: Medium,
    title: str,
    lines: Sequence[Curve],
    *,
    y_label: str,
    y: tuple[float, float] | None = None,
    x: tuple[float, float] | None = None,
    x_label: str = "",
    is_log: bool = False,
    guides: Sequence[Sequence[tuple[float, float]]] = (),
) -> Chart | str:
    """Draw lines over optimizer steps, or over what `x_label` names. What lies beyond `y` leaves the picture."""
    lines = [line for line in lines if line.points]
    if not lines:
        return "nothing to draw"
    chart = Chart(medium, 3.4, title)
    axes = chart.figure.subplots()
    for guide in guides:
        axes.plot(*np.transpose(guide), ":", color=FAINT, linewidth=1.0)
    for line in lines:
        x_N, y_N = np.transpose(line.points)
        label = f"{line.name}: {brief(y_N[-1])}" if line.has_value else line.name
        axes.plot(x_N, y_N, line.stroke, color=line.colour, linewidth=1.8, alpha=line.opacity, label=label)
        if line.marks or len(x_N) == 1:
            marked = slice(None) if line.marks == "all" else slice(-1, None)
            (rings,) = axes.plot(x_N[marked], y_N[marked], "o", color=line.colour, markersize=5.5, zorder=3)
            rings.set(markerfacecolor="white", markeredgewidth=1.6)
    if is_log:
        _make_log(axes, [np.array(line.points)[:, 1] for line in lines])
    else:
        low, high = y or robust_span([value for line in lines for _, value in line.points])
        axes.set_ylim(low, high if high > low else low + 1.0)
        are_counts = all(value == int(value) for line in lines for _, value in line.points)
        axes.yaxis.set_major_locator(MaxNLocator(6, integer=True) if are_counts else MaxNLocator(6, steps=ROUND))
        axes.yaxis.set_major_formatter(TICKS)
    count_steps(axes)
    left, right = x or (0.0, max(line.points[-1][0] for line in lines))
    axes.set_xlim(left, left + 1.02 * max(right - left, 1e-6))
    if x_label:
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=ROUND))
        axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    chart.legend(axes, columns=4)
    return chart


def robust_span(values: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and highest with some room, without the heights of a run's very beginning, which would flatten the rest.

    >>> robust_span([900.0, *[5.0 - 0.1 * place for place in range(40)]])[1] < 10
    True
    """
    low, high = min(values), max(values)
    if len(values) >= 12:
        tail = values[len(values) // 10 :]
        room = (max(tail) - min(tail)) or abs(max(tail)) * 1e-3 or 1.0
        low, high = max(low, min(tail) - room), min(high, max(tail) + room)
    room = max(0.06 * (high - low), abs(high) * 1e-3, 1e-9)
    return low - room, high + room


def bars(
    medium: Medium, title: str, heights: Sequence[tuple[str, float]], x_label: str, y_label: str, *notes: str
) -> Chart | str:
    """Draw upright bars, with as many of their labels as there is room for."""
    if not heights:
        return "nothing to draw"
    chart = Chart(medium, 3.4, title, *notes)
    axes = chart.figure.subplots()
    labels, values = [label for label, _ in heights], [max(value, 0.0) for _, value in heights]
    places, width = np.arange(len(heights)), 0.92 if len(heights) < 40 else 1.0
    axes.bar(places, values, width, color=DARK, alpha=0.85)
    apart = max(1, math.ceil(len(heights) * max(map(len, labels)) / 44))
    axes.set_xticks(places[::apart], labels[::apart])
    axes.set_xlim(-0.6, len(heights) - 0.4)
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    axes.yaxis.set_major_formatter(TICKS)
    axes.set(xlabel=x_label, ylabel=y_label)
    return chart


def validation_elbo(medium: Medium, run: Run) -> Chart | str:
    lines = validation_curves(run, "valid_elbo", (DARK, INK, MIDDLE), ("-",))
    chart = curves(medium, "Validation ELBO, nats per sequence (higher is better)", lines, y_label="nats")
    elbo = column(run.comparable_validations, "valid_elbo")
    if isinstance(chart, Chart) and len(elbo) > 1:
        on = f" {run.validated_on(run.comparable_validations[0])}" if len(lines) > 1 else ""
        chart.keys.append(Key("", f"best{on}", brief(max(value for _, value in elbo))))
    return chart


def validation_curves(run: Run, name: str, colours: Sequence[str], strokes: Sequence[str]) -> list[Curve]:
    """Return a curve for each set of sequences that the run was validated on; where there are several, each names its own."""
    sets = run.validation_sets
    lines = []
    for place, rows in enumerate(sets):
        points = column(rows, name)
        label = f"validation {run.validated_on(rows[0])}".strip() if len(sets) > 1 else "validation"
        marks = "all" if name != "valid_elbo" and len(points) < 40 else "ends"
        lines.append(Curve(label, points, colours[place % len(colours)], strokes[place % len(strokes)], marks=marks))
    return lines


def training_loss(medium: Medium, run: Run) -> Chart | str:
    loss = Curve("training", column(run.training, "nll_per_step"))
    lines = [loss, *validation_curves(run, "valid_nll_per_step", (MIDDLE, INK), ("--", ":"))]
    values = [value for line in lines for _, value in line.points]
    title = f"Reconstruction NLL per {run.unit}"
    return curves(medium, title, lines, y_label="nats", y=robust_span(values or [0.0]))


def last_kl(medium: Medium, run: Run) -> Chart | str:
    last = run.readings[-1] if run.readings else {}
    if whole(last, "codebook_size"):
        return NO_DIMENSIONS
    kl_Z = [(str(place), value or 0.0) for place, value in enumerate(numbers(last, "kl_per_dim"))]
    ordered = sorted(kl_Z, key=lambda pair: -pair[1])[:MOST_BARS]
    few = f"the {MOST_BARS} greatest of {len(kl_Z):,}" if len(kl_Z) > MOST_BARS else ""
    title = f"KL of each dimension at step {whole(last, 'step') or 0:,}"
    return bars(medium, title, ordered, "latent dimension", "nats", few)


def sequence_lengths(medium: Medium, run: Run) -> Chart | str:
    lengths = row_in(row_in(run.facts, "data"), "lengths")
    edges, counts = numbers(lengths, "edges"), numbers(lengths, "counts")
    if len(edges) < 2 or len(edges) != len(counts) + 1:
        return "no lengths"
    labels = [f"{a:,}" if b - a <= 1 else f"{a:,}-{b - 1:,}" for a, b in pairwise(int(edge or 0) for edge in edges)]
    heights = [(label, count or 0.0) for label, count in zip(labels, counts, strict=True)]
    return bars(medium, "Lengths of the training sequences", heights, f"{run.unit}s of a sequence", "sequences")


def speed(medium: Medium, run: Run) -> Chart | str:
    found = column(run.throughput, "real_steps_per_second") or column(run.training, "steps_per_second")
    if len(found) < 2:
        return "too few measurements"
    top = max(value for _, value in found) * 1.1 or 1.0
    return curves(medium, "Speed", [Curve(f"real {run.unit}s per second", found)], y_label="per second", y=(0.0, top))
