"""A prior over codes, learned when the network that makes them is trained: which codes are likely after which.

    codes of a sequence, one behind the other -> what it remembers of those before -> the probability of each next code

With one latent for a sequence these are its codes in the order of the codebooks; with one for each step, those of the first step,
then those of the second, and so on. How many steps there are is no part of it, as with a Gaussian for each step: the decoder says
where tokens end, and vectors and events are given their lengths.

`RecurrentCodes` is the prior, `fit_codes` trains it. It begins as the frequencies of the training codes, which are all there is to
know where a sequence has a single code.

Shapes: B sequences, S steps, H codebooks, K codes of each, N codes of a sequence (N = S H), W width, R codes of a batch that are
real, X codes of a whole split.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from seqvae.config.inference import PriorSettings
from seqvae.models.codes import CodePrior
from seqvae.models.noise import Noise

PATIENCE = 5
"""Passes over the training codes without a better validation, after which the training ends."""
CODES_AT_ONCE = 2048
"""Codes of a batch, padding included; a sequence that has more makes a batch of its own."""
LOGITS_AT_ONCE = 2**23
"""Numbers that the probabilities of codes are computed from at once."""
SORTED_TOGETHER = 32
"""Batches whose sequences are sorted by length, so that little is padded and their company is still drawn at random."""
DROPOUT = 0.2
"""Share of what it remembers that training hides, since there may be few sequences for many codes."""
PSEUDO_COUNT = 0.5
"""Added to the count of each code in the frequencies that it begins with: no code is impossible."""


class RecurrentCodes(CodePrior):
    """An LSTM over the codes of a sequence."""

    def __init__(self, codes: int, codebooks: int, width: int) -> None:
        super().__init__(codes, codebooks)
        self.width = width
        self.before = nn.Embedding(1 + codebooks * codes, width)
        """A vector of each code of each codebook, behind the one that nothing came before the first."""
        self.memory = nn.LSTM(width, width, batch_first=True)
        self.weight_HKW = nn.Parameter(torch.zeros(codebooks, codes, width))
        self.bias_HK = nn.Parameter(torch.zeros(codebooks, codes))

    def begin_with(self, codes_XH: Tensor) -> None:
        """Take the frequencies of codes for what is known before anything is learned."""
        for book, bias_K in enumerate(self.bias_HK.data):
            counts_K = torch.bincount(codes_XH[:, book], minlength=self.codes).double() + PSEUDO_COUNT
            bias_K.copy_((counts_K / counts_K.sum()).log())

    def nll(self, codes: Tensor) -> Tensor:
        """Return -log p of the codes of each latent given those before it, (B,) or (B, S), in float32 whatever the precision."""
        codes_BN = codes.flatten(1)
        books_N = torch.arange(codes_BN.shape[1], device=codes.device) % self.codebooks
        with torch.autocast(codes.device.type, enabled=False):
            before_BN = functional.pad(1 + books_N * self.codes + codes_BN, (1, -1))
            remembered_BNW, _ = self.memory(self.before(before_BN))
            remembered_BNW = functional.dropout(remembered_BNW, DROPOUT, self.training)
            rows = max(1, LOGITS_AT_ONCE // max(1, self.codes * codes_BN.shape[1]))
            parts = zip(remembered_BNW.split(rows), codes_BN.split(rows), strict=True)
            nll = torch.cat([self._nll_of(*part) for part in parts])
        return nll.unflatten(1, (-1, self.codebooks)).sum(dim=-1).view(codes.shape[:-1])

    def _nll_of(self, remembered_BNW: Tensor, codes_BN: Tensor) -> Tensor:
        of_books = [
            functional.cross_entropy(
                (remembered_BNW[:, book :: self.codebooks] @ self.weight_HKW[book].T + self.bias_HK[book]).mT,
                codes_BN[:, book :: self.codebooks],
                reduction="none",
            )
            for book in range(self.codebooks)
        ]
        return torch.stack(of_books, dim=2).flatten(1)

    @torch.no_grad()
    def sample_codes(self, shape: Sequence[int], noise: Noise) -> Tensor:
        """Draw codes for latents of this shape, (..., H), one after the other."""
        uniform_BN = noise.uniform((*shape, self.codebooks)).flatten(1).double()
        before_B1 = torch.zeros_like(uniform_BN[:, :1], dtype=torch.int64)
        state, drawn = None, []
        with torch.autocast(uniform_BN.device.type, enabled=False):
            for place, uniform_B1 in enumerate(uniform_BN.split(1, dim=1)):
                book = place % self.codebooks
                remembered_B1W, state = self.memory(self.before(before_B1), state)
                logits_BK = remembered_B1W[:, 0] @ self.weight_HKW[book].T + self.bias_HK[book]
                bounds_BK = logits_BK.double().softmax(dim=-1).cumsum(dim=-1)[:, :-1].contiguous()
                drawn.append(torch.searchsorted(bounds_BK, uniform_B1.contiguous(), right=True))
                before_B1 = 1 + book * self.codes + drawn[-1]
        return torch.cat(drawn, dim=1).view(*shape, self.codebooks)


class CodeSet(NamedTuple):
    """The codes of many sequences, those of one behind those of another."""

    codes_XH: np.ndarray
    """int32, a row for each latent."""
    lengths_B: np.ndarray
    """How many latents each sequence has."""
    starts_B: np.ndarray
    """The row of its first one."""

    @classmethod
    def of(cls, codes: Sequence[np.ndarray], lengths: Sequence[np.ndarray]) -> "CodeSet":
        """Return the codes of several batches as one set."""
        lengths_B = np.concatenate(lengths)
        return cls(np.concatenate(codes), lengths_B, np.cumsum(lengths_B) - lengths_B)

    def gather(self, chosen: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return codes, (B, S, H), and which of them are real, (B, S)."""
        lengths_B, starts_B1 = self.lengths_B[chosen], self.starts_B[chosen, None]
        steps_S = np.arange(lengths_B.max())
        is_real_BS = steps_S < lengths_B[:, None]
        rows_BS = starts_B1 + np.where(is_real_BS, steps_S, 0)
        return torch.from_numpy(self.codes_XH[rows_BS]).long(), torch.from_numpy(is_real_BS)


class FittedPrior(NamedTuple):
    """A trained prior and its losses, in nats per latent over the validation codes."""

    prior: RecurrentCodes
    valid: float
    frequencies: float
    """By the frequencies of the training codes alone."""
    even: float
    """By equally likely codes."""
    epochs: int
    """Passes over the training codes until it was best."""


def fit_codes(
    train: CodeSet,
    valid: CodeSet,
    codes: int,
    settings: PriorSettings,
    seed: int,
    device: torch.device,
    on_epoch: Callable[[int, float], object] = lambda epoch, nll: None,
) -> FittedPrior:
    """Train a prior on codes, and return it as it was when it was best on the validation codes.

    `on_epoch` gets the number of each pass, and the nats per latent over the validation codes after it. The same seed gives the
    same prior. Torch's random numbers are left as they were.
    """
    books = train.codes_XH.shape[1]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
        torch.manual_seed(seed)
        prior = RecurrentCodes(codes, books, settings.width)
        prior.begin_with(torch.from_numpy(train.codes_XH).long())
        prior.to(device)
        optimizer = torch.optim.AdamW(prior.parameters(), lr=settings.lr)
        random = np.random.default_rng(seed)
        frequencies = best = mean_nll(prior, valid)
        best_epoch, weights = 0, _copied(prior)
        for epoch in range(1, settings.max_epochs + 1):
            prior.train()
            for chosen in batches(train.lengths_B, books, random):
                codes_BSH, real_BS = (each.to(device) for each in train.gather(chosen))
                loss = prior.nll(codes_BSH)[real_BS].mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(prior.parameters(), 1.0)
                optimizer.step()
            found = mean_nll(prior, valid)
            on_epoch(epoch, found)
            if found < best:
                best, best_epoch, weights = found, epoch, _copied(prior)
            elif epoch - best_epoch >= PATIENCE:
                break
        prior.load_state_dict(weights)
    return FittedPrior(prior.eval(), best, frequencies, books * math.log(codes), best_epoch)


def _copied(prior: nn.Module) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in prior.state_dict().items()}


@torch.no_grad()
def mean_nll(prior: RecurrentCodes, held_out: CodeSet) -> float:
    """Return the mean of -log p over all latents of some sequences."""
    device, total = prior.bias_HK.device, 0.0
    prior.eval()
    for chosen in batches(held_out.lengths_B, prior.codebooks):
        codes_BSH, real_BS = (each.to(device) for each in held_out.gather(chosen))
        total += float(prior.nll(codes_BSH)[real_BS].double().sum())
    return total / len(held_out.codes_XH)


def batches(lengths_B: np.ndarray, books: int, random: np.random.Generator | None = None) -> Iterator[np.ndarray]:
    """Yield the sequences of each batch; with `random` in another order, and with others beside them, each time."""
    count = len(lengths_B)
    order = np.arange(count) if random is None else random.permutation(count)
    most = max(1, CODES_AT_ONCE // books)
    together = max(1, int(SORTED_TOGETHER * most / lengths_B.mean()))
    found = []
    for first in range(0, count, together):
        part = order[first : first + together]
        part = part[np.argsort(lengths_B[part], kind="stable")]
        start = 0
        for place, length in enumerate(lengths_B[part].tolist()):
            if place > start and (place + 1 - start) * length > most:
                found.append(part[start:place])
                start = place
        found.append(part[start:])
    for number in range(len(found)) if random is None else random.permutation(len(found)):
        yield found[number]
