"""Say where a training step's time goes, how near that is to what this machine can do, and what to change: `seqvae profile`.

    python analyze_performance.py --data_dir my_data                                 # as train_optimized.py would train
    python analyze_performance.py --command reference --data_dir my_data             # as train_with_collapse_detection.py would
    python analyze_performance.py --compare reference,optimized --data_dir my_data   # both, taking turns
    python analyze_performance.py --advise --data_dir my_data                        # try changes, and measure each
    python analyze_performance.py --find_batch --memory_limit 6GB                    # the largest --tokens_per_batch that fits

The flags of the training commands mean here what they mean there.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # which python -P leaves out

from seqvae.cli.profile import run
from seqvae.errors import run_command

if __name__ == "__main__":
    sys.exit(run_command(lambda: run("profile", sys.argv[1:]), "analyze_performance.py"))
