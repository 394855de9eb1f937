"""Several runs -> one HTML page: how each of them is, their curves over one another, rate against distortion, what differs.

Runs keep their colour and stroke throughout the page; the first six colours differ, then strokes do.
"""

from collections import Counter
from collections.abc import Sequence

from matplotlib.ticker import MaxNLocator

from seqvae.reports.charts import Curve, curves, robust_span
from seqvae.reports.figures import DARK, INK, MIDDLE, MORE_COLOURS, Chart, Medium, page_figure
from seqvae.reports.read_run import Run, column, number
from seqvae.reports.run_page import OWN_SETTINGS, render, shown, six_numbers
from seqvae.reports.runs_page import different_data, summary_of
from seqvae.reports.story import moment, story_of
from seqvae.text import clip, visible

COLOURS, STROKES = (DARK, MIDDLE, INK, *MORE_COLOURS), ("-", "--", ":")
NAME_WIDTH = 40
OVERLAYS = (
    ("Validation ELBO, nats per sequence", "comparable_validations", "valid_elbo"),
    ("Rate, nats", "readings", "rate"),
    ("Mutual information, nats", "readings", "mutual_information"),
    ("Decoder use, nats", "readings", "decoder_use"),
    ("Active units", "readings", "active_units"),
    ("Training NLL per token or time step, nats", "training", "nll_per_step"),
)
"""Title, kind of rows and column."""


def comparison_page(runs: Sequence[Run], now: float) -> str:
    """Write a page about several runs. `now`: seconds since 1970."""
    times = Counter(run.name for run in runs)
    paths = [run.directory.absolute() for run in runs]
    full = [f"{path.parent.name}/{path.name}" if times[path.name] > 1 else path.name for path in paths]
    names = [clip(visible(name), NAME_WIDTH) for name in full]  # with the folder above where a name occurs twice
    stories = [story_of(run, now) for run in runs]
    overview = []
    last_sets = {number(run.validations[-1], "valid_sequences") for run in runs if run.validations}
    for run, name, story in zip(runs, names, stories, strict=True):
        values = {title: value for title, value, _ in six_numbers(run)}
        others = [values.get(title, "") for title in ("Mutual information", "Decoder use", "Active units", "Speed")]
        rate = values.get("Rate") or values.get("Validation KL", "")
        last_elbo = values["Validation ELBO"]
        if run.validations and len(last_sets) > 1:  # one run has ended, another is under way
            last_elbo = f"{last_elbo} {run.validated_on(run.validations[-1])}"
        overview.append([name, story.verdict, last_elbo, rate, *others, f"{run.step:,}"])
    every = dict.fromkeys(name for run in runs for name in run.settings)
    settings = {
        name: [shown(run.settings[name]) if name in run.settings else "(not known)" for run in runs] for name in every
    }
    looks = []
    for place, name in enumerate(names):
        colour, stroke = COLOURS[place % len(COLOURS)], STROKES[place // len(COLOURS) % len(STROKES)]
        looks.append(Curve(name, (), colour, stroke, marks="ends", has_value=False))
    overlays = {}
    for title, rows, name in OVERLAYS:
        lines = [look._replace(points=column(getattr(run, rows), name)) for run, look in zip(runs, looks, strict=True)]
        if rows == "training":
            lines = [line._replace(marks="") for line in lines]
        is_log = rows == "readings" and name != "active_units"
        overlays[name] = page_figure(f"{rows}_{name}", curves, title, lines, y_label="", is_log=is_log)
    elbo = overlays.pop("valid_elbo")
    return render(
        "comparison.html.j2",
        title=f"{len(runs)} runs compared",
        runs=list(zip(names, stories, strict=True)),
        names=names,
        overview=overview,
        different=different_data([summary_of(run, now) for run in runs]),
        rate_distortion=page_figure("rate_distortion", rate_distortion, runs, looks),
        elbo=elbo,
        overlays=[overlay for overlay in overlays.values() if overlay],
        differing=[
            [f"--{name}", *row] for name, row in settings.items() if len(set(row)) > 1 and name not in OWN_SETTINGS
        ],
        alike=[[f"--{name}", row[0]] for name, row in settings.items() if len(set(row)) == 1],
        written=moment(now),
    )


def path_of(run: Run) -> list[tuple[float, float]]:
    """Return rate and NLL of each validation on the same sequences, in nats per sequence; where there are none, of each reading."""
    rows, names = run.comparable_validations, ("valid_kl", "valid_nll")
    if not rows:
        rows, names = run.readings, ("rate", "nll")
    found = [(number(row, names[0]), number(row, names[1])) for row in rows]
    return [(rate, nll) for rate, nll in found if rate is not None and nll is not None]


def rate_distortion(medium: Medium, runs: Sequence[Run], looks: Sequence[Curve]) -> Chart | str:
    """Draw NLL against rate, with lines along which the ELBO is the same; `looks` are the curves without their points."""
    lines = [look._replace(points=path_of(run), opacity=0.6) for run, look in zip(runs, looks, strict=True)]
    paths = [line.points for line in lines if line.points]
    if not paths:
        return "no run has a rate and an NLL"
    # Where the runs ended up, and twice as far above; how they began lies beyond the edge.
    ends = [path[-1][1] for path in paths]
    nlls = [nll for path in paths for _, nll in path[len(path) // 10 :]]
    low, high = min([*ends, *nlls]), max(ends)
    reach = max(high - low, 0.25 * abs(high), 1e-6)
    bottom, top = robust_span([low, min(max(nlls), high + reach)])
    right = 1.06 * max(rate for path in paths for rate, nll in path if nll <= top)
    guides = []
    for total in MaxNLocator(8).tick_values(bottom, top + right):
        start, end = max(0.0, total - top), min(right, total - bottom)
        if end > start:
            guides.append([(start, total - start), (end, total - end)])
    title, x_label = "Distortion (reconstruction NLL) against rate", "rate: KL, nats per sequence"
    return curves(medium, title, lines, y_label="NLL", x_label=x_label, x=(0.0, right), y=(bottom, top), guides=guides)
