"""A run directory -> the figures in its plots/: drawn anew from posterior.jsonl and plots/posteriors.npz.

    python -m seqvae.monitors.figures runs/name

Needs neither torch nor Lightning, so that it can run beside a training run (`drawing.py` starts it there).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from seqvae.monitors.figure_data import PLOTS, POSTERIORS, read_history, read_posteriors
from seqvae.monitors.figure_dimensions import draw_active_units, draw_kl_per_dim
from seqvae.monitors.figure_posteriors import draw_posterior_means, draw_posterior_pca
from seqvae.monitors.figure_timeline import draw_timeline
from seqvae.monitors.reading import NAME

OF_READINGS = {
    "timeline.png": draw_timeline,
    "kl_per_dim.png": draw_kl_per_dim,
    "active_units.png": draw_active_units,
}
OF_POSTERIORS = {"posterior_means.png": draw_posterior_means, "posterior_pca.png": draw_posterior_pca}


def draw(directory: Path) -> dict[str, str | None]:
    """Draw all figures of a run directory. Return for each one None, or why there is none.

    A figure that cannot be drawn any more is removed: it would pass for one of the run as it is.
    """
    plots = directory / PLOTS
    history = read_history(directory / NAME)
    plots.mkdir(exist_ok=True)
    said: dict[str, str | None] = {}
    for name, draw_readings in OF_READINGS.items():
        said[name] = "no reading yet"
        if history is not None:
            draw_readings(plots / name, history)
            said[name] = None
    stored = plots / POSTERIORS
    posteriors = read_posteriors(stored) if stored.exists() else None
    for name, draw_those in OF_POSTERIORS.items():
        said[name] = f"no {PLOTS}/{POSTERIORS}" if posteriors is None else draw_those(plots / name, posteriors)
    for name in (name for name, reason in said.items() if reason):
        (plots / name).unlink(missing_ok=True)
    return said


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.figures", description="Draw the figures of a run anew.", allow_abbrev=False
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help=f"the run's directory, which holds {NAME}")
    directory = parser.parse_args(argv).directory
    try:
        said = draw(directory)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{directory}: {error}") from None
    for name, reason in said.items():
        print(f"{directory / PLOTS / name}" + (f": not drawn, {reason}" if reason else ""))


if __name__ == "__main__":
    main()
