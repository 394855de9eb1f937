"""Scores and cross entropy in one against torch's, forward and backward, whatever the rows weigh in the loss."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from seqvae.data.batch import TokenBatch
from seqvae.models.cpu_kernels import MANY_IDS, linear_cross_entropy, wide_cross_entropy
from seqvae.models.likelihoods import TokenLikelihood

ROWS, WIDTH, IDS = 600, 8, 41


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    inputs = {"hidden": torch.randn(ROWS, WIDTH), "weight": torch.randn(IDS, WIDTH), "bias": torch.randn(IDS)}
    return {name: tensor.requires_grad_() for name, tensor in inputs.items()}


def ours(inputs: dict[str, torch.Tensor], targets_N: torch.Tensor, counts_N: torch.Tensor) -> torch.Tensor:
    return linear_cross_entropy(inputs["hidden"], inputs["weight"], inputs["bias"], targets_N, counts_N)


def torchs(inputs: dict[str, torch.Tensor], targets_N: torch.Tensor, counts_N: torch.Tensor) -> torch.Tensor:
    scores_NV = F.linear(inputs["hidden"], inputs["weight"], inputs["bias"])
    return F.cross_entropy(scores_NV.float(), targets_N, reduction="none") * counts_N


WEIGHTS = {
    "all alike": lambda rows: torch.full((rows,), 0.3),
    "each its own": lambda rows: torch.linspace(-1, 2, rows),
    "some not at all": lambda rows: (torch.arange(rows) % 3 > 0).float(),
}


@pytest.mark.parametrize("scores_at_once", [1, 2**21], ids=["in slices", "at once"])
@pytest.mark.parametrize("counting", ["all", "two of three", "none"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_values_and_gradients_are_torchs(inputs, weights, counting, scores_at_once, monkeypatch):
    monkeypatch.setattr("seqvae.models.cpu_kernels.SCORES_AT_ONCE", scores_at_once)
    targets_N = torch.randint(0, IDS, (ROWS,))
    counts_N = torch.arange(ROWS) % {"all": ROWS + 1, "two of three": 3, "none": 1}[counting] > 0
    counts_N[0] = counting == "all"
    weights_N = WEIGHTS[weights](ROWS)
    nll_N = ours(inputs, targets_N, counts_N)
    expected_N = torchs(inputs, targets_N, counts_N)
    torch.testing.assert_close(nll_N, expected_N)
    gradients = torch.autograd.grad((nll_N * weights_N).sum(), inputs.values())
    expected = torch.autograd.grad((expected_N * weights_N).sum(), inputs.values())
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_under_autocast_the_values_stay_exact_where_p_is_nearly_one(inputs):
    """In bf16 the gradient p - 1 would be 0 from p = 0.998 on."""
    targets_N = torch.zeros(ROWS, dtype=torch.long)
    with torch.no_grad():
        inputs["bias"][0] = 15.0
    with torch.autocast("cpu", torch.bfloat16):
        nll_N = ours(inputs, targets_N, torch.ones(ROWS, dtype=torch.bool))
    assert nll_N.dtype == torch.float32
    (gradient_V,) = torch.autograd.grad(nll_N.sum(), inputs["bias"])
    p_N = torch.exp(-nll_N.detach())
    torch.testing.assert_close(gradient_V[0], -(1 - p_N).sum(), rtol=2e-2, atol=0)
    assert p_N.median() > 0.998


@pytest.mark.parametrize("bias", [-200.0, -95.0])
def test_targets_of_next_to_no_probability_have_their_nats_and_gradients(inputs, bias):
    """exp(-200) is 0 in float32, and exp(-95) has two digits."""
    with torch.no_grad():
        inputs["bias"][0] = bias
    targets_N = torch.arange(ROWS) % 2
    nll_N = ours(inputs, targets_N, torch.ones(ROWS, dtype=torch.bool))
    expected_N = torchs(inputs, targets_N, torch.ones(ROWS, dtype=torch.bool))
    assert nll_N[0] > 80
    torch.testing.assert_close(nll_N, expected_N)
    gradients, expected = (torch.autograd.grad(losses_N.sum(), inputs["bias"]) for losses_N in (nll_N, expected_N))
    torch.testing.assert_close(gradients, expected)


def test_padding_is_left_out_of_the_products_but_for_a_few_rows(inputs, monkeypatch):
    seen = []
    softmax = torch.softmax

    def noted(scores_RV: torch.Tensor, **named: Any) -> torch.Tensor:
        seen.append(len(scores_RV))
        return softmax(scores_RV, **named)

    monkeypatch.setattr(torch, "softmax", noted)
    counts_N = torch.arange(ROWS) < 400
    ours(inputs, torch.zeros(ROWS, dtype=torch.long), counts_N)
    assert sum(seen) == 448  # seven times 64


def test_nothing_comes_of_what_stands_in_padding(inputs):
    """Some of it fills up the last slice."""
    with torch.no_grad():
        inputs["hidden"][400:] = float("nan")
    nll_N = ours(inputs, torch.zeros(ROWS, dtype=torch.long), torch.arange(ROWS) < 400)
    assert torch.isfinite(nll_N).all()
    gradients = torch.autograd.grad(nll_N.sum(), inputs.values())
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("broken", ["hidden", "weight", "bias"])
def test_what_is_not_a_number_in_a_row_that_counts_stays_so(inputs, broken):
    with torch.no_grad():
        inputs[broken][3] = float("nan")
    nll_N = ours(inputs, torch.zeros(ROWS, dtype=torch.long), torch.ones(ROWS, dtype=torch.bool))
    assert torch.isnan(nll_N[3])
    assert all(torch.isnan(gradient).any() for gradient in torch.autograd.grad(nll_N.sum(), inputs.values()))


def test_a_loss_that_no_row_counts_in_has_no_gradient(inputs):
    counts_N = torch.zeros(ROWS, dtype=torch.bool)
    nll_N = ours(inputs, torch.zeros(ROWS, dtype=torch.long), counts_N)
    assert not any(gradient.any() for gradient in torch.autograd.grad(nll_N.sum(), inputs.values()))


# --- In blocks of ids -------------------------------------------------------------------------------------------------


def wide(inputs: dict[str, torch.Tensor], targets_N: torch.Tensor, counts_N: torch.Tensor) -> torch.Tensor:
    return wide_cross_entropy(inputs["hidden"], inputs["weight"], inputs["bias"], targets_N, counts_N)


@pytest.fixture
def blocks_of_seven(monkeypatch):
    monkeypatch.setattr("seqvae.models.cpu_kernels.SCORES_AT_ONCE", 1)
    monkeypatch.setattr("seqvae.models.cpu_kernels.FEWEST_COLUMNS", 7)


@pytest.mark.parametrize("counting", ["all", "two of three", "none"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_in_blocks_of_ids_values_and_gradients_are_torchs(inputs, weights, counting, blocks_of_seven):
    targets_N = torch.randint(0, IDS, (ROWS,))
    counts_N = torch.arange(ROWS) % {"all": ROWS + 1, "two of three": 3, "none": 1}[counting] > 0
    counts_N[0] = counting == "all"
    nll_N, expected_N = wide(inputs, targets_N, counts_N), torchs(inputs, targets_N, counts_N)
    torch.testing.assert_close(nll_N, expected_N)
    weights_N = WEIGHTS[weights](ROWS)
    gradients = torch.autograd.grad((nll_N * weights_N).sum(), inputs.values())
    expected = torch.autograd.grad((expected_N * weights_N).sum(), inputs.values())
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_in_blocks_of_ids_nothing_comes_of_padding_and_what_is_not_a_number_stays_so(inputs, blocks_of_seven):
    targets_N, counts_N = torch.zeros(ROWS, dtype=torch.long), torch.arange(ROWS) < 400
    with torch.no_grad():
        inputs["hidden"][400:] = float("nan")
    nll_N = wide(inputs, targets_N, counts_N)
    assert torch.isfinite(nll_N).all()
    assert all(torch.isfinite(gradient).all() for gradient in torch.autograd.grad(nll_N.sum(), inputs.values()))
    with torch.no_grad():
        inputs["hidden"][3] = float("nan")
    assert torch.isnan(wide(inputs, targets_N, counts_N)[3])


def test_in_blocks_of_ids_bf16_is_as_near_as_in_slices_of_rows(inputs, blocks_of_seven):
    targets_N, counts_N = torch.randint(0, IDS, (ROWS,)), torch.ones(ROWS, dtype=torch.bool)
    with torch.autocast("cpu", torch.bfloat16):
        nll_N = wide(inputs, targets_N, counts_N)
        sliced_N = ours(inputs, targets_N, counts_N)
    assert nll_N.dtype == torch.float32
    torch.testing.assert_close(nll_N, sliced_N, rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(
        *(torch.autograd.grad(losses_N.sum(), inputs.values()) for losses_N in (nll_N, sliced_N)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=0.2)


def test_the_scores_of_a_hundred_thousand_ids_take_bounded_memory():
    """240 rows of them are 96 MB, and were there twice."""
    likelihood = TokenLikelihood(100_000, 4)
    assert likelihood.end >= MANY_IDS
    tokens_BT = torch.randint(0, 100_000, (4, 59))
    batch = TokenBatch(tokens_BT, torch.full((4,), 59), torch.arange(4), None, 236, 0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        nll = likelihood(torch.randn(4, 60, 4), batch).sum()
        nll.backward()
    assert max(event.cpu_memory_usage for event in profiler.events()) < 32e6
    with torch.no_grad():
        assert nll.item() == pytest.approx(240 * 11.7, rel=0.05)
