"""`seqvae encode`, `reconstruct`, `sample`, `interpolate`, `impute` and `export`: a trained model in, files out."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
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


def encode(model: "Model", settings: Encode, ids: list[str]) -> "Iterator[pa.Table]":
    from seqvae.inference.encode import encode

    return encode(model, *_opened(model, settings.data))


def reconstruct(model: "Model", settings: Reconstruct, ids: list[str]) -> "Iterator[pa.Table]":
    from seqvae.inference.sample import reconstructed

    data, splits = _opened(model, settings.data)
    return reconstructed(model, data, splits, temperature=settings.drawing.temperature, seed=settings.machine.seed)


def sample(model: "Model", settings: Sample, ids: list[str]) -> "Iterator[pa.Table]":
    from seqvae.inference.sample import sampled

    own = settings.sampling
    return sampled(model, own.count, temperature=own.temperature, length=own.length, seed=settings.machine.seed)


def interpolate(model: "Model", settings: Interpolate, ids: list[str]) -> "Iterator[pa.Table]":
    from seqvae.inference.sample import interpolated

    data, splits = _opened(model, settings.data)
    temperature, seed = settings.drawing.temperature, settings.machine.seed
    return interpolated(model, data, splits, ids, settings.path.steps, temperature=temperature, seed=seed)


def impute(model: "Model", settings: Impute, ids: list[str]) -> "Iterator[pa.Table]":
    from seqvae.inference.impute import imputed

    data, splits = _opened(model, settings.data)
    names = settings.imputing.variables
    variables = None if names is None else [name.strip() for name in names.split(",")]
    return imputed(model, data, splits, draws=settings.imputing.draws, variables=variables, seed=settings.machine.seed)


class Action(NamedTuple):
    """A verb that uses a model."""

    settings: type[Any]
    run: "Callable[[Model, Any, list[str]], Iterator[pa.Table]] | None"
    """None: export, which writes no table."""
    summary: str
    default: str
    """Where the output goes."""
    words: tuple[str, ...] = ("CHECKPOINT",)
    """What stands before the flags."""


ACTIONS = {
    "encode": Action(
        Encode,
        encode,
        "Each sequence's posterior mean and variance, its NLL and its rate (in nats; their sum is an outlier score).",
        "latents.parquet",
    ),
    "reconstruct": Action(
        Reconstruct, reconstruct, "Each sequence as decoded from its own latent.", "reconstructed.parquet"
    ),
    "sample": Action(Sample, sample, "New sequences, from the prior.", "samples.parquet"),
    "interpolate": Action(
        Interpolate,
        interpolate,
        "What lies between two sequences of the data, by their ids.",
        "between.parquet",
        ("CHECKPOINT", "ID", "ID"),
    ),
    "impute": Action(
        Impute, impute, "Missing values of vectors and events, with how sure the model is.", "filled.parquet"
    ),
    "export": Action(
        Export,
        None,
        "Weights as safetensors, with settings, and tokenizer or scaler, for other programs; every verb reads it back.",
        "exported",
    ),
}


def run(verb: str, words: Sequence[str]) -> None:
    action = ACTIONS[verb]
    example = f"{program()} {' '.join(action.words)} [--flag value ...]"
    places, flags = split_positional(words, action.words, example)
    prog = f"seqvae {verb} {' '.join(action.words)}"
    settings = parse_command_line(
        action.settings, flags, prog=prog, description=action.summary + _ABOUT_CHECKPOINTS, presets=None
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

    output = Path(settings.output.output or action.default).expanduser()
    if action.run is None:
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
    rows = write_parquet(output, _with_progress(action.run(model, settings, places[1:])), about)
    print(harmless(f"{output}: {rows:,} rows in {time.perf_counter() - begin:.1f} s ({verb})"))


def _opened(model: "Model", choices: DataChoices) -> "tuple[SequenceDataModule, list[str]]":
    """Return the data, and the splits to go through: all of them, where none is named."""
    from seqvae.inference.model import open_data
    from seqvae.inference.streaming import all_splits, chosen_split

    data = open_data(model, choices)
    splits = all_splits(data) if choices.split is None else [chosen_split(data, choices.split)]
    for note in (
        data.data.notes if choices.data_dir is not None else ()
    ):  # those on the training's own data were shown then
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
