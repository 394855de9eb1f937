"""run.json: what a session says of its run when it begins, for whoever looks at the run's directory without torch.

In: what the header is made of. Out: plain types of JSON: the header's lines, the command's defaults, the data in figures.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from seqvae.config.config_files import to_flat_dict
from seqvae.config.training_settings import TrainingSettings
from seqvae.data.datamodule import SequenceDataModule
from seqvae.reports.histogram import bin_edges
from seqvae.terminal import clip, percent, visible
from seqvae.training.plan import Plan

MOST_NAMES = 200
MOST_CLASSES = 100
NAME_WIDTH = 80
"""Characters."""


def facts_of(
    settings: TrainingSettings,
    data: SequenceDataModule,
    plan: Plan,
    lines: Sequence[tuple[str, str]],
    resume_command: str,
) -> dict[str, Any]:
    """`lines`: the header's; those without a name belong to the one before."""
    return {
        "total_steps": plan.total_steps,
        "resume_command": resume_command,
        "header": {name: text for name, text in lines if name},
        "defaults": to_flat_dict(type(settings)()),
        "data": data_facts(data),
    }


def data_facts(data: SequenceDataModule) -> dict[str, Any]:
    description = data.description
    layout, _, batches, *notes = data.summary()
    counts = data.data.counts
    lengths = {name: data.split(name).lengths_N for name in data.data.splits}
    lengths_N = lengths["train"]
    edges = bin_edges(lengths_N)
    return {
        "kind": description.kind,
        "layout": layout,
        "batches": batches,
        "splits": [
            {
                "split": name,
                "sequences": len(of_split),
                "steps": int(of_split.sum(dtype=np.int64)),
                "mean_length": float(of_split.mean()) if len(of_split) else None,
                "longest": int(of_split.max()) if len(of_split) else None,
            }
            for name, of_split in sorted(lengths.items(), key=lambda pair: ("train", "valid", "test").index(pair[0]))
        ],
        "lengths": {"edges": edges.tolist(), "counts": np.histogram(lengths_N, edges)[0].tolist()},
        "notes": notes,
        "names": _names(data, counts.get("train", {})),
        "classes": [shortened(name) for name in description.classes[:MOST_CLASSES]],
    }


def shortened(name: str) -> str:
    """Names are data, and can be as long as they like."""
    return clip(visible(name[:NAME_WIDTH]), NAME_WIDTH)


def _names(data: SequenceDataModule, counts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Features and variables as they are in the training split, before the length cap."""
    description = data.description
    if description.kind == "tokens":
        return []
    told = _missing(counts) if description.kind == "vectors" else _seen(counts)
    rows = zip(description.names, description.mean, description.std, told, strict=True)
    return [
        {"name": shortened(name), "mean": mean, "std": std, "told": said} for name, mean, std, said in rows if said
    ][:MOST_NAMES]


def _missing(counts: Mapping[str, Any]) -> list[str]:
    steps = max(1, counts["steps"])
    return [f"{percent(number / steps)} missing" if number else "none missing" for number in counts["missing"]]


def _seen(counts: Mapping[str, Any]) -> list[str]:
    """Of variables that do not occur, like <unknown>, nothing."""
    return [f"{number:,} events" if number else "" for number in counts["per_name"]]
