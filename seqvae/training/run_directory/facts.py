"""What a session says when it begins: the header on the console, and run.json for readers without torch.

In: settings, data, network, plan and devices. Out: lines with their names, and plain types of JSON.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from lightning import Callback
from torch import nn

from seqvae.config.training import TrainingSettings
from seqvae.config.yaml_files import to_flat_dict
from seqvae.data.datamodule import SequenceDataModule
from seqvae.models.vae import SequenceVAE
from seqvae.reports.terminal import bin_edges
from seqvae.text import clip, percent, visible
from seqvae.training.distributed import Devices, ResolvedPrecision
from seqvae.training.objective import resolve_free_bits
from seqvae.training.schedules import Plan

MOST_NAMES = 200
MOST_CLASSES = 100
NAME_WIDTH = 80
"""Characters of a name."""
UNMONITORED = "off: a posterior collapse will neither be seen nor named, and there will be no posterior.jsonl"


@runtime_checkable
class Describes(Protocol):
    """A callback that describes what it does in a run of `total_steps` optimizer steps."""

    def describe(self, total_steps: int) -> str: ...


def header_lines(
    settings: TrainingSettings,
    data: SequenceDataModule,
    network: nn.Module,
    plan: Plan,
    devices: Devices,
    precision: ResolvedPrecision,
    callbacks: Sequence[Callback],
) -> list[tuple[str, str]]:
    """Return what will run, as names and texts; a line without a name continues the one before."""
    model, objective, compute = settings.model, settings.objective, settings.compute
    parameters = f"{sum(p.numel() for p in network.parameters()) / 1e6:.2f} M parameters"
    described = f"{type(network).__name__}, {parameters}"
    if isinstance(network, SequenceVAE):
        described = (
            f"{model.encoder} encoder, {model.decoder} decoder, {parameters} (width {model.width}, depth {model.depth}), "
            f"{model.latent_size} latent dimensions for each {model.latent_scope}"
            + (", means normalised over the batch" if model.posterior == "batch_norm" else "")
        )
    if objective.target_kl is not None:
        weight = f"steered to {objective.target_kl:g} nats (--target_kl)"
    elif objective.kl_schedule == "constant":
        weight = f"{objective.beta:g}"
    else:
        cycle = f", --kl_cycle {objective.kl_cycle:g}" if objective.kl_schedule == "cyclical" else ""
        weight = (
            f"{objective.kl_schedule} to {objective.beta:g} (--kl_schedule, --kl_warmup {objective.kl_warmup:g}{cycle})"
        )
    free_bits = resolve_free_bits(objective, model.latent_scope)
    steps = plan.total_steps
    reason = f" in place of {compute.precision}: {precision.reason}" if precision.reason else ""
    monitoring = [callback.describe(steps) for callback in callbacks if isinstance(callback, Describes)]
    first, *rest = data.summary()
    return [
        ("data", first),
        *(("", line) for line in rest),
        ("model", described),
        ("objective", f"negative ELBO; KL weight {weight}; {free_bits:g} nats of each dimension free (--free_bits)"),
        (
            "training",
            f"{steps:,} optimizer steps ({steps / plan.steps_per_epoch:.3g} epochs), each of {plan.tokens_per_step:,.0f} tokens "
            f"in {plan.sequences_per_step:,.3g} sequences on average; lr {plan.lr:.3g}"
            f"{' (scaled)' if settings.optimizer.scale_lr else ''}, {settings.optimizer.lr_schedule}",
        ),
        ("devices", f"{devices}, {precision.precision}{reason}"),
        ("monitoring", "; ".join(monitoring) or UNMONITORED),
    ]


def facts_of(
    settings: TrainingSettings,
    data: SequenceDataModule,
    plan: Plan,
    lines: Sequence[tuple[str, str]],
    resume_command: str,
) -> dict[str, Any]:
    """Return the content of run.json; `lines` are the header's, of which those with a name are kept."""
    description = data.description
    layout, _, batches, *notes = data.summary()
    lengths = {name: data.split(name).lengths_N for name in ("train", "valid", "test") if name in data.data.splits}
    edges = bin_edges(lengths["train"])
    return {
        "total_steps": plan.total_steps,
        "resume_command": resume_command,
        "header": {name: text for name, text in lines if name},
        "defaults": to_flat_dict(type(settings)()),
        "data": {
            "kind": description.kind,
            "layout": layout,
            "batches": batches,
            "splits": [
                {
                    "split": name,
                    "sequences": len(lengths_N),
                    "steps": int(lengths_N.sum(dtype=np.int64)),
                    "mean_length": float(lengths_N.mean()) if len(lengths_N) else None,
                    "longest": int(lengths_N.max()) if len(lengths_N) else None,
                }
                for name, lengths_N in lengths.items()
            ],
            "lengths": {"edges": edges.tolist(), "counts": np.histogram(lengths["train"], edges)[0].tolist()},
            "notes": notes,
            "names": _features(data),
            "classes": [_shortened(name) for name in description.classes[:MOST_CLASSES]],
        },
    }


def _features(data: SequenceDataModule) -> list[dict[str, Any]]:
    """Return the features or variables as they are in the training split, before the length cap.

    Variables that do not occur, like <unknown>, are left out.
    """
    description, counts = data.description, data.data.counts.get("train", {})
    if description.kind == "tokens":
        return []
    if description.kind == "vectors":
        steps = max(1, counts["steps"])
        notes = [f"{percent(n / steps)} missing" if n else "none missing" for n in counts["missing"]]
    else:
        notes = [f"{n:,} events" if n else "" for n in counts["per_name"]]
    rows = zip(description.names, description.mean, description.std, notes, strict=True)
    return [
        {"name": _shortened(name), "mean": mean, "std": std, "told": note} for name, mean, std, note in rows if note
    ][:MOST_NAMES]


def _shortened(name: str) -> str:
    """Cut a name, which is data and can be of any length."""
    return clip(visible(name[:NAME_WIDTH]), NAME_WIDTH)
