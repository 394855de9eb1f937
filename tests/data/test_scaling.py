"""What values are normalised by, and which are not used: names that training has nothing of, heavy tails, codes for "missing".

Shapes: N values of a feature.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from seqvae.data.cache import SequenceData
from seqvae.models.vae import SequenceVAE
from tests.support.parquet_files import Load, events_of, write_splits
from tests.support.small_models import SMALL


def validation_elbo(data: SequenceData) -> float:
    """The ELBO of one and the same untrained network on all validation sequences."""
    torch.manual_seed(0)
    network = SequenceVAE(data.description, SMALL).eval()
    split = data.splits["valid"]
    with torch.no_grad():
        output = network(split.gather(np.arange(len(split))), at_mean=True)
    return -float(output.nll_B.double().sum())


def rows(first_id: int, y: pa.Array) -> dict[str, object]:
    return {"id": [first_id] * 4, "time": [0, 1, 2, 3], "x": [1.0, 2.0, 4.0, 3.0], "y": y}


def stays(first_id: int, pressure: float | None) -> dict[str, object]:
    """Events of which `bp` has this value."""
    columns = events_of(first_id, first_id + 1)
    return columns | {"value": pa.array([60.0, pressure, 70.0] * 2)}


@pytest.mark.parametrize("kind", ["vectors", "events"])
def test_values_of_names_that_training_never_saw_a_value_of_move_no_validation_elbo(tmp_path: Path, load: Load, kind):
    nothing = pa.nulls(4, pa.float64())
    train = rows(1, nothing) if kind == "vectors" else stays(1, None)
    found = {}
    for name, filled in (("empty", False), ("filled", True)):
        if kind == "vectors":
            valid = rows(7, pa.array([1e5] * 4) if filled else nothing)
        else:
            valid = stays(7, 1e5 if filled else None)
        found[name] = load(write_splits(tmp_path / name, train=train, valid=valid))
    assert validation_elbo(found["filled"]) == validation_elbo(found["empty"])
    assert not [note for note in found["empty"].notes if "count as missing" in note]
    name, count = ("y", 4) if kind == "vectors" else ("bp", 2)
    expected = f"warning: valid: {count} values count as missing, as training saw no value of theirs: {name} ({count})"
    assert expected in found["filled"].notes
