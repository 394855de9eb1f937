"""Draw the pictures of verdicts for the monitor's handbook, from recorded runs that the detector of today judges again.

    python -m benchmarks.detection.verdict_pictures            # writes docs/images/verdicts/

In: tests/support/recorded_runs.json, runs of the zoo and one that was continued under a higher KL weight. Out: the timeline of each
run in `SHOWN`, as a run's own plots/ have it. Without escape thresholds, which those records do not hold.
"""

from pathlib import Path

from PIL import Image

from seqvae.monitors.reading import to_row
from seqvae.reports.charts import timeline
from seqvae.reports.figures import save_png
from seqvae.reports.read_run import History, history_of
from tests.support.made_curves import Cadence
from tests.support.recorded_runs import RECORDED, Recorded

PICTURES = Path(__file__).parent.parent.parent / "docs" / "images" / "verdicts"
CADENCE = Cadence(20, 1)
"""Decoder use is read each time, so that the pictures show when it moved."""
SHOWN = {
    "healthy": "weight-0.2.demo-vectors.weak-transformer",
    "warming_up": "linear-in-0.5.japanese_vowels.transformer",
    "collapsing": "continued-at-6.demo-tokens.small-transformer",
    "decoder_ignores_z": "cut-off-free-bits.physionet2012.transformer",
    "partly_collapsed": "word-dropout-0.6.moses_smiles.transformer",
    "not_variational": "weight-0.005.moses_smiles.tcn",
    "diverged": "diverging-late.demo-vectors.weak-transformer",
}
"""The recorded run that shows a verdict. `cannot_tell` is at the beginning of most of them."""
COLOURS = 64


def recorded(verdict: str) -> Recorded:
    (run,) = [run for run in RECORDED if run.name == SHOWN[verdict]]
    return run


def history(run: Recorded) -> History:
    """Return the readings of a run, with the verdicts on them."""
    curve = run.curve()
    rows = [to_row(curve(step)) | {"verdict": verdict.name} for step, verdict in run.watched(CADENCE).verdicts]
    found = history_of(rows, len(rows))
    assert found is not None
    return found


def draw(folder: Path = PICTURES) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for verdict in SHOWN:
        path = folder / f"{verdict}.png"
        assert save_png(path, timeline, history(recorded(verdict))) is None
        Image.open(path).convert("RGB").quantize(COLOURS).save(path, optimize=True)  # a third of the size


if __name__ == "__main__":
    draw()
