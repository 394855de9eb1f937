"""What a run came to, as a saved model carries it, and the model card that is made from that: Markdown with the hub's YAML header.

    results_of(run directory, step of the checkpoint)  -> types of JSON, for config.json
    card_of(content of config.json)                    -> README.md

Nothing in a card can be markup that came from data or names: it is escaped, cut and kept in one line.
"""

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from seqvae.reports.read_run import Row, Run, is_run_directory, number, read_run, row_in, rows_in, text, texts, whole
from seqvae.reports.story import story_of
from seqvae.text import brief, counted, measure, some, step_name, visible

MOST_TEXT = 600
"""Characters of one piece of text."""
MOST_NAMES = 40
READING = (
    *("step", "rate", "mutual_information", "mutual_information_cap", "active_units"),
    *("decoder_use", "decoder_use_error"),
)
"""What is kept of a reading of the monitor."""
METRICS = {"IW-NLL": "iw_nll", "mutual information": "mutual_information", "decoder use": "decoder_use"}
"""Rows of an evaluation that stand in the header of a card, with the names that they have there."""
_MARKUP = re.compile(r"([\\`*_{}\[\]<>#|~$&!])")


def results_of(directory: Path, step: int) -> dict[str, Any]:
    """Return what is known of a run, in types of JSON: `step` is that of its checkpoint, which evaluations must be of.

    {}: the directory holds no more than checkpoints.
    """
    if not is_run_directory(directory):
        return {}
    run = read_run(directory)
    story = story_of(run, time.time())
    results: dict[str, Any] = {
        "run": run.name,
        **{name: getattr(story, name) for name in ("verdict", "sentence", "why", "state")},
        "command": text(run.environment, "command"),
        "environment": {
            name: run.environment[name] for name in ("started", "commit", "python") if name in run.environment
        },
        "data": {
            name: value
            for name, value in row_in(run.facts, "data").items()
            if name in ("layout", "splits", "notes", "classes")
        },
    }
    if validation := _nearest(run.validations, step):
        results["validation"] = {
            name: value for name, value in validation.items() if name.startswith(("step", "valid_"))
        }
    probed = [row for row in run.readings if "decoder_use" in row]
    if reading := _nearest(probed or run.readings, step):
        results["reading"] = {name: reading[name] for name in READING if name in reading}
    if evaluation := _evaluation_of(run, step):
        results["evaluation"] = evaluation
    return results


def _nearest(rows: list[Row], step: int) -> Row | None:
    return min(rows, key=lambda row: abs((number(row, "step") or 0) - step), default=None)


def _evaluation_of(run: Run, step: int) -> Row | None:
    """Return the newest evaluation of this checkpoint on the run's own data, rather one with an IW-NLL."""
    data_dir = run.settings.get("data_dir")
    own = "demo data" if data_dir is None else Path(data_dir).name or data_dir
    found = [row for row in run.evaluations if whole(row, "step") == step and text(row, "data") == own]
    found.sort(key=lambda row: any(text(one, "name") == "IW-NLL" for one in rows_in(row, "rows")))
    return (
        {name: found[-1][name] for name in ("time", "split", "sequences", "rows", "notes") if name in found[-1]}
        if found
        else None
    )


# --- The card ---------------------------------------------------------------------------------------------------------


def card_of(config: Mapping[str, Any], address: str | None = None) -> str:
    """Write the card of a saved model; `address`: what `seqvae.load` opens it by, otherwise the directory that it stands in."""
    results, settings = row_in(config, "results"), row_in(config, "settings")
    description = row_in(config, "description")
    name = address.rpartition("/")[2] if address else text(results, "run") or "SeqVAE model"
    has_two = settings.get("latent_scope") == "both"
    latent = f"{settings.get('latent_size')} latent dimensions for each {'sequence' if has_two else settings.get('latent_scope')}"
    latent += f", {settings.get('step_latent_size')} below it for each step" if has_two else ""
    lines = [
        f"---\n{yaml.safe_dump(_header(results, text(description, 'kind'), name), sort_keys=False, allow_unicode=True)}---",
        f"# {_escaped(name)}",
        f"A variational autoencoder of sequences of {_escaped(text(description, 'kind'))}, trained with SeqVAE "
        f"{_escaped(text(config, 'version'))}: {_escaped(settings.get('encoder'))} encoder, "
        f"{_escaped(settings.get('decoder'))} decoder, {_escaped(latent)}, "
        f"{whole(config, 'parameters') or 0:,} parameters, step {whole(config, 'step') or 0:,}.",
        *_verdict(results),
        "## Use",
        "```python\nimport seqvae\n\n"
        f'model = seqvae.load("{visible(address) if address else "."}")'
        f"{'' if address else '  # the directory of this file'}\n"
        'latents = model.encode("my_data.parquet")  # a DataFrame; also reconstruct, sample, interpolate, impute, evaluate\n```',
        *_numbers(results),
        *_data(results, description),
        *_training(results, settings),
    ]
    return "\n\n".join(lines) + "\n"


def _header(results: Row, kind: str, name: str) -> dict[str, Any]:
    header: dict[str, Any] = {
        "library_name": "seqvae",
        "pipeline_tag": "feature-extraction",
        "tags": ["seqvae", "variational-autoencoder", "sequences", visible(kind)],
    }
    evaluation = row_in(results, "evaluation")
    metrics = [
        {"type": METRICS[text(row, "name")], "name": text(row, "name"), "value": value}
        for row in rows_in(evaluation, "rows")
        if text(row, "name") in METRICS and (value := number(row, "value")) is not None
    ]
    if metrics:
        dataset = {"name": "the data of the run", "type": visible(kind), "split": visible(text(evaluation, "split"))}
        task = {"type": "feature-extraction"}
        header["model-index"] = [
            {"name": visible(name), "results": [{"task": task, "dataset": dataset, "metrics": metrics}]}
        ]
    return header


def _verdict(results: Row) -> list[str]:
    if not text(results, "verdict"):
        return ["Of the run that trained it nothing is known: it was saved from a checkpoint alone."]
    verdict = f"**Posterior: {_escaped(text(results, 'verdict'))}.** {_escaped(text(results, 'sentence'))}."
    return [f"{verdict} {_escaped(text(results, 'why'))}", _escaped(text(results, "state"))]


def _numbers(results: Row) -> list[str]:
    evaluation, reading, validation = (row_in(results, name) for name in ("evaluation", "reading", "validation"))
    if evaluation:
        rows = [
            [text(row, "name"), _with_error(number(row, "value"), number(row, "error")), text(row, "of")]
            for row in rows_in(evaluation, "rows")
        ]
        where = (
            f"{_escaped(text(evaluation, 'split'))} split, {counted(whole(evaluation, 'sequences') or 0, 'sequence')}"
        )
        notes = [f"- {_escaped(note)}" for note in texts(evaluation, "notes")]
        about = f"By `seqvae evaluate`, on the {where}, in nats per sequence where nothing else is said:"
        return ["## Numbers", about, _table(("", "value", "of"), rows), *(["\n".join(notes)] if notes else [])]
    rows = []
    if validation:
        on = f"validation at step {whole(validation, 'step') or 0:,}"
        if sequences := whole(validation, "valid_sequences"):
            on += f", {counted(sequences, 'sequence')}"
        rows += [
            [name, _with_error(number(validation, key)), on]
            for name, key in (("ELBO", "valid_elbo"), ("rate", "valid_kl"))
        ]
    if reading:
        on = f"monitor at step {whole(reading, 'step') or 0:,}"
        cap = number(reading, "mutual_information_cap")
        rows += [
            [
                "mutual information",
                _with_error(number(reading, "mutual_information")),
                f"{on}{'' if cap is None else f', at most {brief(cap)}'}",
            ],
            ["decoder use", _with_error(number(reading, "decoder_use"), number(reading, "decoder_use_error")), on],
        ]
        if whole(reading, "codebook_size"):
            rows.append(["codes in use, share", _with_error(number(reading, "codes_in_use")), on])
        else:
            rows.append(["active units", _with_error(number(reading, "active_units")), on])
    missing = "The IW-NLL was not measured: `seqvae evaluate RUN` before the model is saved writes it here."
    if not rows:
        return [missing] if results else []
    return [
        "## Numbers",
        "In nats per sequence:",
        _table(("", "value", "of"), [row for row in rows if row[1]]),
        missing,
    ]


def _data(results: Row, description: Row) -> list[str]:
    data, lines = row_in(results, "data"), ["## Data"]
    if layout := text(data, "layout"):
        lines.append(_escaped(layout))
    steps = f"{step_name(text(description, 'kind'))}s"
    rows = [
        [
            text(row, "split"),
            *(f"{whole(row, key) or 0:,}" for key in ("sequences", "steps")),
            *(_with_error(number(row, key)) for key in ("mean_length", "longest")),
        ]
        for row in rows_in(data, "splits")
    ]
    if rows:
        lines.append(_table(("split", "sequences", steps, "mean length", "longest"), rows))
    if names := texts(description, "names"):
        noun = "features" if description.get("kind") == "vectors" else "variables"
        lines.append(f"{len(names):,} {noun}: {_escaped(some([visible(name) for name in names], MOST_NAMES), 4000)}.")
    else:
        tokenizer = text(description, "tokenizer")
        kept = "tokenizer.json" if tokenizer.lstrip().startswith("{") else tokenizer or "ids as they are"
        lines.append(f"{whole(description, 'vocabulary_size') or 0:,} symbols ({_escaped(kept)}).")
    if classes := texts(description, "classes"):
        lines.append(f"Classes: {_escaped(some([visible(name) for name in classes], MOST_NAMES), 4000)}.")
    if notes := [f"- {_escaped(note.removeprefix('note: '))}" for note in texts(data, "notes")]:
        lines.append("\n".join(notes))
    return lines


def _training(results: Row, settings: Row) -> list[str]:
    lines = ["## Training"]
    if command := text(results, "command"):
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", command)), default=0))
        lines.append(f"{fence}\n{visible(command)}\n{fence}")
    environment = row_in(results, "environment")
    shown = {"started": "Started", "commit": "commit", "python": "Python"}
    if about := [f"{word} {text(environment, name)}" for name, word in shown.items() if text(environment, name)]:
        lines.append(f"{_escaped(', '.join(about))}.")
    return [*lines, f"All {len(settings)} settings are in config.json."]


def _with_error(value: float | None, error: float | None = None) -> str:
    if value is None:
        return ""
    return measure(value) + ("" if error is None else f" ± {error:.2g}")


def _table(head: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *([_escaped(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escaped(value: object, most: int = MOST_TEXT) -> str:
    """Return text as Markdown shows it letter by letter, in one line, cut.

    >>> _escaped("<b>a_b\\n[x](y)")
    '\\\\<b\\\\>a\\\\_b\\\\\\\\n\\\\[x\\\\](y)'
    """
    shown = visible(str(value))
    shown = shown if len(shown) <= most else f"{shown[: most - 2]}.."
    return _MARKUP.sub(r"\\\1", shown)
