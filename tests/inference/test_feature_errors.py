"""Errors of each feature against a computation by hand, value by value.

Shapes: B sequences, T steps, D features.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from seqvae.inference.estimates import mean_of
from seqvae.inference.evaluate import feature_errors
from seqvae.inference.model import Model
from seqvae.inference.streaming import Part
from seqvae.training.network import StoredNetwork
from tests.support.small_models import DESCRIPTIONS, make_batch, make_vae

STD = (2.0, 1.0, 10.0)


def make_trained(kind: str, **model) -> Model:
    description = replace(DESCRIPTIONS[kind], mean=(5.0, 0.0, -1.0), std=STD)
    return Model(make_vae(kind, **model), StoredNetwork(description, {}, {}, 1, {}), Path("x.ckpt"), None, None)


def means_by_hand(trained: Model, batch) -> torch.Tensor:
    """The mean of each value: one step at a time, from a batch that ends there."""
    network = trained.network
    likelihood: Any = network.likelihood
    with torch.no_grad():
        hidden_BTW = network.decode_hidden(network.embedding(batch), network.encode(batch).mean)
        if trained.description.kind == "vectors":
            return likelihood.predict(hidden_BTW)[0]
        hidden_BTW = likelihood.condition_on_gaps(hidden_BTW, batch.gaps_BT)
        all_BTV = likelihood.value_moments.of_all(hidden_BTW)[..., 0]
        return all_BTV.flatten(0, 1)[batch.steps_E, batch.variables_E]


OWNERS = {"whole": [np.array([0, 1, 2]), np.array([3, 4])], "windows": [np.array([0, 1, 0]), np.array([1, 2])]}


@pytest.mark.parametrize("owners", OWNERS)
@pytest.mark.parametrize("latent_scope", ["sequence", "step"])
@pytest.mark.parametrize("kind", ["vectors", "events"])
def test_errors_are_those_of_every_measured_value(kind, latent_scope, owners):
    trained = make_trained(kind, latent_scope=latent_scope)
    batches = [make_batch(kind, [3, 5, 1]), make_batch(kind, [4, 4], seed=1)]
    cells: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for number, batch in enumerate(batches):
        means, steps = means_by_hand(trained, batch), 5 if number == 0 else 4
        if kind == "vectors":
            found = [
                (b, d, batch.values_BTD[b, t, d] - means[b, t, d], batch.values_BTD[b, t, d])
                for b, t, d in batch.observed_BTD.nonzero().tolist()
            ]
        else:
            found = [
                (
                    int(batch.steps_E[e]) // steps,
                    int(batch.variables_E[e]),
                    batch.values_E[e] - means[e],
                    batch.values_E[e],
                )
                for e in batch.has_value_E.nonzero().flatten().tolist()
            ]
        for b, d, off, value in found:
            cells.setdefault((10 * number + b, d), []).append((float(off), float(value)))
    windows_O = np.bincount(np.concatenate(OWNERS[owners]))
    parts = [
        Part("test", batch, owners_B, windows_O[owners_B] == 1)
        for batch, owners_B in zip(batches, OWNERS[owners], strict=True)
    ]
    errors = {one.name: one for one in feature_errors(trained, parts)}
    for d, name in enumerate(trained.description.names):
        values = [pair for (_, column), pairs in cells.items() if column == d for pair in pairs]
        if not values:
            assert name not in errors
            continue
        off_N, value_N = np.array(values).T * STD[d]
        assert errors[name].values == len(values)
        assert errors[name].rmse == pytest.approx(np.sqrt((off_N**2).mean()), rel=1e-4)
        assert errors[name].mae == pytest.approx(np.abs(off_N).mean(), rel=1e-4)
        assert errors[name].rmse_of_mean == pytest.approx(np.sqrt((value_N**2).mean()), rel=1e-4)
        sums_N = [
            [sum(abs(off) for off, _ in cells.get((n, d), [])) * STD[d], len(cells.get((n, d), []))]
            for n in (0, 1, 2, 10, 11)
        ]
        absolute_N, count_N = np.array(sums_N).T
        expected = mean_of(absolute_N, count_N, np.concatenate(OWNERS[owners]))
        assert errors[name].mae_error == pytest.approx(expected.error, rel=1e-3)


def test_tokens_have_no_features():
    assert feature_errors(make_trained("tokens"), []) == []
