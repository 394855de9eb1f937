"""What tens of thousands of codes cost in training, and a million token ids in memory.

    python -m benchmarks.speed.many_codes [--rounds 7] [--short]

A batch of 48 sequences of 80 steps (3,840 steps), four events a step, codes as frequent as 1 / rank; the network, optimizer and
precision of `train_optimized.py`, in a plain loop. It trains on 500 codes and on 40,000, and on 40,000 with the scores of all codes
at all steps, as evaluation computes them. "Presence" is the likelihood of which codes are present, forward and backward,
alone. All take turns in this process.

Memory: the likelihood of 240 tokens, forward and backward, in a process of its own: the peak beyond what was there before, less the
gradients of the weights. Scores lie in slices of rows up to 65,535 ids, in blocks of ids above; here both are measured.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.measure import (
    interleaved_seconds,
    machine,
    make_parser,
    median,
    peak_mb,
    print_table,
    restart_as_commands_run,
    run_in_own_process,
    spread,
)
from seqvae.errors import run_command

PROG = "benchmarks.speed.many_codes"
FEW, MANY = 500, 40_000
SEQUENCES, STEPS, EVENTS_PER_STEP = 48, 80, 4
IDS, WIDTH, TOKENS = 1_000_000, 128, 240
LAYOUTS = {"slices": "slices of rows", "blocks": "blocks of ids"}


def main() -> None:
    parser = make_parser(PROG, __doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--short", action="store_true", help="three rounds")
    parser.add_argument("--memory_of", choices=LAYOUTS, help="measure the memory of one layout in this process")
    options = parser.parse_args()
    restart_as_commands_run()
    if options.memory_of:
        print(json.dumps(measure_memory(options.memory_of)))
        return
    rows, ratios = measure_speed(3 if options.short else options.rounds)
    print_table(f"Training on {SEQUENCES * STEPS:,} steps, medians of turns", rows)
    print_table(f"{MANY:,} codes, times as long as {FEW}", ratios)
    memory = [run_in_own_process(PROG, "--memory_of", layout) for layout in LAYOUTS]
    print_table(f"Likelihood of {TOKENS} tokens of {IDS:,} ids", memory)
    print(json.dumps({"machine": machine(), "rows": rows, "ratios": ratios, "memory": memory}))


def measure_speed(rounds: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    steps: dict[str, Callable[[], None]] = {}
    heads: dict[str, Callable[[], None]] = {}
    for name, codes, of_all in (
        (f"{FEW} codes", FEW, False),
        (f"{MANY:,} codes", MANY, False),
        (f"{MANY:,} codes, all scores", MANY, True),
    ):
        steps[name], heads[name] = trainings(codes, of_all=of_all)
    whole = interleaved_seconds(steps, rounds)
    alone = interleaved_seconds(heads, rounds)
    rows = [
        {
            "training on": name,
            "optimizer step, ms": round(1000 * median(whole[name]), 1),
            "spread": spread(whole[name]),
            "presence, ms": round(1000 * median(alone[name]), 1),
            "its spread": spread(alone[name]),
        }
        for name in steps
    ]
    base, *others = steps
    ratios = [
        {
            "of": name,
            "optimizer step": round(median(ratios_of(whole, name, base)), 2),
            "spread": spread(ratios_of(whole, name, base)),
            "presence": round(median(ratios_of(alone, name, base)), 2),
            "its spread": spread(ratios_of(alone, name, base)),
        }
        for name in others
    ]
    return rows, ratios


def ratios_of(seconds: dict[str, list[float]], one: str, other: str) -> list[float]:
    return [above / below for above, below in zip(seconds[one], seconds[other], strict=True)]


def trainings(codes: int, *, of_all: bool) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return an optimizer step of the whole network, and forward and backward of the presence of codes alone."""
    import torch

    from benchmarks.speed.bare_loop import BareLoop
    from seqvae.cli.command_line import parse_command_line
    from seqvae.config.training import OptimizedSettings
    from seqvae.data.building.finishing import presence_rates
    from seqvae.data.description import DataDescription
    from seqvae.models.likelihoods import EventLikelihood, Presence
    from seqvae.training.distributed import DTYPES

    batch = made_batch(codes)
    rates = presence_rates(torch.bincount(batch.variables_E, minlength=codes).tolist(), SEQUENCES * STEPS)
    names = tuple(map(str, range(codes)))
    description = DataDescription(
        kind="events",
        names=names,
        mean=(0.0,) * codes,
        std=(1.0,) * codes,
        valued=(True,) * codes,
        presence_rates=rates,
    )
    loop = BareLoop(parse_command_line(OptimizedSettings, [], prog=PROG, description=""), description)
    likelihood = loop.network.likelihood
    assert isinstance(likelihood, EventLikelihood)
    presence = likelihood.presence
    if of_all:
        vars(presence)["nll"] = partial(Presence.nll, presence)
    hidden_NW = torch.randn(SEQUENCES * STEPS, presence.in_features, requires_grad=True)
    dtype = DTYPES[loop.precision]

    def head() -> None:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = presence.nll(hidden_NW, batch).sum()
        loss.backward()
        hidden_NW.grad = presence.weight.grad = presence.bias.grad = None

    return lambda: loop.step([batch]), head


def made_batch(codes: int) -> Any:
    """Return sequences of one length; a code of rank r is as frequent as 1 / r."""
    import torch

    from seqvae.data.batch import EventBatch

    generator = torch.Generator().manual_seed(0)
    frequency_V = 1 / torch.arange(1, codes + 1, dtype=torch.float64)
    steps = SEQUENCES * STEPS
    drawn = torch.multinomial(frequency_V, steps * EVENTS_PER_STEP, replacement=True, generator=generator)
    steps_E = torch.arange(steps).repeat_interleave(EVENTS_PER_STEP)
    keys_E = (steps_E * codes + drawn).unique()  # a step holds a code once
    gaps_BT = torch.rand(SEQUENCES, STEPS, generator=generator) * 100
    gaps_BT[:, 0] = 0
    return EventBatch(
        gaps_BT=gaps_BT,
        lengths_B=torch.full((SEQUENCES,), STEPS),
        variables_E=keys_E % codes,
        values_E=torch.randn(len(keys_E), generator=generator),
        has_value_E=torch.ones(len(keys_E), dtype=torch.bool),
        steps_E=keys_E // codes,
        sequences_B=torch.arange(SEQUENCES),
        labels_B=None,
        step_tokens=steps,
        position=0,
    )


def measure_memory(layout: str) -> dict[str, Any]:
    import torch

    from seqvae.models.cpu_kernels import linear_cross_entropy, wide_cross_entropy

    head = torch.nn.Linear(WIDTH, IDS)
    hidden_NW = torch.randn(TOKENS, WIDTH, requires_grad=True)
    targets_N, counts_N = torch.randint(0, IDS, (TOKENS,)), torch.ones(TOKENS, dtype=torch.bool)
    cross_entropy = wide_cross_entropy if layout == "blocks" else linear_cross_entropy
    torch.mm(torch.randn(TOKENS, WIDTH), torch.randn(WIDTH, TOKENS))  # threads and kernels
    before = peak_mb()
    start = time.perf_counter()
    cross_entropy(hidden_NW, head.weight, head.bias, targets_N, counts_N).sum().backward()
    seconds = time.perf_counter() - start
    gradients = sum(weight.numel() * weight.element_size() for weight in head.parameters()) / 2**20
    return {
        "scores in": LAYOUTS[layout],
        "weights, MB": round(gradients),
        "peak beyond weights and gradients, MB": round(peak_mb() - before - gradients),
        "seconds": round(seconds, 2),
    }


if __name__ == "__main__":
    sys.exit(run_command(main, PROG))
