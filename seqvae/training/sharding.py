"""A network whose weights, gradients and optimizer state are shared out among processes (--strategy fsdp, torch's FSDP2).

In: the network that each process has built alike. Out: one whose processes each hold a share of every weight; the weights of a
block are gathered while it computes, and no longer. Computed is what DDP computes, and checkpoints hold whole weights and states as
every other run's do, so that a run may go on either way.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from seqvae.errors import UsageError
from seqvae.models.backbones import Blocks
from seqvae.models.vae import SequenceVAE
from seqvae.training.run_directory.checkpoint_file import read_lazily

ENTRANCES = ("encode", "nll_given_z", "nll_given_level", "step_posterior")
"""Methods beside `forward` by which monitors enter a network."""

Value = TypeVar("Value")


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's strategy for FSDP2, with checkpoints of one file that hold what DDP's hold.

    Where several batches make a step, gradients are summed up after each of them: kept back, they would be as large as the network.
    """

    def __init__(self, backend: str, timeout: timedelta) -> None:
        super().__init__(save_distributed_checkpoint=False, process_group_backend=backend, timeout=timeout)

    def setup_environment(self) -> None:
        """Connect the processes; one dimension takes their own group, whose calls end after --distributed_timeout."""
        self._setup_distributed()
        self._device_mesh = init_device_mesh(self.root_device.type, (self.world_size,))

    def training_step(self, *arguments: Any, **named: Any) -> Any:
        self._share_buffers()
        return super().training_step(*arguments, **named)

    def validation_step(self, *arguments: Any, **named: Any) -> Any:
        self._share_buffers()
        return super().validation_step(*arguments, **named)

    def _share_buffers(self) -> None:
        """Take the running statistics of the first process, as DDP does."""
        assert self.lightning_module is not None
        for buffer in self.lightning_module.buffers():
            torch.distributed.broadcast(buffer, src=0)

    # --- Checkpoints ------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return self._gathered(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        own = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return self._gathered(own.state_dict())

    def _gathered(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state with whole tensors in main memory, in the first process; the others have taken part, and keep nothing."""

        def gather(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            all_of_it = whole(value)
            return all_of_it.cpu() if self.is_global_zero else None

        return tree_map(gather, state)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint tensor by tensor, as each is shared out."""
        return read_lazily(Path(checkpoint_path))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        load_whole(self.lightning_module, checkpoint["state_dict"])

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, stored in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            shares = {
                number: {
                    name: share_of(value, weights[number]) if value.shape == weights[number].shape else value
                    for name, value in values.items()
                }
                for number, values in stored["state"].items()
            }
            optimizer.load_state_dict({**stored, "state": shares})


def share_out(network: nn.Module, mesh: DeviceMesh) -> None:
    """Keep this process's share of a network's weights, once."""
    if isinstance(network, FSDPModule):  # the run goes on from an earlier checkpoint
        return
    refuse_wrong_means(mesh)
    for part in network.modules():
        if isinstance(part, Blocks):
            for block in part:
                fully_shard(block, mesh=mesh)
    # Without the last word torch keeps what is outside of all blocks whole after a forward pass, for a backward pass to come.
    fully_shard(network, mesh=mesh, reshard_after_forward=True)
    for name in ENTRANCES:
        if hasattr(network, name):
            register_fsdp_forward_method(network, name)
    if isinstance(network, SequenceVAE):
        vars(network)["latent_scores"] = with_whole_weights(network, network.latent_scores)


def whole(tensor: Tensor) -> Tensor:
    """Return the tensor that the processes hold shares of; all have to ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def share_of(value: Tensor, own: Tensor) -> Tensor:
    """Return this process's share of the first one's whole tensor, where it holds a share of `own`; all have to ask."""
    if not isinstance(own, DTensor):
        return value
    return distribute_tensor(value.to(own.device), own.device_mesh, own.placements)


def load_whole(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load whole weights into a module that may be shared out."""
    own = module.state_dict()
    module.load_state_dict(
        {name: share_of(weight, own[name]) if name in own else weight for name, weight in weights.items()}
    )


def with_whole_weights(network: nn.Module, work: Callable[..., Value]) -> Callable[..., Value]:
    """Return `work` with all weights gathered around it: gradients that are taken amid a forward pass would free them."""

    def gathered(*arguments: Any) -> Value:
        with whole_weights(network):
            return work(*arguments)

    return gathered


@contextmanager
def whole_weights(network: nn.Module) -> Iterator[None]:
    """Hold all weights of a network in each process."""
    parts = [part for part in network.modules() if isinstance(part, FSDPModule)]
    try:
        for part in parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.set_reshard_after_backward(False, recurse=False)
            part.unshard()
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(True, recurse=False)
            part.set_reshard_after_backward(True, recurse=False)
            part.reshard()


def refuse_wrong_means(mesh: DeviceMesh) -> None:
    """Refuse a torch that adds gradients up where it should average them, as with gloo some did (pytorch#162338)."""
    device = torch.device(mesh.device_type)
    probe = fully_shard(nn.utils.skip_init(nn.Linear, 1, 1, bias=False, device=device), mesh=mesh)
    probe(torch.ones(1, 1, device=device)).sum().backward()
    assert isinstance(probe.weight.grad, Tensor)
    if float(whole(probe.weight.grad)) != 1.0:
        raise UsageError(
            f"--strategy fsdp: torch {torch.__version__} adds gradients up that it should average (pytorch#162338). Take a "
            "later one, or --strategy ddp"
        )
