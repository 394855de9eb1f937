"""Events per second in training: SequenceVAE beside SeqSetVAE's loop over patients and their sets.

    python -m benchmarks.speed.event_throughput [--rounds 7] [--profile] [--width 448 --depth 2 --heads 2 ...]

On physionet2012 below SEQVAE_REAL_DATA, or --data_dir; both models have about 10 million parameters, and both train on the CPU.
SequenceVAE trains as train_optimized.py has it, whose flags are taken here, too: real loader, forward, backward, clipping,
optimizer; once at the precision of that command and once in float32. The loop (benchmarks/speed/set_loop_reference.py) trains in
float32 on batches of four patients, which lie ready in memory; once with all that SeqSetVAE does, and once lean. They take turns.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW
from torch.profiler import ProfilerActivity, profile

from benchmarks.measure import machine, make_parser, median, print_table, spread
from benchmarks.speed.bare_loop import BareLoop, endless
from benchmarks.speed.set_loop_reference import SetLoopVAE
from seqvae.cli.command_line import parse_command_line
from seqvae.config.training import OptimizedSettings, TrainingSettings
from seqvae.data.batch import EventBatch
from seqvae.errors import run_command
from seqvae.training.fit import make_data

TEN_MILLION = ("--width", "448", "--depth", "2", "--heads", "2")
"""Flags for as many weights, heads and layers as SeqSetVAE has: two to encode, two to decode."""
PATIENTS = 4
PROFILED_STEPS = 3

Train = Callable[[], int]
"""A function that trains for a while and returns the number of events."""


def main() -> None:
    parser = make_parser("benchmarks.speed.event_throughput", __doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps of SequenceVAE in a round")
    parser.add_argument("--patients", type=int, default=PATIENTS, help="in the one step of the loop in a round")
    parser.add_argument(
        "--profile", action="store_true", help="print where the time of a step goes, and measure nothing"
    )
    options, words = parser.parse_known_args()
    if real := os.environ.get("SEQVAE_REAL_DATA"):
        words = ["--data_dir", f"{real}/physionet2012", *words]
    settings = parse_command_line(
        OptimizedSettings, [*TEN_MILLION, *words], prog="event_throughput", description=__doc__ or ""
    )
    if options.profile:
        ours = SequenceVAETraining(settings)
        ours.train(1)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            ours.train(PROFILED_STEPS)
        print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60))
    else:
        print(json.dumps(run(settings, options.rounds, options.steps, options.patients)))


def run(settings: TrainingSettings, rounds: int, steps: int, patients: int) -> dict[str, Any]:
    ours = SequenceVAETraining(settings)
    full = SequenceVAETraining(replace(settings, compute=replace(settings.compute, precision="32-true")))
    candidates: dict[str, tuple[nn.Module, Train]] = {
        f"SequenceVAE, as the command has it ({ours.precision})": (ours.network, lambda: ours.train(steps)),
        "SequenceVAE, 32-true": (full.network, lambda: full.train(steps)),
    }
    for name, lean in {"loop over sets, as SeqSetVAE": False, "the same, lean": True}.items():
        loop = SetLoopTraining(ours.first_patients(patients), ours.variables, lean=lean)
        candidates[name] = (loop.network, loop.train)
    rates: dict[str, list[float]] = {name: [] for name in candidates}
    for _, train in candidates.values():
        train()  # warm up
    for _ in range(rounds):
        for name, (_, train) in candidates.items():
            start = time.perf_counter()
            events = train()
            rates[name].append(events / (time.perf_counter() - start))
    first = median(next(iter(rates.values())))
    rows = [
        {
            "training": name,
            "M parameters": round(sum(p.numel() for p in candidates[name][0].parameters()) / 1e6, 1),
            "events/s": round(median(values), 1),
            "spread": spread(values),
            "SequenceVAE is faster by": round(first / median(values), 1),
        }
        for name, values in rates.items()
    ]
    print_table(f"Events per second in training, medians of {rounds} rounds in turns", rows)
    ratio = rows[2]["SequenceVAE is faster by"]
    return {"benchmark": "event_throughput", "machine": machine(), "rows": rows, "ratio": ratio}


class SequenceVAETraining:
    """The training of the command on a CPU, without the Trainer around it."""

    def __init__(self, settings: TrainingSettings) -> None:
        self.data = make_data(settings)
        if self.data.description.kind != "events":
            raise SystemExit("event_throughput: --data_dir, or SEQVAE_REAL_DATA with physionet2012/, must hold events")
        self.loop = BareLoop(settings, self.data.description)
        self.network, self.precision = self.loop.network, self.loop.precision
        self.batches = endless(self.data)

    @property
    def variables(self) -> int:
        return len(self.data.description.names)

    def first_patients(self, count: int) -> EventBatch:
        """Return patients of average length, so that they stand for all."""
        stored = self.data.split("train")
        order_N = abs(stored.lengths_N - stored.lengths_N.mean()).argsort(kind="stable")
        batch = stored.gather(order_N[:count])
        assert isinstance(batch, EventBatch)
        return batch

    def train(self, steps: int) -> int:
        return sum(
            len(batch.values_E) for batch in self.loop.steps(self.batches, steps) if isinstance(batch, EventBatch)
        )


class SetLoopTraining:
    """The loop's training, always on the same patients: its cost hardly depends on which they are."""

    def __init__(self, batch: EventBatch, variables: int, *, lean: bool) -> None:
        torch.manual_seed(0)
        self.batch = batch
        self.network = SetLoopVAE(variables, lean=lean)
        self.optimizer = AdamW(self.network.parameters(), lr=1e-4, fused=True)

    def train(self) -> int:
        self.network(self.batch).backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return len(self.batch.values_E)


if __name__ == "__main__":
    sys.exit(run_command(main, "benchmarks.speed.event_throughput"))
