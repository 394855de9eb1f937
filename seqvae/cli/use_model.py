"""`seqvae encode`, `reconstruct`, `sample`, `interpolate`, `impute` and `export`: a trained model in, files out."""

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from seqvae.cli.command_line import parse_command_line, split_positional
from seqvae.config.inference import DataChoices, Encode, Export, Impute, Interpolate, Reconstruct, Sample
from seqvae.console import program, say, set_up_output, share_machine
from seqvae.errors import harmless

if TYPE_CHECKING:
    import pyarrow as pa

    from seqvae.data.datamodule import SequenceDataModule
    from seqvae.inference.model import Model

PROGRESS_SECONDS = 5
"""Between two lines of progress on a terminal."""
_ABOUT_CHECKPOINTS = """

CHECKPOINT is a .ckpt file, the directory of a run (its best checkpoint) or an export. Values come out in the data's own units,
text as text, all of it as Parquet, written as it is computed: memory does not grow with the data."""


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
        "Weights as safetensors, with settings, and tokenizer or scaler, for other programs; every verb reads it back.",
        "exported",
    ),
}


def run(verb: str, words: Sequence[str]) -> None:
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
    share_machine()
    set_up_output()

    from seqvae.inference.model import (  # only now: torch takes seconds
        open_model,
        refuse_foreign_directory,
        write_exported,
    )
    from seqvae.inference.streaming import refuse_foreign_file, write_parquet
    from seqvae.reports.run_files import command_line

    output = Path(settings.output.output or action.output).expanduser()
    if verb == "export":
        refuse_foreign_directory(output)
        model = open_model(places[0])
        say(repr(model))
        output.mkdir(parents=True, exist_ok=True)
        for path in write_exported(output, model.stored):
            print(harmless(f"{path}: {path.stat().st_size:,} bytes"))
        return
    refuse_foreign_file(output)
    model = open_model(places[0], settings.machine)
    say(repr(model))
    begin = time.perf_counter()
    about = {"command": command_line(sys.argv), "checkpoint": str(model.path)}
    rows = write_parquet(output, _with_progress(computed_tables(model, settings, places[1:])), about)
    print(harmless(f"{output}: {rows:,} rows in {time.perf_counter() - begin:.1f} s ({verb})"))


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
            return tables.impute(model, *_opened(model, settings.data), own.draws, names, seed)
        case _:
            return tables.encode(model, *_opened(model, settings.data))


def _opened(model: "Model", choices: DataChoices) -> "tuple[SequenceDataModule, list[str]]":
    """Return the data, and the splits to go through: all of them, where none is named."""
    from seqvae.inference.model import open_data
    from seqvae.inference.streaming import all_splits, chosen_split

    data = open_data(model, choices)
    splits = all_splits(data) if choices.split is None else [chosen_split(data, choices.split)]
    if choices.data_dir is not None:  # notes on the training's own data were shown then
        for note in data.data.notes:
            say(note if note.startswith("warning: ") else f"note: {note}")
    return data, splits


def _with_progress(tables: "Iterator[pa.Table]") -> "Iterator[pa.Table]":
    rows, last = 0, time.monotonic()
    for table in tables:
        rows += table.num_rows
        if sys.stderr.isatty() and time.monotonic() - last > PROGRESS_SECONDS:
            say(f"{rows:,} rows so far")
            last = time.monotonic()
        yield table
