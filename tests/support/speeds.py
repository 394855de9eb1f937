"""Speeds as they could have been measured, for the tests of their reports."""

from typing import Any

from seqvae.reports.profile_report import STAGE_NAMES, Speed, WholeRun

RUN = WholeRun(
    steps=1000,
    epochs=10.0,
    training_seconds=1000.0,
    validations=10,
    validation_seconds=20.0,
    checkpoints=10,
    checkpoint_seconds=1.0,
)


def speed(name: str = "optimized", *, stages: dict[str, float] | None = None, **others: Any) -> Speed:
    """Return ten optimizer steps of a second each, without padding; all of it is forward unless `stages` says otherwise."""
    known = stages or {}
    shares = {stage: known.get(stage, 0.0) for stage in STAGE_NAMES}
    shares["forward"] += 10.0 - sum(shares.values())
    facts: dict[str, Any] = {
        "name": name,
        "unit": "token",
        "device": "cpu",
        "precision": "bf16-mixed",
        "parameters": 6_000_000,
        "steps": 10,
        "seconds": 10.0,
        "stages": shares,
        "real_steps": 50_000,
        "padded_steps": 50_000,
        "sequences": 500,
        "events_per_step": None,
        "turns": [4_000.0, 5_000.0, 6_000.0],
        "first_step_seconds": 2.0,
        "start_seconds": 1.0,
        "cpu_utilisation": 0.9,
        "cores": 2,
        "others_cpu_share": 0.0,
        "gpu_utilisation": None,
        "peak_memory_gib": 1.25,
        "flops_per_padded_step": 4e7,
        "peak_flops_per_second": 4e11,
        "peak_dtype": "bfloat16",
        "recompiles": 0,
        "run": RUN,
    }
    return Speed(**{**facts, **others})
