"""The command `seqvae`: one table of verbs; each imports what it needs when it runs.

In: `sys.argv`. Out: the exit code.
"""

import sys
from importlib import import_module
from typing import NamedTuple

import seqvae
from seqvae.console import named_command
from seqvae.errors import ExitCode, UsageError, did_you_mean, run_command


class Verb(NamedTuple):
    """A word behind `seqvae`. Its module has `run(verb, words) -> int | None`."""

    module: str
    usage: str
    summary: str


VERBS = {
    "train": Verb("train", "", "train a model as fast as this machine allows, and watch its posterior"),
    "inspect": Verb("inspect_data", "", "say what Parquet files hold, and whether they would train"),
    "evaluate": Verb("evaluate", "CHECKPOINT", "say what a trained model is worth on some data"),
    "encode": Verb("use_model", "CHECKPOINT", "write each sequence's latents, NLL and rate"),
    "reconstruct": Verb("use_model", "CHECKPOINT", "write sequences as decoded from their latents"),
    "sample": Verb("use_model", "CHECKPOINT", "write new sequences from the prior"),
    "interpolate": Verb("use_model", "CHECKPOINT ID ID", "write what lies between two sequences"),
    "impute": Verb("use_model", "CHECKPOINT", "write vectors or events with missing values filled"),
    "export": Verb("use_model", "CHECKPOINT", "write the weights as safetensors, with settings as JSON"),
    "profile": Verb("profile", "", "say where a training step's time goes, and what to change"),
    "report": Verb("report", "RUN ...", "write the report of each run again"),
    "compare": Verb("report", "RUN RUN ...", "write one page that lays runs over one another"),
}


def main() -> int:
    module = sys.modules["__main__"].__spec__
    typed = "python -m seqvae" if module is not None and module.name == "seqvae.__main__" else "seqvae"
    verb, words = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])

    def run() -> int | None:
        if verb in ("", "-h", "--help"):
            print(_help())
            return ExitCode.DONE if verb else ExitCode.USAGE
        if verb == "--version":
            print(f"seqvae {seqvae.__version__}")
            return None
        if verb not in VERBS:
            raise UsageError(f"{verb!r} is no command{did_you_mean(verb, VERBS)}; there are {', '.join(VERBS)}")
        with named_command(f"{typed} {verb}"):
            code: int | None = import_module(f"seqvae.cli.{VERBS[verb].module}").run(verb, words)
            return code

    return run_command(run, f"seqvae {verb}" if verb in VERBS else "seqvae")


def _help() -> str:
    lines = [f"  {f'{name} {verb.usage}':<26} {verb.summary}" for name, verb in VERBS.items()]
    return "\n".join(
        [
            "usage: seqvae COMMAND [...]\n",
            f"{seqvae.__doc__}\n",
            *lines,
            "\nCHECKPOINT is a .ckpt file, the directory of a run, or an export; RUN the directory of a run.",
            "`seqvae COMMAND --help` explains the flags of a command. --version prints the version.",
        ]
    )
