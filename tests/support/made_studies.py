"""A study as `seqvae tune` would leave it, without its runs: the ELBO falls as the latent knows more."""

from typing import Any

import numpy as np

from seqvae.reports.study_page import COLLAPSED, FAILED, FINISHED, UNFINISHED, Study, TrialRow

SPACE: dict[str, dict[str, Any]] = {
    "lr": {"low": 3e-4, "high": 1e-2, "is_whole": False},
    "latent_size": {"low": 4.0, "high": 64.0, "is_whole": True},
    "decoder": {"values": ["transformer", "lstm"]},
}


def made_study(trials: int = 20, *, objectives: tuple[str, str] = ("ELBO", "mutual information")) -> Study:
    """Return a study; every seventh trial collapsed, the ninth failed, the last one is under way."""
    generator = np.random.default_rng(1)
    rows = []
    for number in range(trials):
        known = float(generator.uniform(0.5, 6.0))
        values = {
            "lr": f"{10 ** generator.uniform(-3.5, -2):.6g}",
            "latent_size": str(int(2 ** generator.uniform(2, 6))),
            "decoder": ("transformer", "lstm")[number % 2],
        }
        row = TrialRow(
            f"trial-{number:03d}",
            FINISHED,
            "healthy",
            values,
            (-140 - known**1.5 - generator.gamma(2.0, 2.0), known),
            False,
            93.0,
            "",
        )
        if number % 7 == 6:
            row = row._replace(state=COLLAPSED, verdict="collapsed", objectives=(-141.0, 0.02))
        if number == 8:
            row = row._replace(state=FAILED, verdict="failed", objectives=(), said="seqvae train: out of memory")
        rows.append(row)
    rows[-1] = rows[-1]._replace(state=UNFINISHED, verdict="", objectives=(), seconds=None)
    finished = [one for one in rows if one.state == FINISHED]
    front = {
        one.name
        for one in finished
        if not any(all(a > b for a, b in zip(other.objectives, one.objectives, strict=True)) for other in finished)
    }
    return Study(
        "made",
        objectives,
        SPACE,
        tuple(one._replace(is_on_front=one.name in front) for one in rows),
        24,
        {"data_dir": None, "depth": 2},
    )
