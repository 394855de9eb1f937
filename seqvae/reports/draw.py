"""Draw the figures of a run again: a run directory -> the PNG files in its plots/.

    python -m seqvae.reports.draw runs/name

Needs neither torch nor Lightning, so that it can run beside a training run (`seqvae/monitors/drawing.py` starts it there).
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from seqvae.reports.charts import active_units, kl_per_dim_chart, posterior_means, posterior_pca, timeline
from seqvae.reports.figures import Chart, Medium, save_png
from seqvae.reports.read_run import PLOTS, POSTERIORS, READINGS, History, Posteriors, read_history, read_posteriors

CHARTS_OF_READINGS: dict[str, Callable[[Medium, History], Chart | str]] = {
    "timeline.png": timeline,
    "kl_per_dim.png": kl_per_dim_chart,
    "active_units.png": active_units,
}
CHARTS_OF_POSTERIORS: dict[str, Callable[[Medium, Posteriors], Chart | str]] = {
    "posterior_means.png": posterior_means,
    "posterior_pca.png": posterior_pca,
}


def draw_plots(directory: Path) -> dict[str, str | None]:
    """Draw all figures of a run directory into its plots/. Return for each file None, or why there is none.

    A figure that cannot be drawn any more is removed: it would pass for one of the run as it is.
    """
    plots, stored = directory / PLOTS, directory / POSTERIORS
    history = read_history(directory / READINGS)
    plots.mkdir(exist_ok=True)
    reasons: dict[str, str | None] = {}
    for name, draw_readings in CHARTS_OF_READINGS.items():
        reasons[name] = "no reading yet" if history is None else save_png(plots / name, draw_readings, history)
    posteriors = read_posteriors(stored) if stored.exists() else None
    for name, draw_those in CHARTS_OF_POSTERIORS.items():
        reasons[name] = f"no {POSTERIORS}" if posteriors is None else save_png(plots / name, draw_those, posteriors)
    for name, reason in reasons.items():
        if reason:
            (plots / name).unlink(missing_ok=True)
    return reasons


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
