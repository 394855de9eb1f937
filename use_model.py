"""Use a trained model: latents, reconstructions, samples, what lies between two sequences, missing values, an export.

    python use_model.py encode CHECKPOINT --output latents.parquet              # means, variances, NLL and rate of each sequence
    python use_model.py encode CHECKPOINT --data_dir new.parquet --output latents.parquet
    python use_model.py reconstruct CHECKPOINT --output reconstructed.parquet
    python use_model.py sample CHECKPOINT --count 1000 --temperature 0.8 --output samples.parquet
    python use_model.py interpolate CHECKPOINT ID ID --steps 8 --output between.parquet
    python use_model.py impute CHECKPOINT --output filled.parquet               # vectors and events with missing values
    python use_model.py export CHECKPOINT --output exported                     # safetensors, JSON, tokenizer

CHECKPOINT is a .ckpt file, a run's directory (its best checkpoint) or an export. Values come out in the data's own units, text as
text, all of it as Parquet, written as it is computed: memory does not grow with the data.
`python use_model.py ACTION --help` has the flags of each.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from seqvae.cli.command_line import did_you_mean, parse_command_line, split_positional
from seqvae.config.inference import DataChoices, Encode, Export, Impute, Interpolate, Reconstruct, Sample
from seqvae.console import set_up_output, share_machine
from seqvae.errors import ExitCode, UsageError, harmless, run_command

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from seqvae.data.datamodule import SequenceDataModule
    from seqvae.inference.model import Trained

PROG = "use_model.py"
ORDER = ("train", "valid", "test", "pool")
"""Of splits in an output."""


# --- What it does ------------------------------------------------------------------------------------------------------


def encode(trained: "Trained", asked: Encode, _: list[str]) -> "Iterator[pa.Table]":
    from seqvae.inference import encode as encoding

    return encoding.encode(trained, *opened(trained, asked.data))


def reconstruct(trained: "Trained", asked: Reconstruct, _: list[str]) -> "Iterator[pa.Table]":
    from seqvae.inference import sample as sampling

    data, splits = opened(trained, asked.data)
    temperature, seed = asked.drawing.temperature, asked.machine.seed
    return sampling.reconstructed(trained, data, splits, temperature=temperature, seed=seed)


def sample(trained: "Trained", asked: Sample, _: list[str]) -> "Iterator[pa.Table]":
    from seqvae.inference import sample as sampling

    own, seed = asked.sampling, asked.machine.seed
    return sampling.sampled(trained, own.count, temperature=own.temperature, length=own.length, seed=seed)


def interpolate(trained: "Trained", asked: Interpolate, ids: list[str]) -> "Iterator[pa.Table]":
    from seqvae.inference import sample as sampling

    data, splits = opened(trained, asked.data)
    temperature, seed = asked.drawing.temperature, asked.machine.seed
    return sampling.interpolated(trained, data, splits, ids, asked.path.steps, temperature=temperature, seed=seed)


def impute(trained: "Trained", asked: Impute, _: list[str]) -> "Iterator[pa.Table]":
    from seqvae.inference import impute as imputing

    data, splits = opened(trained, asked.data)
    names = asked.imputing.variables
    variables = None if names is None else [name.strip() for name in names.split(",")]
    draws, seed = asked.imputing.draws, asked.machine.seed
    return imputing.imputed(trained, data, splits, draws=draws, variables=variables, seed=seed)


class Action(NamedTuple):
    """One word behind `use_model.py`."""

    settings: type[Any]
    words: tuple[str, ...]
    """What stands before the flags."""
    run: "Callable[[Trained, Any, list[str]], Iterator[pa.Table]] | None"
    says: str
    default: str
    """Where the output goes."""


ACTIONS = {
    "encode": Action(
        *(Encode, ("CHECKPOINT",), encode),
        "Each sequence's posterior mean and variance, its NLL and its rate (in nats; their sum is an outlier score).",
        "latents.parquet",
    ),
    "reconstruct": Action(
        *(Reconstruct, ("CHECKPOINT",), reconstruct),
        "What is left of each sequence on its way through the latent.",
        "reconstructed.parquet",
    ),
    "sample": Action(
        *(Sample, ("CHECKPOINT",), sample), "Sequences that nobody has seen, from the prior.", "samples.parquet"
    ),
    "interpolate": Action(
        *(Interpolate, ("CHECKPOINT", "ID", "ID"), interpolate),
        "What lies between two sequences of the data, by their ids.",
        "between.parquet",
    ),
    "impute": Action(
        *(Impute, ("CHECKPOINT",), impute),
        "Missing values of vectors and events, with how sure the model is.",
        "filled.parquet",
    ),
    "export": Action(
        *(Export, ("CHECKPOINT",), None),
        "Weights as safetensors, with settings, and tokenizer or scaler, for other programs; use_model.py reads it back.",
        "exported",
    ),
}


def main() -> None:
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(f"usage: {PROG} ACTION CHECKPOINT [--flag value ...]\n\n{__doc__}")
        raise SystemExit(ExitCode.DONE if words else ExitCode.USAGE)
    if words[0] == "--version":
        parse_command_line(Export, words, prog=PROG, description="")  # prints and leaves
    name = words[0]
    if name not in ACTIONS:
        hint = did_you_mean(name, ACTIONS)
        raise UsageError(f"{name!r} is no action{hint}; there are {', '.join(ACTIONS)}")
    action = ACTIONS[name]
    places, flags = split_positional(
        words[1:], action.words, f"{PROG} {name} {' '.join(action.words)} [--flag value ...]"
    )
    asked = parse_command_line(
        action.settings,
        flags,
        prog=f"{PROG} {name} {' '.join(action.words)}",
        description=action.says,
        presets=None,
    )
    share_machine()  # only now: what follows imports torch, which --help must not
    set_up_output()

    from seqvae.inference.model import open_trained
    from seqvae.inference.output import refuse_foreign_file

    output = Path(asked.output.output or action.default).expanduser()
    if action.run is None:
        export(places[0], output)
        return
    refuse_foreign_file(output)
    trained = open_trained(places[0], asked.machine)
    announce(trained)
    write(output, action.run(trained, asked, places[1:]), name, trained)


def opened(trained: "Trained", choices: DataChoices) -> "tuple[SequenceDataModule, list[str]]":
    """The data, and the splits to go through: all of them, where none is named."""
    from seqvae.inference.model import chosen_split, open_data

    data = open_data(trained, choices)
    there = [name for name in ORDER if name in data.data.splits]
    splits = there if choices.split is None else [chosen_split(data, choices.split)]
    for note in data.data.notes if choices.data_dir is not None else ():  # of the training's own, the training told
        say(note if note.startswith("warning: ") else f"note: {note}")
    return data, splits


def announce(trained: "Trained") -> None:
    settings, description = trained.settings, trained.description
    latent = f"{settings['latent_size']} latent dimensions for each {settings['latent_scope']}"
    size = f"{trained.parameters / 1e6:.2f} M parameters"
    say(f"{trained.path}: {description.kind}, step {trained.step:,}, {settings['decoder']} decoder, {size}, {latent}")


def write(output: Path, tables: "Iterator[pa.Table]", name: str, trained: "Trained") -> None:
    from seqvae.inference.output import write_parquet
    from seqvae.reports.run_files import command_line

    begin = time.perf_counter()
    about = {"command": command_line(sys.argv), "checkpoint": str(trained.path)}
    rows = write_parquet(output, told(tables), about)
    print(harmless(f"{output}: {rows:,} rows in {time.perf_counter() - begin:.1f} s ({name})"))


def told(tables: "Iterator[pa.Table]") -> "Iterator[pa.Table]":
    """With a word now and then on how far it is, on a terminal."""
    rows, last = 0, time.monotonic()
    for table in tables:
        rows += table.num_rows
        if sys.stderr.isatty() and time.monotonic() - last > 5:
            say(f"{rows:,} rows so far")
            last = time.monotonic()
        yield table


def export(place: str, output: Path) -> None:
    from seqvae.inference.export import refuse_foreign, write_exported
    from seqvae.inference.model import open_trained

    refuse_foreign(output)
    trained = open_trained(place)
    announce(trained)
    output.mkdir(parents=True, exist_ok=True)
    for path in write_exported(output, trained.stored):
        print(harmless(f"{path}: {path.stat().st_size:,} bytes"))


def say(line: str) -> None:
    print(harmless(line), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
