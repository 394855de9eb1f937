"""Draw the figures of a run again: a run directory -> the PNG files in its plots/.

    python -m seqvae.reports.draw runs/name

Needs neither torch nor Lightning, so that it can run beside a training run (`seqvae/monitors/drawing.py` starts it there).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from seqvae.reports.charts import draw_plots
from seqvae.reports.read_run import PLOTS, READINGS


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m seqvae.reports.draw", description="Draw the figures of a run again.", allow_abbrev=False
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help=f"the run's directory, which holds {READINGS}")
    directory = parser.parse_args(argv).directory
    try:
        reasons = draw_plots(directory)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{directory}: {error}") from None
    for name, reason in reasons.items():
        print(f"{directory / PLOTS / name}" + (f": not drawn, {reason}" if reason else ""))


if __name__ == "__main__":
    main()
