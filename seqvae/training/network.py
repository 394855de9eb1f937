"""The network of a run: built from settings or rebuilt from a checkpoint, made ready to train.

In: settings and data, or a checkpoint's path. Out: a network that turns a batch into a `VAEOutput`, and a remark for the header; or
a `UsageError`.
"""

import math
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seqvae.config.model import ModelSettings
from seqvae.config.training import SHARDED, ComputeSettings
from seqvae.data.datamodule import SequenceDataModule
from seqvae.data.description import DataDescription
from seqvae.errors import UsageError
from seqvae.models.code_prior import RecurrentCodes
from seqvae.models.embeddings import PretrainedVectors
from seqvae.models.likelihoods import EventLikelihood, TokenLikelihood
from seqvae.models.vae import SequenceVAE
from seqvae.text import some
from seqvae.training.callbacks.compile import remark_on_compiling
from seqvae.training.run_directory.checkpoint_file import (
    ADDED_LATER,
    WEIGHTS,
    damage_of,
    misfits,
    other_meanings,
    plain,
    read_lazily,
)

CODE_PRIOR = "code_prior"
"""What a checkpoint holds the weights of a fitted prior over codes under. A run that goes on leaves them behind, as it moves the
codes."""
PRIOR = "prior."
"""Prefix of the prior's weights among those of a network."""


def build_network(
    data: SequenceDataModule, model: ModelSettings, compute: ComputeSettings, world: int = 1
) -> SequenceVAE:
    """Build the network for the data; refuse one that the data's batches do not allow."""
    vectors_VG = data.variable_vectors()
    pretrained = None
    if vectors_VG is not None:
        pretrained = PretrainedVectors(torch.from_numpy(vectors_VG), data.source.freeze_variable_embeddings)
    network = SequenceVAE(data.description, model, pretrained)
    if compute.strategy in SHARDED and model.posterior == "flow":
        raise UsageError(
            f"--posterior flow: monitors move latents between the steps, when --strategy {compute.strategy} has no whole weights "
            "at hand. Take --strategy ddp"
        )
    least = network.posterior.least_sequences
    if data.fewest_sequences < least:
        raise UsageError(
            f"--posterior {model.posterior} needs {least} sequences in every batch, but here one holds "
            f"{data.fewest_sequences}: give --tokens_per_batch {least * data.longest} or more (and --drop_last where it is the "
            "last batch of an epoch that is short)"
        )
    network.posterior.synchronised = compute.sync_batchnorm and world > 1
    return network


def make_ready(network: nn.Module, compute: ComputeSettings, accelerator: str = "cpu") -> str:
    """Apply the settings to the network in place; return a remark for the header."""
    if compute.plain_operations and isinstance(network, SequenceVAE):  # others have nothing else
        network.use_torch_operations()
    if compute.gradient_checkpointing:
        use_gradient_checkpointing = getattr(network, "use_gradient_checkpointing", None)
        if use_gradient_checkpointing is None:
            raise UsageError(
                f"--gradient_checkpointing: {type(network).__name__} has no method use_gradient_checkpointing()"
            )
        use_gradient_checkpointing()
    return remark_on_compiling(compute.compile_mode, accelerator) if compute.compile_model else ""


class StoredNetwork(NamedTuple):
    """The network in a checkpoint: all that it takes to build it again, and to give it data."""

    description: DataDescription
    settings: dict[str, Any]
    """The settings of the run that it was trained in, by the names of their flags."""
    weights: dict[str, Tensor]
    """Read only when they are used."""
    step: int
    data: dict[str, Any]
    """What is kept of the training data: the number of sequences, quantiles of their lengths, checksums."""

    @property
    def model(self) -> ModelSettings:
        settings = ADDED_LATER | self.settings
        return ModelSettings(**{each.name: settings[each.name] for each in fields(ModelSettings)})


def read_network(path: Path, flag: str = "checkpoint") -> StoredNetwork:
    """Read a checkpoint; `flag` is what the user named the path by."""
    if damage := damage_of(path):
        raise UsageError(f"{flag} {path}: {damage}")
    checkpoint = read_lazily(path)
    try:
        origin = checkpoint["origin"]
        weights = {
            name.removeprefix(WEIGHTS): weight
            for name, weight in checkpoint["state_dict"].items()
            if name.startswith(WEIGHTS)
        }
        weights |= {f"{PRIOR}{name}": weight for name, weight in checkpoint.get(CODE_PRIOR, {}).items()}
        if strange := [name for name, weight in weights.items() if not isinstance(weight, Tensor)]:
            raise TypeError(f"no weights: {some(strange)}")
        return StoredNetwork(
            DataDescription(**{name: plain(value) for name, value in origin["description"].items()}),
            dict(origin["settings"]),
            weights,
            int(checkpoint["global_step"]),
            dict(origin["data"]),
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:  # what a hostile file leads to
        raise UsageError(f"{flag} {path} holds no network of this product: {error!r}") from error


def build_stored(stored: StoredNetwork, where: object) -> SequenceVAE:
    """Build a stored network on the CPU, ready to be used; `where` names it in messages."""
    pretrained = None
    if "embedding.table.projection.weight" in stored.weights:  # with --variable_embeddings_path
        pretrained = PretrainedVectors(stored.weights["embedding.table.vectors_VG"], frozen=True)
    try:
        model = stored.model
    except (LookupError, TypeError, ValueError) as error:
        raise UsageError(f"{where} holds no network of this product: {error!r}") from error
    network = SequenceVAE(stored.description, model, pretrained)
    memory = stored.weights.get(f"{PRIOR}memory.weight_hh_l0")
    if model.is_discrete and memory is not None:  # (4 W, W); no wider than the file is large, whatever it holds
        network.prior = RecurrentCodes(model.codes, model.codebooks, max(1, math.isqrt(memory.numel() // 4)))
    if found := list(misfits(network.state_dict(), stored.weights)):
        raise UsageError(f"{where} does not hold a network of this product: {some(found, separator='; ')}")
    network.load_state_dict(stored.weights)
    return network.eval()


def rebuild_network(path: Path) -> SequenceVAE:
    return build_stored(read_network(path), path)


def go_on_as_begun(network: nn.Module, own_origin: dict[str, Any], stored_origin: dict[str, Any]) -> None:
    """Let a run go on with the share of <unknown> that it began with: those of earlier versions had none."""
    share = stored_origin["description"].get("unknown_share", 0.0)
    own_origin["description"]["unknown_share"] = share
    likelihood = getattr(network, "likelihood", None)
    if isinstance(likelihood, TokenLikelihood | EventLikelihood):
        likelihood.unknown_share = share


def load_weights(network: nn.Module, path: Path, description: DataDescription) -> None:
    """Take a checkpoint's weights and nothing else (--init_from)."""
    stored = read_network(path, "--init_from")
    if (
        stored.settings.get("latent") == "discrete"
    ):  # codes are about to move, and a prior that was fitted to them is not for others
        kept = {name: weight for name, weight in stored.weights.items() if not name.startswith(PRIOR)}
        stored = stored._replace(weights=kept)
    found = other_meanings(stored.description, description) + list(misfits(network.state_dict(), stored.weights))
    if found:
        raise UsageError(f"--init_from {path} does not fit: {some(found, separator='; ')}")
    network.load_state_dict(stored.weights)
