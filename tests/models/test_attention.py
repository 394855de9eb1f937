"""Attention written out by hand against torch's own operations, forward and backward."""

import pytest
import torch
from torch import Tensor

from seqvae.models.blocks.pieces import real_steps
from seqvae.models.cpu_kernels.attention import _as_torch_has_it, attention, rotate, sight

HEADS, WIDTH = 2, 16
TOLERANCES = [(torch.float64, 1e-6), (torch.float32, 1e-5), (torch.bfloat16, 4e-2)]


def packed(length: int, dtype: torch.dtype = torch.float32, sequences: int = 2) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(sequences, length, 3 * WIDTH).to(dtype).requires_grad_()


def with_gradient(function, packed_BTX: Tensor, seen) -> tuple[Tensor, Tensor]:
    attended_BTW = function(packed_BTX, seen, HEADS)
    slope_BTW = torch.linspace(-1, 1, attended_BTW.numel()).view_as(attended_BTW).to(attended_BTW.dtype)
    return attended_BTW, torch.autograd.grad(attended_BTW, packed_BTX, slope_BTW)[0]


@pytest.mark.parametrize("lengths", [None, [20, 7], [20, 20]], ids=["causal", "masked", "all seen"])
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_attention_written_out_equals_torchs_and_so_does_its_gradient(dtype, tolerance, lengths):
    packed_BTX = packed(20, dtype)
    real_BT = None if lengths is None else real_steps(torch.tensor(lengths), 20)
    seen = sight(torch.empty(2, 20, WIDTH, dtype=dtype), HEADS, real_BT)
    assert seen.is_written_out
    ours, theirs = with_gradient(attention, packed_BTX, seen), with_gradient(_as_torch_has_it, packed_BTX, seen)
    for mine, torchs in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, torchs, rtol=tolerance, atol=tolerance)


def test_the_gradient_is_that_of_finite_differences():
    packed_BTX = packed(5, torch.float64)
    seen = sight(torch.empty(2, 5, WIDTH, dtype=torch.float64), HEADS)
    assert torch.autograd.gradcheck(lambda given: attention(given, seen, HEADS), packed_BTX, fast_mode=True)


@pytest.mark.parametrize("length", [5, 384, 385])
def test_attention_looks_back_alone_at_every_length(length):
    given = packed(length, sequences=1).detach()
    changed = given.clone()
    changed[:, 3:].unflatten(-1, (HEADS, 3, -1))[..., 2, :] += 1  # the values
    seen = sight(torch.empty(1, length, WIDTH), HEADS)
    difference = attention(changed, seen, HEADS) - attention(given, seen, HEADS)
    assert not difference[:, :3].any()
    assert (difference[:, 3:].abs() > 1e-4).all()


def test_long_sequences_are_left_to_torch():
    steps_BTW = torch.empty(1, 1025, WIDTH)
    assert not sight(steps_BTW, HEADS).is_written_out
    assert sight(steps_BTW.bfloat16()[:, :1024], HEADS).is_written_out


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_where_there_are_no_complex_numbers_pairs_turn_alike(dtype, tolerance, monkeypatch):
    torch.manual_seed(0)
    vectors_BHTK = torch.randn(2, HEADS, 20, 8).to(dtype).requires_grad_()
    seen = sight(torch.empty(2, 20, WIDTH, dtype=dtype), HEADS)
    turned_BHTK = rotate(vectors_BHTK, seen)
    monkeypatch.setattr("seqvae.models.cpu_kernels.attention.is_plain_cpu", lambda tensor: False)
    also_BHTK = rotate(vectors_BHTK, seen)
    torch.testing.assert_close(turned_BHTK, also_BHTK, rtol=tolerance, atol=tolerance)
    slopes = torch.linspace(-1, 1, also_BHTK.numel()).view_as(also_BHTK).to(dtype)
    gradients = [torch.autograd.grad(one, vectors_BHTK, slopes)[0] for one in (turned_BHTK, also_BHTK)]
    torch.testing.assert_close(*gradients, rtol=tolerance, atol=tolerance)
