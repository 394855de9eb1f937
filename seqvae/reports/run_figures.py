"""A run's rows -> the figures of its report: loss, what the monitor read, dimensions, posteriors, lengths, speed."""

from collections.abc import Sequence
from itertools import groupby, pairwise

import numpy as np

from seqvae.reports.page import Key, brief, figure
from seqvae.reports.run_directory import Run
from seqvae.reports.run_lines import Row, number, numbers, row_in, spread, text, whole
from seqvae.reports.run_story import TONES, spoken
from seqvae.reports.svg_chart import Chart, Line, Span, draw
from seqvae.reports.svg_figures import MOST_COLUMNS, draw_bars, draw_cloud, draw_shades
from seqvae.reports.svg_scale import robust_span, spanned
from seqvae.text import percent

STEP = "optimizer step"
MOST_BARS = 64


def loss_figures(run: Run) -> list[str]:
    return [part for part in (_elbo(run), _training_loss(run)) if part]


def collapse_figures(run: Run) -> list[str]:
    return [_timeline(run), _weight(run), _active(run), _shades(run)] if run.readings else []


def latent_figures(run: Run) -> list[str]:
    parts = []
    last = run.readings[-1] if run.readings else {}
    kl_Z = [(place, value or 0.0) for place, value in enumerate(numbers(last, "kl_per_dim"))]
    if kl_Z:
        ordered = sorted(kl_Z, key=lambda pair: -pair[1])[:MOST_BARS]
        more = f" The {MOST_BARS} greatest of {len(kl_Z)}." if len(kl_Z) > MOST_BARS else ""
        bars = [(str(place), value) for place, value in ordered]
        drawn = draw_bars("KL of each latent dimension", bars, "latent dimension", "nats")
        parts.append(figure(f"KL of each dimension at step {whole(last, 'step') or 0:,}", drawn, remark=more.strip()))
    if run.posteriors is not None:
        mean_NZ, logvar_NZ = run.posteriors
        drawn = draw_cloud("Posterior means in the plane in which they vary most", mean_NZ, logvar_NZ)
        keys = [
            Key("c1 dotted", f"{len(mean_NZ):,} posterior means"),
            Key("c2", "a posterior's width"),
            Key("mute dashed", "prior, 1 and 2 standard deviations"),
        ]
        parts.append(figure("Posteriors against the prior, the two main directions", drawn, keys))
    return parts


def length_figure(run: Run) -> str:
    lengths = row_in(row_in(run.facts, "data"), "lengths")
    edges, counts = numbers(lengths, "edges"), numbers(lengths, "counts")
    if len(edges) < 2 or len(edges) != len(counts) + 1:
        return ""
    ends = [int(edge or 0) for edge in edges]
    labels = [f"{a:,}" if b - a <= 1 else f"{a:,}-{b - 1:,}" for a, b in pairwise(ends)]
    bars = [(label, count or 0.0) for label, count in zip(labels, counts, strict=True)]
    return figure("Lengths of the training sequences", draw_bars("Lengths", bars, "steps of a sequence", "sequences"))


def speed_figure(run: Run) -> str:
    speed = column(run.throughput, "real_steps_per_second") or column(run.training, "steps_per_second")
    if len(speed) < 2:
        return ""
    values = [value for _, value in speed if value is not None]
    chart = Chart(
        "Real steps a second over the run",
        [Line(speed, "c1")],
        x=(0.0, speed[-1][0]),
        y=(0.0, max(values, default=1.0) * 1.1 or 1.0),
        x_label=STEP,
        y_label="a second",
    )
    return figure("Speed", draw(chart), [Key("c1", "real steps a second", brief(values[-1]) if values else "")])


def column(rows: Sequence[Row], name: str) -> list[tuple[float, float | None]]:
    """By step; rows that do not tell are left out."""
    return [
        (step, value)
        for row in rows
        if (value := number(row, name)) is not None
        if (step := number(row, "step")) is not None
    ]


def verdict_spans(readings: Sequence[Row]) -> list[tuple[str, float, float]]:
    """Each verdict from its first reading to the next one's."""
    named = [(text(row, "verdict") or "cannot_tell", number(row, "step") or 0.0) for row in readings]
    starts = [(name, next(group)[1]) for name, group in groupby(named, key=lambda pair: pair[0])]
    ends = [*(start for _, start in starts[1:]), named[-1][1] if named else 0.0]
    return [(name, start, end) for (name, start), end in zip(starts, ends, strict=True)]


def last_of(points: Sequence[tuple[float, float | None]]) -> str:
    return brief(points[-1][1]) if points and points[-1][1] is not None else ""


def _elbo(run: Run) -> str:
    elbo = column(run.validations, "valid_elbo")
    if not elbo:
        return ""
    values = [value for _, value in elbo if value is not None]
    low, high = robust_span(values)
    chart = Chart(
        "Validation ELBO over the run",
        [Line(elbo, "c1", marks="ends")],
        (0.0, _end(run, elbo)),
        (low, high),
        STEP,
        "nats",
    )
    keys = [Key("c1", "validation ELBO", last_of(elbo)), Key("", "best", brief(max(values)))]
    return figure(
        "Validation ELBO, nats a sequence (higher is better)", draw(chart), keys[:1] if len(elbo) < 2 else keys
    )


def _training_loss(run: Run) -> str:
    loss, valid = column(run.training, "nll_per_step"), column(run.validations, "valid_nll_per_step")
    if not loss and not valid:
        return ""
    values = [value for _, value in (*loss, *valid) if value is not None]
    lines = [Line(loss, "c1"), Line(valid, "c2 dashed", marks="all" if len(valid) < 40 else "ends")]
    x = (0.0, max(_end(run, loss), _end(run, valid)))
    chart = Chart("Reconstruction NLL a step", lines, x, robust_span(values), STEP, "nats")
    keys = [Key("c1", "training", last_of(loss)), Key("c2 dashed", "validation", last_of(valid))]
    return figure("Reconstruction NLL for each step of a sequence", draw(chart), [key for key in keys if key.value])


def _timeline(run: Run) -> str:
    rate, information = column(run.readings, "rate"), column(run.readings, "mutual_information")
    cap, use = column(run.readings, "mutual_information_cap"), column(run.readings, "decoder_use")
    errors = [
        (step, value - error, value + error)
        for row in run.readings
        if (value := number(row, "decoder_use")) is not None
        if (error := number(row, "decoder_use_error")) is not None
        if (step := number(row, "step")) is not None
    ]
    seen = [value for _, value in (*rate, *information, *cap, *use) if value is not None]
    low, high = min([-0.12, *(1.3 * value for value in seen)]), max([12.0, *(1.3 * value for value in seen)])
    spans = verdict_spans(run.readings)
    chart = Chart(
        "Rate, mutual information and decoder use over the run, with the verdicts below",
        [
            Line(use, "c3 thin", marks="all" if len(use) < 30 else "ends", errors=errors),
            Line(information, "c2 dashed"),
            Line(rate, "c1"),
        ],
        (0.0, _end(run, rate)),
        (max(low, -1e5), min(high, 1e6)),
        STEP,
        "nats",
        is_log=True,
        strip=[Span(start, end, f"v-{TONES.get(name, 'open')}") for name, start, end in spans],
        guides=[Line(cap, "c2 dotted thin")],
    )
    keys = [
        Key("c1", "rate", last_of(rate)),
        Key("c2 dashed", "mutual information", last_of(information)),
        Key("c2 dotted", "its cap", last_of(cap)),
        *([Key("c3", "decoder use", last_of(use))] if use else []),
        *(
            Key(f"block v-{TONES.get(name, 'open')}", spoken(name))
            for name in dict.fromkeys(name for name, _, _ in spans)
        ),
    ]
    remark = "Logarithmic, linear below 0.1. The strip below shows the verdict in force."
    return figure("Rate, mutual information and decoder use", draw(chart), keys, remark)


def _weight(run: Run) -> str:
    weight = column(run.readings, "kl_weight")
    if not weight:
        return ""
    high = max(value for _, value in weight if value is not None)
    chart = Chart("KL weight", [Line(weight, "c1")], (0.0, _end(run, weight)), (0.0, high * 1.1 or 1.0), STEP, "weight")
    return figure("Weight of the KL in the loss", draw(chart), [Key("c1", "KL weight", last_of(weight))])


def _active(run: Run) -> str:
    active, effective = column(run.readings, "active_units"), column(run.readings, "effective_dimensions")
    dimensions = len(numbers(run.readings[-1], "kl_per_dim"))
    if not active and not effective:
        return ""
    end = max(_end(run, active), _end(run, effective))
    full: list[tuple[float, float | None]] = [(0.0, float(dimensions)), (end, float(dimensions))]
    lines = [Line(effective, "c2 dashed"), Line(active, "c1")]
    _, high = spanned([value for _, value in (*active, *effective, *full)])
    chart = Chart(
        "Active units", lines, (0.0, end), (0.0, high), STEP, "dimensions", guides=[Line(full, "mute dotted thin")]
    )
    keys = [Key("c1", "active units", last_of(active)), Key("c2 dashed", "effective dimensions", last_of(effective))]
    return figure(f"Active units, of {dimensions:,}", draw(chart), keys)


def _shades(run: Run) -> str:
    last = numbers(run.readings[-1], "kl_per_dim")
    rows = [
        (step, values)
        for row in spread(run.readings, MOST_COLUMNS)
        if (step := number(row, "step")) is not None
        if len(values := numbers(row, "kl_per_dim")) == len(last)
    ]
    if len(rows) < 2 or len(last) < 2:
        return ""
    kl_RZ = np.array([[np.nan if value is None else value for value in values] for _, values in rows])
    drawn = draw_shades("KL of each latent dimension over the run", [step for step, _ in rows], kl_RZ)
    alive = sum((value or 0.0) >= 0.03 for value in last)
    remark = "Darker is more: from 0.001 to 3 nats, logarithmic; columns are readings, the greatest last KL on top."
    return figure(
        f"KL of each dimension over the run ({percent(alive / len(last))} above 0.03 nats)", drawn, remark=remark
    )


def _end(run: Run, points: Sequence[tuple[float, float | None]]) -> float:
    return max(points[-1][0] if points else 0.0, 1.0)
