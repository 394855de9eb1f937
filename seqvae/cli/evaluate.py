"""`seqvae evaluate`: a model and data in; a table, a row of evaluation.jsonl and perhaps a JSON file out."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from seqvae.cli.command_line import INFORMATION_FLAGS, parse_command_line, split_positional
from seqvae.config.inference import Evaluate
from seqvae.console import program, set_up_output, share_machine
from seqvae.errors import UsageError

DESCRIPTION = """Say in numbers what a trained model is worth on some data, in nats, in the data's own units, and by a linear probe.

    seqvae evaluate runs/mine                                    # a run, a checkpoint or an export; its test split
    seqvae evaluate runs/mine --split valid+test --probe label   # what the latents know of a label
    seqvae evaluate runs/mine --data_dir other_data --json numbers.json
    seqvae evaluate --compare runs/a runs/b runs/c               # side by side

Prints a table, and appends a row to evaluation.jsonl in the run's directory. The same seed gives the same numbers.
"""
COMPARE = "--compare"


def run(verb: str, words: Sequence[str]) -> None:
    share_machine()
    places, flags, compares = models_and_flags(words)
    settings = parse_command_line(
        Evaluate, flags, prog=f"seqvae {verb} CHECKPOINT", description=DESCRIPTION, presets=None
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
    from seqvae.inference.evaluate import append_record, compare, evaluate
    from seqvae.inference.model import open_data, open_model
    from seqvae.inference.streaming import chosen_splits, new_file
    from seqvae.reports.evaluation_report import comparison_lines, evaluation_lines
    from seqvae.reports.terminal import ink_for

    found, directories = [], []
    for place in places:
        model = open_model(place, settings.machine)
        data = open_data(model, settings.data, own.probe)
        splits = chosen_splits(data, settings.data.split)
        found.append(evaluate(model, data, splits, own, settings.machine.seed, sys.argv))
        directories.append(model.run)
    content = compare(found) if compares else found[0][0]
    lines = comparison_lines if compares else evaluation_lines
    print("\n".join(lines(content, ink_for(sys.stdout, os.environ))))
    if output is not None:
        with new_file(output) as partial:
            text = json.dumps(to_json(content), indent=1, ensure_ascii=False, allow_nan=False)
            partial.write_text(text + "\n", encoding="utf-8")
    for (record, _), directory in zip(found, directories, strict=True):  # last, as a run's directory may be read-only
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
        raise UsageError(f"{COMPARE} needs two runs or more behind it, got {len(places)}. Usage: {example}")
    if flags and not flags[0].startswith("-"):
        raise UsageError(f"{flags[0]!r}: with {COMPARE} all runs stand behind it. Usage: {example}")
    return places, flags, True
