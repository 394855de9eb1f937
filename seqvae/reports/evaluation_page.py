"""What `evaluate.py` found, as text for people: its record (the dict that is written as JSON) in, lines out."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from seqvae.text import Ink, cells, clip, heading, measure, note, percent, section, table, visible

BARS, PLAIN_BARS = " ▁▂▃▄▅▆▇█", " .:-=+*%#"
MOST_FEATURES = 50
HIGHER_IS_BETTER = {
    "ELBO": True,
    "IW-NLL": False,
    "IW-NLL per step": False,
    "perplexity": False,
    "perplexity, ELBO": False,
}
"""Of those readings of which it can be said."""
NAME_WIDTH = 24


class Reading(NamedTuple):
    """Of the first table."""

    reading: str
    value: str
    error: str
    of: str


class Feature(NamedTuple):
    """Of the table of features."""

    feature: str
    values: int
    rmse: float
    MAE: float
    training_mean: float
    explained: str


class ProbeLine(NamedTuple):
    """Of the table of probes."""

    told: str
    numbers: int | None
    score: str
    interval: str
    clearly: str | None


def evaluation_lines(record: Mapping[str, Any], ink: Ink) -> list[str]:
    """The whole page."""
    about = (
        f"step {record['step']:,}, {record['parameters']:,} parameters; {record['split']} of {record['data']}: "
        f"{record['sequences']:,} sequences, {record['steps']:,} steps ({record['kind']})"
    )
    return [
        *heading(record["checkpoint"], ink),
        *note(about, ink, mark=""),
        *note("in nats a sequence, where nothing else is said; ± one standard error", ink, mark=""),
        "",
        *table([_reading(row) for row in record["rows"]], ink),
        *_dimensions(record["kl_per_dim"], ink),
        *_features(record["features"], ink),
        *_probe(record.get("probe"), ink),
        *notes_lines(record["notes"], ink),
    ]


def comparison_lines(comparison: Mapping[str, Any], ink: Ink) -> list[str]:
    """Runs side by side: `records`, whether they are of the same data, and the differences of each pair."""
    records = comparison["records"]
    letters = [chr(ord("A") + number) for number in range(len(records))]
    lines = heading("Runs side by side", ink)
    for letter, record in zip(letters, records, strict=True):
        about = (
            f"{letter}: {record['checkpoint']}, step {record['step']:,}, {record['parameters']:,} parameters; {record['split']} of "
            f"{record['data']}, {record['sequences']:,} sequences"
        )
        lines += note(about, ink, mark="")
    lines += ["", *_grid(letters, _metrics(records), comparison["same_data"], ink)]
    lines += _paired(comparison["differences"], ink)
    if unlike := comparison["unlike"]:
        lines += ["", *(line for text in unlike for line in note(text, ink))]
        lines += note("so these numbers do not compare, and none is called the best", ink)
    told = [f"{letter}: {text}" for letter, record in zip(letters, records, strict=True) for text in record["notes"]]
    return lines + notes_lines(told, ink)


def notes_lines(notes: Sequence[str], ink: Ink) -> list[str]:
    return ["", *(ink.warning(line) for text in notes for line in note(text, ink))] if notes else []


def _reading(row: Mapping[str, Any]) -> Reading:
    error = row["error"]
    value = measure(row["value"]) if row["value"] == row["value"] else "-"
    return Reading(row["name"], value, "" if error is None else f"± {measure(error)}", row["of"])


def _dimensions(kl_per_dim: Sequence[float], ink: Ink) -> list[str]:
    """One bar a dimension, in their order, and the largest in numbers."""
    bars, most = BARS if ink.blocks else PLAIN_BARS, max(kl_per_dim)
    line = "".join(bars[min(8, round(8 * kl / most))] if most > 0 else bars[0] for kl in kl_per_dim)
    width = ink.width - 6
    rows = [f"  |{line[first : first + width]}|" for first in range(0, len(line), width)]
    largest = sorted(range(len(kl_per_dim)), key=lambda number: -kl_per_dim[number])[:5]
    told = ", ".join(f"z{number} {measure(kl_per_dim[number])}" for number in largest)
    return [*heading("KL of each dimension, nats", ink), *rows, *note(f"largest: {told}", ink, mark="")]


def _features(features: Sequence[Mapping[str, Any]], ink: Ink) -> list[str]:
    rows = [
        Feature(
            one["name"],
            one["values"],
            one["rmse"],
            one["mae"],
            one["rmse_of_mean"],
            percent(max(0.0, 1 - (one["rmse"] / one["rmse_of_mean"]) ** 2)) if one["rmse_of_mean"] else "-",
        )
        for one in features
    ]
    remark = (
        "One step ahead, told the posterior's mean and all steps before; in the data's own units. Training mean: the RMSE of "
        "always saying that. Explained: the share of its square that the model takes away."
    )
    return section("Errors of each feature", rows, ink, most=MOST_FEATURES, remark=remark)


def _probe(probe: Mapping[str, Any] | None, ink: Ink) -> list[str]:
    if probe is None:
        return []
    rows = [
        ProbeLine(row["features"], row["numbers"], _digits(row["score"][0]), _interval(row["score"]), None)
        for row in probe["rows"]
    ]
    rows += [
        ProbeLine(
            one["of"], None, f"{one['score'][0]:+.4f}", _interval(one["score"], signed=True), _meaning(one["score"])
        )
        for one in probe["differences"]
    ]
    guess = "" if probe["metric"] == "AUROC" else f" Guessing the most frequent class: {probe['largest_share']:.3f}."
    left_out = f" {probe['without_label']:,} without a label were left out." if probe["without_label"] else ""
    remark = (
        f"Logistic regression, trained on {probe['trained_on']:,} sequences of the training split, scored on "
        f"{probe['scored_on']:,}; 95 % by bootstrap over these, paired in the differences.{guess}{left_out}"
    )
    title = f"Probe: {probe['label']}, {probe['metric']} ({len(probe['classes'])} classes)"
    return section(title, rows, ink, remark=remark)


def _meaning(score: Sequence[float]) -> str:
    if score[1] > 0:
        return "better"
    return "worse" if score[2] < 0 else "neither"


def _digits(value: float) -> str:
    return f"{value:.4f}"


def _interval(score: Sequence[float], signed: bool = False) -> str:
    form = "+.4f" if signed else ".4f"
    return f"{score[1]:{form}} to {score[2]:{form}}"


class _Metric(NamedTuple):
    name: str
    values: tuple[float | None, ...]
    errors: tuple[float | None, ...]
    higher_is_better: bool | None


def _metrics(records: Sequence[Mapping[str, Any]]) -> list[_Metric]:
    """Everything that one of them has, in the order in which it is met."""
    found = [{row["name"]: (row["value"], row["error"]) for row in record["rows"]} for record in records]
    better: dict[str, bool | None] = dict(HIGHER_IS_BETTER)
    for record, rows in zip(records, found, strict=True):
        if (probe := record.get("probe")) is not None:
            for row in probe["rows"]:
                name = f"probe, {row['features']}"
                better[name] = True
                rows[name] = (row["score"][0], None)
        for one in record["features"]:
            name = f"RMSE, {one['name']}"
            better[name] = False
            rows[name] = (one["rmse"], one["rmse_error"])
    names = list(dict.fromkeys(name for rows in found for name in rows))
    return [
        _Metric(
            name,
            tuple(rows[name][0] if name in rows else None for rows in found),
            tuple(rows[name][1] if name in rows else None for rows in found),
            better.get(name),
        )
        for name in names
    ]


def _grid(letters: Sequence[str], metrics: Sequence[_Metric], same_data: bool, ink: Ink) -> list[str]:
    shown = metrics[:MOST_FEATURES]
    written = [[_written(*pair) for pair in zip(one.values, one.errors, strict=True)] for one in shown]
    widths = [max(cells(text) for text in (letter, *column)) for letter, *column in zip(letters, *written, strict=True)]
    name_width = min(NAME_WIDTH, max(cells(visible(one.name)) for one in shown))

    def line(name: str, texts: Sequence[str], bold: int | None = None) -> str:
        name = clip(visible(name), name_width)
        padded = [" " * (width - cells(text)) + text for width, text in zip(widths, texts, strict=True)]
        padded = [ink.bold(text) if number == bold else text for number, text in enumerate(padded)]
        return "  " + "  ".join([name + " " * (name_width - cells(name)), *padded]).rstrip()

    body = [line(one.name, texts, _best(one) if same_data else None) for one, texts in zip(shown, written, strict=True)]
    more = [ink.dim(f"  ... and {len(metrics) - len(shown):,} more")] if len(metrics) > len(shown) else []
    return [ink.dim(line("", letters)), *body, *more]


def _written(value: float | None, error: float | None) -> str:
    if value is None or value != value:
        return "-"
    return measure(value) if error is None else f"{measure(value)} ± {error:.2g}"


def _best(metric: _Metric) -> int | None:
    """Which run's it is; None where that cannot be said, or where two are as good."""
    values = [value for value in metric.values if value is not None and value == value]
    if metric.higher_is_better is None or len(values) < 2:
        return None
    best = (max if metric.higher_is_better else min)(values)
    return metric.values.index(best) if values.count(best) == 1 else None


def _paired(differences: Sequence[Mapping[str, Any]], ink: Ink) -> list[str]:
    if not differences:
        return []
    lines = heading("IW-NLL on the same sequences, nats a sequence", ink)
    for one in differences:
        value, error = one["value"], one["error"]
        clear = abs(value) > 2 * error
        said = f"{one['lower']} is lower" if clear else "no difference shown"
        lines.append(f"  {one['of']}: {value:+.4g} ± {error:.2g} ({said})")
    return lines
