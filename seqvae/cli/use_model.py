"""The commands that use a trained model: `seqvae evaluate` in numbers; `encode`, `reconstruct`, `sample`, `interpolate`, `impute`
and `export` in files; `push` on the Hugging Face Hub; and `fit-prior`, which adds a prior over codes to it.
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from seqvae.cli.command_line import INFORMATION_FLAGS, parse_command_line, split_positional
from seqvae.config.inference import (
    DataChoices,
    DataSource,
    Encode,
    Evaluate,
    Export,
    FitPrior,
    Impute,
    Interpolate,
    Push,
    Reconstruct,
    Sample,
)
from seqvae.console import program, say, set_up_output, share_machine
from seqvae.errors import UsageError, harmless
from seqvae.files import MADE_BY, is_csv
from seqvae.text import counted

if TYPE_CHECKING:
    import pyarrow as pa

    from seqvae.data.datamodule import SequenceDataModule
    from seqvae.inference.model import Model

# --- Files -------------------------------------------------------------------------------------------------------------

PROGRESS_SECONDS = 5
"""Between two lines of progress on a terminal."""
_ABOUT_CHECKPOINTS = """

CHECKPOINT is a .ckpt file, the directory of a run (its best checkpoint), an export, or hf://user/name. Values come out in the
data's own units, text as text, as Parquet or, with an --output that ends in .csv, as CSV, written as it is computed: memory does
not grow with the data."""


class Action(NamedTuple):
    """A command that uses a model."""

    settings: type[Any]
    summary: str
    output: str
    """Where the output goes by default."""
    words: tuple[str, ...] = ("CHECKPOINT",)
    """What stands before the flags."""


ACTIONS = {
    "encode": Action(
        Encode,
        "Each sequence's posterior mean and variance, its NLL and its rate (in nats; their sum is an outlier score).",
        "latents.parquet",
    ),
    "reconstruct": Action(Reconstruct, "Each sequence as decoded from its own latent.", "reconstructed.parquet"),
    "sample": Action(Sample, "New sequences, from the prior.", "samples.parquet"),
    "interpolate": Action(
        Interpolate,
        "What lies between two sequences of the data, by their ids.",
        "between.parquet",
        ("CHECKPOINT", "ID", "ID"),
    ),
    "impute": Action(Impute, "Missing values of vectors and events, with how sure the model is.", "filled.parquet"),
    "export": Action(
        Export,
        "Weights as safetensors, with settings, tokenizer or scaler, and a model card, which every verb reads back; or ONNX.",
        "exported",
    ),
}


def run(verb: str, words: Sequence[str]) -> None:
    """Write what the action computes: a Parquet or CSV file, or the files of an export."""
    action = ACTIONS[verb]
    names = " ".join(action.words)
    places, flags = split_positional(words, action.words, f"{program()} {names} [--flag value ...]")
    settings = parse_command_line(
        action.settings,
        flags,
        prog=f"seqvae {verb} {names}",
        description=action.summary + _ABOUT_CHECKPOINTS,
        presets=None,
    )
    output = Path(settings.output.output or action.output).expanduser()
    if verb != "export":
        refuse_foreign_file(output)
    share_machine()
    set_up_output()

    from seqvae.inference.model import open_model  # only now: torch takes seconds
    from seqvae.inference.onnx_export import write_onnx
    from seqvae.inference.saved import refuse_foreign_directory, write_saved
    from seqvae.inference.streaming import write_tables
    from seqvae.reports.run_files import command_line

    if verb == "export":
        is_onnx = settings.export.format == "onnx"
        if not is_onnx:  # before the model is read
            refuse_foreign_directory(output)
        model = open_model(places[0])
        say(repr(model))
        if is_onnx:
            paths = write_onnx(output, model.network, model.stored)
        else:
            paths = write_saved(output, model.stored, model.results)
        for path in paths:
            print(harmless(f"{path}: {path.stat().st_size:,} bytes"))
        return
    model = open_model(places[0], settings.machine)
    say(repr(model))
    begin = time.perf_counter()
    about = {"command": command_line(sys.argv), "checkpoint": str(model.path)}
    rows = write_tables(output, _with_progress(computed_tables(model, settings, places[1:])), about)
    print(harmless(f"{output}: {rows:,} rows in {time.perf_counter() - begin:.1f} s ({verb})"))


def refuse_foreign_file(path: Path) -> None:
    """Refuse to overwrite a file that is no output of ours: it may be the user's data."""
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--output {path}: {path.absolute().parent} is no directory; make it first, or choose another")
    if path.is_dir():
        raise UsageError(f"--output {path}: is a directory; give the name of a file")
    if not path.exists():
        return
    if is_csv(path):
        raise UsageError(
            f"--output {path}: is there already, and CSV does not say whose it is; remove it, or choose another"
        )
    import pyarrow as pa  # only now: it takes a while
    import pyarrow.parquet as pq

    try:
        maker = (pq.read_schema(path).metadata or {}).get(b"made_by")
    except (OSError, pa.ArrowException):
        maker = None
    if maker != MADE_BY.encode():
        raise UsageError(f"--output {path}: is there already, and is no output of {MADE_BY}; choose another")


def computed_tables(model: "Model", settings: Any, ids: Sequence[str]) -> "Iterator[pa.Table]":
    """Return what the model computes for a command, by the type of its settings."""
    from seqvae.inference import tables

    seed = settings.machine.seed
    match settings:
        case Sample(sampling=own):
            return tables.sample(model, own, seed)
        case Reconstruct(drawing=own):
            return tables.reconstruct(model, *_opened(model, settings.data), own, seed)
        case Interpolate(path=path, drawing=own):
            return tables.interpolate(model, *_opened(model, settings.data), ids, path, own, seed)
        case Impute(imputing=own):
            names = None if own.variables is None else [name.strip() for name in own.variables.split(",")]
            keeps_values = model.description.kind != "tokens"
            opened = _opened(model, settings.data, keeps_values=keeps_values)
            return tables.impute(model, *opened, own.draws, names, seed)
        case _:
            return tables.encode(model, *_opened(model, settings.data))


def _opened(
    model: "Model", choices: DataChoices, *, keeps_values: bool = False
) -> "tuple[SequenceDataModule, list[str]]":
    """Return the data, and the splits to go through: all of them, where none is named."""
    from seqvae.inference.model import open_data
    from seqvae.inference.streaming import all_splits, chosen_split

    data = open_data(model, choices, keeps_values=keeps_values)
    splits = all_splits(data) if choices.split is None else [chosen_split(data, choices.split)]
    _show_notes(data, choices)
    return data, splits


def _show_notes(data: "SequenceDataModule", choices: DataSource) -> None:
    if choices.data_dir is not None:  # notes on the training's own data were shown then
        for note in data.data.notes:
            say(note if note.startswith("warning: ") else f"note: {note}")


def _with_progress(tables: "Iterator[pa.Table]") -> "Iterator[pa.Table]":
    rows, last = 0, time.monotonic()
    for table in tables:
        rows += table.num_rows
        if sys.stderr.isatty() and time.monotonic() - last > PROGRESS_SECONDS:
            say(f"{rows:,} rows so far")
            last = time.monotonic()
        yield table


# --- The hub -----------------------------------------------------------------------------------------------------------

_ABOUT_PUSH = """\
Put a model onto the Hugging Face Hub: weights, settings, tokenizer or scaler, and a model card with what the run came to.

    seqvae push runs/mine ann/molecules          # private, unless --public
    seqvae push runs/mine molecules              # of your own
    seqvae encode hf://ann/molecules --data_dir my_data

CHECKPOINT is a .ckpt file, the directory of a run (its best checkpoint) or an export. Paths of this machine are left out, and a
card that was edited on the hub stays as it is. Needs the extra hub, and a token of `hf auth login` or HF_TOKEN.
"""


def push(verb: str, words: Sequence[str]) -> None:
    """Put a model onto the hub, and print the address to load it by."""
    names = ["CHECKPOINT", "USER/NAME"]
    places, flags = split_positional(words, names, f"{program()} {' '.join(names)} [--flag value ...]")
    prog = f"seqvae {verb} {' '.join(names)}"
    own = parse_command_line(Push, flags, prog=prog, description=_ABOUT_PUSH, presets=None).hub
    share_machine()
    set_up_output()

    from seqvae.inference.model import open_model  # only now: torch takes seconds

    model = open_model(places[0])
    say(repr(model))
    print(harmless(model.push_to_hub(places[1], private=not own.public, message=own.message)))


# --- A prior over codes ------------------------------------------------------------------------------------------------

_ABOUT_PRIOR = """\
Fit a prior over the codes of a model that was trained with --latent discrete: which codes are likely after which.

    seqvae fit-prior runs/mine                       # into its best checkpoint
    seqvae sample runs/mine --output samples.parquet # from the prior; evaluate takes its rate from it, too

CHECKPOINT is a .ckpt file, the directory of a run (its best checkpoint) or an export; the prior is written into it, in place of an
older one. It learns from the training split and ends by the validation split. The same seed gives the same prior.
"""


def fit_prior(verb: str, words: Sequence[str]) -> None:
    """Fit a prior over the codes of a model, and write it into the model's file."""
    places, flags = split_positional(words, ["CHECKPOINT"], f"{program()} CHECKPOINT [--flag value ...]")
    settings = parse_command_line(
        FitPrior, flags, prog=f"seqvae {verb} CHECKPOINT", description=_ABOUT_PRIOR, presets=None
    )
    share_machine()
    set_up_output()

    from seqvae.inference import prior_fitting  # only now: torch takes seconds
    from seqvae.inference.hub import is_on_hub
    from seqvae.inference.model import open_data, open_model

    if is_on_hub(places[0]):
        raise UsageError(
            f"{places[0]}: a prior is written into a file of this machine; `seqvae export` the model first"
        )
    model = open_model(places[0], settings.machine)
    prior_fitting.refuse_no_codes(model)
    say(repr(model))
    begin = last = time.perf_counter()

    def show(epoch: int, nll: float) -> None:
        nonlocal last
        if sys.stderr.isatty() and time.perf_counter() - last > PROGRESS_SECONDS:
            say(f"epoch {epoch}: {nll:.3f} nats per latent, valid")
            last = time.perf_counter()

    data = open_data(model, settings.data)
    _show_notes(data, settings.data)
    fitted_model, fitted = prior_fitting.fit_prior(model, data, settings.prior, settings.machine.seed, show)
    prior_fitting.store_prior(fitted_model)
    seconds = time.perf_counter() - begin
    print(harmless(f"{model.path}: prior fitted in {counted(fitted.epochs, 'epoch')}, {seconds:.1f} s ({verb})"))
    print(
        f"nats per latent, valid: {fitted.valid:.3f}; by frequencies alone {fitted.frequencies:.3f}; all equally likely "
        f"{fitted.even:.3f}"
    )


# --- Evaluation --------------------------------------------------------------------------------------------------------

_ABOUT_EVALUATION = """\
Say in numbers what a trained model is worth on some data, in nats, in the data's own units, and by a linear probe.

    seqvae evaluate runs/mine                                    # a run, a checkpoint or an export; its test split
    seqvae evaluate runs/mine --split valid+test --probe label   # what the latents know of a label
    seqvae evaluate runs/mine --data_dir other_data --json numbers.json
    seqvae evaluate --compare runs/a runs/b runs/c               # side by side

Prints a table, and appends a row to evaluation.jsonl in the run's directory. The same seed gives the same numbers.
"""
COMPARE = "--compare"


def evaluate(verb: str, words: Sequence[str]) -> None:
    """Print a table, append a row to evaluation.jsonl in the run's directory, and write a JSON file if one is requested."""
    share_machine()
    places, flags, compares = models_and_flags(words)
    settings = parse_command_line(
        Evaluate, flags, prog=f"seqvae {verb} CHECKPOINT", description=_ABOUT_EVALUATION, presets=None
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
    from seqvae.inference.estimates import MOST_SAMPLES
    from seqvae.inference.evaluate import append_record, compare, draw_latents
    from seqvae.inference.evaluate import evaluate as evaluate_model
    from seqvae.inference.model import open_data, open_model
    from seqvae.inference.streaming import chosen_splits, new_file
    from seqvae.reports.evaluation_report import comparison_lines, evaluation_lines
    from seqvae.reports.terminal import ink_for

    if (
        compares and own.iw_samples is None
    ):  # a paired difference may be smaller than the error bar that suffices for one model
        own = replace(own, iw_samples=MOST_SAMPLES)
    found, directories = [], []
    for place in places:
        model = open_model(place, settings.machine)
        data = open_data(model, settings.data, own.probe)
        splits = chosen_splits(data, settings.data.split)
        found.append(evaluate_model(model, data, splits, own, settings.machine.seed, sys.argv))
        directories.append(model.run)
        if settings.data.data_dir is None:
            draw_latents(model, data)
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
