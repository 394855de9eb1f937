"""How fast commands train: the numbers, as text, as one figure, and what `--advise` found out.

In: `Speed`, plain numbers of a stretch of training, and the trials of `seqvae/profiling`. Nothing of it is text from data.

Of one command times are in milliseconds of an optimizer step; of several in microseconds of a real step of a sequence, since their
optimizer steps are of different sizes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from seqvae.reports.figures import DARK, GREY, LIGHT, MIDDLE
from seqvae.reports.terminal import Ink, bar, grid, heading, note
from seqvae.text import counted, duration, measure, percent, visible

STAGE_NAMES = {
    "data": "waiting for data",
    "transfer": "to the device",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "clipping and optimizer",
    "monitoring": "logging and monitoring",
    "loop": "Lightning's loop",
}
"""The stages of an optimizer step, in the order in which they come."""
BAR = 20
"""Characters."""
BUSY = 0.1
"""Share of a machine, taken by others, from which on rates are not what they could be."""
STEADY = 0.1
"""Spread of a rate that a quiet machine stays below."""
COLOURS = {
    "data": MIDDLE,
    "transfer": "#e69f00",
    "forward": LIGHT,
    "backward": DARK,
    "optimizer": "#009e73",
    "monitoring": "#cc79a7",
    "loop": "#8a8a8a",
}
"""Colours that people who do not see all of them can tell apart; neighbours differ in lightness, too."""
ON_DARK = {"backward"}
"""Stages whose names are written in white."""
STYLE = {
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 12,  # readable on a phone
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "hatch.linewidth": 1.2,
    "hatch.color": "white",
}
WIDTH, DOTS_PER_INCH = 9.0, 120
LETTER = 0.0125
"""Width of a letter as a share of the axis: a segment is labelled where its name has room."""
HATCHES = ("", "///", "...")
"""Hatches of the commands, where there are several."""


# --- Numbers ----------------------------------------------------------------------------------------------------------


class WholeRun(NamedTuple):
    """The length of the requested run at the speed measured."""

    steps: int
    """Optimizer steps."""
    epochs: float
    training_seconds: float
    validations: int
    """Including the last one, on all validation data."""
    validation_seconds: float
    """Duration of all validations together."""
    checkpoints: int
    checkpoint_seconds: float
    """Duration of all checkpoints together."""

    @property
    def seconds(self) -> float:
        return self.training_seconds + self.validation_seconds + self.checkpoint_seconds

    @property
    def validation_share(self) -> float:
        return self.validation_seconds / self.seconds

    @property
    def checkpoint_share(self) -> float:
        return self.checkpoint_seconds / self.seconds


class Speed(NamedTuple):
    """The speed of a command, and where its time goes. None: unknown on this machine, or for this kind of sequence."""

    name: str
    """optimized or reference."""
    unit: str
    """What a step of a sequence is called: token or step."""
    device: str
    precision: str
    """The precision in force."""
    parameters: int
    steps: int
    """Optimizer steps measured."""
    seconds: float
    """Duration of these steps."""
    stages: Mapping[str, float]
    """Seconds of each of `STAGE_NAMES` in this time."""
    real_steps: int
    padded_steps: int
    """Steps that were computed on, padding included."""
    sequences: int
    events_per_step: float | None
    """Events in a step of a sequence, averaged over a sample."""
    turns: Sequence[float]
    """Real steps per second in each turn."""
    start_seconds: float
    """Until the first optimizer step, without imports; where layers are compiled, that is in it."""
    first_step_seconds: float
    """Duration of the very first optimizer step, which does everything for the first time."""
    cpu_utilisation: float
    """Share of the cores that the process may use, taken by itself."""
    cores: int
    others_cpu_share: float | None
    """Share of all the machine's cores that other programs took meanwhile."""
    gpu_utilisation: float | None
    peak_memory_gib: float
    flops_per_padded_step: float
    """Floating-point operations, forward and backward."""
    peak_flops_per_second: float
    """Rate of a large product of matrices, measured in between."""
    peak_dtype: str
    recompiles: int
    """Graphs that were compiled after warm-up."""
    run: WholeRun

    @property
    def seconds_per_step(self) -> float:
        """Return the duration of an optimizer step."""
        return self.seconds / self.steps

    @property
    def real_steps_per_second(self) -> float:
        return self.real_steps / self.seconds

    @property
    def sequences_per_second(self) -> float:
        return self.sequences / self.seconds

    @property
    def events_per_second(self) -> float | None:
        return None if self.events_per_step is None else self.events_per_step * self.real_steps_per_second

    @property
    def padding_share(self) -> float:
        return 1 - self.real_steps / self.padded_steps

    @property
    def flops_per_second(self) -> float:
        """Return the rate on real steps: what is computed on padding is no work."""
        return self.flops_per_padded_step * self.real_steps_per_second

    @property
    def share_of_peak(self) -> float:
        return self.flops_per_second / self.peak_flops_per_second

    def share(self, *stages: str) -> float:
        """Return the share of training time that these stages take together."""
        return sum(self.stages[stage] for stage in stages) / self.seconds


class Bottleneck(NamedTuple):
    """The greatest cost, of those that could be changed."""

    name: str
    evidence: str
    """A sentence."""
    tries: tuple[str, ...]
    """Flags that may help, none of them measured."""


class Comparison(NamedTuple):
    """The ratio of two commands' speeds, in real steps of sequences per second."""

    faster: str
    slower: str
    ratio: float
    lowest: float
    """The lowest ratio of a turn."""
    highest: float
    """The highest ratio of a turn."""


def as_dict(speed: Speed, bottleneck: Bottleneck) -> dict[str, Any]:
    """Return a speed in types of JSON, with what follows from the numbers."""
    run = speed.run
    return {
        **speed._asdict(),
        "seconds_per_step": speed.seconds_per_step,
        "real_steps_per_second": speed.real_steps_per_second,
        "sequences_per_second": speed.sequences_per_second,
        "events_per_second": speed.events_per_second,
        "padding_share": speed.padding_share,
        "flops_per_second": speed.flops_per_second,
        "share_of_peak": speed.share_of_peak,
        "run": {
            **run._asdict(),
            "seconds": run.seconds,
            "validation_share": run.validation_share,
            "checkpoint_share": run.checkpoint_share,
        },
        "bottleneck": bottleneck._asdict(),
    }


# --- Text -------------------------------------------------------------------------------------------------------------


def performance_page(
    data: Sequence[str],
    speeds: Sequence[Speed],
    bottlenecks: Sequence[Bottleneck],
    comparison: Comparison | None,
    ink: Ink,
) -> list[str]:
    """Report on one command, or on several side by side; `data` says in some lines what they trained on."""
    unit = speeds[0].unit
    names = [f"{speed.name}: " if len(speeds) > 1 else "" for speed in speeds]
    lines = []
    for speed in speeds:
        about = f"{speed.name}: {speed.parameters / 1e6:.2f} M parameters, {speed.precision} on {speed.device}"
        lines.append(ink.bold(visible(about)))
    for line in data:
        lines += note(line, ink, mark="")
    lines += _stages(speeds, ink)
    figures = [_figures_of(speed) for speed in speeds]
    rows = [["", *(speed.name for speed in speeds)]]
    for title, *texts in zip(figures[0], *(one.values() for one in figures), strict=True):
        known = [text for text in texts if text is not None]
        if len(known) == len(speeds):
            rows.append([title, *known])
    lines += [*heading("Speed", ink), *grid(rows, ink)]
    busiest = max((speed.others_cpu_share or 0.0) for speed in speeds)
    if busiest > BUSY:
        taken = f"Other programs took {percent(busiest)} of this machine meanwhile"
        remark = f"{taken}: on a quiet one, all of this is faster."
        lines += ["", *map(ink.warning, note(remark, ink, mark="!"))]
    if comparison is not None:
        ratio = (
            f"{comparison.faster} passes {comparison.ratio:.2f} times as many real {unit}s per second as {comparison.slower} "
            f"({comparison.lowest:.2f} to {comparison.highest:.2f} in the turns)"
        )
        lines += ["", *map(ink.good, note(ratio, ink, mark=""))]
    lines += heading("The whole run as requested", ink)
    for name, speed in zip(names, speeds, strict=True):
        run = speed.run
        parts = (
            f"training {percent(run.training_seconds / run.seconds)}",
            f"{counted(run.validations, 'validation')} {percent(run.validation_share)}",
            f"{counted(run.checkpoints, 'checkpoint')} {percent(run.checkpoint_share)}",
        )
        epochs = f"{run.epochs:.3g} epoch{'s' * (run.epochs != 1)}"
        length = f"{run.steps:,} optimizer steps ({epochs}) in about {duration(run.seconds)}"
        lines += note(f"{name}{length}: {', '.join(parts)}.", ink, mark="")
    lines += heading("What holds it back", ink)
    for name, bottleneck in zip(names, bottlenecks, strict=True):
        tries = f" Worth a try: {' or '.join(bottleneck.tries)}." if bottleneck.tries else ""
        lines += note(f"{name}{bottleneck.name}: {bottleneck.evidence}{tries}", ink, mark="")
    return lines


def _stages(speeds: Sequence[Speed], ink: Ink) -> list[str]:
    """Return a table of where the time goes, with bars where there is one command."""
    first = speeds[0]
    if len(speeds) == 1:
        rows = [["stage", "ms", "share"]]
        for stage, name in STAGE_NAMES.items():
            rows.append([name, f"{1e3 * first.stages[stage] / first.steps:,.2f}", percent(first.share(stage))])
        lines = grid(rows, ink)
        for place, stage in enumerate(STAGE_NAMES, start=1):
            lines[place] = f"{lines[place]}  {bar(first.share(stage), BAR, ink)}".rstrip()
        title = f"Where an optimizer step of {measure(1000 * first.seconds_per_step)} ms goes ({first.steps:,} of them)"
        return [*heading(title, ink), *lines]
    head, together = [f"us per real {first.unit}"], ["together"]
    rows = [[name] for name in STAGE_NAMES.values()]
    for speed in speeds:
        head += [speed.name, "share"]
        together += [f"{1e6 * speed.seconds / speed.real_steps:,.2f}", ""]
        for row, stage in zip(rows, STAGE_NAMES, strict=True):
            row += [f"{1e6 * speed.stages[stage] / speed.real_steps:,.2f}", percent(speed.share(stage))]
    return [*heading(f"Where the time of a real {first.unit} goes", ink), *grid([head, *rows, together], ink)]


def _figures_of(speed: Speed) -> dict[str, str | None]:
    """Return the rows of the table of speed; None where a number is not known."""
    unit, turns = speed.unit, speed.turns
    events, others, gpu = speed.events_per_second, speed.others_cpu_share, speed.gpu_utilisation

    def flops(per_second: float) -> str:
        return f"{per_second / 1e12:.3g} TFLOP/s" if per_second >= 1e12 else f"{per_second / 1e9:.3g} GFLOP/s"

    return {
        f"real {unit}s/s": f"{speed.real_steps_per_second:,.0f}",
        f"  in {len(turns)} turns": f"{min(turns):,.0f}-{max(turns):,.0f}",
        "sequences/s": measure(speed.sequences_per_second),
        "events/s": None if events is None else f"{events:,.0f}",
        "optimizer step": f"{measure(1000 * speed.seconds_per_step)} ms",
        f"  real {unit}s in it": f"{speed.real_steps / speed.steps:,.0f}",
        "padding": percent(speed.padding_share),
        "peak memory": f"{speed.peak_memory_gib:.2f} GiB",
        "CPU": f"{percent(speed.cpu_utilisation)} of {speed.cores} cores",
        "  other programs": None if others is None else f"{percent(others)} of the machine",
        "GPU": None if gpu is None else percent(gpu),
        f"arithmetic on real {unit}s": flops(speed.flops_per_second),
        "  large products alone": f"{flops(speed.peak_flops_per_second)}, {speed.peak_dtype}",
        "  share of that peak": percent(speed.share_of_peak),
        "recompiles after warm-up": f"{speed.recompiles}",
        "start, without imports": duration(speed.start_seconds),
        "  very first step": duration(speed.first_step_seconds),
    }


# --- What --advise found out ------------------------------------------------------------------------------------------


def advice_lines(advice: Mapping[str, Any], ink: Ink) -> list[str]:
    """Return the trials, what is left to the user, and the command to use; `advice` is the dict that is written as JSON."""
    base = (
        f"As it is: {advice['base_rate']:,.0f} real {advice['unit']}/s, {advice['base_memory_gib']:.1f} GiB; training would take "
        f"{duration(advice['run_seconds'])}. {advice['rule'].capitalize()}. Spread: the middle half of the rounds."
    )
    lines = [
        *_trials("Each change alone", advice["alone"], ink),
        *_trials("Measured again", advice["together"], ink),
        "",
        *note(base, ink, mark=""),
    ]
    if advice["base_spread"] > STEADY:
        unsteady = (
            f"The run as it is was not equally fast all the time (its turns spread by {percent(advice['base_spread'])}): where "
            "other programs are at work, small gains are uncertain. Try again when the machine is quiet."
        )
        lines += [ink.warning(line) for line in note(unsteady, ink)]
    best = advice["best"]
    if best is not None:
        spread = f"{best['lower']:.2f} to {best['upper']:.2f} in the middle half of {len(best['ratios'])} rounds"
        effect = f" What it changes beside: {best['effect']}." if best["effect"] else ""
        found = f"{best['gain']:.2f} times as fast ({spread}), {best['memory_gib']:.1f} GiB.{effect}"
    elif advice["together"]:
        found = "What was faster at first was not when it was measured again: these settings are the fastest that was found."
    else:
        tried = len(advice["alone"])
        found = f"None of {tried} changes may be proposed as faster: these settings are the fastest that was found."
    return [*lines, *heading("Advice", ink), *note(found, ink, mark=""), f"  {ink.bold(visible(advice['command']))}"]


def _trials(title: str, trials: Sequence[Mapping[str, Any]], ink: Ink) -> list[str]:
    """Return a table of trials, each with its flags below it, which are too long for a column."""
    if not trials:
        return []
    rows = [["change", "gain", "spread", "memory", "verdict"]]
    for trial in trials:
        numbers = ["-", "-", "-"]
        if trial["gain"] is not None:
            spread = f"{trial['lower']:.2f}-{trial['upper']:.2f}"
            numbers = [f"{trial['gain']:.2f}x", spread, f"{trial['memory_gib']:.1f} GiB"]
        rows.append([visible(trial["change"]), *numbers, visible(trial["verdict"])])
    titles, *lines = grid(rows, ink, texts=range(len(rows[0])))
    found = [*heading(title, ink), titles]
    for trial, line in zip(trials, lines, strict=True):
        found.append(ink.good(line) if trial["verdict"] == "faster" else line)
        found.append(ink.dim(f"      {visible(trial['flags'])}"))
        remarks = "; ".join(trial[name] for name in ("remark", "effect") if trial[name])
        found += [ink.dim(part) for part in note(remarks, ink, mark="   ")]
    return found


# --- The figure -------------------------------------------------------------------------------------------------------


def write_performance_figure(path: Path, speeds: Sequence[Speed], comparison: Comparison | None) -> None:
    """Draw a PNG: a stacked bar for each command, and below it every stage with its number."""
    several, first, names = len(speeds) > 1, speeds[0], list(STAGE_NAMES.values())
    if comparison is not None:
        title = f"{comparison.faster}: {comparison.ratio:.2f}x the real {first.unit}s per second"
        notes = f"{comparison.lowest:.2f}x to {comparison.highest:.2f}x in {len(first.turns)} turns"
    else:
        title = f"Where an optimizer step of {measure(1e3 * first.seconds_per_step)} ms goes"
        notes = (
            f"{first.real_steps_per_second:,.0f} real {first.unit}s/s, {percent(first.padding_share)} padding, {first.precision}, "
            f"{percent(first.share_of_peak)} of the peak, {first.peak_memory_gib:.1f} GiB"
        )
    columns: list[list[float]] = []
    for speed in speeds:
        per, count = (1e6, speed.real_steps) if several else (1e3, speed.steps)
        columns.append([per * speed.stages[stage] / count for stage in STAGE_NAMES])
    unit, totals = "µs" if several else "ms", [sum(values) for values in columns]
    stacks, rows = 0.75 * len(speeds) + 0.55, len(names) * (0.62 if several else 0.42) + 0.2
    with matplotlib.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(h_pad=0.08, hspace=0.04)
        figure = Figure(figsize=(WIDTH, stacks + rows + 1.3), layout=layout)
        above, below = figure.subplots(2, 1, height_ratios=(stacks, rows))

        above.set_title(f"{title}\n", loc="left", x=0, fontsize=16, fontweight="bold")
        above.annotate(notes, (0, 1), (0, 8), xycoords="axes fraction", textcoords="offset points", color=GREY)
        for place, (values, total, hatch) in enumerate(zip(columns, totals, HATCHES, strict=False)):
            left = 0.0
            for stage, name, value in zip(STAGE_NAMES, names, values, strict=True):
                above.barh(
                    place, value, 0.62, left, color=COLOURS[stage], hatch=hatch, edgecolor="white", linewidth=0.8
                )
                if not several and value > LETTER * len(name) * max(totals):
                    text, colour = f"{name}\n{percent(value / total)}", "white" if stage in ON_DARK else "black"
                    above.text(left + value / 2, place, text, ha="center", va="center", color=colour)
                left += value
        commands = [f"{speed.name}\n{speed.real_steps_per_second:,.0f} {speed.unit}s/s" for speed in speeds]
        above.set_yticks(range(len(speeds)), commands if several else [""])
        above.set_ylim(len(speeds) - 0.55, -0.45)
        above.set_xlim(0, max(totals))
        above.tick_params(axis="y", length=0)
        above.set_xlabel(f"{unit} per real {first.unit}" if several else unit, loc="right", labelpad=1)

        places, height = np.arange(len(names)), 0.78 / len(speeds)
        for number, (values, total, hatch) in enumerate(zip(columns, totals, HATCHES, strict=False)):
            offsets = places + (number - (len(speeds) - 1) / 2) * height
            colours = [COLOURS[stage] for stage in STAGE_NAMES]
            below.barh(offsets, values, 0.92 * height, color=colours, hatch=hatch, edgecolor="white", linewidth=0)
            for offset, value in zip(offsets, values, strict=True):
                written = "<0.1" if 0 < value < 0.05 else f"{value:.0f}" if value >= 100 else f"{value:.1f}"
                text = f"{written} {unit}, {percent(value / total)}"
                below.annotate(text, (value, offset), (7, 0), textcoords="offset points", va="center", fontsize=11)
        for place, stage in enumerate(STAGE_NAMES):  # where a bar is too short to show its colour
            below.vlines(0, place - 0.39, place + 0.39, color=COLOURS[stage], linewidth=5)
        below.set_yticks(places, names)
        below.set_ylim(len(names) - 0.5, -0.5)
        below.set_xlim(0, 1.4 * max(map(max, columns)))
        below.tick_params(axis="y", length=0)
        below.set_xticks([])
        below.spines["bottom"].set_visible(False)
        figure.savefig(path, dpi=DOTS_PER_INCH, format="png")
