"""Several runs -> one HTML page: how each of them is, their curves over one another, rate against distortion, what differs.

Runs keep their colour and dash throughout the page; the first six colours differ, then dashes do.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from seqvae.reports.page import Key, figure, fold, grid, page, paragraph, said, section, table
from seqvae.reports.run_directory import Run
from seqvae.reports.run_figures import column
from seqvae.reports.run_lines import number, row_in, rows_in, text
from seqvae.reports.run_story import Story, moment, tell
from seqvae.reports.run_tables import shown, six_numbers
from seqvae.reports.svg_chart import Chart, Line, draw
from seqvae.reports.svg_scale import robust_span, spanned, ticks
from seqvae.text import clip, visible

COLOURS, DASHES = 6, ("", " dashed", " dotted")
NAME_WIDTH = 40
Points = list[tuple[float, float | None]]


def compare_page(runs: Sequence[Run], now: float) -> str:
    """`now`: seconds since 1970."""
    names, stories = names_of(runs), [tell(run, now) for run in runs]
    body = [
        f"<header><h1>{len(runs)} runs compared</h1></header>",
        section("How they are", [_overview(runs, names, stories), _verdicts(names, stories)]),
        section("Rate and distortion", [grid([_rate_distortion(runs, names), _elbo(runs, names)])]),
        section("Over the run", [grid([part for part in _overlays(runs, names) if part])]),
        _settings(runs, names),
        f"<footer><p>Written {moment(now)} from the files of these runs' directories.</p></footer>",
    ]
    return page(f"{len(runs)} runs compared", body)


def names_of(runs: Sequence[Run]) -> list[str]:
    """Directories' names; those that occur twice with the folder above."""
    times = Counter(run.name for run in runs)
    full = [run.directory.absolute() for run in runs]
    names = [
        f"{path.parent.name}/{path.name}" if times[run.name] > 1 else run.name
        for run, path in zip(runs, full, strict=True)
    ]
    return [clip(visible(name), NAME_WIDTH) for name in names]


def different_data(runs: Sequence[Run]) -> list[str]:
    """What tells that the runs were not validated on the same sequences; where it is not known, nothing is said."""
    found = [
        f"--{name}"
        for name in ("data_dir", "tokenizer")
        if len({run.settings[name] for run in runs if name in run.settings}) > 1
    ]
    data = [row_in(run.facts, "data") for run in runs if row_in(run.facts, "data")]
    if len({text(one, "kind") for one in data}) > 1:
        found.append("the kind of data")
    counts = [
        [(text(row, "split"), number(row, "sequences"), number(row, "steps")) for row in rows_in(one, "splits")]
        for one in data
    ]
    if any(one != counts[0] for one in counts):
        found.append("the number of sequences or steps")
    return found


def look_of(place: int) -> str:
    """
    >>> look_of(0), look_of(7)
    ('c1', 'c2 dashed')
    """
    return f"c{place % COLOURS + 1}{DASHES[place // COLOURS % len(DASHES)]}"


def path_of(run: Run) -> Points:
    """Rate and NLL of each validation, in nats a sequence; where there are none, of each reading."""
    rows, names = (run.validations, ("valid_kl", "valid_nll")) if run.validations else (run.readings, ("rate", "nll"))
    found = [(number(row, names[0]), number(row, names[1])) for row in rows]
    return [(rate, nll) for rate, nll in found if rate is not None and nll is not None]


def _overview(runs: Sequence[Run], names: Sequence[str], stories: Sequence[Story]) -> str:
    different = different_data(runs)
    warning = f"ELBOs of different data cannot be compared: these runs differ in {', '.join(different)}."
    rows = []
    for run, name, story in zip(runs, names, stories, strict=True):
        numbers = {title: value for title, value, _ in six_numbers(run)}
        told = [
            numbers.get(title, "") for title in ("Rate", "Mutual information", "Decoder use", "Active units", "Speed")
        ]
        told[0] = told[0] or numbers.get("Validation KL", "")
        rows.append([name, story.verdict, numbers["Validation ELBO"], *told, f"{run.step:,}"])
    heads = ("run", "verdict", "ELBO", "rate", "information", "decoder use", "active units", "speed", "step")
    overview = table(heads, rows, numbers=range(2, len(heads)), look="first-short")
    return overview + (paragraph(warning) if different else "")


def _verdicts(names: Sequence[str], stories: Sequence[Story]) -> str:
    return "".join(
        f'<div class="verdict small {story.tone}"><p class="word">{said(name)}: {said(story.verdict)}</p>'
        f"<p><b>{said(story.sentence)}.</b> {said(story.why, 600)}</p>{paragraph(story.state, 'state')}</div>"
        for name, story in zip(names, stories, strict=True)
    )


def _rate_distortion(runs: Sequence[Run], names: Sequence[str]) -> str:
    paths = [path_of(run) for run in runs]
    if not any(paths):
        return ""
    rates = [rate for path in paths for rate, _ in path]
    ends = [path[-1] for path in paths if path]
    nlls = [nll for path in paths for _, nll in path[len(path) // 10 :] if nll is not None]
    x, y = (0.0, spanned(rates)[1]), _near([nll for _, nll in ends if nll is not None], nlls)
    chart = Chart(
        "Rate against distortion",
        [Line(_below(path, y[1]), f"{look_of(place)} faint", marks="ends") for place, path in enumerate(paths) if path],
        x,
        y,
        "rate: KL, nats a sequence",
        "NLL",
        guides=[Line(line, "mute dotted thin") for line in _equal_elbos(x, y)],
    )
    keys = [Key(look_of(place), name) for place, name in enumerate(names) if paths[place]]
    better = "between different data that says nothing" if different_data(runs) else "the lower left is better"
    remark = (
        "Each path leads through the validations to its ring. Along a dotted line the ELBO is the same: "
        f"{better}, and a run at rate 0 does without its latent."
    )
    return figure("Distortion (reconstruction NLL) against rate", draw(chart), keys, remark)


def _near(ends: Sequence[float], all_of_them: Sequence[float]) -> tuple[float, float]:
    """Where the runs ended up, and twice as far above; how they began lies beyond the edge."""
    low, high = min([*ends, *all_of_them]), max(ends)
    reach = max(high - low, 0.25 * abs(high), 1e-6)
    return spanned([low, min(max(all_of_them), high + reach)])


def _below(path: Points, top: float) -> Points:
    return [(rate, nll if nll is not None and nll <= top else None) for rate, nll in path]


def _equal_elbos(x: tuple[float, float], y: tuple[float, float]) -> list[Points]:
    """Where NLL and KL have one sum."""
    lines: list[Points] = []
    for total in ticks(y[0], y[1] + x[1], 8):
        left, right = max(x[0], total - y[1]), min(x[1], total - y[0])
        if right > left:
            lines.append([(left, total - left), (right, total - right)])
    return lines


def _elbo(runs: Sequence[Run], names: Sequence[str]) -> str:
    return _overlay("Validation ELBO, nats a sequence", runs, names, lambda run: column(run.validations, "valid_elbo"))


def _overlays(runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    told = (
        ("Rate, nats", "rate"),
        ("Mutual information, nats", "mutual_information"),
        ("Decoder use, nats", "decoder_use"),
        ("Active units", "active_units"),
    )
    drawn = [_overlay(title, runs, names, _reader(name), is_log=name != "active_units") for title, name in told]
    nll = _overlay(
        "Training NLL of a step, nats", runs, names, lambda run: column(run.training, "nll_per_step"), marks=""
    )
    return [*drawn, nll]


def _reader(name: str) -> Callable[[Run], Points]:
    return lambda run: column(run.readings, name)


def _overlay(
    title: str,
    runs: Sequence[Run],
    names: Sequence[str],
    read: Callable[[Run], Points],
    *,
    is_log: bool = False,
    marks: str = "ends",
) -> str:
    curves = [read(run) for run in runs]
    values = [value for curve in curves for _, value in curve if value is not None]
    if not values:
        return ""
    y = (
        (min([-0.12, *(1.3 * v for v in values)]), max([12.0, *(1.3 * v for v in values)]))
        if is_log
        else robust_span(values)
    )
    lines = [Line(curve, look_of(place), marks) for place, curve in enumerate(curves) if curve]
    end = max(curve[-1][0] for curve in curves if curve)
    chart = Chart(title, lines, (0.0, end), y, "optimizer step", "", is_log=is_log)
    keys = [Key(look_of(place), name) for place, name in enumerate(names) if curves[place]]
    return figure(title, draw(chart), keys)


def _settings(runs: Sequence[Run], names: Sequence[str]) -> str:
    every = dict.fromkeys(name for run in runs for name in run.settings)
    missing = "(not told)"
    values = {name: [shown(run.settings[name]) if name in run.settings else missing for run in runs] for name in every}
    own = {"run_name", "output_dir", "resume"}
    differing = [[f"--{name}", *row] for name, row in values.items() if len(set(row)) > 1 and name not in own]
    alike = [[f"--{name}", row[0]] for name, row in values.items() if len(set(row)) == 1]
    told = table(("setting", *names), differing, look="mono") or paragraph("None: all settings are the same.")
    shared = fold(f"{len(alike)} settings that are the same", table(("setting", "value"), alike, look="mono"))
    return section("Settings that differ", [told, shared])
