"""What will run, in some lines that a run begins with: everything a reader of the output would otherwise have to ask."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from lightning import Callback
from torch import nn

from seqvae.config.model import ModelSettings
from seqvae.config.training import ObjectiveSettings, TrainingSettings
from seqvae.config.yaml_files import to_flat_dict
from seqvae.data.datamodule import SequenceDataModule
from seqvae.models.vae import SequenceVAE
from seqvae.reports.histogram import bin_edges
from seqvae.text import clip, percent, visible
from seqvae.training.distributed import Devices, ResolvedPrecision
from seqvae.training.objective import resolve_free_bits
from seqvae.training.schedules import Plan

UNMONITORED = "off: a posterior collapse will neither be seen nor named, and there will be no posterior.jsonl"


@runtime_checkable
class Describes(Protocol):
    """A callback that says what it does in a run of so many optimizer steps."""

    def describe(self, total_steps: int) -> str: ...


def header(
    settings: TrainingSettings,
    data: SequenceDataModule,
    network: nn.Module,
    plan: Plan,
    devices: Devices,
    precision: ResolvedPrecision,
    more: Iterable[tuple[str, str]],
) -> str:
    """`more`: lines that the caller adds, each with its name."""
    return written(header_lines(settings, data, network, plan, devices, precision, more))


def written(lines: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"{name:<11} {text}" for name, text in lines)


def header_lines(
    settings: TrainingSettings,
    data: SequenceDataModule,
    network: nn.Module,
    plan: Plan,
    devices: Devices,
    precision: ResolvedPrecision,
    more: Iterable[tuple[str, str]],
) -> list[tuple[str, str]]:
    """Each with its name; one without goes on with the one before."""
    first, *rest = data.summary()
    return [
        ("data", first),
        *(("", line) for line in rest),
        ("model", describe_network(network, settings.model)),
        ("objective", describe_objective(settings.objective, settings.model.latent_scope)),
        ("training", describe_training(settings, plan)),
        ("devices", describe_devices(settings, devices, precision)),
        *more,
    ]


def describe_network(network: nn.Module, model: ModelSettings) -> str:
    parameters = f"{sum(p.numel() for p in network.parameters()) / 1e6:.2f} M parameters"
    if not isinstance(network, SequenceVAE):
        return f"{type(network).__name__}, {parameters}"
    latents = f"{model.latent_size} latent dimensions for each {model.latent_scope}"
    if model.posterior == "batch_norm":
        latents += ", means normalised over the batch"
    return (
        f"{model.encoder} encoder, {model.decoder} decoder, {parameters} (width {model.width}, depth {model.depth}), "
        f"{latents}"
    )


def describe_objective(objective: ObjectiveSettings, latent_scope: Literal["sequence", "step"]) -> str:
    if objective.target_kl is not None:
        weight = f"steered to {objective.target_kl:g} nats (--target_kl)"
    elif objective.kl_schedule == "constant":
        weight = f"{objective.beta:g}"
    else:
        cycle = f", --kl_cycle {objective.kl_cycle:g}" if objective.kl_schedule == "cyclical" else ""
        weight = (
            f"{objective.kl_schedule} to {objective.beta:g} (--kl_schedule, --kl_warmup {objective.kl_warmup:g}{cycle})"
        )
    free_bits = resolve_free_bits(objective, latent_scope)
    return f"negative ELBO; KL weight {weight}; {free_bits:g} nats of each dimension free (--free_bits)"


def describe_training(settings: TrainingSettings, plan: Plan) -> str:
    optimizer, steps = settings.optimizer, plan.total_steps
    scaled = " (scaled)" if optimizer.scale_lr else ""
    epochs = f"{steps / plan.steps_per_epoch:.3g} epochs"
    return (
        f"{steps:,} optimizer steps ({epochs}), each of {plan.tokens_per_step:,.0f} tokens in "
        f"{plan.sequences_per_step:,.3g} sequences on average; lr {plan.lr:.3g}{scaled}, {optimizer.lr_schedule}"
    )


def describe_devices(settings: TrainingSettings, devices: Devices, precision: ResolvedPrecision) -> str:
    reason = f" in place of {settings.compute.precision}: {precision.reason}" if precision.reason else ""
    return f"{devices}, {precision.precision}{reason}"


def describe_monitoring(callbacks: Sequence[Callback], total_steps: int) -> str:
    said = [callback.describe(total_steps) for callback in callbacks if isinstance(callback, Describes)]
    return "; ".join(said) or UNMONITORED


# run.json: what a session says of its run when it begins, for whoever looks at the run's directory without torch.
#
# In: what the header is made of. Out: plain types of JSON: the header's lines, the command's defaults, the data in figures.

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
