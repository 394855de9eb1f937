"""Run directories that never ran: written by hand as a run writes them, for the tests of reports."""

import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

STEPS = range(20, 1001, 20)
CONFIG = {
    "data_dir": "data",
    "max_sequence_length": 1000,
    "bucketing": True,
    "lr": 0.001,
    "free_bits": None,
    "disable_metrics_monitoring": False,
    "run_name": "a",
}
DEFAULTS = {**CONFIG, "data_dir": None, "lr": None, "run_name": None}


def make_run(
    directory: Path,
    *,
    verdict: str = "healthy",
    names: Sequence[str] = ("pulse", "pH"),
    says: str = "the latent carries something and the decoder uses it; rate 2, mutual information 1.5",
    end: Mapping[str, Any] | None = None,
    monitored: bool = True,
    kind: str = "tokens",
) -> Path:
    """Write everything that a run of 1,000 steps has; `names` stand wherever something comes from data."""
    directory.mkdir(parents=True)
    settings = CONFIG | {"disable_metrics_monitoring": not monitored}
    write(directory / "config.yaml", [f"{name}: {json.dumps(value)}" for name, value in settings.items()])
    write_json(directory / "environment.json", environment(names))
    write_json(directory / "run.json", facts(names, kind))
    write(directory / "metrics.csv", metrics())
    write_rows(directory / "events.jsonl", [*events(verdict, says if monitored else None), *([end] if end else [])])
    if monitored:
        write_rows(directory / "posterior.jsonl", [reading(step, verdict) for step in STEPS])
        write_rows(directory / "throughput.jsonl", [throughput(step) for step in STEPS])
        rng = np.random.default_rng(0)
        (directory / "plots").mkdir()
        np.savez(directory / "plots" / "posteriors.npz", mean_NZ=rng.normal(size=(99, 4)), logvar_NZ=-np.ones((99, 4)))
    (directory / "samples").mkdir()
    if kind == "tokens":
        lines = ["Step 1,000", "", "   1  original        " + names[0], "      reconstruction  " + names[-1], ""]
        write(directory / "samples" / "step-0001000.txt", [*lines, "Drawn from the prior", "", f"   1{'':18}CCO"])
    else:
        (directory / "samples" / "step-0001000.png").write_bytes(picture(100, 60))
    return directory


def finished(step: int = 1000) -> dict[str, Any]:
    return event("finished", step) | {"total_steps": step, "ended_by": "steps", "valid_elbo": -25.0, "valid_kl": 2.0}


def event(name: str, step: int, **more: Any) -> dict[str, Any]:
    return {"time": "2026-01-01T00:00:00.000Z", "step": step, "event": name, **more}


def events(verdict: str, says: str | None) -> list[dict[str, Any]]:
    rows = [event("started", 0)]
    if says is not None:
        advice = [] if verdict == "healthy" else ["--free_bits 0.25 (the first nats of each dimension are free)"]
        rows.append(
            event("verdict", 500, verdict=verdict, was="cannot_tell", since_step=480, evidence=says, advice=advice)
        )
    return [*rows, event("step_skipped", 600, said="the loss came to NaN", sequences=["a"])]


def reading(step: int, verdict: str) -> dict[str, Any]:
    rate = 2.0 + math.exp(-step / 100)
    row = {
        "step": step,
        "epoch": 0,
        "scope": "sequence",
        "posteriors": 1024,
        "rate": rate,
        "kl_per_dim": [rate / 2, rate / 4, rate / 4, 0.0],
        "active_units": 3,
        "mutual_information": 1.5,
        "mutual_information_cap": 6.93,
        "effective_dimensions": 2.8,
        "kl_weight": min(1.0, step / 200),
        "nll": 30.0,
        "verdict": "warming_up" if step < 200 else verdict,
    }
    return row | ({"decoder_use": 3.0, "decoder_use_error": 0.4} if step % 100 == 0 else {})


def throughput(step: int) -> dict[str, Any]:
    shares = {"padding_share": 0.02, "waiting_share": 0.01, "cpu_utilisation": 0.9, "machine_cpu_utilisation": 0.95}
    return {"step": step, "seconds": 10.0, "real_steps_per_second": 1e4, "sequences_per_second": 300.0, **shares}


def metrics() -> list[str]:
    columns = "step,epoch,seconds,loss,nll_per_step,kl,kl_weight,lr,steps_per_second,valid_elbo,valid_nll,valid_kl"
    lines = [f"{columns},valid_sequences"]
    for step in STEPS:
        nll = 1 + 2 * math.exp(-step / 200)
        lines.append(f"{step},0,{step / 10},{nll + 0.1},{nll},2.0,1,0.001,9000,,,")
        if step % 100 == 0:
            lines.append(f"{step},0,{step / 10},,,,,,,{-25 * nll - 2},{25 * nll},2.0,90")
    return lines


def facts(names: Sequence[str], kind: str = "vectors") -> dict[str, Any]:
    splits = [
        {"split": split, "sequences": 900, "steps": 9000, "mean_length": 10.0, "longest": 19}
        for split in ("train", "valid")
    ]
    data = {
        "kind": kind,
        "layout": f"{kind}: {names[0]}",
        "batches": "90 batches an epoch",
        "splits": splits,
        "lengths": {"edges": [1, 5, 10, 20], "counts": [100, 500, 300]},
        "notes": [f"warning: constant in the training split: {names[-1]}", "note: 3 values are far out"],
        "names": [{"name": name, "mean": 7.4, "std": 0.1, "told": "3.0 % missing"} for name in names],
        "classes": list(names),
    }
    return {
        "total_steps": 1000,
        "resume_command": "python train_optimized.py --config a/config.yaml",
        "header": {
            "model": "transformer",
            "objective": "negative ELBO",
            "training": "1,000 steps",
            "devices": "one CPU",
        },
        "defaults": DEFAULTS,
        "free_bits": {"sequence": {"nats": 0.5, "shared_by": 1}},
        "data": data,
    }


def environment(names: Sequence[str]) -> dict[str, Any]:
    machine = {"cpu": "Some CPU", "cpu_count": 2, "memory_bytes": 2**34, "platform": "Linux", "python": "3.11.7"}
    command = f"python train_optimized.py --data_dir {names[0]}"
    return {
        "command": command,
        "started": "2026-01-01T00:00:00.000Z",
        "commit": None,
        **machine,
        "packages": {"numpy": "2.0"},
    }


def picture(width: int, height: int) -> bytes:
    """Return a PNG."""
    file = io.BytesIO()
    Figure(figsize=(width / 10, height / 10), dpi=20).savefig(file, format="png")
    return file.getvalue()


def latents(names: Sequence[str], *, is_text: bool) -> dict[str, Any]:
    """Return what a run's end writes of its latents; `names` stand wherever something comes from data."""
    places = np.random.default_rng(0).normal(size=(60, 2)).tolist()

    def sequence(number: int) -> dict[str, Any]:
        name = names[number % len(names)]
        points = [[float(time), math.sin(time + number)] for time in range(9)]
        return {"id": name} | ({"text": 6 * name} if is_text else {"points": points})

    def sketch(number: int) -> dict[str, Any]:
        """A text, or a drawing."""
        points = [[(1 + number) * math.cos(angle), math.sin(angle)] for angle in range(9)]
        return sequence(number) if is_text else {"id": names[0], "points": points, "is_drawing": True}

    by_class = [{"class": name, "original": sketch(0), "drawn": [sketch(1), sketch(2)]} for name in names[:2]]
    walk = {
        "ends": [sketch(0) | {"class": names[0]}, sketch(1)],
        "shares": [0, 0.5, 1],
        "decoded": [*map(sketch, range(3))],
    }
    nearest = {"of": sequence(0), "nearest": [sequence(1), sequence(2)], "distances": [0.5, 1.25], "name": names[0]}
    moved = {"moves": [-2.0, 0.0, 2.0], "decoded": [sequence(number) for number in range(3)], "name": names[0]}
    return {
        "step": 1000,
        "places": places,
        "shares": [0.5, 0.25],
        "lengths": list(range(60)),
        "labels": [place % len(names) for place in range(60)] if is_text else [-1] * 60,
        "classes": list(names) if is_text else [],
        "by_class": by_class,
        "walk": walk,
        "neighbours": [nearest, nearest],
        "moved": [moved | {"dimension": dimension} for dimension in (3, 1)]
        + ([] if is_text else [{"dimension": 7, "moves": [0.0], "decoded": [sketch(0)], "name": ""}]),
        "time_label": f"{names[0]} since the first step",
    }


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    write(path, [json.dumps(row) for row in rows])


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def write(path: Path, lines: Sequence[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="")
