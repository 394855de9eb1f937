"""The network of a run, made ready: built as the settings say or brought by the caller, then checkpointed, compiled, checked.

In: settings and data. Out: a network that turns a batch into a `VAEOutput`, and what the header has to say of it.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import nn

from seqvae.config.model_settings import ModelSettings
from seqvae.config.training_settings import ComputeSettings
from seqvae.data.datamodule import SequenceDataModule
from seqvae.exit_codes import UsageError
from seqvae.models.embeddings import GivenVectors
from seqvae.models.sequence_vae import SequenceVAE
from seqvae.training.callbacks.compiling import compile_in_place


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
