"""Each sequence has a stream of random numbers of its own, as good as one of torch.

Shapes: B sequences, N numbers.
"""

import math

import pytest
import torch

from seqvae.models.noise import Noise

MANY = 200_000


@pytest.mark.parametrize("draw", [Noise.uniform, Noise.normal])
def test_numbers_depend_on_seed_sequence_draw_and_place_alone(draw):
    noise, longer = Noise(3, torch.arange(5)), Noise(3, torch.tensor([4, 1]))
    for count in (7, 2, 1):
        torch.testing.assert_close(draw(noise, (5, count))[[4, 1]], draw(longer, (2, 2, 4)).flatten(1)[:, :count])
    others = torch.cat([draw(Noise(seed, torch.arange(9)), (9, 50)).flatten() for seed in (0, 1)])
    assert len({*others.tolist()}) > 890


@pytest.mark.parametrize("shape", [(MANY, 1), (1, MANY), (500, 400)])
def test_numbers_follow_their_distribution_and_not_each_other(shape):
    noise = Noise(0, torch.arange(shape[0]))
    uniform_N, normal_N = noise.uniform(shape).double().flatten(), noise.normal(shape).double().flatten()
    assert 0 <= uniform_N.min() < uniform_N.max() < 1
    for standard_N in ((uniform_N - 0.5) * math.sqrt(12), normal_N):
        assert standard_N.mean().abs() < 4 / math.sqrt(MANY)
        for lag in (1, 2, 400):
            assert (standard_N[lag:] * standard_N[:-lag]).mean().abs() < 4 / math.sqrt(MANY)
    for cdf_N in (uniform_N, torch.special.ndtr(normal_N)):
        distance = (cdf_N.sort().values - torch.linspace(0, 1, MANY, dtype=torch.float64)).abs().max()
        assert distance < 1.95 / math.sqrt(MANY)  # Kolmogorov and Smirnov: exceeded once in 1,000
