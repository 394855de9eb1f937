"""A trained model, opened: out of a checkpoint, a run's directory, or what `use_model.py export` wrote.

In: a path as typed. Out: the network, ready to be used, with all that it takes to give it data and to read what it says.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from seqvae.config.inference_settings import MachineChoices
from seqvae.data.description import DataDescription
from seqvae.exit_codes import UsageError
from seqvae.inference.exported import MODEL, read_exported
from seqvae.local_paths import why_no_path
from seqvae.models.sequence_vae import SequenceVAE
from seqvae.monitors.decoder_probe import undisturbed
from seqvae.training.run_directory.checkpoint_files import BEST, LAST, PREVIOUS, damage_of
from seqvae.training.stored_network import StoredNetwork, build_stored, read_network

_log = logging.getLogger(__name__)


class Trained(NamedTuple):
    """A network and where it came from."""

    network: SequenceVAE
    stored: StoredNetwork
    path: Path
    """The file that the weights lie in."""
    run: Path | None
    """The directory of the run that it is a checkpoint of."""
    autocast: torch.dtype | None
    """What the decoder computes in; None: float32."""

    @property
    def description(self) -> DataDescription:
        return self.stored.description

    @property
    def settings(self) -> dict[str, Any]:
        """All of the run that it was trained in, by the names of their flags."""
        return self.stored.settings

    @property
    def step(self) -> int:
        return self.stored.step

    @property
    def device(self) -> torch.device:
        return self.network.begin_W.device

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.network.parameters())


def open_trained(place: str, machine: MachineChoices | None = None) -> Trained:
    """`place` is a checkpoint, a run's directory (its best checkpoint, by the ELBO of validation) or an export."""
    machine = machine or MachineChoices()
    if reason := why_no_path(place):
        raise UsageError(f"CHECKPOINT {reason}")
    path, stored = _read(Path(place).expanduser())
    network = build_stored(stored, path)
    autocast = torch.bfloat16 if machine.precision == "bf16-mixed" else None
    return Trained(network.to(_device(machine.accelerator)), stored, path, _run_of(path), autocast)


@contextmanager
def at_work(trained: Trained) -> Iterator[None]:
    """No gradients, no dropout; torch's own random numbers are left as they were."""
    device = trained.device
    precision = torch.autocast(device.type, trained.autocast, enabled=trained.autocast is not None)
    with undisturbed(trained.network, device, precision):
        yield


def _device(asked: str) -> str:
    """Never an Apple GPU, which has no float64."""
    there = torch.cuda.is_available()
    if asked == "gpu" and not there:
        raise UsageError("--accelerator gpu: there is none here that torch can use and that has float64")
    return "cuda" if there and asked != "cpu" else "cpu"


def _read(path: Path) -> tuple[Path, StoredNetwork]:
    if path.is_dir():
        if (path / MODEL).is_file():
            return path / MODEL, read_exported(path)
        path = _best_of(path)
    if path.name == MODEL:
        return path, read_exported(path.parent)
    return path, read_network(path, "CHECKPOINT")


def _best_of(directory: Path) -> Path:
    folder = directory if directory.name == "checkpoints" else directory / "checkpoints"
    there = [path for name in (BEST, LAST, PREVIOUS) if (path := folder / name).exists()]
    for path in there:
        if damage := damage_of(path):
            _log.warning("%s: %s; left aside", path, damage)
        else:
            return path
    found = "its checkpoints are damaged" if there else "it holds no checkpoint"
    raise UsageError(f"CHECKPOINT {directory}: {found}. Wanted: a .ckpt file, a run's directory, or an export.")


def _run_of(path: Path) -> Path | None:
    directory = path.absolute().parent
    return directory.parent if directory.name == "checkpoints" else None
