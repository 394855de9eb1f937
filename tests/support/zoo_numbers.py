"""Made-up numbers of a run of the zoo, as `benchmarks/detection/zoo_truth.py` measures them."""

import math

from benchmarks.detection.zoo_truth import Measured, from_json

UNUSED = {"decoder_use": 0.02, "decoder_use_error": 0.02, "gain": 0.0}
"""Changes that make the latent one that nobody listens to."""


def measured(**changed: object) -> Measured:
    """A healthy run of 4 dimensions, but for what is changed."""
    numbers: dict[str, object] = {
        "sequences": 400,
        "rate": 3.0,
        "kl_per_dim": (0.75,) * 4,
        "mutual_information": 2.5,
        "mutual_information_cap": math.log(400),
        "active_units": 4,
        "variance_of_means": (0.5,) * 4,
        "mean_of_variances": (0.4,) * 4,
        "decoder_use": 5.0,
        "decoder_use_error": 0.2,
        "nll_without_latent": 100.0,
        "gain": 0.5,
        "gain_error": 0.1,
    }
    return from_json(numbers | changed)
