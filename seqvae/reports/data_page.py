"""A report on data as lines of text: whether they would train, what to know before, and the numbers behind it."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from seqvae.reports.data_numbers import DataNumbers, FileNumbers, Heading
from seqvae.reports.histogram import bar, draw_histogram
from seqvae.text import Ink, cells, heading, measure, note, percent, section, size, visible

FORMATS = {
    **dict.fromkeys(("share", "in_sequences", "missing", "unknown", "efficiency"), percent),
    "memory": size,
}
WARNING, LEFT_OUT = "warning: ", "left out: "
"""How notes begin that have a place of their own here."""
LABEL_NAMES = ("label", "labels", "target", "class", "outcome", "y")
TITLES = {"tokens": "Tokens", "vectors": "Features", "events": "Variables"}
VALUES = "mean, std, min, max: in own units; far out: values more than 10 std from the mean"
OF_NAMES = {
    "tokens": "Training split. share: of all its tokens.",
    "vectors": f"Training split. missing: steps without a value; {VALUES}.",
    "events": f"Training split. in sequences: those that have it; missing: events without a value; {VALUES}.",
}
OF_BATCHES = (
    "Training split; random: plain batches of 64 and of 4, to compare. updates: optimizer steps of an epoch, {} batches "
    "each; sequences: in a batch, on average; efficiency: real steps / padded steps; largest: padded steps of the largest "
    "batch; memory: bytes of its tensors, without model, gradients and activations."
)


def data_page(found: DataNumbers, about: Heading, ink: Ink, most: int) -> list[str]:
    """Tables have at most so many rows; 0: all."""
    rows = partial(section, ink=ink, most=most, formats=FORMATS)
    columns = sorted(found.columns, key=lambda column: column.part is None)
    return [
        ink.bold(visible(f"{about.name}: {about.kind}")),
        *note(about.layout.removeprefix(f"{about.kind}: "), ink, mark=""),
        *note(f"{found.files:,} file{'s' * (found.files > 1)}, {size(found.bytes)}; cache {about.cache}", ink, mark=""),
        "",
        ink.good("READY to train") + _warned(len(_warnings(found, about))),
        f"  {visible(about.command)}",
        *_worth_knowing(found, about, ink),
        *rows("Columns", columns, remark=_of_columns(columns)),
        *rows("Splits", found.splits, remark=_of_splits(found)),
        *heading("Lengths", ink),
        *draw_histogram(found.lengths, about.cap, ink),
        *_names(found, about, ink, most),
        *rows("Labels", found.labels),
        *rows("Batches", found.batches, remark=OF_BATCHES.format(about.accumulate)),
    ]


def refusal_page(name: str, reason: str, files: FileNumbers | None, ink: Ink, most: int) -> list[str]:
    """What stands in the way of training, every file that cannot be used, and what columns there are."""
    refused = list(files.refused) if files else []
    place = reason.partition(": ")[0]
    known = any(one.startswith(f"{place}: ") for one in refused)
    lines = [ink.bold(visible(name)), "", ink.bad("NOT READY to train")]
    for one in without_advice(refused if known else [reason, *refused]):
        lines += note(one, ink, mark="x")
    if files is None:
        return lines
    remark = f"{files.files - len(files.refused):,} can be used, {len(files.refused):,} cannot"
    if refused:
        remark += "; mend or remove them, or do without them: --on_bad_files skip"
    lines += [*heading(f"Files: {files.files:,}, {size(files.bytes)}", ink), *note(f"{remark}.", ink, mark="")]
    return lines + section("Columns of those that can be read", files.columns, ink, most=most)


def without_advice(messages: Sequence[str]) -> list[str]:
    """Of a single message all; of several what was found: the advice, their last sentence, is much the same in all of them.

    >>> without_advice(["a: is empty. Fill it.", "b: is cut. Write it again."])
    ['a: is empty.', 'b: is cut.']
    """
    if len(messages) == 1:
        return list(messages)
    return [f"{message.rpartition('. ')[0]}." if ". " in message else message for message in messages]


def _warnings(found: DataNumbers, about: Heading) -> list[str]:
    return [*found.warnings, *(text.removeprefix(WARNING) for text in about.notes if text.startswith(WARNING))]


def _warned(number: int) -> str:
    return "" if number == 0 else f", with {number} warning{'s' * (number > 1)}"


def _worth_knowing(found: DataNumbers, about: Heading, ink: Ink) -> Iterator[str]:
    """Warnings, then all else, then every file that was left out."""
    warnings = _warnings(found, about)
    others = [text for text in about.notes if not text.startswith((WARNING, LEFT_OUT))]
    if warnings or others:
        yield from heading("Worth knowing", ink)
    for text in warnings:
        yield from (ink.warning(line) for line in note(text, ink, mark="!"))
    for text in others:
        yield from note(text, ink)
    if found.bad_files:
        yield from heading(f"Files left out: {len(found.bad_files):,}", ink)
    for text in without_advice(found.bad_files):
        yield from note(text, ink, mark="x")


def _of_columns(columns: Sequence[Any]) -> str:
    like_labels = [row.column for row in columns if row.part is None and row.column.lower() in LABEL_NAMES]
    return (
        f"Labels are taken from the data where they are asked for: --label_column {like_labels[0]}."
        if like_labels
        else ""
    )


def _of_splits(found: DataNumbers) -> str:
    remark = "mean, median, longest: steps of a sequence."
    if found.time:
        span, gap = (duration(value, found.time.unit) for value in (found.time.median_span, found.time.mean_gap))
        remark += f" A sequence spans {span} (median), its steps are {gap} apart (mean)."
    return remark


def _names(found: DataNumbers, about: Heading, ink: Ink, most: int) -> list[str]:
    """Tokens have nothing but their share to show: it is drawn, too."""
    names = found.names
    title = f"{TITLES[about.kind]}: {names.total:,}"
    if about.kind == "tokens" and names.total < names.possible:
        title += f" of {names.possible:,} occur"
    if 0 < most < names.total:
        title += ", those with the most missing values" if about.kind == "vectors" else ", the most frequent"
    remark = OF_NAMES[about.kind]
    lines = section(title, names.rows, ink, most=most, total=names.total, formats=FORMATS, remark=remark)
    if about.kind == "tokens":
        first = 3  # behind an empty line, the title and the heading
        for number, row in enumerate(names.rows[:most] if most else names.rows, start=first):
            room = ink.width - cells(lines[number]) - 2
            lines[number] += f"  {bar(row.share / names.rows[0].share, room, ink)}".rstrip()
    return lines


def duration(value: float, unit: str) -> str:
    """
    >>> duration(90, "minutes"), duration(2880, "minutes"), duration(14400, "minutes"), duration(2.5, "weeks")
    ('90 minutes', '48 hours', '10 days', '2.5 weeks')
    """
    if unit == "minutes" and value >= 120:
        value, unit = (value / 60, "hours") if value < 4320 else (value / 1440, "days")
    return f"{measure(value)} {unit}"
