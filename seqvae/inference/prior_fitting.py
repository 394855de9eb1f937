"""A prior over the codes of a trained model: fitted to its own codes of the training split, and kept in the model's file.

In: an opened model whose latents are codes, and data. Out: the model with the prior, by which it is sampled and evaluated from then
on; and the checkpoint or the saved model that it came from, with the prior in it.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from lightning.fabric.utilities import move_data_to_device

from seqvae.config.inference import PriorSettings
from seqvae.data.datamodule import SequenceDataModule
from seqvae.errors import UsageError
from seqvae.inference.saved import write_saved
from seqvae.inference.streaming import batches_of, evaluating
from seqvae.models.code_prior import CodeSet, FittedPrior, fit_codes
from seqvae.training.network import CODE_PRIOR, PRIOR, build_stored, read_network
from seqvae.training.run_directory.checkpoint_file import AtomicCheckpointIO
from seqvae.training.run_directory.resume import lock_run_directory

if TYPE_CHECKING:
    from seqvae.inference.model import Model

_log = logging.getLogger(__name__)

MOST_CODES = 2**25
"""Codes of a split that a prior is fitted to; they are held in memory, 4 bytes each."""


def fit_prior(
    model: "Model",
    data: SequenceDataModule,
    settings: PriorSettings,
    seed: int,
    on_epoch: Callable[[int, float], object] = lambda epoch, nll: None,
) -> tuple["Model", FittedPrior]:
    """Return the model with a prior over its codes, trained on those of the training split and validated on those of the validation
    split; `on_epoch` as in `fit_codes`."""
    refuse_no_codes(model)
    train, valid = (codes_of(model, data, split, seed) for split in ("train", "valid"))
    fitted = fit_codes(train, valid, model.network.settings.codes, settings, seed, model.device, on_epoch)
    weights = {f"{PRIOR}{name}": weight.cpu() for name, weight in fitted.prior.state_dict().items()}
    others = {name: weight for name, weight in model.stored.weights.items() if not name.startswith(PRIOR)}
    stored = model.stored._replace(weights=others | weights)
    return replace(model, network=build_stored(stored, model.path).to(model.device), stored=stored), fitted


def refuse_no_codes(model: "Model") -> None:
    if not model.network.has_codes:
        raise UsageError(
            f"{model.path}: its latents are no codes, and its prior was trained with it. A prior is fitted to a model that was "
            "trained with --latent discrete"
        )


def codes_of(model: "Model", data: SequenceDataModule, split: str, seed: int) -> CodeSet:
    """Return the codes of a split, or of as many of its sequences, chosen at random, as MOST_CODES allows."""
    network, lengths_N = model.network, np.asarray(data.split(split).lengths_N)
    of_each = (lengths_N.mean() + 1 if network.latent_per_step else 1) * network.settings.codebooks
    sequences = min(len(lengths_N), max(1, int(MOST_CODES / of_each)))
    if sequences < len(lengths_N):
        _log.warning("the prior is fitted to %s of %s sequences (%s)", f"{sequences:,}", f"{len(lengths_N):,}", split)
    codes, lengths = [], []
    with evaluating(network, model.autocast) as device:
        for batch in batches_of(data, split, sequences=sequences, seed=seed):
            encoding = network.encoding(move_data_to_device(batch, device))
            assert encoding.quantised is not None, "its latents are codes"
            mask = encoding.posterior.mask
            codes.append(encoding.quantised.codes[mask].int().cpu().numpy())
            lengths.append((mask.sum(dim=1) if mask.dim() == 2 else mask.long()).cpu().numpy())
    return CodeSet.of(codes, lengths)


def store_prior(model: "Model") -> None:
    """Write the model's prior into the checkpoint or the saved model that it was opened from."""
    if model.path.suffix == ".json":
        write_saved(model.path.parent, model.stored, model.results)
        return
    weights, file = model.stored.weights, AtomicCheckpointIO()
    prior = {name.removeprefix(PRIOR): weight for name, weight in weights.items() if name.startswith(PRIOR)}
    with lock_run_directory(model.path.absolute().parent if model.run is None else model.run):
        now = read_network(model.path).weights
        others = [name for name in weights if not name.startswith(PRIOR)]
        if not all(name in now and weights[name].equal(now[name]) for name in others):
            raise UsageError(f"{model.path} has changed while the prior was fitted: fit it again")
        file.save_checkpoint(file.load_checkpoint(model.path) | {CODE_PRIOR: prior}, model.path)
