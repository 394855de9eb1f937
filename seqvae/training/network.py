"""The network of a run, made ready: built as the settings say or brought by the caller, then checkpointed, compiled, checked.

In: settings and data. Out: a network that turns a batch into a `VAEOutput`, and what the header has to say of it.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from seqvae.config.model import ModelSettings
from seqvae.config.training import ComputeSettings
from seqvae.data.datamodule import SequenceDataModule
from seqvae.data.description import DataDescription
from seqvae.errors import UsageError
from seqvae.models.embeddings import GivenVectors
from seqvae.models.vae import SequenceVAE
from seqvae.training.callbacks.compile import compile_in_place
from seqvae.training.run_directory.checkpoint_file import (
    damage_of,
    misfits,
    other_meanings,
    plain,
    read_lazily,
    some_of,
)


@runtime_checkable
class ForgetsActivations(Protocol):
    """A network that can compute its inner results anew on the way back."""

    def use_gradient_checkpointing(self) -> None: ...


def build_network(
    data: SequenceDataModule, model: ModelSettings, compute: ComputeSettings, world: int = 1
) -> SequenceVAE:
    """Refuses what the data's batches do not allow."""
    network = SequenceVAE(data.description, model, given_vectors(data))
    if data.fewest_sequences < network.least_sequences:
        raise UsageError(
            f"--posterior {model.posterior} needs {network.least_sequences} sequences in every batch, but here one holds "
            f"{data.fewest_sequences}: give --tokens_per_batch {network.least_sequences * data.longest} or more (and "
            "--drop_last where it is the last batch of an epoch that is short)"
        )
    network.synchronise_batch_norm = compute.sync_batchnorm and world > 1
    return network


def make_ready(network: nn.Module, compute: ComputeSettings, accelerator: str = "cpu") -> str:
    """Change the network in place, as the settings say; what is returned belongs into the header."""
    if compute.plain_operations and isinstance(network, SequenceVAE):  # others have nothing else
        network.use_plain_operations()
    if compute.gradient_checkpointing:
        if not isinstance(network, ForgetsActivations):
            raise UsageError(
                f"--gradient_checkpointing: {type(network).__name__} has no method use_gradient_checkpointing()"
            )
        network.use_gradient_checkpointing()
    return compile_in_place(network, compute.compile_mode, accelerator) if compute.compile_model else ""


def given_vectors(data: SequenceDataModule) -> GivenVectors | None:
    """What --variable_embeddings_path says."""
    vectors_VG = data.variable_vectors()
    if vectors_VG is None:
        return None
    return GivenVectors(torch.from_numpy(vectors_VG), data.source.freeze_variable_embeddings)


# The network that a checkpoint holds: what it was built from, its weights, and the network made anew.
#
# In: the path of a checkpoint. Out: a `StoredNetwork`, a `SequenceVAE` that is ready to be used, or a `UsageError`.

_WEIGHTS = "network."
"""How the names of the network's weights begin in a checkpoint."""
_GIVEN = "embedding.table"
"""Where the vectors of --variable_embeddings_path are kept."""


class StoredNetwork(NamedTuple):
    """All that it takes to build a network again, and to give it data."""

    description: DataDescription
    settings: dict[str, Any]
    """All of the run that it was trained in, by the names of their flags."""
    weights: dict[str, Tensor]
    """Read only where they are looked at."""
    step: int
    data: dict[str, Any]
    """What is kept of the training data: how many sequences, quantiles of their lengths, checksums."""

    @property
    def model(self) -> ModelSettings:
        return ModelSettings(**{each.name: self.settings[each.name] for each in fields(ModelSettings)})


def read_network(path: Path, flag: str = "checkpoint") -> StoredNetwork:
    """`flag` is what the user named the path by."""
    if damage := damage_of(path):
        raise UsageError(f"{flag} {path}: {damage}")
    checkpoint = read_lazily(path)
    try:
        return _stored_in(checkpoint)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{flag} {path} holds no network of this product: {error!r}") from error


def build_stored(stored: StoredNetwork, where: object) -> SequenceVAE:
    """On the CPU and ready to be used."""
    given = None
    if f"{_GIVEN}.projection.weight" in stored.weights:
        given = GivenVectors(stored.weights[f"{_GIVEN}.vectors_VG"], frozen=True)
    try:
        model = stored.model
    except (LookupError, TypeError, ValueError) as error:
        raise UsageError(f"{where} holds no network of this product: {error!r}") from error
    network = SequenceVAE(stored.description, model, given)
    if found := list(misfits(network.state_dict(), stored.weights)):
        raise UsageError(f"{where} does not hold a network of this product: {some_of(found)}")
    network.load_state_dict(stored.weights)
    return network.eval()


def rebuild_network(path: Path) -> SequenceVAE:
    return build_stored(read_network(path), path)


def load_weights(network: nn.Module, path: Path, description: DataDescription) -> None:
    """Take a checkpoint's weights and nothing else (--init_from)."""
    stored = read_network(path, "--init_from")
    found = other_meanings(stored.description, description) + list(misfits(network.state_dict(), stored.weights))
    if found:
        raise UsageError(f"--init_from {path} does not fit: {some_of(found)}")
    network.load_state_dict(stored.weights)


def _stored_in(checkpoint: dict[str, Any]) -> StoredNetwork:
    """What a hostile file holds comes to an error of Python's own."""
    origin = checkpoint["origin"]
    described = {name: plain(value) for name, value in origin["description"].items()}
    weights = {
        name.removeprefix(_WEIGHTS): weight
        for name, weight in checkpoint["state_dict"].items()
        if name.startswith(_WEIGHTS)
    }
    if strange := [name for name, weight in weights.items() if not isinstance(weight, Tensor)]:
        raise TypeError(f"no weights: {some_of(strange)}")
    step, settings, data = int(checkpoint["global_step"]), dict(origin["settings"]), dict(origin["data"])
    return StoredNetwork(DataDescription(**described), settings, weights, step, data)
