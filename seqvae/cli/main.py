"""The command `seqvae`: one table of verbs, and those of them that need no module of their own.

In: `sys.argv`. Out: the exit code. Each verb imports what it needs when it runs: `seqvae --help` is there at once.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

import seqvae
from seqvae.console import named_command, program, set_up_output, share_machine
from seqvae.errors import ExitCode, UsageError, did_you_mean, run_command
from seqvae.text import visible


class Verb(NamedTuple):
    """A word behind `seqvae`."""

    function: str
    """`module.function` of this package; called with the verb and the words behind it, it returns an exit code or None."""
    usage: str
    summary: str


VERBS = {
    "train": Verb("main.train", "", "train a model as fast as this machine allows, and watch its posterior"),
    "demo": Verb("main.demo", "", "train on demo data for about a minute, and print where the report is"),
    "tune": Verb("main.tune", "", "train with different settings, and keep what no other surpasses"),
    "inspect": Verb("inspect_data.run", "", "say what Parquet files hold, and whether they would train"),
    "evaluate": Verb("use_model.evaluate", "CHECKPOINT", "say what a trained model is worth on some data"),
    "encode": Verb("use_model.run", "CHECKPOINT", "write each sequence's latents, NLL and rate"),
    "reconstruct": Verb("use_model.run", "CHECKPOINT", "write sequences as decoded from their latents"),
    "sample": Verb("use_model.run", "CHECKPOINT", "write new sequences from the prior"),
    "interpolate": Verb("use_model.run", "CHECKPOINT ID ID", "write what lies between two sequences"),
    "impute": Verb("use_model.run", "CHECKPOINT", "write vectors or events with missing values filled"),
    "export": Verb("use_model.run", "CHECKPOINT", "write the weights as safetensors, with settings as JSON"),
    "push": Verb("use_model.push", "CHECKPOINT USER/NAME", "put a model onto the Hugging Face Hub"),
    "fit-prior": Verb(
        "use_model.fit_prior", "CHECKPOINT", "fit a prior over a model's codes, to sample and evaluate by"
    ),
    "profile": Verb("profile.run", "", "say where a training step's time goes, and what to change"),
    "build-cache": Verb("manage_cache.build", "", "convert data before they are used, by several processes"),
    "cache": Verb("manage_cache.run", "list|clear", "say what the cache of converted data holds, or empty it"),
    "report": Verb("main.report", "RUN ...", "write the report of each run again, or an index of runs/"),
    "compare": Verb("main.report", "RUN RUN ...", "write one page that lays runs over one another"),
}

PLAIN = "--plain"
TRAIN_DESCRIPTION = """Train a sequence VAE as fast as this machine allows.

    seqvae train --fast_detection                           # demo data with known truth
    seqvae train --fast_detection --data_dir my_data        # any Parquet of sequences
    seqvae train --data_dir smiles --tokenizer characters   # text
    seqvae train --plain --data_dir my_data                 # the reference recipe: 32-bit numbers, random batches
    torchrun --nproc_per_node 8 -m seqvae train             # or --devices 8

The recommended recipe, on top of the defaults that --help shows: mixed precision, two batches to an optimizer step,
validation ten times an epoch on a tenth of the validation data, and a posterior that is read now and then. --plain is the
recipe that it is measured against, with the posterior watched most closely.
"""

DEMO_DESCRIPTION = """Train on demo data with known truth for about a minute, and print where the report is.

    seqvae demo                    # text of eight invented languages
    seqvae demo --kind vectors     # drawings of a pen
    seqvae demo --kind events      # diaries of patients

The data are written once, into the cache directory. The recipe is that of `seqvae train --fast_detection` with a small network; the
flags of `seqvae train` overrule it. The known class of a sequence, --label_column label, colours the report and trains nothing.
"""
DEMO_RECIPE = "--fast_detection --label_column label --width 64 --depth 1 --latent_size 8"
DEMO_RECIPES = {
    "tokens": "--max_steps 500",
    "vectors": "--decoder parallel --depth 2 --max_steps 320",  # all that is to be known of a drawing is in its latent
    "events": "--decoder parallel --max_steps 300",
}
"""The flags of each kind: as many steps as take most of a minute on two cores."""

TUNE_DESCRIPTION = """Search for good settings: runs with different ones, towards a high ELBO and a latent that knows much.

    seqvae tune --data_dir my_data --run_name study --trials 20 --space beta,free_bits,latent_size,lr
    seqvae tune --data_dir my_data --run_name study --trials 40          # goes on, with twenty more
    seqvae tune --run_name study --space "lr=1e-4:1e-2,latent_size=8|16|32" --max_steps 2000
    seqvae tune --run_name study --launcher ray --ray_workers 8           # eight at a time, on a cluster

Each trial is a run in the study's directory; index.html there shows the front: the trials that no other one surpasses in both the
validation ELBO and the mutual information (or --probe LABEL). The first trial has the settings as they are typed. What all trials
share is said by the flags of seqvae train. A trial that is called collapsed is stopped (--on_collapse stop), and the search
keeps away from its settings. Needs the extra tune.
"""


def main() -> int:
    module = sys.modules["__main__"].__spec__
    typed = "python -m seqvae" if module is not None and module.name == "seqvae.__main__" else "seqvae"
    verb, words = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])

    def run() -> int | None:
        if verb in ("", "-h", "--help"):
            lines = [f"  {f'{name} {row.usage}':<26} {row.summary}" for name, row in VERBS.items()]
            print("usage: seqvae COMMAND [...]\n", f"{seqvae.__doc__}\n", *lines, sep="\n")
            print(
                "\nCHECKPOINT is a .ckpt file, the directory of a run, an export, or hf://user/name; RUN the directory of a run."
            )
            print("`seqvae COMMAND --help` explains the flags of a command. --version prints the version.")
            return ExitCode.DONE if verb else ExitCode.USAGE
        if verb == "--version":
            print(f"seqvae {seqvae.__version__}")
            return None
        if verb not in VERBS:
            raise UsageError(f"{verb!r} is no command{did_you_mean(verb, VERBS)}; there are {', '.join(VERBS)}")
        file, _, name = VERBS[verb].function.partition(".")
        with named_command(f"{typed} {verb}"):
            code: int | None = getattr(import_module(f"seqvae.cli.{file}"), name)(verb, words)
            return code

    return run_command(run, f"seqvae {verb}" if verb in VERBS else "seqvae")


def train(verb: str, words: Sequence[str]) -> None:
    """Train by the recipe of train_optimized.py, or with --plain by that of train_with_collapse_detection.py."""
    from seqvae.cli.command_line import parse_command_line
    from seqvae.config.training import OptimizedSettings, ReferenceSettings, TrainingSettings

    is_plain = PLAIN in words
    schema: type[TrainingSettings] = ReferenceSettings if is_plain else OptimizedSettings
    flags = [word for word in words if word != PLAIN]
    settings = parse_command_line(schema, flags, prog=f"seqvae {verb} [{PLAIN}]", description=TRAIN_DESCRIPTION)
    share_machine()

    from seqvae.training.fit import fit  # only now: torch and Lightning take seconds, which --help must not

    set_up_output()  # after Lightning, which sets the levels of its loggers when it is imported
    with named_command(f"{program()} {PLAIN}" if is_plain else program()):
        fit(settings)


def demo(verb: str, words: Sequence[str]) -> None:
    """Train a small network on the demo data of a kind; a run ends with the path of its report."""
    from seqvae.cli.command_line import parse_command_line
    from seqvae.config.training import OptimizedSettings

    def parse(recipe: str) -> OptimizedSettings:
        line = [*recipe.split(), *words]
        return parse_command_line(OptimizedSettings, line, prog=f"seqvae {verb}", description=DEMO_DESCRIPTION)

    typed = parse("").source
    if typed.data_dir is not None:
        raise UsageError(
            "--data_dir: the demo has data of its own; yours are trained on by `seqvae train --data_dir ...`"
        )
    kind = "tokens" if typed.kind == "auto" else typed.kind
    settings = parse(f"{DEMO_RECIPE} {DEMO_RECIPES[kind]}")
    share_machine()

    from seqvae.training.fit import fit

    set_up_output()
    with named_command(f"{program().removesuffix(verb)}train"):  # to go on, by the settings of the run alone
        fit(settings)


def tune(verb: str, words: Sequence[str]) -> None:
    """Run the trials of a study, and print where its page is."""
    from seqvae.cli.command_line import parse_command_line
    from seqvae.config.training import OptimizedSettings
    from seqvae.config.tuning import StudySettings

    settings = parse_command_line(
        StudySettings, words, prog=f"seqvae {verb}", description=TUNE_DESCRIPTION, config_of=OptimizedSettings
    )
    set_up_output()

    from seqvae.reports.runs_page import PAGE
    from seqvae.tuning import tune as run_trials

    directory = run_trials(settings, lambda line: print(line, flush=True))
    print(visible(str(directory / PAGE)))


def report(verb: str, words: Sequence[str]) -> int:
    """Write reports, or a comparison, as `python -m seqvae.reports` does."""
    from seqvae.reports.__main__ import main

    return main(words if verb == "report" else ["--compare", *words])
