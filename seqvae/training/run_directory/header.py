"""What will run, in some lines that a run begins with: everything a reader of the output would otherwise have to ask."""

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol, runtime_checkable

from lightning import Callback
from torch import nn

from seqvae.config.model_settings import ModelSettings
from seqvae.config.training_settings import ObjectiveSettings, TrainingSettings
from seqvae.data.datamodule import SequenceDataModule
from seqvae.models.sequence_vae import SequenceVAE
from seqvae.training.devices import Devices
from seqvae.training.objective import free_bits_in_force
from seqvae.training.plan import Plan
from seqvae.training.precision import InForce

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
    precision: InForce,
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
    precision: InForce,
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
    free_bits = free_bits_in_force(objective, latent_scope)
    return f"negative ELBO; KL weight {weight}; {free_bits:g} nats of each dimension free (--free_bits)"


def describe_training(settings: TrainingSettings, plan: Plan) -> str:
    optimizer, steps = settings.optimizer, plan.total_steps
    scaled = " (scaled)" if optimizer.scale_lr else ""
    epochs = f"{steps / plan.steps_per_epoch:.3g} epochs"
    return (
        f"{steps:,} optimizer steps ({epochs}), each of {plan.tokens_per_step:,.0f} tokens in "
        f"{plan.sequences_per_step:,.3g} sequences on average; lr {plan.lr:.3g}{scaled}, {optimizer.lr_schedule}"
    )


def describe_devices(settings: TrainingSettings, devices: Devices, precision: InForce) -> str:
    reason = f" in place of {settings.compute.precision}: {precision.reason}" if precision.reason else ""
    return f"{devices}, {precision.precision}{reason}"


def describe_monitoring(callbacks: Sequence[Callback], total_steps: int) -> str:
    said = [callback.describe(total_steps) for callback in callbacks if isinstance(callback, Describes)]
    return "; ".join(said) or UNMONITORED
