"""Encoders and decoders: vectors of steps in, vectors of steps out, whatever kind of sequence they stand for.

    encoder(steps, which are real) -> one vector for each step, which knows the whole sequence
    decoder(inputs, z)             -> one vector for each step, which knows the steps up to its own, and z up to it
    decoder.step(input, z, ...)    -> the same for one step, without reading those before it again

Both are a stack of blocks of one architecture. To add one: a block with `forward` and `step`, two lines in
`make_block`, two in `surroundings`.

Shapes: B sequences, T steps, W width, Z latent dimensions.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from seqvae.config.model import Architecture, ModelSettings
from seqvae.models.blocks.lstm import BidirectionalBlock, RecurrentBlock, opposite_steps
from seqvae.models.blocks.tcn import ConvolutionBlock
from seqvae.models.blocks.transformer import Block
from seqvae.models.cpu_kernels.attention import AttentionContext, sight, sight_of_step

LONGEST_WAVE = 10_000.0
"""Positions of the parallel decoder are waves with periods from 2 pi steps up to 2 pi times this."""

COMPILED_VARIANTS = 32
"""How often torch may compile one function."""


Pasts = tuple[tuple[Tensor, ...], ...]
"""What each block remembers of the steps so far: tensors whose first dimension are the sequences; () before the first step."""


class Encoder(nn.Module):
    """Looks at a sequence in both directions; nothing of what it says of a real step depends on padding."""

    by_hand = True
    """Whether a CPU gets attention that is written out for it."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.architecture: Architecture = settings.encoder
        self.heads = settings.heads
        self.blocks = Blocks(
            make_block(settings, settings.encoder, layer, causal=False) for layer in range(settings.depth)
        )
        self.norm = nn.LayerNorm(settings.width)

    def forward(self, steps_BTW: Tensor, real_BT: Tensor) -> Tensor:
        """`real_BT` is False where padded; each sequence needs one real step."""
        around = surroundings(self.architecture, steps_BTW, self.heads, real_BT, by_hand=self.by_hand)
        for block in self.blocks:
            steps_BTW = self.blocks.run(block, steps_BTW, around)
        return self.norm(steps_BTW)


class Decoder(nn.Module):
    """Looks back only, so that padding, which stands behind all real steps, cannot matter.

    The latent enters every layer, so that no layer has to carry it for the others; where each step has one of its own, it
    enters at its step. The parallel decoder is told where a step stands instead of what came before it. It still looks back:
    over positions, and over the latents of earlier steps. It may not look ahead either, because how many steps there are is part
    of what is predicted.
    """

    by_hand = True

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.autoregressive = settings.decoder != "parallel"
        """Whether it looks at its inputs. If not, only the first of them counts, the begin mark, which stands at every step."""
        self.architecture: Architecture = "transformer" if settings.decoder == "parallel" else settings.decoder
        self.heads = settings.heads
        self.latent = nn.Linear(settings.latent_size, settings.depth * settings.width)
        self.blocks = Blocks(
            make_block(settings, self.architecture, layer, causal=True) for layer in range(settings.depth)
        )
        self.norm = nn.LayerNorm(settings.width)

    def forward(self, inputs_BTW: Tensor, z: Tensor) -> Tensor:
        """`z` is (B, Z) or, with a latent for each step, (B, T, Z)."""
        hidden_BTW = inputs_BTW if self.autoregressive else inputs_BTW[:, :1] + position_waves(inputs_BTW)
        shifts = self.latent(z if z.dim() == 3 else z[:, None]).chunk(len(self.blocks), dim=-1)
        around = surroundings(self.architecture, inputs_BTW, self.heads, by_hand=self.by_hand)
        for block, shift in zip(self.blocks, shifts, strict=True):
            hidden_BTW = self.blocks.run(block, hidden_BTW + shift, around)
        return self.norm(hidden_BTW)

    def step(self, input_BW: Tensor, z_BZ: Tensor, step: int, pasts: Pasts) -> tuple[Tensor, Pasts]:
        """What `forward` says of one step, and the pasts of the next: all that blocks remember. Steps are asked for in turn.

        Not for the parallel decoder: it says all steps at once.
        """
        assert self.autoregressive
        shifts = self.latent(z_BZ).chunk(len(self.blocks), dim=-1)
        around = sight_of_step(step, input_BW, self.heads) if self.architecture == "transformer" else None
        hidden_BW, after = input_BW, []
        for number, (block, shift) in enumerate(zip(self.blocks, shifts, strict=True)):
            hidden_BW, past = self.blocks.step(block, hidden_BW + shift, step, around, pasts[number] if pasts else ())
            after.append(past)
        return self.norm(hidden_BW), tuple(after)


class Blocks(nn.ModuleList):
    """The layers of a backbone."""

    forgetful = False
    """Whether a block's inner results are forgotten and computed anew on the way back, with the same dropout."""

    def run(self, block: nn.Module, hidden_BTW: Tensor, around: Any) -> Tensor:
        if self.forgetful and torch.is_grad_enabled():
            return checkpoint(block, hidden_BTW, around, use_reentrant=False)
        return block(hidden_BTW, around)

    def step(
        self, block: Any, hidden_BW: Tensor, step: int, around: AttentionContext | None, past: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        hidden_BW, past = block.step(hidden_BW, step, around, past)
        return hidden_BW, past

    def compile_each(self, mode: str) -> None:
        """In place, and for any length. Torch leaves recurrent networks as they are.

        Code is compiled for encoder and decoder, training and evaluation, batches of one sequence and of several, for each of the
        two distances of convolutions: beyond 8 times torch would leave the rest uncompiled, in silence.
        """
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, COMPILED_VARIANTS)
        for block in self:
            if not isinstance(block, RecurrentBlock | BidirectionalBlock):
                block.compile(dynamic=True, mode=mode)


def make_block(settings: ModelSettings, architecture: Architecture, layer: int, *, causal: bool) -> nn.Module:
    match architecture:
        case "transformer":
            return Block(settings)
        case "lstm":
            return RecurrentBlock(settings) if causal else BidirectionalBlock(settings)
        case "tcn":
            return ConvolutionBlock(settings, layer, causal=causal)


def surroundings(
    architecture: Architecture, steps_BTW: Tensor, heads: int, real_BT: Tensor | None = None, *, by_hand: bool
) -> Any:
    """What all blocks of a backbone need to know of a batch, worked out once; without `real_BT` for looking back only."""
    match architecture:
        case "transformer":
            return sight(steps_BTW, heads, real_BT, by_hand=by_hand)
        case "lstm":
            return None if real_BT is None else opposite_steps(real_BT)
        case "tcn":
            return None if real_BT is None else real_BT[..., None]


def position_waves(steps_BTW: Tensor) -> Tensor:
    """Sine and cosine of each position at many frequencies, (T, W): which step it is, where nothing else tells (Vaswani 2017)."""
    length, width = steps_BTW.shape[1:]
    frequencies = torch.exp(-math.log(LONGEST_WAVE) * torch.arange(0, width, 2, device=steps_BTW.device) / width)
    angles = torch.arange(length, device=steps_BTW.device)[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=-1)
