"""`seqvae train`: the recipe of train_optimized.py, or with --plain that of train_with_collapse_detection.py."""

from collections.abc import Sequence

from seqvae.cli.command_line import parse_command_line
from seqvae.config.training import OptimizedSettings, ReferenceSettings, TrainingSettings
from seqvae.console import named_command, program, set_up_output, share_machine

DESCRIPTION = """Train a sequence VAE as fast as this machine allows.

    seqvae train --fast_detection                           # demo data with known truth
    seqvae train --fast_detection --data_dir my_data        # any Parquet of sequences
    seqvae train --data_dir smiles --tokenizer characters   # text
    seqvae train --plain --data_dir my_data                 # the reference recipe: 32-bit numbers, random batches
    torchrun --nproc_per_node 8 -m seqvae train             # or --devices 8

The recommended recipe, on top of the defaults that --help shows: mixed precision, two batches to an optimizer step,
validation ten times an epoch on a tenth of the validation data, and a posterior that is read now and then. --plain is the
recipe that it is measured against, with the posterior watched most closely.
"""
PLAIN = "--plain"


def run(verb: str, words: Sequence[str]) -> None:
    is_plain = PLAIN in words
    schema: type[TrainingSettings] = ReferenceSettings if is_plain else OptimizedSettings
    flags = [word for word in words if word != PLAIN]
    settings = parse_command_line(schema, flags, prog=f"seqvae {verb} [{PLAIN}]", description=DESCRIPTION)
    share_machine()

    from seqvae.training.fit import fit  # only now: torch and Lightning take seconds, which --help must not

    set_up_output()  # after Lightning, which sets the levels of its loggers when it is imported
    with named_command(f"{program()} {PLAIN}" if is_plain else program()):
        fit(settings)
