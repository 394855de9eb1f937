"""`seqvae evaluate`: a model and data in; a table, a row of evaluation.jsonl and perhaps a JSON file out."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqvae.cli.command_line import INFORMATION_FLAGS, parse_command_line, split_positional
from seqvae.config.inference import DataChoices, MachineChoices
from seqvae.console import program, set_up_output, share_machine
from seqvae.errors import UsageError
from seqvae.files import refuse_no_paths

if TYPE_CHECKING:
    from seqvae.inference.evaluate import Weighted

DESCRIPTION = """Say in numbers what a trained model is worth on some data, in nats, in the data's own units, and by a linear probe.

    seqvae evaluate runs/mine                                    # a run, a checkpoint or an export; its test split
    seqvae evaluate runs/mine --split valid+test --probe label   # what the latents know of a label
    seqvae evaluate runs/mine --data_dir other_data --json numbers.json
    seqvae evaluate --compare runs/a runs/b runs/c               # side by side

Prints a table, and appends a row to evaluation.jsonl in the run's directory. The same seed gives the same numbers.
"""
COMPARE = "--compare"


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings:
    """Evaluation"""

    iw_samples: int = 500
    """Samples of z for the importance-weighted NLL of each sequence, IW-NLL: the more, the tighter."""

    iw_sequences: int = 1000
    """How many sequences, chosen at random, the IW-NLL is computed of; it costs --iw_samples passes of the decoder. 0: none."""

    probe: str | None = None
    """Column with a label, in the data or the --label_path: how well the posterior means tell its classes apart."""

    json: str | None = None
    """File that everything is written to, as JSON."""

    def __post_init__(self) -> None:
        refuse_no_paths(self, "json")
        if self.iw_samples < 1:
            raise ValueError(f"--iw_samples must be 1 or more, got {self.iw_samples}")
        if self.iw_sequences < 0:
            raise ValueError(f"--iw_sequences must be 0 or more, got {self.iw_sequences}")
        if self.probe is not None and not self.probe:
            raise ValueError("--probe is empty: give the name of a column")


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand:
    """All settings of the command."""

    data: DataChoices = field(default_factory=DataChoices)
    evaluation: EvaluateSettings = field(default_factory=EvaluateSettings)
    machine: MachineChoices = field(default_factory=MachineChoices)


def run(verb: str, words: Sequence[str]) -> None:
    share_machine()
    places, flags, compares = models_and_flags(words)
    settings = parse_command_line(
        EvaluateCommand, flags, prog=f"seqvae {verb} CHECKPOINT", description=DESCRIPTION, presets=None
    )
    own = settings.evaluation
    if settings.data.label_path is not None and own.probe is None:
        raise UsageError("--label_path needs --probe, the name of a column with a label in that file")
    output = None if own.json is None else Path(own.json).expanduser()
    if output is not None:  # before anything is computed
        if output.is_dir():
            raise UsageError(f"--json {own.json} is a directory: give the name of a file in it")
        if not output.parent.is_dir():
            raise UsageError(f"--json {own.json}: there is no directory {output.parent}. Make it, or choose another")
        if not os.access(output.parent, os.W_OK):
            raise UsageError(f"--json {own.json}: nothing may be written to {output.parent}. Choose another")
    set_up_output()

    from seqvae.files import to_json  # only now: torch takes seconds
    from seqvae.inference.evaluate import append_record, compare
    from seqvae.inference.streaming import new_file
    from seqvae.reports.evaluation_report import comparison_lines, evaluation_lines
    from seqvae.reports.terminal import ink_for

    found = [_evaluate_one(place, settings) for place in places]
    content = compare([(record, weighted) for record, weighted, _ in found]) if compares else found[0][0]
    lines = comparison_lines if compares else evaluation_lines
    print("\n".join(lines(content, ink_for(sys.stdout, os.environ))))
    if output is not None:
        with new_file(output) as partial:
            text = json.dumps(to_json(content), indent=1, ensure_ascii=False, allow_nan=False)
            partial.write_text(text + "\n", encoding="utf-8")
    for record, _, directory in found:  # last, as a run's directory may be read-only
        append_record(directory, record)


def models_and_flags(words: Sequence[str]) -> tuple[list[str], list[str], bool]:
    """Return the models, the flags, and whether the models are to be compared.

    >>> models_and_flags(["--compare", "a", "b", "--seed", "1"])
    (['a', 'b'], ['--seed', '1'], True)
    """
    example = f"{program()} CHECKPOINT [--split test], or {program()} {COMPARE} RUN RUN"
    if COMPARE not in words:
        places, flags = split_positional(words, ["CHECKPOINT"], example)
        return places, flags, False
    at = words.index(COMPARE)
    end = next((place for place in range(at + 1, len(words)) if words[place].startswith("-")), len(words))
    places, flags = list(words[at + 1 : end]), [*words[:at], *words[end:]]
    if len(places) < 2 and INFORMATION_FLAGS.isdisjoint(flags):
        raise UsageError(f"{COMPARE} wants two runs or more behind it, got {len(places)}. Wanted: {example}")
    if flags and not flags[0].startswith("-"):
        raise UsageError(f"{flags[0]!r}: with {COMPARE} all runs stand behind it. Wanted: {example}")
    return places, flags, True


def _evaluate_one(place: str, settings: EvaluateCommand) -> "tuple[dict[str, Any], Weighted | None, Path | None]":
    """Return the record of a model, the IW-NLL of its sequences, and the directory of its run."""
    from seqvae.inference.evaluate import evaluate, place_and_time, weighted_nll
    from seqvae.inference.model import Labels, open_data, open_model
    from seqvae.inference.probe import probe, refuse_no_probe
    from seqvae.inference.streaming import chosen_splits

    own, seed = settings.evaluation, settings.machine.seed
    model = open_model(place, settings.machine)
    data = open_data(model, settings.data, None if own.probe is None else Labels(own.probe))
    splits = chosen_splits(data, settings.data.split)
    if own.probe is not None:
        refuse_no_probe(data, own.probe, splits)
    weighted = weighted_nll(model, data, splits, samples=own.iw_samples, sequences=own.iw_sequences, seed=seed)
    record = place_and_time(model, data, sys.argv) | evaluate(model, data, splits, weighted, seed)
    if own.probe is not None:
        record["probe"] = probe(model, data, own.probe, splits, seed).to_json()
    return record, weighted, model.run
