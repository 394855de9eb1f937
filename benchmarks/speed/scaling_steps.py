"""What an optimizer step costs, against the length of the sequences, the width of the network and the tokens of a batch.

Token data; forward, backward, clipping and fused AdamW as a command's step on a CPU has them, without a Trainer around it.
Where one number grows, the others stay as `BASE` says. All sequences of a batch are of one length, so that nothing is padded.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.measure import interleaved_seconds, median, print_table, spread
from benchmarks.speed.bare_loop import BareLoop
from benchmarks.speed.scaling_laws import Curve
from seqvae.config.model import ModelSettings
from seqvae.config.training import OptimizedSettings
from seqvae.data.batch import TokenBatch
from seqvae.data.description import DataDescription

VOCABULARY = 5000


class Shape(NamedTuple):
    """Of a training step."""

    length: int
    """Steps of each sequence."""
    width: int
    tokens: int
    """Of the batch."""


class Sweep(NamedTuple):
    """One number that grows."""

    name: str
    label: str
    """Of its axis."""
    shapes: Sequence[Shape]
    sizes: Sequence[int]
    """The number that grows, in each of the shapes."""


BASE = Shape(length=64, width=128, tokens=4096)
LENGTHS, SHORT_LENGTHS = (16, 32, 64, 128, 256, 512, 1024), (16, 64, 256, 1024)
WIDTHS, SHORT_WIDTHS = (32, 64, 128, 256, 512), (32, 64, 128, 256)
TOKENS, SHORT_TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16384), (256, 1024, 4096)


def token_training(model: ModelSettings, vocabulary: int = VOCABULARY) -> BareLoop:
    """A network that trains on whatever batches it is given."""
    settings = replace(OptimizedSettings(), model=model)
    return BareLoop(settings, DataDescription(kind="tokens", vocabulary_size=vocabulary))


def sweeps(*, short: bool, base: Shape = BASE) -> list[Sweep]:
    lengths, widths, tokens = (SHORT_LENGTHS, SHORT_WIDTHS, SHORT_TOKENS) if short else (LENGTHS, WIDTHS, TOKENS)
    return [
        Sweep("length", "length of the sequences", [base._replace(length=length) for length in lengths], lengths),
        Sweep("width", "width of the network", [base._replace(width=width) for width in widths], widths),
        Sweep("batch", "tokens of a batch", [base._replace(tokens=number) for number in tokens], tokens),
    ]


def run_sweep(sweep: Sweep, rounds: int, model: ModelSettings) -> tuple[list[dict[str, Any]], Curve, Curve]:
    """The table, and two curves: milliseconds of a step, and microseconds of it for each token."""
    trainings = {
        width: token_training(replace(model, width=width)) for width in {shape.width for shape in sweep.shapes}
    }
    candidates: dict[str, Callable[[], object]] = {
        str(size): partial(trainings[shape.width].step, [random_batch(shape)])
        for size, shape in zip(sweep.sizes, sweep.shapes, strict=True)
    }
    seconds = list(interleaved_seconds(candidates, rounds).values())
    tokens = [shape.tokens // shape.length * shape.length for shape in sweep.shapes]
    per_step = Curve("a step", sweep.sizes, [[1e3 * one for one in values] for values in seconds])
    per_token = Curve(
        "a token",
        sweep.sizes,
        [[1e6 * one / number for one in values] for values, number in zip(seconds, tokens, strict=True)],
    )
    rows = [
        {
            sweep.label: size,
            "ms a step": round(median(step), 1),
            "us a token": round(median(token), 2),
            "spread": spread(step),
        }
        for size, step, token in zip(sweep.sizes, per_step.costs, per_token.costs, strict=True)
    ]
    print_table(f"An optimizer step against the {sweep.label}, medians of {rounds} rounds in turns", rows)
    return rows, per_step, per_token


def random_batch(shape: Shape, vocabulary: int = VOCABULARY) -> TokenBatch:
    """As many sequences as fit, none of them padded."""
    rows = shape.tokens // shape.length
    tokens_BT = torch.randint(vocabulary, (rows, shape.length), generator=torch.Generator().manual_seed(0))
    lengths_B = torch.full((rows,), shape.length)
    return TokenBatch(tokens_BT, lengths_B, torch.arange(rows), None, rows * shape.length, 0)
