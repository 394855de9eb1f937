"""Say in numbers what a trained model is worth on some data, in nats, in the data's own units, and by a linear probe.

    python evaluate.py runs/mine                                    # a run, a checkpoint or an export; its test split
    python evaluate.py runs/mine --split valid+test --probe label   # what the latents know of a label
    python evaluate.py runs/mine --data_dir other_data --json numbers.json
    python evaluate.py --compare runs/a runs/b runs/c               # side by side

Prints a table, and appends a row to evaluation.jsonl in the run's directory. The same seed gives the same numbers.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqvae.cli.command_line import parse_command_line, split_positional
from seqvae.config.inference import DataChoices, MachineChoices
from seqvae.console import set_up_output, share_machine
from seqvae.errors import UsageError, run_command
from seqvae.files import refuse_no_paths

if TYPE_CHECKING:
    from seqvae.inference.evaluate import Weighted

PROG = "evaluate.py"
EXAMPLE = "python evaluate.py CHECKPOINT [--split test], or python evaluate.py --compare RUN RUN"
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
    """All that this command can be told."""

    data: DataChoices = field(default_factory=DataChoices)
    evaluation: EvaluateSettings = field(default_factory=EvaluateSettings)
    machine: MachineChoices = field(default_factory=MachineChoices)


def main() -> None:
    share_machine()
    places, flags, compares = words_of(sys.argv[1:])
    settings = parse_command_line(EvaluateCommand, flags, prog=PROG, description=__doc__ or "", presets=None)
    if settings.data.label_path is not None and settings.evaluation.probe is None:
        raise UsageError("--label_path needs --probe, the name of a column with a label in that file")
    refuse_no_file(settings.evaluation.json)
    set_up_output()

    from seqvae.inference.evaluate import append_record, compare
    from seqvae.reports.evaluation_page import comparison_lines, evaluation_lines  # only now: torch takes seconds
    from seqvae.text import ink_for

    ink = ink_for(sys.stdout, os.environ)
    found = [evaluate_one(place, settings) for place in places]
    if compares:
        content = compare([(record, weighted) for record, weighted, _ in found])
        print("\n".join(comparison_lines(content, ink)))
    else:
        content = found[0][0]
        print("\n".join(evaluation_lines(content, ink)))
    if settings.evaluation.json is not None:
        write_json(settings.evaluation.json, content)
    for record, _, run in found:  # at last, as a run's directory may be read-only
        append_record(run, record)


def words_of(words: Sequence[str]) -> tuple[list[str], list[str], bool]:
    """The checkpoints, the flags, and whether the checkpoints are to be compared.

    >>> words_of(["--compare", "a", "b", "--seed", "1"])
    (['a', 'b'], ['--seed', '1'], True)
    """
    if COMPARE not in words:
        places, flags = split_positional(words, ["CHECKPOINT"], EXAMPLE)
        return places, flags, False
    at = words.index(COMPARE)
    behind = at + 1
    while behind < len(words) and not words[behind].startswith("-"):
        behind += 1
    places, flags = list(words[at + 1 : behind]), [*words[:at], *words[behind:]]
    if len(places) < 2 and not {"--help", "-h", "--version"} & set(flags):
        raise UsageError(f"{COMPARE} wants two runs or more behind it, got {len(places)}. Wanted: {EXAMPLE}")
    if flags and not flags[0].startswith("-"):
        raise UsageError(f"{flags[0]!r}: with {COMPARE} all runs stand behind it. Wanted: {EXAMPLE}")
    return places, flags, True


def refuse_no_file(path: str | None) -> None:
    """Before anything is computed."""
    if path is None:
        return
    full = Path(path).expanduser()
    folder = full.parent
    if full.is_dir():
        raise UsageError(f"--json {path} is a directory: give the name of a file in it")
    if not folder.is_dir():
        raise UsageError(f"--json {path}: there is no directory {folder}. Make it, or choose another")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"--json {path}: nothing may be written to {folder}. Choose another")


def evaluate_one(place: str, settings: EvaluateCommand) -> "tuple[dict[str, Any], Weighted | None, Path | None]":
    """The record of a model, and the directory of its run."""
    from seqvae.inference.evaluate import evaluate, place_and_time, weighted_nll
    from seqvae.inference.model import Labels, chosen_splits, open_data, open_trained
    from seqvae.inference.probe import probe, refuse_no_probe

    own, seed = settings.evaluation, settings.machine.seed
    trained = open_trained(place, settings.machine)
    data = open_data(trained, settings.data, None if own.probe is None else Labels(own.probe))
    splits = chosen_splits(data, settings.data.split)
    if own.probe is not None:
        refuse_no_probe(data, own.probe, splits)
    weighted = weighted_nll(trained, data, splits, samples=own.iw_samples, sequences=own.iw_sequences, seed=seed)
    record = place_and_time(trained, data, sys.argv) | evaluate(trained, data, splits, weighted, seed)
    if own.probe is not None:
        record["probe"] = probe(trained, data, own.probe, splits, seed).to_json()
    return record, weighted, trained.run


def write_json(path: str, content: dict[str, Any]) -> None:
    import json

    from seqvae.files import to_json
    from seqvae.inference.output import new_file

    with new_file(Path(path).expanduser()) as partial:
        text = json.dumps(to_json(content), indent=1, ensure_ascii=False, allow_nan=False)
        partial.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
