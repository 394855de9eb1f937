"""Bars, a map of shades and a cloud of points -> SVG inside a page, beside the curves of `svg_chart.py`.

Shapes: R readings, Z latent dimensions, N posteriors.
"""

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from seqvae.reports.svg_chart import HEIGHT, LEFT, RIGHT, TOP, WIDTH, picture, words
from seqvae.reports.svg_scale import Scale, spanned, tick_label

BOTTOM = 38
SHADES = 8
SHADE_FROM, SHADE_TO = 1e-3, 3.0
"""Nats of the lightest and the darkest shade, logarithmic in between."""
MOST_ROWS, MOST_COLUMNS = 64, 90
"""Dimensions and readings that there is room for."""
MOST_DOTS = 600


def draw_bars(
    title: str, bars: Sequence[tuple[str, float]], x_label: str, y_label: str, mark: float | None = None
) -> str:
    """Upright, with a line across at `mark`; the labels that there is room for."""
    bottom = HEIGHT - BOTTOM
    _, high = spanned([value for _, value in bars], pad=0.08)
    y = Scale(0.0, max(high, (mark or 0) * 1.1, 1e-9), bottom, TOP)
    wide = (WIDTH - RIGHT - LEFT) / max(1, len(bars))
    parts = []
    for value in y.ticks(5):
        parts.append(f'<path class="grid" d="M{LEFT} {y.place(value):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(words(LEFT - 7, y.place(value) + 4, tick_label(value), anchor="end"))
    every = -(-len(bars) * max((len(label) for label, _ in bars), default=1) * 10 // (WIDTH - LEFT))
    for place, (label, value) in enumerate(bars):
        left, top = LEFT + place * wide, y.place(max(value, 0.0))
        gap = min(2.0, wide / 5)
        parts.append(
            f'<rect class="bar c1" x="{left + gap / 2:.1f}" y="{top:.1f}" width="{wide - gap:.1f}" height="{bottom - top:.1f}"/>'
        )
        if place % max(1, every) == 0:
            parts.append(words(left + wide / 2, bottom + 16, label))
    if mark is not None:
        parts.append(f'<path class="line c2 dashed" d="M{LEFT} {y.place(mark):.1f}H{WIDTH - RIGHT}"/>')
    parts.append(f'<path class="axis" d="M{LEFT} {bottom}H{WIDTH - RIGHT}"/>')
    parts.append(words((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, x_label, "label"))
    middle = (TOP + bottom) / 2
    parts.append(f'<g transform="translate(18 {middle:.0f}) rotate(-90)">{words(0, 0, y_label, "label")}</g>')
    return picture(title, "".join(parts))


def draw_shades(title: str, steps_R: Sequence[float], kl_RZ: np.ndarray) -> str:
    """KL of each dimension over the run, the greatest last one on top: the darker, the more nats. NaN is left white."""
    order_Z = np.argsort(-np.nan_to_num(kl_RZ[-1], nan=-1.0), kind="stable")[:MOST_ROWS]
    shades_ZR = shade_of(kl_RZ[:, order_Z].T)
    x = Scale(0, len(kl_RZ), LEFT, WIDTH - RIGHT)
    bottom = HEIGHT - BOTTOM
    tall = (bottom - TOP) / len(order_Z)
    ways: dict[int, list[str]] = {}
    for row, shades_R in enumerate(shades_ZR.tolist()):
        column = 0
        for shade, group in groupby(shades_R):
            length = len(list(group))
            if shade:
                left, right = x.place(column), x.place(column + length)
                way = f"M{left:.1f} {TOP + row * tall:.1f}h{right - left:.1f}v{tall:.1f}h-{right - left:.1f}z"
                ways.setdefault(shade, []).append(way)
            column += length
    parts = [f'<rect class="ground" x="{LEFT}" y="{TOP}" width="{WIDTH - RIGHT - LEFT}" height="{bottom - TOP}"/>']
    parts += [
        f'<path class="shade" fill-opacity="{shade / SHADES:.3f}" d="{"".join(way)}"/>'
        for shade, way in sorted(ways.items())
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        nearest = round(share * (len(steps_R) - 1))
        anchor = "start" if share == 0 else "end" if share == 1 else "middle"
        place = x.place(nearest + share)
        if len(steps_R) > 4 or share in (0.0, 1.0):
            parts.append(words(place, bottom + 16, tick_label(steps_R[nearest]), anchor=anchor))
    for row in _named_rows(len(order_Z)):
        parts.append(words(LEFT - 7, TOP + (row + 0.5) * tall + 4, str(int(order_Z[row])), anchor="end"))
    parts.append(words((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, "optimizer step", "label"))
    parts.append(
        f'<g transform="translate(18 {(TOP + bottom) / 2:.0f}) rotate(-90)">{words(0, 0, "dimension", "label")}</g>'
    )
    return picture(title, "".join(parts))


def shade_of(kl: np.ndarray) -> np.ndarray:
    """
    >>> shade_of(np.array([0.0, 0.001, 0.05, 3.0, 100.0, np.nan])).tolist()
    [0, 0, 4, 8, 8, 0]
    """
    share = np.log(np.clip(np.nan_to_num(kl, nan=0.0), SHADE_FROM, SHADE_TO) / SHADE_FROM)
    shades: np.ndarray = (share / np.log(SHADE_TO / SHADE_FROM) * SHADES).round().astype(int)
    return shades


def draw_cloud(title: str, mean_NZ: np.ndarray, logvar_NZ: np.ndarray) -> str:
    """Posterior means along the two directions in which they vary most, with the prior's one and two standard deviations."""
    centred_NZ = mean_NZ - mean_NZ.mean(axis=0)
    _, _, directions_ZZ = np.linalg.svd(centred_NZ, full_matrices=False)
    two_2Z = np.zeros((2, mean_NZ.shape[1]))
    two_2Z[: min(2, len(directions_ZZ))] = directions_ZZ[:2]
    points_N2 = (mean_NZ @ two_2Z.T)[:: -(-len(mean_NZ) // MOST_DOTS)]
    width_2 = np.sqrt(np.exp(np.clip(logvar_NZ, -50, 50)).mean(axis=0) @ (two_2Z**2).T)
    reach = max(2.4, float(np.quantile(np.abs(points_N2), 0.995)) * 1.1)
    half = (HEIGHT - TOP - BOTTOM) / 2
    x = Scale(-reach, reach, LEFT + 206 - half, LEFT + 206 + half)
    y = Scale(-reach, reach, HEIGHT - BOTTOM, TOP)
    middle = f'cx="{x.place(0):.1f}" cy="{y.place(0):.1f}"'
    unit = x.place(1) - x.place(0)
    parts = [f'<circle class="prior" {middle} r="{unit * radius:.1f}"/>' for radius in (1, 2)]
    inside_N2 = points_N2[(np.abs(points_N2) <= reach).all(axis=1)]
    dots = "".join(f"M{x.place(a):.1f} {y.place(b):.1f}h0" for a, b in inside_N2.tolist())
    parts.append(f'<path class="dots c1" d="{dots}"/>')
    parts.append(f'<ellipse class="line c2" {middle} rx="{unit * width_2[0]:.1f}" ry="{unit * width_2[1]:.1f}"/>')
    for value in x.ticks(4):
        parts.append(words(x.place(value), HEIGHT - BOTTOM + 16, tick_label(value)))
        parts.append(words(x.start - 7, y.place(value) + 4, tick_label(value), anchor="end"))
    parts.append(words((x.start + x.end) / 2, HEIGHT - 5, "first direction", "label"))
    place = f"translate({x.start - 34:.0f} {(TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)"
    parts.append(f'<g transform="{place}">{words(0, 0, "second direction", "label")}</g>')
    return picture(title, "".join(parts))


def _named_rows(rows: int) -> range:
    return range(0, rows, -(-rows // 16))
