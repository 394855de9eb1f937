"""The network that a checkpoint holds: what it was built from, its weights, and the network made anew.

In: the path of a checkpoint. Out: a `StoredNetwork`, a `SequenceVAE` that is ready to be used, or a `UsageError`.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from seqvae.config.model_settings import ModelSettings
from seqvae.data.description import DataDescription
from seqvae.exit_codes import UsageError
from seqvae.models.embeddings import GivenVectors
from seqvae.models.sequence_vae import SequenceVAE
from seqvae.training.run_directory.checkpoint_files import damage_of, read_lazily
from seqvae.training.run_directory.differences import misfits, other_meanings, plain, some_of

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
