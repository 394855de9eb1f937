"""Somebody's own model in the same pipeline: data, batches, objective, monitors, checkpoints and resume stay as they are.

python -m examples.own_model                        # demo data
python -m examples.own_model --data_dir my_data     # every flag of the training commands
"""

import sys

from examples.own_model.model import BagToGRU
from monitors import PosteriorMetricsMonitor
from training.command_line import parse_command_line
from training.console import set_up_output
from training.exit_codes import run_command
from training.run import fit, make_data
from training.settings import TrainingSettings

PROG = "python -m examples.own_model"


def main() -> None:
    settings = parse_command_line(TrainingSettings, sys.argv[1:], prog=PROG, description=__doc__ or "")
    set_up_output()
    network = BagToGRU(make_data(settings).description.vocabulary_size)
    fit(settings, [PosteriorMetricsMonitor(update_frequency=100)], network=network)


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
