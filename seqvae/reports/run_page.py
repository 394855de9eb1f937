"""A run directory -> the report on it, one HTML page: first what it came to and what to do, then everything that it rests on."""

from seqvae.reports.page import (
    MOST_BYTES,
    TABLE_ROWS,
    embedded,
    fold,
    grid,
    page,
    pairs,
    paragraph,
    prose,
    said,
    section,
    table,
)
from seqvae.reports.run_directory import Run
from seqvae.reports.run_figures import collapse_figures, latent_figures, length_figure, loss_figures, speed_figure
from seqvae.reports.run_lines import row_in, text, texts
from seqvae.reports.run_story import GIVEN_UP, Story, moment, tell
from seqvae.reports.run_tables import (
    bottleneck,
    data_rows,
    differing_settings,
    environment_rows,
    evaluation_tables,
    name_rows,
    performance_rows,
    shown,
    six_numbers,
    split_rows,
    survived_rows,
    verdict_rows,
)

MISSING = {
    "config.yaml": "the settings",
    "environment.json": "what it ran on",
    "run.json": "its data in figures and its defaults (runs of older versions have none)",
    "metrics.csv": "loss and validation",
    "events.jsonl": "verdicts with their evidence, and what happened",
    "posterior.jsonl": "all readings of the posterior",
    "throughput.jsonl": "figures of speed",
    "samples": "samples (the first come with the first validation)",
}


def run_page(run: Run, now: float) -> str:
    """`now`: seconds since 1970. A page that would be too large goes without its picture."""
    made = _made(run, now, has_picture=True)
    return made if len(made.encode()) <= MOST_BYTES else _made(run, now, has_picture=False)


def _made(run: Run, now: float, *, has_picture: bool) -> str:
    story = tell(run, now)
    body = [
        f'<header><p class="run">{said(run.name)}</p></header>',
        head(story),
        tiles(run),
        section("Loss", [grid(loss_figures(run))]) or _empty("Loss", "No metrics.csv, or nothing in it yet."),
        _collapse(run),
        section("Latents", [grid(latent_figures(run))]),
        section("Measured on whole splits", _evaluations(run)),
        _samples(run, has_picture=has_picture),
        _data(run),
        _performance(run),
        _settings(run),
        section("Environment", [_command(run), pairs(environment_rows(run))]),
        _survived(run),
        _footer(run, now),
    ]
    return page(f"{run.name}: {story.verdict}", body)


def head(story: Story) -> str:
    """Verdict, why, how far, what next."""
    advice = "".join(f"<li>{prose(one, 600)}</li>" for one in story.next)
    following = f'<div class="next"><b>What to do next</b><ul>{advice}</ul></div>' if advice else ""
    return (
        f'<div class="verdict {story.tone}"><p class="word">{said(story.verdict)}</p><h1>{said(story.sentence)}.</h1>'
        f"{paragraph(story.why)}{paragraph(story.state, 'state')}{following}</div>"
    )


def tiles(run: Run) -> str:
    cells = "".join(
        f'<div><dt>{said(name)}</dt><dd>{said(value)}<span class="unit">{said(below)}</span></dd></div>'
        for name, value, below in six_numbers(run)
    )
    return f'<dl class="six">{cells}</dl>'


def _collapse(run: Run) -> str:
    if not run.is_monitored:
        return _empty("Collapse", f"{GIVEN_UP}.")
    if not run.readings:
        return _empty("Collapse", "There is no reading of the posterior (posterior.jsonl) yet.")
    rows = verdict_rows(run)
    counted = (
        f"All {len(rows)} verdicts" if len(rows) <= TABLE_ROWS else f"The first {TABLE_ROWS} of {len(rows):,} verdicts"
    )
    verdicts = table(("from step", "verdict", "evidence"), rows, numbers=(0,), look="full first-short")
    folded = verdicts if len(rows) <= 4 else fold(counted, verdicts)
    return section("Collapse", [grid(collapse_figures(run)), folded])


def _evaluations(run: Run) -> list[str]:
    return [
        f"<h3>{said(title)}</h3>" + table(("", "value", "±", ""), rows, numbers=(1, 2))
        for title, rows in evaluation_tables(run)
    ]


def _samples(run: Run, *, has_picture: bool) -> str:
    if run.preview is not None:
        preview = run.preview
        numbered = [[str(place), *pair] for place, pair in enumerate(preview.pairs, 1)]
        drawn = [[str(place), one] for place, one in enumerate(preview.samples, 1)]
        made_of = table(("", "original", "reconstruction"), numbered, look="mono full", most=12)
        made_up = table(("", "drawn from the prior"), drawn, look="mono full", most=12)
        return section("Samples against data", [made_of, made_up], remark=f"{preview.title}.")
    if run.picture is not None:
        shown_here = embedded(run.picture, "Originals, reconstructions and samples") if has_picture else ""
        where = f"samples/{run.picture.name}"
        left_out = "" if shown_here else f"The picture is too large for this page: {where}."
        return section("Samples against data", [shown_here or paragraph(left_out)], remark=where if shown_here else "")
    return _empty("Samples against data", "None yet: they come with a validation.")


def _data(run: Run) -> str:
    data = row_in(run.facts, "data")
    if not data:
        return _empty("Data quality", "The run did not write down what its data are like (run.json).")
    splits = table(("split", "sequences", "steps", "mean length", "longest"), split_rows(run), numbers=(1, 2, 3, 4))
    told = [note.removeprefix("note: ") for note in texts(data, "notes")[:40]]
    notes = "".join(f"<li>{prose(note)}</li>" for note in told)
    listed = (
        f"<h3>Worth knowing</h3><ul>{notes}</ul>"
        if notes
        else paragraph("Nothing in them had to be mended or left out.")
    )
    names = name_rows(run)
    columns = ("name", "mean", "standard deviation", "in the training split")
    named = fold(f"{len(names)} {_noun(run)}", table(columns, names, numbers=(1, 2, 3))) if names else ""
    side = f"<div>{splits}{listed}</div>"
    return section("Data quality", [pairs(data_rows(run)), grid([side, length_figure(run)]), named])


def _noun(run: Run) -> str:
    return "features" if text(row_in(run.facts, "data"), "kind") == "vectors" else "variables"


def _performance(run: Run) -> str:
    rows = performance_rows(run)
    if not rows:
        return _empty("Performance", "No figures of speed yet.")
    found = paragraph(bottleneck(run))
    if not run.is_monitored:
        found = paragraph("Without monitoring nobody tells where the time goes; this is what the progress says.")
    return section("Performance", [found, grid([f"<div>{pairs(rows)}</div>", speed_figure(run)])])


def _settings(run: Run) -> str:
    every = table(
        ("setting", "value"), [[f"--{name}", shown(value)] for name, value in run.settings.items()], look="mono"
    )
    differing = differing_settings(run)
    if differing is None:
        told = paragraph("Which of them differ from the defaults is not known (run.json).")
    elif differing:
        told = table(("setting", "here", "default"), differing, look="mono")
    else:
        told = paragraph("All are the command's defaults.")
    model = row_in(run.facts, "header")
    described = [(name, text(model, name)) for name in ("model", "objective", "training")]
    return section("Settings that differ from the defaults", [told, pairs(described), fold("All settings", every)])


def _command(run: Run) -> str:
    command = text(run.environment, "command")
    return f'<p class="code">{said(command, 2000)}</p>' if command else ""


def _survived(run: Run) -> str:
    rows, more = survived_rows(run)
    if not rows:
        return _empty("What it survived", "Nothing out of the ordinary was noted.")
    happened = table(("UTC", "step", "what", ""), rows, numbers=(1,), look="full first-short")
    return section("What it survived", [happened, paragraph(more)])


def _footer(run: Run, now: float) -> str:
    gone = [f"{name} ({MISSING[name]})" for name in run.missing]
    missing = f"<p>Not there, or not readable: {said('; '.join(gone), 1000)}.</p>" if gone else ""
    return f"<footer>{missing}<p>Written {moment(now)} from the files of this run's directory.</p></footer>"


def _empty(title: str, why: str) -> str:
    return section(title, [paragraph(why, "remark")])
