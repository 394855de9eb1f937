"""What `seqvae evaluate` found, as text for people: its record (the dict that is written as JSON) in, lines out."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from seqvae.reports.terminal import Ink, grid, heading, note, section
from seqvae.text import clip, counted, measure, percent, step_name, visible

BARS, PLAIN_BARS = " ▁▂▃▄▅▆▇█", " .:-=+*%#"
MOST_FEATURES = 50
HIGHER_IS_BETTER = {
    "ELBO": True,
    "ELBO, own units": True,
    "IW-NLL": False,
    "IW-NLL, own units": False,
    "IW-NLL per step": False,
    "perplexity": False,
    "perplexity, ELBO": False,
}
"""Metrics of which one direction is better; of all others none is called the best."""
OF_DENSITIES = {
    "vectors": "ELBO and NLL are densities of normalised values, or of values in their own units where a row says so",
    "events": (
        "ELBO and NLL are densities of gaps in the data's time, and of normalised values, or of values in their own units where a "
        "row says so"
    ),
}
NAME_WIDTH = 24


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
    unit = step_name(record["kind"])
    about = (
        f"step {record['step']:,}, {record['parameters']:,} parameters; {record['split']} of {record['data']}: "
        f"{record['sequences']:,} sequences, {counted(record['steps'], unit)} ({record['kind']})"
    )
    lines = [*heading(record["checkpoint"], ink), *note(about, ink, mark="")]
    remark = f"in nats per sequence, or, per step, per {unit}, unless another unit is named; ± one standard error"
    lines += note(remark, ink, mark="")
    if record["kind"] != "tokens":
        lines += note(OF_DENSITIES[record["kind"]], ink, mark="")
    lines.append("")
    readings = [["reading", "value", "error", "of"]]
    for row in record["rows"]:
        error = "" if row["error"] is None else f"± {measure(row['error'])}"
        readings.append([visible(row["name"]), _written(row["value"], None), error, visible(row["of"])])
    lines += grid(readings, ink, texts=range(len(readings[0])))

    if record["kl_per_dim"]:  # codes have none
        lines += _dimensions(record["kl_per_dim"], ink)

    features = []
    for one in record["features"]:
        rmse, of_mean = one["rmse"], one["rmse_of_mean"]
        explained = percent(max(0.0, 1 - (rmse / of_mean) ** 2)) if of_mean else "-"
        features.append(Feature(one["name"], one["values"], rmse, one["mae"], of_mean, explained))
    remark = (
        "One time step ahead, given the posterior's mean and all time steps before; in the data's own units. Training mean: the "
        "RMSE of always predicting that. Explained: the share of its square that the model takes away."
    )
    lines += section("Errors of each feature", features, ink, most=MOST_FEATURES, remark=remark)
    if record.get("probe") is not None:
        lines += _probe(record["probe"], ink)
    return lines + _warnings(record["notes"], ink)


def _dimensions(kl_per_dim: Sequence[float], ink: Ink) -> list[str]:
    width, most = ink.width - 6, max(kl_per_dim)
    bars = BARS if ink.blocks else PLAIN_BARS
    drawn = "".join(bars[min(8, round(8 * kl / most))] if most > 0 else bars[0] for kl in kl_per_dim)
    lines = heading("KL of each dimension, nats", ink)
    lines += [f"  |{drawn[first : first + width]}|" for first in range(0, len(drawn), width)]
    largest = sorted(range(len(kl_per_dim)), key=lambda number: -kl_per_dim[number])[:5]
    named = ", ".join(f"z{number} {measure(kl_per_dim[number])}" for number in largest)
    return [*lines, *note(f"largest: {named}", ink, mark="")]


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

    higher_is_better = dict(HIGHER_IS_BETTER)
    metrics: dict[str, list[tuple[float | None, float | None]]] = {}
    for place, record in enumerate(records):
        found = {row["name"]: (row["value"], row["error"]) for row in record["rows"]}
        for row in (record.get("probe") or {"rows": []})["rows"]:
            name = f"probe, {row['features']}"
            higher_is_better[name], found[name] = True, (row["score"][0], None)
        for one in record["features"]:
            name = f"RMSE, {one['name']}"
            higher_is_better[name], found[name] = False, (one["rmse"], one["rmse_error"])
        for name, pair in found.items():
            metrics.setdefault(name, [(None, None)] * len(records))[place] = pair
    rows, bold = [["", *letters]], set()
    for number, (name, pairs) in enumerate(list(metrics.items())[:MOST_FEATURES], start=1):
        rows.append([clip(visible(name), NAME_WIDTH), *(_written(*pair) for pair in pairs)])
        values = [value for value, _ in pairs]
        known = [value for value in values if value is not None and value == value]
        if comparison["same_data"] and name in higher_is_better and len(known) > 1:
            best = max(known) if higher_is_better[name] else min(known)
            if known.count(best) == 1:  # else two are as good
                bold.add((number, 1 + values.index(best)))
    lines += ["", *grid(rows, ink, bold=bold)]
    if len(metrics) > MOST_FEATURES:
        lines.append(ink.dim(f"  ... and {len(metrics) - MOST_FEATURES:,} more"))

    if comparison["differences"]:
        lines += heading("IW-NLL on the same sequences, nats per sequence", ink)
    for one in comparison["differences"]:
        value, error = one["value"], one["error"]
        verdict = f"{one['lower']} is lower" if abs(value) > 2 * error else "no difference shown"
        lines.append(f"  {one['of']}: {value:+.4g} ± {error:.2g} ({verdict})")
    if unlike := comparison["unlike"]:
        lines += ["", *(line for text in unlike for line in note(text, ink))]
        lines += note("so these numbers do not compare, and none is called the best", ink)
    notes = [f"{letter}: {text}" for letter, record in zip(letters, records, strict=True) for text in record["notes"]]
    return lines + _warnings(notes, ink)


def _warnings(notes: Sequence[str], ink: Ink) -> list[str]:
    return ["", *(ink.warning(line) for text in notes for line in note(text, ink))] if notes else []


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


def _written(value: float | None, error: float | None) -> str:
    if value is None or value != value:
        return "-"
    return measure(value) if error is None else f"{measure(value)} ± {error:.2g}"
