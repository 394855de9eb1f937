"""What `seqvae evaluate` found, as text for people: its record (the dict that is written as JSON) in, lines out."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from seqvae.reports.terminal import Ink, grid, heading, note, section, table
from seqvae.text import clip, measure, percent, visible

BARS, PLAIN_BARS = " ▁▂▃▄▅▆▇█", " .:-=+*%#"
MOST_FEATURES = 50
HIGHER_IS_BETTER = {
    "ELBO": True,
    "IW-NLL": False,
    "IW-NLL per step": False,
    "perplexity": False,
    "perplexity, ELBO": False,
}
"""Only metrics of which it can be said."""
NAME_WIDTH = 24


class Reading(NamedTuple):
    """A row of the first table."""

    reading: str
    value: str
    error: str
    of: str


class Feature(NamedTuple):
    """A row of the table of features."""

    feature: str
    values: int
    rmse: float
    MAE: float
    training_mean: float
    explained: str


class ProbeLine(NamedTuple):
    """A row of the table of probes."""

    features: str
    numbers: int | None
    score: str
    interval: str
    clearly: str | None


def evaluation_lines(record: Mapping[str, Any], ink: Ink) -> list[str]:
    """Return the evaluation of one checkpoint."""
    about = (
        f"step {record['step']:,}, {record['parameters']:,} parameters; {record['split']} of {record['data']}: "
        f"{record['sequences']:,} sequences, {record['steps']:,} steps ({record['kind']})"
    )
    readings = [
        Reading(
            row["name"],
            _written(row["value"], None),
            "" if row["error"] is None else f"± {measure(row['error'])}",
            row["of"],
        )
        for row in record["rows"]
    ]
    features = [
        Feature(
            one["name"],
            one["values"],
            one["rmse"],
            one["mae"],
            one["rmse_of_mean"],
            percent(max(0.0, 1 - (one["rmse"] / one["rmse_of_mean"]) ** 2)) if one["rmse_of_mean"] else "-",
        )
        for one in record["features"]
    ]
    of_features = (
        "One step ahead, given the posterior's mean and all steps before; in the data's own units. Training mean: the RMSE of "
        "always predicting that. Explained: the share of its square that the model takes away."
    )
    return [
        *heading(record["checkpoint"], ink),
        *note(about, ink, mark=""),
        *note("in nats per sequence, where nothing else is said; ± one standard error", ink, mark=""),
        "",
        *table(readings, ink),
        *_dimensions(record["kl_per_dim"], ink),
        *section("Errors of each feature", features, ink, most=MOST_FEATURES, remark=of_features),
        *(_probe(record["probe"], ink) if record.get("probe") is not None else []),
        *_warnings(record["notes"], ink),
    ]


def comparison_lines(comparison: Mapping[str, Any], ink: Ink) -> list[str]:
    """Lay runs side by side: `records`, whether they are of the same data, and the differences of each pair."""
    records = comparison["records"]
    letters = [chr(ord("A") + number) for number in range(len(records))]
    lines = heading("Runs side by side", ink)
    for letter, record in zip(letters, records, strict=True):
        about = (
            f"{letter}: {record['checkpoint']}, step {record['step']:,}, {record['parameters']:,} parameters; {record['split']} of "
            f"{record['data']}, {record['sequences']:,} sequences"
        )
        lines += note(about, ink, mark="")
    metrics = _metrics(records)
    rows, bold = [["", *letters]], set()
    for number, metric in enumerate(metrics[:MOST_FEATURES], start=1):
        texts = [_written(*pair) for pair in zip(metric.values, metric.errors, strict=True)]
        rows.append([clip(visible(metric.name), NAME_WIDTH), *texts])
        if comparison["same_data"] and (best := _best(metric)) is not None:
            bold.add((number, best + 1))
    lines += ["", *grid(rows, ink, bold=bold)]
    if len(metrics) > MOST_FEATURES:
        lines.append(ink.dim(f"  ... and {len(metrics) - MOST_FEATURES:,} more"))
    if comparison["differences"]:
        lines += heading("IW-NLL on the same sequences, nats per sequence", ink)
    for one in comparison["differences"]:
        value, error = one["value"], one["error"]
        found = f"{one['lower']} is lower" if abs(value) > 2 * error else "no difference shown"
        lines.append(f"  {one['of']}: {value:+.4g} ± {error:.2g} ({found})")
    if unlike := comparison["unlike"]:
        lines += ["", *(line for text in unlike for line in note(text, ink))]
        lines += note("so these numbers do not compare, and none is called the best", ink)
    notes = [f"{letter}: {text}" for letter, record in zip(letters, records, strict=True) for text in record["notes"]]
    return lines + _warnings(notes, ink)


def _warnings(notes: Sequence[str], ink: Ink) -> list[str]:
    return ["", *(ink.warning(line) for text in notes for line in note(text, ink))] if notes else []


def _dimensions(kl_per_dim: Sequence[float], ink: Ink) -> list[str]:
    """Draw a bar for each dimension, in their order, and name the largest."""
    bars, most = BARS if ink.blocks else PLAIN_BARS, max(kl_per_dim)
    line = "".join(bars[min(8, round(8 * kl / most))] if most > 0 else bars[0] for kl in kl_per_dim)
    width = ink.width - 6
    rows = [f"  |{line[first : first + width]}|" for first in range(0, len(line), width)]
    largest = sorted(range(len(kl_per_dim)), key=lambda number: -kl_per_dim[number])[:5]
    named = ", ".join(f"z{number} {measure(kl_per_dim[number])}" for number in largest)
    return [*heading("KL of each dimension, nats", ink), *rows, *note(f"largest: {named}", ink, mark="")]


def _probe(probe: Mapping[str, Any], ink: Ink) -> list[str]:
    """Return the table of probes: how well a label is read from each kind of feature, and how they differ."""
    rows = []
    for row in probe["rows"]:
        score, low, high = row["score"]
        rows.append(ProbeLine(row["features"], row["numbers"], f"{score:.4f}", f"{low:.4f} to {high:.4f}", None))
    for one in probe["differences"]:
        score, low, high = one["score"]
        clearly = "better" if low > 0 else "worse" if high < 0 else "neither"
        rows.append(ProbeLine(one["of"], None, f"{score:+.4f}", f"{low:+.4f} to {high:+.4f}", clearly))
    guess = "" if probe["metric"] == "AUROC" else f" Guessing the most frequent class: {probe['largest_share']:.3f}."
    left_out = f" {probe['without_label']:,} without a label were left out." if probe["without_label"] else ""
    remark = (
        f"Logistic regression, trained on {probe['trained_on']:,} sequences of the training split, scored on "
        f"{probe['scored_on']:,}; 95 % by bootstrap over these, paired in the differences.{guess}{left_out}"
    )
    return section(
        f"Probe: {probe['label']}, {probe['metric']} ({len(probe['classes'])} classes)", rows, ink, remark=remark
    )


class _Metric(NamedTuple):
    name: str
    values: tuple[float | None, ...]
    errors: tuple[float | None, ...]
    higher_is_better: bool | None


def _metrics(records: Sequence[Mapping[str, Any]]) -> list[_Metric]:
    """Return everything that one of the records has, in the order in which it is met."""
    better: dict[str, bool | None] = dict(HIGHER_IS_BETTER)
    found: list[dict[str, tuple[float, float | None]]] = []
    for record in records:
        rows = {row["name"]: (row["value"], row["error"]) for row in record["rows"]}
        for row in (record.get("probe") or {"rows": []})["rows"]:
            name = f"probe, {row['features']}"
            better[name], rows[name] = True, (row["score"][0], None)
        for one in record["features"]:
            name = f"RMSE, {one['name']}"
            better[name], rows[name] = False, (one["rmse"], one["rmse_error"])
        found.append(rows)
    metrics = []
    for name in dict.fromkeys(name for rows in found for name in rows):
        pairs = [rows.get(name, (None, None)) for rows in found]
        metrics.append(_Metric(name, tuple(v for v, _ in pairs), tuple(e for _, e in pairs), better.get(name)))
    return metrics


def _written(value: float | None, error: float | None) -> str:
    if value is None or value != value:
        return "-"
    return measure(value) if error is None else f"{measure(value)} ± {error:.2g}"


def _best(metric: _Metric) -> int | None:
    """Return which run is best; None where that cannot be said, or where two are as good."""
    values = [value for value in metric.values if value is not None and value == value]
    if metric.higher_is_better is None or len(values) < 2:
        return None
    best = (max if metric.higher_is_better else min)(values)
    return metric.values.index(best) if values.count(best) == 1 else None
