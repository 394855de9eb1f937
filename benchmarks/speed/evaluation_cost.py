"""What importance weighting costs: steps per second beside plain forward passes over as many, on the same batches.

    python -m benchmarks.speed.evaluation_cost [CHECKPOINT] [--samples 50] [--sequences 64] [--repeats 5]

Without a checkpoint: the demo data of each kind, and networks as `train_optimized.py` makes them, untrained; a pass costs the same.
The IW-NLL of K samples takes the encoder once and the decoder K times. Two measures of its speed, both over K times
the steps of the batches:

    forward     K plain passes, `network(batch)`: encoder, one z, decoder. The bar is 0.8; K - 1 encoders are saved, so that it may
                be far above 1
    decoder     K passes of the decoder alone, the embedding of the steps included: the rest is the drawing of z and
                the weights in float64
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities import move_data_to_device

from benchmarks.measure import (
    interleaved_seconds,
    machine,
    make_parser,
    median,
    print_table,
    restart_as_commands_run,
    spread,
)
from seqvae.config.data import CacheSettings, SourceSettings
from seqvae.config.inference import DataChoices
from seqvae.config.model import ModelSettings
from seqvae.console import set_up_output
from seqvae.data.batch import Batch
from seqvae.data.datamodule import SequenceDataModule
from seqvae.data.demo import write_demo
from seqvae.data.description import Kind
from seqvae.inference.estimates import importance_weighted_nll
from seqvae.inference.model import open_data, open_model
from seqvae.inference.streaming import batches_of, chosen_splits
from seqvae.models.vae import SequenceVAE

PROG = "benchmarks.speed.evaluation_cost"
REQUIRED_RATIO = 0.8
KINDS: tuple[Kind, ...] = ("tokens", "vectors", "events")


def main() -> None:
    restart_as_commands_run()
    parser = make_parser(PROG, __doc__)
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    set_up_output(quiet=True)
    cases = demo_cases if options.checkpoint is None else partial(checkpoint_case, options.checkpoint)
    rows = [measure(case, options.samples, options.repeats) for case in cases(options.sequences)]
    print_table(f"Steps per second, {options.samples} samples, medians of {options.repeats} turns", rows)
    result = {
        "benchmark": "evaluation_cost",
        "machine": machine(),
        "wanted": REQUIRED_RATIO,
        "rows": rows,
    }
    print(json.dumps(result))


class Case(NamedTuple):
    """A network, and the batches it is measured on."""

    name: str
    network: SequenceVAE
    batches: list[Batch]


def demo_cases(sequences: int) -> Iterator[Case]:
    for kind in KINDS:
        with tempfile.TemporaryDirectory(prefix="evaluation_cost-") as place:
            source = SourceSettings(data_dir=str(write_demo(Path(place), kind, sequences=2000)))
            data = SequenceDataModule(source, cache=CacheSettings(cache_dir=f"{place}/cache"))
            torch.manual_seed(0)
            network = SequenceVAE(data.description, ModelSettings()).eval()
            yield Case(f"demo {kind}", network, list(batches_of(data, "train", sequences=sequences)))


def checkpoint_case(place: str, sequences: int) -> Iterator[Case]:
    trained = open_model(place)
    data = open_data(trained, DataChoices())
    (split,) = chosen_splits(data, None)
    batches = batches_of(data, split, sequences=sequences)
    yield Case(Path(place).name, trained.network, [move_data_to_device(batch, trained.device) for batch in batches])


def measure(case: Case, samples: int, repeats: int) -> dict[str, Any]:
    network, batches = case.network, case.batches
    with torch.no_grad():
        means = [network.encode(batch).mean for batch in batches]

    def weighted() -> None:
        importance_weighted_nll(network, batches, samples=samples)

    def repeated(one_pass: Callable[[int], object]) -> Callable[[], None]:
        def passes() -> None:
            with torch.no_grad():
                for number in range(len(batches)):
                    for _ in range(samples):
                        one_pass(number)

        return passes

    candidates = {
        "weighted": weighted,
        "forward": repeated(lambda number: network(batches[number])),
        "decoder": repeated(lambda number: network.nll_given_z(batches[number], means[number])),
    }
    seconds = interleaved_seconds(candidates, repeats)
    steps = samples * sum(int(batch.lengths_B.sum()) for batch in batches)
    rates = {one: steps / median(times) for one, times in seconds.items()}
    ratios = {
        other: [theirs / ours for ours, theirs in zip(seconds["weighted"], seconds[other], strict=True)]
        for other in ("forward", "decoder")
    }
    return {
        "data": case.name,
        "batches": len(batches),
        "IW-NLL": round(rates["weighted"]),
        "forward": round(rates["forward"]),
        "decoder": round(rates["decoder"]),
        "of forward": round(median(ratios["forward"]), 2),
        "spread": spread(ratios["forward"]),
        "of decoder": round(median(ratios["decoder"]), 2),
    }


if __name__ == "__main__":
    main()
