"""Train a sequence VAE as fast as this machine allows.

    python train_optimized.py                                    # demo data with known truth
    python train_optimized.py --data_dir my_data                 # any Parquet of sequences; what it is, is detected
    python train_optimized.py --data_dir smiles --tokenizer characters --precision bf16-mixed --max_steps 2000

Policy, on top of the defaults that `--help` shows: mixed precision, and two batches to an optimizer step. All the rest is
`training.run.fit`, which every training command shares.
"""

import sys
from dataclasses import dataclass, field
from functools import partial

from training.command_line import parse_command_line
from training.console import set_up_output, share_cores
from training.exit_codes import run_command
from training.settings import RunSettings, TrainingSettings

PROG = "train_optimized.py"


@dataclass(frozen=True, kw_only=True)
class OptimizedSettings(TrainingSettings):
    """The recommended recipe."""

    run: RunSettings = field(default_factory=partial(RunSettings, precision="16-mixed", gradient_accumulation_steps=2))


def main() -> None:
    settings = parse_command_line(OptimizedSettings, sys.argv[1:], prog=PROG, description=__doc__ or "")
    share_cores()

    from training.run import fit  # only now: torch and Lightning take seconds, which --help must not

    set_up_output()  # after Lightning, which sets the levels of its loggers when it is imported
    fit(settings)


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
