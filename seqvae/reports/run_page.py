"""A `Run` -> its report: one HTML page without script or network, readable on a phone, in the dark and on paper.

First what the run came to and what to do, then everything that it rests on. The markup is in templates/. All text is escaped, made
visible and cut there (`upto`, `prose`): nothing in it can become markup, steer a terminal or fill the page. The page's own style
is let through its content policy by its hash; everything else, but pictures inside the page, is forbidden.
"""

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from seqvae.reports import charts
from seqvae.reports.figures import page_figure
from seqvae.reports.read_run import (
    CONFIG,
    METRICS,
    READINGS,
    SAMPLES,
    THROUGHPUT,
    Row,
    Run,
    Shown,
    history_of,
    number,
    numbers,
    row_in,
    rows_in,
    text,
    texts,
    whole,
)
from seqvae.reports.run_files import ENVIRONMENT, EVENTS, FACTS, RESCUE
from seqvae.reports.story import GIVEN_UP, moment, story_of
from seqvae.text import brief, counted, duration, percent, visible

MOST_BYTES = 2_000_000
"""Size of a page."""
MOST_PICTURE_BYTES = 900_000
MOST_TEXT = 400
"""Characters of one piece of text from outside, where a template names no other number."""
MOST_SHOWN = 40
"""Events of one kind that are listed."""
MISSING = {
    CONFIG: "the settings",
    ENVIRONMENT: "what it ran on",
    FACTS: "its data in figures and its defaults (runs of older versions have none)",
    METRICS: "loss and validation",
    EVENTS: "verdicts with their evidence, and what happened",
    READINGS: "all readings of the posterior",
    THROUGHPUT: "figures of speed",
    SAMPLES: "samples (the first come with the first validation)",
}
SURVIVED = {
    "resumed": "went on from a checkpoint",
    "interrupted": "was interrupted",
    "step_skipped": "left out a step that came to NaN or infinity",
    "rolled_back": "went back to an earlier checkpoint",
    "out_of_memory": "ran out of memory, and went on in smaller parts",
    "loader_restarted": "the process that prepares the data was started again",
    "not_saved": "a checkpoint could not be written",
    "decoder_not_asked": "the decoder could not be probed",
    "failed": "was ended by an error",
    "diverged": "came to NaN or infinity for good",
    "stopped": "was stopped, as its posterior had collapsed",
}
GPU_UNKNOWN = "not measured: pip install nvidia-ml-py (AMD: amdsmi)"
OWN_SETTINGS = ("run_name", "output_dir", "resume")
"""Settings that differ between any two runs."""
NOTABLE_WAIT, NOTABLE_PADDING, NOTABLE_OTHERS, LITTLE_OF_PEAK = 0.05, 0.10, 0.10, 0.3
"""Shares from which something is worth a change."""
TEMPLATES = Path(__file__).parent / "templates"
_FLAG = re.compile(r"--[a-z]\w*(?: (?:[\d.:]+\b|cyclical|linear|parallel|32-true|stop)(?![\w-]))?")


def report_page(run: Run, now: float) -> str:
    """Write the report of a run. `now`: seconds since 1970. A page that would be too large goes without its picture."""
    story = story_of(run, now)
    history = history_of(run.readings, run.readings_taken) if run.is_monitored else None
    drawn = {
        "elbo": page_figure("elbo", charts.validation_elbo, run),
        "loss": page_figure("loss", charts.training_loss, run),
        "timeline": history and page_figure("timeline", charts.timeline, history),
        "active_units": history and page_figure("active_units", charts.active_units, history),
        "kl_per_dim": history and page_figure("kl_per_dim", charts.kl_per_dim_chart, history),
        "last_kl": page_figure("last_kl", charts.last_kl, run),
        "posterior_pca": run.posteriors and page_figure("posterior_pca", charts.posterior_pca, run.posteriors),
        "latent_places": run.latents
        and page_figure("latent_places", charts.latent_places, run.latents, run.unit, run.label),
        "lengths": page_figure("lengths", charts.sequence_lengths, run),
        "speed": page_figure("speed", charts.speed, run),
    }
    data, header, preview = row_in(run.facts, "data"), row_in(run.facts, "header"), run.preview
    splits = rows_in(data, "splits")
    picture = b""
    if run.picture and not preview:
        with suppress(OSError):
            picture = run.picture.read_bytes()
    if len(picture) > MOST_PICTURE_BYTES or not picture.startswith(b"\x89PNG"):
        picture = b""
    survived, survived_more = survived_rows(run)
    unmonitored = "Without monitoring nothing measures where the time goes; this is what the progress reports."
    content = {
        "title": f"{run.name}: {story.verdict}",
        "run": run,
        "story": story,
        "six_numbers": six_numbers(run),
        "charts": drawn,
        "neighbours": neighbour_rows(run),
        **moves_shown(run),
        "classes": class_rows(run),
        "are_drawn": any(one.original.is_drawing for one in run.latents.by_class) if run.latents else False,
        "label": run.label,
        "apart": apart_line(run),
        "feature": run.latents.feature if run.latents else "",
        "labels_train": labels_train(run),
        "walk": walk_shown(run),
        "given_up": GIVEN_UP,
        "verdicts": [
            [f"{whole(row, 'step') or 0:,}", text(row, "verdict").replace("_", " "), text(row, "evidence")]
            for row in run.events
            if row["event"] == "verdict"
        ],
        "levels": [level_below(name, level) for name, level in list(run.levels.items())[1:]],
        "rescue_rows": rescue_rows(run),
        "rescued": rescued(run),
        "evaluations": evaluation_tables(run),
        "previews": [[str(place), *pair] for place, pair in enumerate(preview.pairs, 1)] if preview else [],
        "samples": [[str(place), one] for place, one in enumerate(preview.samples, 1)] if preview else [],
        "picture": Markup(base64.b64encode(picture).decode("ascii")),
        "has_data": bool(data),
        "data_rows": [
            ("layout", text(data, "layout")),
            ("batches", text(data, "batches")),
            ("classes", "" if splits else ", ".join(texts(data, "classes")[:20])),
        ],
        "splits": [
            [text(row, "split"), *(_value(row, name) for name in ("sequences", "steps", "mean_length", "longest"))]
            for row in splits
        ],
        "notes": [note.removeprefix("note: ") for note in texts(data, "notes")[:40]],
        "names": [
            [text(row, "name"), _value(row, "mean"), _value(row, "std"), text(row, "told")]
            for row in rows_in(data, "names")
        ],
        "noun": "features" if text(data, "kind") == "vectors" else "variables",
        "speed_rows": speed_rows(run),
        "bottleneck": bottleneck(run) if run.is_monitored else unmonitored,
        "differing": differing_settings(run),
        "settings": [[f"--{name}", shown(value)] for name, value in run.settings.items()],
        "model_rows": [(name, text(header, name)) for name in ("model", "objective", "training")],
        "command": text(run.environment, "command"),
        "environment_rows": environment_rows(run),
        "survived": survived,
        "survived_more": survived_more,
        "missing": [f"{name} ({MISSING[name]})" for name in run.missing],
        "written": moment(now),
    }
    page = render("run.html.j2", **content)
    return page if len(page.encode()) <= MOST_BYTES else render("run.html.j2", **content | {"picture": ""})


def moves_shown(run: Run) -> dict[str, Any]:
    """Return what is decoded while dimensions are moved: as curves, in words, or as drawings."""
    moved = run.latents.moved if run.latents else ()
    curves = [
        page_figure(f"moved{place}", charts.moved_dimension, one, run.latents.time_label)
        for place, one in enumerate(moved)
        if run.latents and any(shown.points and not shown.is_drawing for shown in one.decoded)
    ]
    return {
        "drawn_moves": [one for one in curves if one],
        "written_moves": [
            (one.dimension, [[charts.move_name(move), each.text] for move, each in zip(*one[1:3], strict=True)])
            for one in moved
            if any(each.text for each in one.decoded)
        ],
        "sketched_moves": [
            (f"dimension {one.dimension}", sketches(one.decoded, [charts.move_name(move) for move in one.moves]))
            for one in moved
            if any(each.is_drawing for each in one.decoded)
        ],
    }


def level_below(name: str, run: Run) -> dict[str, Any]:
    """Return what the section of one of the lower levels of latents holds."""
    history = history_of(run.readings, run.readings_taken)
    return {
        "title": f"{name.capitalize()} latents",
        "numbers": list(six_numbers(run)[1:5]) if run.readings else [],
        "charts": [
            history and page_figure(f"{name}_timeline", charts.timeline, history),
            history and page_figure(f"{name}_active_units", charts.active_units, history),
            history and page_figure(f"{name}_kl_per_dim", charts.kl_per_dim_chart, history),
            run.posteriors and page_figure(f"{name}_posterior_pca", charts.posterior_pca, run.posteriors),
        ],
        "verdicts": [
            [f"{whole(row, 'step') or 0:,}", text(row, "verdict").replace("_", " "), text(row, "evidence")]
            for row in run.events
            if row["event"] == "verdict"
        ],
    }


def upto(value: object, most: int = MOST_TEXT) -> Markup:
    """Return text that is safe on a page: what is not printable spelled out, escaped, and cut.

    >>> str(upto("<b>\\x1b[2J")), str(upto("long" * 500, 8))
    ('&lt;b&gt;\\\\x1b[2J', 'longlo..')
    """
    shown = visible(str(value)[: most + 1])
    return escape(shown if len(shown) <= most else f"{shown[: most - 2]}..")


def prose(value: object, most: int = MOST_TEXT) -> Markup:
    """Set flags apart, each in one piece.

    >>> str(prose("try --free_bits 0.25"))
    'try <code>--free_bits 0.25</code>'
    """
    return Markup(_FLAG.sub(r"<code>\g<0></code>", str(upto(value, most))))


_STYLE = (TEMPLATES / "style.css").read_text(encoding="utf-8")
_PAGES = Environment(
    loader=FileSystemLoader(TEMPLATES),
    autoescape=True,
    finalize=lambda value: value if isinstance(value, Markup) else upto(value),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_PAGES.globals |= {
    "style": Markup(_STYLE),
    "style_hash": Markup("sha256-" + base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode("ascii")),
}
_PAGES.filters |= {"upto": upto, "prose": prose}


def render(template: str, **content: Any) -> str:
    """Fill a template of templates/."""
    return _PAGES.get_template(template).render(content) + "\n"


# --- Numbers, tables and sentences ----------------------------------------------------------------------------------


def six_numbers(run: Run) -> list[tuple[str, str, str]]:
    """Return name, value and unit of the numbers that matter most."""

    def known(value: float | None) -> str:
        return "none" if value is None else brief(value)

    last = run.validations[-1] if run.validations else {}
    elbo, nll, kl = (number(last, name) for name in ("valid_elbo", "valid_nll", "valid_kl"))
    parts = f"NLL {brief(nll)} + KL {brief(kl)}, nats per sequence" if nll is not None and kl is not None else ""
    on = run.validated_on(last)
    first = ("Validation ELBO", known(elbo), (parts or "nats per sequence") + (f", {on}" if on else ""))
    speed = _typical(run.throughput, "real_steps_per_second") or _typical(run.training, "steps_per_second")
    pace = ("Speed", known(speed), f"real {run.unit}s per second, median")
    if not run.readings:
        seconds = number((run.training or run.validations or [{}])[-1], "seconds")
        return [
            first,
            ("Validation KL", known(kl), "nats per sequence"),
            (f"NLL per {run.unit}", known(number(last, "valid_nll_per_step")), "nats, validation"),
            ("Steps", f"{run.step:,}", "of the optimizer"),
            ("Time", "none" if seconds is None else duration(seconds), "of the run"),
            pace,
        ]
    reading, probed = run.readings[-1], run.last_probe
    error, cap = number(probed, "decoder_use_error"), number(reading, "mutual_information_cap")
    rate_error = number(reading, "rate_error")
    active, of = whole(reading, "active_units"), len(numbers(reading, "kl_per_dim"))
    scope = "step" if text(reading, "scope") == "step" else "sequence"
    floor, at_floor = at_free_bits(run)
    sequences, steps = whole(probed, "decoder_use_sequences"), whole(probed, "decoder_use_steps")
    rests_on = ("" if sequences is None else f", of {counted(sequences, 'sequence')}") + (
        "" if steps is None else f" ({counted(steps, run.unit)})"
    )
    probe = f"nats, at step {whole(probed, 'step') or 0:,}{rests_on}" if probed else "never probed"
    information = known(number(reading, "mutual_information"))
    in_use, codes = None, whole(reading, "codebook_size")
    if codes:
        share, perplexity = number(reading, "codes_in_use"), known(number(reading, "code_perplexity"))
        in_use = ("Codes in use", "none" if share is None else percent(share), f"of {codes:,}, perplexity {perplexity}")
    return [
        first,
        (
            "Rate",
            known(number(reading, "rate")),
            (f"± {brief(rate_error)} " if rate_error else "")
            + f"nats per {scope}, KL to the prior, latest in training{floor}",
        ),
        ("Mutual information", information, f"nats, of at most {brief(cap)}" if cap is not None else "nats"),
        ("Decoder use", known(number(probed, "decoder_use")), (f"± {brief(error)} " if error else "") + probe),
        in_use
        or (
            "Active units",
            "none" if active is None else f"{active:,} of {of:,}",
            f"dimensions whose mean moves with the input, latest in training{at_floor}",
        ),
        pace,
    ]


AT_FLOOR = 1.3
"""Times its free bits up to which a KL is at them: it hovers there, between 0.7 and 1.26 times in runs of 150 to 1,700 steps."""


def at_free_bits(run: Run) -> tuple[str, str]:
    """Return what is to be said where the last reading's rate lies at its free bits, and how many dimensions do; empty for none."""
    reading = run.readings[-1]
    kl_Z = [value or 0.0 for value in numbers(reading, "kl_per_dim")]
    free = row_in(row_in(run.facts, "free_bits"), "step" if text(reading, "scope") == "step" else "sequence")
    nats, together = number(free, "nats") or 0.0, max(whole(free, "shared_by") or 1, 1)
    floors = [floor for row in run.events if row["event"] == RESCUE and (floor := number(row, "floor")) is not None]
    if floors and kl_Z:
        nats = floors[-1] / len(kl_Z)
    rate = number(reading, "rate")
    if not nats or rate is None:
        return "", ""
    floor = nats * len(kl_Z)
    at_all = (
        f"; the free bits alone are {brief(floor)}, {brief(nats)} for each of {len(kl_Z):,} dimensions"
        if rate <= AT_FLOOR * floor
        else ""
    )
    if number(reading, "rate_error"):  # the KL of all dimensions together has their free bits
        return at_all, ""
    groups = [kl_Z[place : place + together] for place in range(0, len(kl_Z), together)]
    count = sum(len(group) for group in groups if sum(group) <= AT_FLOOR * nats * len(group))
    return at_all, f"; {count:,} {'is' if count == 1 else 'are'} at the free {brief(nats)} nats" if count else ""


def labels_train(run: Run) -> bool:
    """Return whether a loss on the labels had a part in the training."""
    return run.settings.get("label_weight", "") not in (None, "0", "0.0")


def apart_line(run: Run) -> str:
    """Answer whether the classes differ in the latents; empty where it cannot be said."""
    found = run.latents.told_apart if run.latents else None
    if found is None:
        return ""
    chance = 1 / found.classes
    score, low, high = (f"{100 * share:.0f} %" for share in (found.score, found.low, found.high))
    of = f' of "{run.label}"' if run.label != "class" else ""
    answer = "Yes" if found.low > chance else "Not that it shows here"
    trained = " The labels had a part in the training (--label_weight)." if labels_train(run) else ""
    return (
        f"Do the classes{of} differ in the latents? {answer}: the nearest mean of a class is a sequence's own in {score} of the "
        f"cases (95 %: {low} to {high}; by chance {100 * chance:.0f} %), as a mean over {found.classes} classes, in tenfold "
        f"cross-validation of {counted(found.sequences, 'sequence')}.{trained}"
    )


def neighbour_rows(run: Run) -> list[list[Markup]]:
    """Return a sequence and its nearest neighbours in each row, as text or as the line of a feature."""
    rows = []
    for one in run.latents.neighbours if run.latents else ():
        among = [one.of, *one.nearest]
        is_line = bool(one.of.points) and not one.of.is_drawing
        heads = [one.name if is_line else "", *(brief(far or 0.0) for far in one.distances)]
        rows.append([_sequence(run, each, among, more) for each, more in zip(among, heads, strict=True)])
    return rows


def _sequence(run: Run, one: Shown, among: Sequence[Shown], more: str) -> Markup:
    """Return a sequence as a cell of a table: its id, its class and what else is known of it, and its text, drawing or line."""
    parts = [one.id, f"{run.label}: {one.group}" if one.group else "", more]
    head = Markup(", ").join(upto(part, 40) for part in parts if part)
    return Markup('<span class="remark">{}</span><br>').format(head) + _content(one, among)


def _content(one: Shown, among: Sequence[Shown]) -> Markup:
    """Return the text of a sequence, or its drawing or its line, of one scale with the sequences among which it stands."""
    if one.text or not one.points:
        return upto(one.text, 240)
    if one.is_drawing:
        (middle_x, middle_y), scale = _middle(one.points), SKETCH / 2 / reach_of(among)
        places = " ".join(f"{scale * (x - middle_x):.3g},{scale * (middle_y - y):.3g}" for x, y in one.points)
        side = SKETCH + 4
        sheet = f'<svg class="sketch" viewBox="{-side / 2:g} {-side / 2:g} {side:g} {side:g}" aria-hidden="true">'
        return Markup(sheet + '<polyline points="{}"/></svg>').format(places)
    values = [value for each in among if not each.is_drawing for _, value in each.points]
    line = '<svg class="spark" viewBox="-2 -2 100 28" aria-hidden="true"><polyline points="{}"/></svg>'
    return Markup(line).format(spark(one.points, (min(values), max(values))))


SKETCH = 60.0
"""Width and height of a drawing."""


def _middle(points: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    return tuple((min(along) + max(along)) / 2 for along in zip(*points, strict=True))


def reach_of(shown: Sequence[Shown]) -> float:
    """Return how far drawings that are to be compared reach from their middles at most."""
    spans = [
        max(along) - min(along)
        for one in shown
        if one.is_drawing and one.points
        for along in zip(*one.points, strict=True)
    ]
    return max(spans, default=0.0) / 2 or 1.0


def sketches(shown: Sequence[Shown], names: Sequence[str]) -> list[tuple[str, Markup]]:
    """Return drawings or lines of one scale, each with its name."""
    return [(name, _content(one, shown)) for name, one in zip(names, shown, strict=True)]


def class_rows(run: Run) -> list[list[Markup | str]]:
    """Return in each row a class, a sequence of it, and what was drawn for it."""
    by_class = run.latents.by_class if run.latents else ()
    among = [one for each in by_class for one in (each.original, *each.drawn)]
    return [[each.name, *(_content(one, among) for one in (each.original, *each.drawn))] for each in by_class]


def walk_shown(run: Run) -> dict[str, Any] | None:
    """Return the ends of the walk and what is decoded between them: pictures with their places on the way, or rows of a table."""
    walk = run.latents.walk if run.latents else None
    if walk is None:
        return None
    places = [f"{share:.0%}{', reconstruction' if share in (0, 1) else ''}" for share in walk.shares]
    ends = [f"{one.id} ({run.label}: {one.group})" if one.group else one.id for one in walk.ends]
    shown = [walk.ends[0], *walk.decoded, walk.ends[1]]
    names = [ends[0], *places, ends[1]]
    if any(one.points for one in shown):
        return {"ends": ends, "sketches": sketches(shown, names), "rows": []}
    rows = [[name, _content(one, shown)] for name, one in zip(names, shown, strict=True)]
    return {"ends": ends, "sketches": [], "rows": rows}


SPARK_WIDTH, SPARK_HEIGHT = 96.0, 24.0


def spark(points: Sequence[tuple[float, float]], span: tuple[float, float] | None = None) -> str:
    """Return the points of a polyline of SPARK_WIDTH x SPARK_HEIGHT, empty for fewer than two. `span`: lowest and highest value.

    A figure of matplotlib takes 60 ms, and a page of 100 runs would have 200 of them.

    >>> spark([(0, 1.0), (10, 2.0)])
    '0,24 96,0'
    """
    if len(points) < 2:
        return ""
    if span is None:
        low, high = charts.robust_span([value for _, value in points])
        room = (high - low) * 0.06 / 1.12  # without its border: a spark line has one of its own
        low, high = low + room, high - room
    else:
        low, high = span[0], max(span[1], span[0] + 1e-9)
    left, right = points[0][0], max(points[-1][0], points[0][0] + 1e-9)
    return " ".join(
        f"{SPARK_WIDTH * (step - left) / (right - left):.4g},"
        f"{SPARK_HEIGHT * (1 - (min(max(value, low), high) - low) / (high - low)):.3g}"
        for step, value in points
    )


def speed_rows(run: Run) -> list[tuple[str, str]]:
    """Return name and value of the figures of speed that are known."""
    rows, last = run.throughput, run.throughput[-1] if run.throughput else {}
    seconds = number((run.training or run.validations or [{}])[-1], "seconds")
    speed = _typical(rows, "real_steps_per_second") or _typical(run.training, "steps_per_second")
    sequences = _typical(rows, "sequences_per_second")
    shares = {
        "waiting for data": "waiting_share",
        "padding": "padding_share",
        "CPU, by this run": "cpu_utilisation",
        "CPU, by all programs": "machine_cpu_utilisation",
        "GPU": "gpu_utilisation",
        "share of the machine's peak": "share_of_peak",
    }
    on_gpu = any(number(row, "gpu_peak_memory_gib") is not None for row in rows)
    is_unknown = on_gpu and _typical(rows, "gpu_utilisation") is None
    memory = {"peak memory": "peak_memory_gib", "peak memory of the GPU": "gpu_peak_memory_gib"}
    found = [
        (f"real {run.unit}s per second", None if speed is None else brief(speed)),
        ("sequences per second", None if sequences is None else brief(sequences)),
        *((name, percent(value)) for name, of in shares.items() if (value := _typical(rows, of)) is not None),
        ("GPU", GPU_UNKNOWN if is_unknown else None),
        *((name, f"{value:.2f} GiB") for name, of in memory.items() if (value := number(last, of)) is not None),
        ("time so far", None if seconds is None else duration(seconds)),
    ]
    return [(name, value) for name, value in found if value]


def bottleneck(run: Run) -> str:
    """Say what holds the run back, and what to try; from the shares alone, where `seqvae profile` measures."""
    rows = run.throughput
    waiting, padding = _typical(rows, "waiting_share"), _typical(rows, "padding_share")
    if waiting is None or padding is None:
        return ""
    own, all_of_them = _typical(rows, "cpu_utilisation"), _typical(rows, "machine_cpu_utilisation")
    peak = _typical(rows, "share_of_peak")
    on_gpu = any(number(row, "gpu_peak_memory_gib") is not None for row in rows)
    more = " seqvae profile measures where an optimizer step goes, and, with --advise, what would be faster."
    if waiting > NOTABLE_WAIT and waiting >= padding:
        return f"Waiting for data: {percent(waiting)} of training time. Try --num_workers 2 or --cache_data.{more}"
    if padding > NOTABLE_PADDING:
        settings = run.settings
        tries = "smaller batches (--tokens_per_batch or --batch_size)"
        if settings.get("use_dynamic_padding") == "false":
            tries = "--use_dynamic_padding"
        elif settings.get("bucketing") == "false":
            tries = "--bucketing"
        elif settings.get("pad_grid") not in (None, "0"):
            tries = f"--pad_grid 0, or {tries}"
        return f"Padding: {percent(padding)} of all {run.unit}s that are computed on are not real. Try {tries}.{more}"
    if own is not None and all_of_them is not None and not on_gpu and all_of_them - own > NOTABLE_OTHERS:
        others = percent(all_of_them - own)
        return f"Other programs take about {others} of this machine: on a quiet one, all of this is faster.{more}"
    if peak is not None and peak < LITTLE_OF_PEAK:
        tries = "a larger --batch_size or --tokens_per_batch"
        return f"Small operations: {percent(peak)} of what large products of matrices reach here. Try {tries}.{more}"
    share = f", at {percent(peak)} of what large products reach here" if peak is not None else ""
    return f"The products themselves: next to no time goes into waiting or padding{share}.{more}"


def evaluation_tables(run: Run) -> list[tuple[str, list[list[str]]]]:
    """Return the newest evaluation of each checkpoint, step, data and split, and the newest probe of each label there.

    Each is a title and rows of name, value, error and note.
    """
    newest: dict[tuple[object, ...], tuple[str, list[list[str]]]] = {}
    for row in run.evaluations:
        checkpoint, data, split = (text(row, name) for name in ("checkpoint", "data", "split"))
        subject = (checkpoint, whole(row, "step"), data, split, text(row, "content"))
        where = " on ".join(part for part in (checkpoint, f"the {split} split" if split else "") if part)
        of, when = f" of {data}" if data else "", _time(row, "time")
        title = f"{where or 'a checkpoint'}{of}{f', {when}' if when else ''}"
        measured = [
            [
                text(one, "name"),
                _value(one, "value"),
                _value(one, "error"),
                text(one, "of"),
            ]
            for one in rows_in(row, "rows")
        ]
        probe = row_in(row, "probe")
        label = text(probe, "label")
        probed = [_probe_row(one) for one in rows_in(probe, "rows")]
        for key, heading, rows in (
            ("", title, measured),
            (label, f"{label}, {text(probe, 'metric')}: {title}", probed),
        ):
            if rows:
                newest[(*subject, key)] = heading, rows
    return list(newest.values())


def _probe_row(row: Row) -> list[str]:
    """Return a probe's name, score, no standard error, and the bounds of its 95 %."""
    score, low, high = ([*numbers(row, "score"), None, None, None])[:3]
    bounds = "" if low is None or high is None else f"95 %: {brief(low)} to {brief(high)}"
    return [f"probe of {text(row, 'features')}", "" if score is None else brief(score), "", bounds]


def differing_settings(run: Run) -> list[list[str]] | None:
    """Return name, value and default; None where the run did not write down its defaults."""
    defaults = row_in(run.facts, "defaults")
    if not defaults or not run.settings:
        return None
    found = []
    for name, value in run.settings.items():
        default = defaults.get(name)
        written = str(default).lower() if isinstance(default, bool) else None if default is None else str(default)
        if name not in defaults or name in OWN_SETTINGS or value == written:
            continue
        try:
            if float(value or "") == float(written or ""):  # 1e-3 is 0.001
                continue
        except ValueError:
            pass
        found.append([f"--{name}", shown(value), shown(written)])
    return found


def shown(value: str | None) -> str:
    return "none" if value is None else value


def rescue_rows(run: Run) -> list[list[str]]:
    """Return step, outcome of what was before, KL weight, and free nats of each move of the run's rescues."""
    rows = []
    for row in run.events:
        if row["event"] == RESCUE:
            target, weight = number(row, "target_kl"), _value(row, "kl_weight")
            steered = weight if target is None else f"steered to a KL of {brief(target)}"
            rows.append([f"{whole(row, 'step') or 0:,}", text(row, "outcome"), steered, _value(row, "floor")])
    return rows[:MOST_SHOWN]


def rescued(run: Run) -> str:
    """Say what the rescues of a run came to, what they took, and what the latent costs beside the dead state."""
    moves = [row for row in run.events if row["event"] == RESCUE]
    if not moves:
        return ""
    last, begun = moves[-1], number(moves[0], "step") or 0.0
    stands = {
        "watching": "The latent came to life, and the last row stands.",
        "given_up": "The latent did not stay alive within the budget; the last row stands, and no further rescue is tried.",
    }.get(text(last, "phase"), "The rescue goes on.")
    used, budget = whole(last, "used_steps") or 0, whole(last, "budget_steps") or 0
    found = f"{stands} {used:,} of {budget:,} steps were used."
    before = [row for row in run.comparable_validations if (number(row, "step") or 0.0) <= begun]
    after = run.comparable_validations[-1] if run.comparable_validations else {}
    dead, alive = (number(row, "valid_elbo") for row in (before[-1] if before else {}, after))
    if dead is None or alive is None or before[-1] is after:
        return f"{found} There are no two validations to compare the ELBO by."
    then, now = whole(before[-1], "step") or 0, whole(after, "step") or 0
    return (
        f"{found} The validation ELBO was {brief(dead)} nats per sequence before the rescue (step {then:,}) and is {brief(alive)} "
        f"now (step {now:,}). A run that is left dead often ends with the better ELBO."
    )


def survived_rows(run: Run) -> tuple[list[list[str]], str]:
    """Return what happened beside verdicts, and a note on what is left out."""
    counts = Counter[str]()
    kept = []
    for row in run.events:
        name = row["event"]
        if name in ("started", "verdict", "finished", RESCUE):
            continue
        counts[name] += 1
        if counts[name] <= MOST_SHOWN:
            message = text(row, "said") or text(row, "verdict").replace("_", " ")
            what = SURVIVED.get(name, name.replace("_", " "))
            found = text(row, "checkpoint") if name == "resumed" else message
            kept.append([_time(row, "time"), f"{whole(row, 'step') or 0:,}", what, found])
    more = [
        f"{count - MOST_SHOWN:,} more of {name.replace('_', ' ')}"
        for name, count in counts.items()
        if count > MOST_SHOWN
    ]
    return kept, f"Left out here: {', '.join(more)}; all stand in {EVENTS}." if more else ""


def environment_rows(run: Run) -> list[tuple[str, str]]:
    """Return name and value of what is known of the machine and the software."""
    found = run.environment
    memory, cores, threads = number(found, "memory_bytes"), whole(found, "cpu_count"), whole(found, "threads")
    cpu = ", ".join(part for part in (text(found, "cpu"), f"{cores} cores" if cores else "") if part)
    packages = row_in(found, "packages").items()
    return [
        ("started", _time(found, "started")),
        ("device", text(row_in(run.facts, "header"), "devices")),
        ("CPU", cpu + (f", {threads} threads used" if threads else "")),
        ("memory", "" if memory is None else f"{memory / 2**30:.1f} GiB"),
        ("system", text(found, "platform")),
        ("Python", text(found, "python")),
        ("packages", ", ".join(f"{name} {version}" for name, version in packages if isinstance(version, str))),
        ("commit", text(found, "commit")),
    ]


def _time(row: Mapping[str, Any], name: str) -> str:
    return text(row, name).replace("T", " ").partition(".")[0]


def _value(row: Row, name: str) -> str:
    """Return a number as people read it, or the text that stands there."""
    value = number(row, name)
    if value is None:
        return text(row, name)
    return f"{value:,.0f}" if isinstance(row[name], int) else brief(value)


def _typical(rows: Sequence[Row], name: str) -> float | None:
    values = [value for row in rows if (value := number(row, name)) is not None]
    return median(values) if values else None
