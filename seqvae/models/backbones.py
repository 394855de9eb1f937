"""Encoders and decoders: vectors of steps in, vectors of steps out, whatever kind of sequence they stand for.

    encoder(steps, which are real) -> one vector for each step, which knows the whole sequence
    decoder(inputs, z)             -> one vector for each step, which knows the steps up to its own, and z up to it
    decoder.step(input, z, ...)    -> the same for one step, without reading those before it again

Both are a stack of blocks of one architecture. To add one: a block with `forward` and `step` in `blocks`, and cases in `Blocks`.

Shapes: B sequences, T steps, W width, Z latent dimensions.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from seqvae.config.model import Architecture, ModelSettings
from seqvae.models.blocks import (
    AttentionBlock,
    BidirectionalBlock,
    ConvolutionBlock,
    RecurrentBlock,
    attention_context,
    opposite_steps,
)
from seqvae.models.cpu_kernels import HasCpuKernel

LONGEST_WAVE = 10_000.0
"""Positions of the parallel decoder are waves with periods from 2 pi steps up to 2 pi times this."""

COMPILED_VARIANTS = 32
"""How often torch may compile one function."""

Pasts = tuple[tuple[Tensor, ...], ...]
"""What each block remembers of the steps so far: tensors whose first dimension are the sequences; () before the first step."""


class Encoder(nn.Module):
    """Looks at a sequence in both directions; nothing of what it returns for a real step depends on padding."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.blocks = Blocks(settings, settings.encoder, causal=False)
        self.norm = nn.LayerNorm(settings.width)

    def forward(self, steps_BTW: Tensor, real_BT: Tensor) -> Tensor:
        """Encode; `real_BT` is False where padded, and each sequence needs one real step."""
        return self.norm(self.blocks(steps_BTW, real_BT))


class Decoder(nn.Module):
    """Looks back only, so that padding, which stands behind all real steps, cannot matter.

    The latent enters every layer, so that no layer has to carry it for the others; where each step has one of its own, it
    enters at its step. The parallel decoder gets where a step stands instead of what came before it. It still looks back:
    over positions, and over the latents of earlier steps. It may not look ahead either, because how many steps there are is part
    of what is predicted.
    """

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.autoregressive = settings.decoder != "parallel"
        """Whether it looks at its inputs. If not, only the first of them counts, the begin mark, which stands at every step."""
        self.latent = nn.Linear(settings.decoded_size, settings.depth * settings.width)
        architecture = "transformer" if settings.decoder == "parallel" else settings.decoder
        self.blocks = Blocks(settings, architecture, causal=True)
        self.norm = nn.LayerNorm(settings.width)

    def forward(self, inputs_BTW: Tensor, z: Tensor) -> Tensor:
        """Decode; `z` is (B, Z) or, with a latent for each step, (B, T, Z). Of two levels it holds both, side by side."""
        return self.add_at_layers(inputs_BTW, self.latent(z if z.dim() == 3 else z[:, None]))

    def add_at_layers(self, inputs_BTW: Tensor, added_BTM: Tensor) -> Tensor:
        """Decode, with what z comes to at all layers, one behind the other, (B, T or 1, depth * W)."""
        hidden_BTW = inputs_BTW
        if not self.autoregressive:
            _, length, width = inputs_BTW.shape
            hidden_BTW = inputs_BTW[:, :1] + position_waves(length, width, inputs_BTW.device)
        return self.norm(self.blocks(hidden_BTW, shifts=added_BTM.chunk(len(self.blocks), dim=-1)))

    def step(self, input_BW: Tensor, z_BZ: Tensor, step: int, pasts: Pasts) -> tuple[Tensor, Pasts]:
        """Return what `forward` does for one step, and the pasts of the next: all that blocks remember. Steps come in turn.

        Not for the parallel decoder, which decodes all steps at once.
        """
        assert self.autoregressive
        shifts = self.latent(z_BZ).chunk(len(self.blocks), dim=-1)
        is_attending = self.blocks.architecture == "transformer"
        context = attention_context(input_BW[:, None], self.blocks.heads, start=step) if is_attending else None
        hidden_BW, after = input_BW, []
        block: Any
        for number, (block, shift) in enumerate(zip(self.blocks, shifts, strict=True)):
            hidden_BW, past = block.step(hidden_BW + shift, step, context, pasts[number] if pasts else ())
            after.append(past)
        return self.norm(hidden_BW), tuple(after)


class Blocks(HasCpuKernel, nn.ModuleList):
    """The layers of a backbone, all of one architecture."""

    recomputes_activations = False
    """Whether a block's inner results are forgotten and computed again in the backward pass, with the same dropout."""

    def __init__(self, settings: ModelSettings, architecture: Architecture, *, causal: bool) -> None:
        blocks: Any
        match architecture:
            case "transformer":
                blocks = (AttentionBlock(settings) for _ in range(settings.depth))
            case "lstm":
                make = RecurrentBlock if causal else BidirectionalBlock
                blocks = (make(settings) for _ in range(settings.depth))
            case "tcn":
                blocks = (ConvolutionBlock(settings, layer, causal=causal) for layer in range(settings.depth))
        super().__init__(blocks)
        self.architecture = architecture
        self.heads = settings.heads

    def forward(
        self, hidden_BTW: Tensor, real_BT: Tensor | None = None, shifts: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Apply the blocks; each of `shifts` is added before its block. Without `real_BT`, for blocks that look back only."""
        context: Any = None  # what all blocks need to know of a batch, computed once
        if self.architecture == "transformer":
            context = attention_context(hidden_BTW, self.heads, real_BT, use_kernel=self.use_kernel(hidden_BTW))
        elif real_BT is not None:
            context = opposite_steps(real_BT) if self.architecture == "lstm" else real_BT[..., None]
        for number, block in enumerate(self):
            if shifts is not None:
                hidden_BTW = hidden_BTW + shifts[number]
            if self.recomputes_activations and torch.is_grad_enabled():
                hidden_BTW = checkpoint(block, hidden_BTW, context, use_reentrant=False)
            else:
                hidden_BTW = block(hidden_BTW, context)
        return hidden_BTW

    def compile_each(self, mode: str) -> None:
        """Compile each block in place, for any length. Torch leaves recurrent networks as they are.

        Code is compiled for encoder and decoder, training and evaluation, batches of one sequence and of several, for each of the
        two distances of convolutions: beyond 8 times torch would leave the rest uncompiled, in silence.
        """
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, COMPILED_VARIANTS)
        if self.architecture != "lstm":
            for block in self:
                block.compile(dynamic=True, mode=mode)


def position_waves(length: int, width: int, device: torch.device) -> Tensor:
    """Return sine and cosine of each position at many frequencies, (T, W): the only sign of the step (Vaswani 2017)."""
    frequencies = torch.exp(-math.log(LONGEST_WAVE) * torch.arange(0, width, 2, device=device) / width)
    angles = torch.arange(length, device=device)[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=-1)
