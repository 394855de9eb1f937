"""A run's rows -> the tables and sentences of its report: six numbers, speed and what holds it back, settings, events."""

from collections.abc import Sequence
from statistics import median

from seqvae.reports.page import brief
from seqvae.reports.run_directory import Run
from seqvae.reports.run_files import EVENTS
from seqvae.reports.run_lines import Row, number, numbers, row_in, rows_in, text, texts, whole
from seqvae.reports.run_story import duration
from seqvae.text import percent

MOST_TOLD = 40
"""Events of one kind."""
SURVIVED = {
    "resumed": "went on from a checkpoint",
    "interrupted": "was interrupted",
    "step_skipped": "left out a step that came to NaN or infinity",
    "rolled_back": "went back to an earlier checkpoint",
    "out_of_memory": "ran out of memory, and went on in smaller parts",
    "loader_restarted": "what prepares the data had to start anew",
    "not_saved": "a checkpoint could not be written",
    "decoder_not_asked": "the decoder could not be asked",
    "failed": "was ended by an error",
    "diverged": "came to NaN or infinity for good",
    "stopped": "was stopped, as its posterior had collapsed",
}
NOTABLE_WAIT, NOTABLE_PADDING, NOTABLE_OTHERS, LITTLE_OF_PEAK = 0.05, 0.10, 0.10, 0.3
"""Shares from which something is worth a change."""


def six_numbers(run: Run) -> list[tuple[str, str, str]]:
    last = run.validations[-1] if run.validations else {}
    elbo, nll, kl = (number(last, name) for name in ("valid_elbo", "valid_nll", "valid_kl"))
    sums = f"NLL {brief(nll)} + KL {brief(kl)}, nats a sequence" if nll is not None and kl is not None else ""
    first = ("Validation ELBO", _or_none(elbo), sums or "nats a sequence")
    speed = _typical(run.throughput, "real_steps_per_second") or _typical(run.training, "steps_per_second")
    pace = ("Speed", _or_none(speed), "real steps a second, median")
    if not run.readings:
        per_step = number(last, "valid_nll_per_step")
        seconds = number((run.training or run.validations or [{}])[-1], "seconds")
        return [
            first,
            ("Validation KL", _or_none(kl), "nats a sequence"),
            ("NLL of a step", _or_none(per_step), "nats, validation"),
            ("Steps", f"{run.step:,}", "of the optimizer"),
            ("Time", "none" if seconds is None else duration(seconds), "of the run"),
            pace,
        ]
    reading = run.readings[-1]
    probed = next((row for row in reversed(run.readings) if number(row, "decoder_use") is not None), {})
    error, cap = number(probed, "decoder_use_error"), number(reading, "mutual_information_cap")
    active, of = whole(reading, "active_units"), len(numbers(reading, "kl_per_dim"))
    scope = "step" if text(reading, "scope") == "step" else "sequence"
    asked = f"nats, at step {whole(probed, 'step') or 0:,}" if probed else "never asked"
    return [
        first,
        ("Rate", _or_none(number(reading, "rate")), f"nats a {scope}, KL to the prior, latest in training"),
        (
            "Mutual information",
            _or_none(number(reading, "mutual_information")),
            f"nats, of at most {brief(cap)}" if cap is not None else "nats",
        ),
        ("Decoder use", _or_none(number(probed, "decoder_use")), (f"± {brief(error)} " if error else "") + asked),
        (
            "Active units",
            "none" if active is None else f"{active:,} of {of:,}",
            "latent dimensions, latest in training",
        ),
        pace,
    ]


def performance_rows(run: Run) -> list[tuple[str, str]]:
    rows = run.throughput
    last = rows[-1] if rows else {}
    seconds = number((run.training or run.validations or [{}])[-1], "seconds")
    found = [
        (
            "real steps a second",
            _or_empty(_typical(rows, "real_steps_per_second") or _typical(run.training, "steps_per_second")),
        ),
        ("sequences a second", _or_empty(_typical(rows, "sequences_per_second"))),
        ("waiting for data", _share(_typical(rows, "waiting_share"))),
        ("padding", _share(_typical(rows, "padding_share"))),
        ("CPU, by this run", _share(_typical(rows, "cpu_utilisation"))),
        ("CPU, by everybody", _share(_typical(rows, "machine_cpu_utilisation"))),
        ("GPU", _share(_typical(rows, "gpu_utilisation"))),
        ("share of the machine's peak", _share(_typical(rows, "share_of_peak"))),
        ("peak memory", _gib(number(last, "peak_memory_gib"))),
        ("peak memory of the GPU", _gib(number(last, "gpu_peak_memory_gib"))),
        ("time so far", "" if seconds is None else duration(seconds)),
    ]
    return [(name, value) for name, value in found if value]


def bottleneck(run: Run) -> str:
    """What holds it back, and what to try; from the shares alone, where `analyze_performance.py` measures."""
    waiting, padding = _typical(run.throughput, "waiting_share"), _typical(run.throughput, "padding_share")
    if waiting is None or padding is None:
        return ""
    own, all_of_them = _typical(run.throughput, "cpu_utilisation"), _typical(run.throughput, "machine_cpu_utilisation")
    peak = _typical(run.throughput, "share_of_peak")
    on_gpu = any(number(row, "gpu_peak_memory_gib") is not None for row in run.throughput)
    more = " analyze_performance.py measures where a step goes, and, with --advise, what would be faster."
    if waiting > NOTABLE_WAIT and waiting >= padding:
        return f"Waiting for data: {percent(waiting)} of training time. Try --num_workers 2 or --cache_data.{more}"
    if padding > NOTABLE_PADDING:
        tries = "--bucketing" if run.settings.get("bucketing") == "false" else "a lower --max_sequence_length"
        return f"Padding: {percent(padding)} of all steps that are computed on are not real. Try {tries}.{more}"
    if own is not None and all_of_them is not None and not on_gpu and all_of_them - own > NOTABLE_OTHERS:
        others = percent(all_of_them - own)
        return f"Other programs take about {others} of this machine: on a quiet one, all of this is faster.{more}"
    if peak is not None and peak < LITTLE_OF_PEAK:
        tries = "a larger --batch_size or --tokens_per_batch"
        return f"Small operations: {percent(peak)} of what large products of matrices reach here. Try {tries}.{more}"
    told = f", at {percent(peak)} of what large products reach here" if peak is not None else ""
    return f"The products themselves: next to no time goes into waiting or padding{told}.{more}"


def data_rows(run: Run) -> list[tuple[str, str]]:
    data = row_in(run.facts, "data")
    splits = [text(row, "split") for row in rows_in(data, "splits")]
    return [
        ("layout", text(data, "layout")),
        ("batches", text(data, "batches")),
        ("splits", ", ".join(splits) if splits else ""),
        ("classes", ", ".join(texts(data, "classes")[:20])),
    ][: 2 if splits else 4]


def split_rows(run: Run) -> list[list[str]]:
    rows = rows_in(row_in(run.facts, "data"), "splits")
    return [
        [
            text(row, "split"),
            _count(row, "sequences"),
            _count(row, "steps"),
            _or_empty(number(row, "mean_length")),
            _count(row, "longest"),
        ]
        for row in rows
    ]


def name_rows(run: Run) -> list[list[str]]:
    rows = rows_in(row_in(run.facts, "data"), "names")
    return [
        [text(row, "name"), _or_empty(number(row, "mean")), _or_empty(number(row, "std")), text(row, "told")]
        for row in rows
    ]


def differing_settings(run: Run) -> list[list[str]] | None:
    """Name, value and default; None where the run did not write down its defaults."""
    defaults = row_in(run.facts, "defaults")
    if not defaults or not run.settings:
        return None
    own = {"run_name", "output_dir", "resume"}
    return [
        [f"--{name}", shown(value), shown(as_setting(defaults[name]))]
        for name, value in run.settings.items()
        if name in defaults and name not in own and not _same(value, as_setting(defaults[name]))
    ]


def as_setting(value: object) -> str | None:
    """As config.yaml has it.

    >>> as_setting(True), as_setting(None), as_setting(0.1)
    ('true', None, '0.1')
    """
    if value is None:
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


def shown(value: str | None) -> str:
    return "none" if value is None else value


def environment_rows(run: Run) -> list[tuple[str, str]]:
    found = run.environment
    packages = row_in(found, "packages")
    memory, cores, threads = number(found, "memory_bytes"), whole(found, "cpu_count"), whole(found, "threads")
    cpu = ", ".join(part for part in (text(found, "cpu"), f"{cores} cores" if cores else "") if part)
    return [
        ("started", text(found, "started").replace("T", " ").partition(".")[0]),
        ("device", text(row_in(run.facts, "header"), "devices")),
        ("CPU", cpu + (f", {threads} threads used" if threads else "")),
        ("memory", "" if memory is None else f"{memory / 2**30:.1f} GiB"),
        ("system", text(found, "platform")),
        ("Python", text(found, "python")),
        ("packages", ", ".join(f"{name} {version}" for name, version in packages.items() if isinstance(version, str))),
        ("commit", text(found, "commit")),
    ]


def survived_rows(run: Run) -> tuple[list[list[str]], str]:
    """What happened beside verdicts, and a note on what is left out."""
    rows = [row for row in run.events if row["event"] not in ("started", "verdict", "finished")]
    told: dict[str, int] = {}
    kept = []
    for row in rows:
        name = row["event"]
        told[name] = told.get(name, 0) + 1
        if told[name] <= MOST_TOLD:
            kept.append(
                [_clock(row), f"{whole(row, 'step') or 0:,}", SURVIVED.get(name, name.replace("_", " ")), _said(row)]
            )
    more = [
        f"{count - MOST_TOLD:,} more of {name.replace('_', ' ')}" for name, count in told.items() if count > MOST_TOLD
    ]
    return kept, f"Left out here: {', '.join(more)}; all stand in {EVENTS}." if more else ""


def verdict_rows(run: Run) -> list[list[str]]:
    rows = [row for row in run.events if row["event"] == "verdict"]
    return [
        [f"{whole(row, 'step') or 0:,}", text(row, "verdict").replace("_", " "), text(row, "evidence")] for row in rows
    ]


def evaluation_tables(run: Run) -> list[tuple[str, list[list[str]]]]:
    """The newest line of each checkpoint and split: a title and rows of name, value, error, note."""
    newest = {(text(row, "checkpoint"), text(row, "split")): row for row in run.evaluations}
    found = []
    for (checkpoint, split), row in newest.items():
        rows = [
            [text(one, "name"), _figure(one, "value"), _figure(one, "error"), text(one, "of")]
            for one in rows_in(row, "rows")
        ]
        if rows:
            when = text(row, "time").replace("T", " ").partition(".")[0]
            where = " on ".join(part for part in (checkpoint, f"the {split} split" if split else "") if part)
            found.append((f"{where or 'a checkpoint'}{f', {when}' if when else ''}", rows))
    return found


def _figure(row: Row, name: str) -> str:
    value = number(row, name)
    return text(row, name) if value is None else brief(value)


def _said(row: Row) -> str:
    if row["event"] == "resumed":
        return text(row, "checkpoint")
    return text(row, "said") or text(row, "verdict").replace("_", " ")


def _clock(row: Row) -> str:
    return text(row, "time").replace("T", " ").partition(".")[0]


def _typical(rows: Sequence[Row], name: str) -> float | None:
    values = [value for row in rows if (value := number(row, name)) is not None]
    return median(values) if values else None


def _same(one: str | None, other: str | None) -> bool:
    """1e-3 is 0.001."""
    if one == other or one is None or other is None:
        return one == other
    try:
        return float(one) == float(other)
    except ValueError:
        return False


def _count(row: Row, name: str) -> str:
    value = whole(row, name)
    return "" if value is None else f"{value:,}"


def _share(value: float | None) -> str:
    return "" if value is None else percent(value)


def _gib(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} GiB"


def _or_none(value: float | None) -> str:
    return "none" if value is None else brief(value)


def _or_empty(value: float | None) -> str:
    return "" if value is None else brief(value)
