"""Asks a decoder for one step after another, while a sequence is made: the step before in, what it says of the next one out.

An autoregressive decoder remembers what it read, so that T steps cost T steps of decoding instead of the T^2 / 2 of reading all
so far anew for each. Sequences that have ended are left out of the computation.

Shapes: B sequences, R of them that are still read, T steps, W width, Z latent dimensions.
"""

from collections.abc import Callable

from torch import Tensor

from seqvae.models.backbones import Decoder, Pasts

Reader = Callable[[Tensor, Tensor], Tensor]
"""What the decoder says of the next step, (B, W), told the embedded step before it, (B, W), and which sequences go on, (B,)."""

CROWDED = 0.75
"""While more of the sequences that are read go on, the others are read, too: leaving them out copies what is remembered."""


def reader(decoder: Decoder, begin_W: Tensor, z: Tensor, steps: int) -> Reader:
    """`z` is (B, Z), or (B, T, Z) with a latent for each step. A sequence that has ended stays so; what is said of it means
    nothing."""
    return Stepwise(decoder, z) if decoder.autoregressive else at_once(decoder, begin_W, z, steps)


class Stepwise:
    """For decoders that look at their inputs."""

    def __init__(self, decoder: Decoder, z: Tensor) -> None:
        self.decoder = decoder
        self.step = 0
        self.z = z
        self.pasts: Pasts = ()
        self.rows_R: Tensor | None = None
        """Which sequences are read; None: all."""

    def __call__(self, before_BW: Tensor, going_B: Tensor) -> Tensor:
        self.leave_out(going_B)
        before_RW = before_BW if self.rows_R is None else before_BW[self.rows_R]
        z_RZ = self.z[:, self.step] if self.z.dim() == 3 else self.z
        said_RW, self.pasts = self.decoder.step(before_RW, z_RZ, self.step, self.pasts)
        self.step += 1
        if self.rows_R is None:
            return said_RW
        return said_RW.new_zeros(len(before_BW), said_RW.shape[1]).index_copy(0, self.rows_R, said_RW)

    def leave_out(self, going_B: Tensor) -> None:
        """Those that have ended, once they are enough to be worth it."""
        going_R = going_B if self.rows_R is None else going_B[self.rows_R]
        (kept_R,) = going_R.nonzero(as_tuple=True)  # sync: one for each step
        if not 0 < len(kept_R) < CROWDED * len(going_R):
            return
        self.rows_R = kept_R if self.rows_R is None else self.rows_R[kept_R]
        self.z = self.z[kept_R]
        self.pasts = tuple(tuple(tensor[kept_R] for tensor in past) for past in self.pasts)


def at_once(decoder: Decoder, begin_W: Tensor, z: Tensor, steps: int) -> Reader:
    """For decoders that look at no input but the first: one pass says all there is to say."""
    said_BTW: Tensor = decoder(begin_W.expand(len(z), steps, -1), z if z.dim() == 2 else z[:, :steps])
    said_T = iter(said_BTW.unbind(dim=1))
    return lambda before_BW, going_B: next(said_T)
