"""The attention kernel for CPUs against torch's own operations, forward and backward."""

import pytest
import torch
from torch import Tensor

from seqvae.models.blocks import AttentionContext, attention, attention_context, rotate
from seqvae.models.likelihoods import real_steps

HEADS, WIDTH = 2, 16
TOLERANCES = [(torch.float64, 1e-6), (torch.float32, 1e-5), (torch.bfloat16, 4e-2)]


def packed(length: int, dtype: torch.dtype = torch.float32, sequences: int = 2) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(sequences, length, 3 * WIDTH).to(dtype).requires_grad_()


def with_gradient(packed_BTX: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
    attended_BTW = attention(packed_BTX, context, HEADS)
    slope_BTW = torch.linspace(-1, 1, attended_BTW.numel()).view_as(attended_BTW).to(attended_BTW.dtype)
    return attended_BTW, torch.autograd.grad(attended_BTW, packed_BTX, slope_BTW)[0]


@pytest.mark.parametrize("lengths", [None, [20, 7], [20, 20]], ids=["causal", "masked", "all seen"])
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_the_kernel_equals_torchs_attention_and_so_does_its_gradient(dtype, tolerance, lengths):
    packed_BTX = packed(20, dtype)
    real_BT = None if lengths is None else real_steps(torch.tensor(lengths), 20)
    context = attention_context(torch.empty(2, 20, WIDTH, dtype=dtype), HEADS, real_BT, use_kernel=True)
    assert context.use_kernel
    ours = with_gradient(packed_BTX, context)
    theirs = with_gradient(packed_BTX, context._replace(use_kernel=False))
    for mine, torchs in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, torchs, rtol=tolerance, atol=tolerance)


def test_the_gradient_is_that_of_finite_differences():
    packed_BTX = packed(5, torch.float64)
    context = attention_context(torch.empty(2, 5, WIDTH, dtype=torch.float64), HEADS, use_kernel=True)
    assert torch.autograd.gradcheck(lambda inputs: attention(inputs, context, HEADS), packed_BTX, fast_mode=True)


@pytest.mark.parametrize("length", [5, 384, 385])
def test_attention_looks_back_alone_at_every_length(length):
    packed_BTX = packed(length, sequences=1).detach()
    changed = packed_BTX.clone()
    changed[:, 3:].unflatten(-1, (HEADS, 3, -1))[..., 2, :] += 1  # the values
    context = attention_context(torch.empty(1, length, WIDTH), HEADS, use_kernel=True)
    difference = attention(changed, context, HEADS) - attention(packed_BTX, context, HEADS)
    assert not difference[:, :3].any()
    assert (difference[:, 3:].abs() > 1e-4).all()


def test_long_sequences_are_left_to_torch():
    steps_BTW = torch.empty(1, 1025, WIDTH)
    assert not attention_context(steps_BTW, HEADS, use_kernel=True).use_kernel
    assert attention_context(steps_BTW.bfloat16()[:, :1024], HEADS, use_kernel=True).use_kernel


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_pairs_turn_alike_without_complex_numbers(dtype, tolerance, monkeypatch):
    torch.manual_seed(0)
    vectors_BHTK = torch.randn(2, HEADS, 20, 8).to(dtype).requires_grad_()
    context = attention_context(torch.empty(2, 20, WIDTH, dtype=dtype), HEADS)
    turned_BHTK = rotate(vectors_BHTK, context)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    also_BHTK = rotate(vectors_BHTK, context)
    torch.testing.assert_close(turned_BHTK, also_BHTK, rtol=tolerance, atol=tolerance)
    slopes = torch.linspace(-1, 1, also_BHTK.numel()).view_as(also_BHTK).to(dtype)
    gradients = [torch.autograd.grad(one, vectors_BHTK, slopes)[0] for one in (turned_BHTK, also_BHTK)]
    torch.testing.assert_close(*gradients, rtol=tolerance, atol=tolerance)
