"""How fast commands train, as lines of text: where a step goes, how fast that is, what the whole run comes to, and what to try."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from seqvae.reports.histogram import bar
from seqvae.reports.performance_numbers import STAGE_NAMES, Bottleneck, Comparison, Speed
from seqvae.text import Ink, cells, heading, measure, note, percent, visible

BAR = 20
"""Characters."""
BUSY = 0.1
"""Share of a machine, taken by others, from which on rates are not what they could be."""


class Row(NamedTuple):
    """Of the table of speeds."""

    name: str
    write: Callable[[Speed], str]
    is_shown: Callable[[Speed], bool] = lambda _: True


def performance_page(
    data: Sequence[str],
    speeds: Sequence[Speed],
    bottlenecks: Sequence[Bottleneck],
    comparison: Comparison | None,
    ink: Ink,
) -> list[str]:
    """Of one command, or of several side by side; `data` says in some lines what they trained on."""
    lines = [ink.bold(visible(_title(speed))) for speed in speeds]
    for line in data:
        lines += note(line, ink, mark="")
    lines += _stages_of_one(speeds[0], ink) if len(speeds) == 1 else _stages_of_several(speeds, ink)
    lines += [*heading("Speed", ink), *grid(_speed_rows(speeds), ink)]
    busiest = max((speed.others_cpu_share or 0.0) for speed in speeds)
    if busiest > BUSY:
        remark = (
            f"Other programs took {percent(busiest)} of this machine meanwhile: on a quiet one, all of this is faster."
        )
        lines += ["", *map(ink.warning, note(remark, ink, mark="!"))]
    if comparison is not None:
        lines += ["", *map(ink.good, note(said_of(comparison, speeds[0].unit), ink, mark=""))]
    lines += heading("The whole run, as asked for", ink)
    for speed in speeds:
        lines += note(_whole_run(speed) if len(speeds) == 1 else f"{speed.name}: {_whole_run(speed)}", ink, mark="")
    lines += heading("What holds it back", ink)
    for speed, bottleneck in zip(speeds, bottlenecks, strict=True):
        said = said_of_bottleneck(bottleneck)
        lines += note(said if len(speeds) == 1 else f"{speed.name}: {said}", ink, mark="")
    return lines


def said_of(comparison: Comparison, unit: str) -> str:
    return (
        f"{comparison.faster} passes {comparison.ratio:.2f} times as many real {unit}s a second as {comparison.slower} "
        f"({comparison.lowest:.2f} to {comparison.highest:.2f} in the turns)"
    )


def said_of_bottleneck(bottleneck: Bottleneck) -> str:
    tries = f" Worth a try: {' or '.join(bottleneck.tries)}." if bottleneck.tries else ""
    return f"{bottleneck.name}: {bottleneck.evidence}{tries}"


def grid(rows: Sequence[Sequence[str]], ink: Ink) -> list[str]:
    """The first row is the heading; the first column stands left, the others right."""
    widths = [max(map(cells, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        first, *others = (" " * (width - cells(text)) for text, width in zip(row, widths, strict=True))
        rest = [space + text for space, text in zip(others, row[1:], strict=True)]
        lines.append("  " + "  ".join([row[0] + first, *rest]).rstrip())
    return [ink.dim(lines[0]), *lines[1:]]


def span(seconds: float) -> str:
    """
    >>> span(0.2134), span(75), span(3675), span(200_000)
    ('0.21 s', '1 min 15 s', '1 h 1 min', '2 d 7 h')
    """
    if seconds < 59.5:
        return f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    days, hours_left = divmod(hours, 24)
    if days:
        return f"{days} d {hours_left} h"
    return f"{hours} h {minutes_left} min" if hours else f"{minutes} min {rest} s"


def _title(speed: Speed) -> str:
    return f"{speed.name}: {speed.parameters / 1e6:.2f} M parameters, {speed.precision} on {speed.device}"


def _stages_of_one(speed: Speed, ink: Ink) -> list[str]:
    rows = [["stage", "ms", "share"]]
    for stage, name in STAGE_NAMES.items():
        rows.append([name, f"{1e3 * speed.stages[stage] / speed.steps:,.2f}", percent(speed.share(stage))])
    head, *lines = grid(rows, ink)
    drawn = [
        f"{line}  {bar(speed.share(stage), BAR, ink)}".rstrip() for line, stage in zip(lines, STAGE_NAMES, strict=True)
    ]
    title = f"Where an optimizer step of {measure(1000 * speed.seconds_per_step)} ms goes ({speed.steps:,} of them)"
    return [*heading(title, ink), head, *drawn]


def _stages_of_several(speeds: Sequence[Speed], ink: Ink) -> list[str]:
    """By real step of a sequence: optimizer steps of one hold more of them than those of another."""
    rows = [[f"us a real {speeds[0].unit}", *(word for speed in speeds for word in (speed.name, "share"))]]
    for stage, name in STAGE_NAMES.items():
        values = [(1e6 * speed.stages[stage] / speed.real_steps, speed.share(stage)) for speed in speeds]
        rows.append([name, *(text for value, share in values for text in (f"{value:,.2f}", percent(share)))])
    total = [f"{1e6 * speed.seconds / speed.real_steps:,.2f}" for speed in speeds]
    rows.append(["together", *(text for value in total for text in (value, ""))])
    return [*heading(f"Where the time of a real {speeds[0].unit} goes", ink), *grid(rows, ink)]


def _speed_rows(speeds: Sequence[Speed]) -> list[list[str]]:
    unit = speeds[0].unit
    rows = [
        Row(f"real {unit}s/s", lambda speed: f"{speed.real_steps_per_second:,.0f}"),
        Row(f"  in {len(speeds[0].turns)} turns", lambda speed: f"{min(speed.turns):,.0f}-{max(speed.turns):,.0f}"),
        Row("sequences/s", lambda speed: measure(speed.sequences_per_second)),
        Row(
            "events/s",
            lambda speed: f"{speed.events_per_second:,.0f}",
            lambda speed: speed.events_per_second is not None,
        ),
        Row("optimizer step", lambda speed: f"{measure(1000 * speed.seconds_per_step)} ms"),
        Row(f"  real {unit}s in it", lambda speed: f"{speed.real_steps / speed.steps:,.0f}"),
        Row("padding", lambda speed: percent(speed.padding_share)),
        Row("peak memory", lambda speed: f"{speed.peak_memory_gib:.2f} GiB"),
        Row("CPU", lambda speed: f"{percent(speed.cpu_utilisation)} of {speed.cores} cores"),
        Row(
            "  other programs",
            lambda speed: f"{percent(speed.others_cpu_share or 0)} of the machine",
            lambda speed: speed.others_cpu_share is not None,
        ),
        Row("GPU", lambda speed: percent(speed.gpu_utilisation or 0), lambda speed: speed.gpu_utilisation is not None),
        Row(f"arithmetic on real {unit}s", lambda speed: _flops(speed.flops_per_second)),
        Row(
            "  large products alone",
            lambda speed: f"{_flops(speed.peak_flops_per_second)}, {speed.peak_dtype}",
        ),
        Row("  share of that peak", lambda speed: percent(speed.share_of_peak)),
        Row("recompiles after warm-up", lambda speed: f"{speed.recompiles}"),
        Row("start, without imports", lambda speed: span(speed.start_seconds)),
        Row("  very first step", lambda speed: span(speed.first_step_seconds)),
    ]
    written = [[row.name, *map(row.write, speeds)] for row in rows if all(map(row.is_shown, speeds))]
    return [["", *(speed.name for speed in speeds)], *written]


def _flops(per_second: float) -> str:
    return f"{per_second / 1e12:.3g} TFLOP/s" if per_second >= 1e12 else f"{per_second / 1e9:.3g} GFLOP/s"


def _whole_run(speed: Speed) -> str:
    run = speed.run
    epochs = f"{run.epochs:.3g} epoch{'s' * (run.epochs != 1)}"
    validations = f"{run.validations:,} validation{'s' * (run.validations != 1)} {percent(run.validation_share)}"
    checkpoints = f"{run.checkpoints:,} checkpoint{'s' * (run.checkpoints != 1)} {percent(run.checkpoint_share)}"
    training = f"training {percent(run.training_seconds / run.seconds)}"
    return f"{run.steps:,} optimizer steps ({epochs}) in about {span(run.seconds)}: {training}, {validations}, {checkpoints}."
