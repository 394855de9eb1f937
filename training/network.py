"""The network of a run, made ready: built as the settings say or brought by the caller, then checkpointed, compiled, checked.

In: settings and data. Out: a network that turns a batch into a `VAEOutput`, and what the header has to say of it.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import nn

from dataset import SequenceDataModule
from models.embeddings import GivenVectors
from models.sequence_vae import SequenceVAE
from models.settings import ModelSettings
from training.exit_codes import UsageError
from training.settings import ComputeSettings


@runtime_checkable
class ForgetsActivations(Protocol):
    """A network that can compute its inner results anew on the way back."""

    def use_gradient_checkpointing(self) -> None: ...


@runtime_checkable
class KnowsItsLayers(Protocol):
    """A network that says which of its parts are worth compiling."""

    def compile_inner(self, mode: str) -> None: ...


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


def make_ready(network: nn.Module, compute: ComputeSettings) -> str:
    """Change the network in place, as the settings say; what is returned belongs into the header."""
    if compute.gradient_checkpointing:
        if not isinstance(network, ForgetsActivations):
            raise UsageError(
                f"--gradient_checkpointing: {type(network).__name__} has no method use_gradient_checkpointing()"
            )
        network.use_gradient_checkpointing()
    return compile_in_place(network, compute.compile_mode) if compute.compile_model else ""


def compile_in_place(network: nn.Module, mode: str) -> str:
    """In place, so that checkpoints keep their names. Lengths differ from batch to batch: without `dynamic` each new one
    would be compiled for, for seconds."""
    problem = why_nothing_compiles()
    if problem:
        return f"not compiled: {problem}"
    if isinstance(network, KnowsItsLayers):
        network.compile_inner(mode)
    else:
        network.compile(mode=mode, dynamic=True)
    return f"compiled ({mode}): the first steps of training and validation take up to a minute, which pays on long runs"


def why_nothing_compiles() -> str:
    """Found out with next to nothing to compile; empty where it works."""
    try:
        torch.compile(torch.neg, dynamic=True)(torch.ones(2))
    except RuntimeError as error:  # all that a compiler throws is one
        return f"torch.compile does not work here ({str(error).strip().splitlines()[0]})"
    return ""


def given_vectors(data: SequenceDataModule) -> GivenVectors | None:
    """What --variable_embeddings_path says."""
    vectors_VG = data.variable_vectors()
    if vectors_VG is None:
        return None
    return GivenVectors(torch.from_numpy(vectors_VG), data.source.freeze_variable_embeddings)
