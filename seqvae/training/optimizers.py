"""What moves the weights: AdamW for all of them, or Muon for the matrices inside the layers; and an average of the weights.

In: a network, and gradients on it. Out: a network that has taken a step; for validation and checkpoints, the mean of its weights
over its last steps.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from seqvae.config.training import RATE_TOKENS, OptimizerSettings
from seqvae.errors import UsageError
from seqvae.models.backbones import Blocks

MUON_RATE = 8.0
"""Learning rate of matrices under Muon, in units of --lr. Its step is an orthogonal matrix times 0.2 sqrt(max(rows, columns))
(`match_rms_adamw`), so that a number moves by 0.2 of the rate, where AdamW moves one by nearly all of it."""


def make_optimizer(network: nn.Module, settings: OptimizerSettings) -> Optimizer:
    """Return the optimizer of all weights that train: where there are two, as one."""
    rate = settings.rate(RATE_TOKENS)
    weights = [p for p in network.parameters() if p.requires_grad]
    matrices = hidden_matrices(network) if settings.optimizer == "muon" else []
    of_muon = {id(matrix) for matrix in matrices}
    others = [p for p in weights if id(p) not in of_muon]
    groups = [
        {"params": [p for p in others if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=settings.fused_optimizer)
    if settings.optimizer == "adamw":
        return adamw
    if not matrices:
        raise UsageError(f"--optimizer muon: {type(network).__name__} has no layers of ours, whose matrices it is for")
    decay = settings.weight_decay / MUON_RATE  # which counts in units of --lr
    return InTurn([adamw, Muon(matrices, lr=MUON_RATE * rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")])


def hidden_matrices(network: nn.Module) -> list[nn.Parameter]:
    """Return the matrices inside the layers of encoder and decoder: no embeddings, nothing that makes posteriors or likelihoods."""
    layers = [part for part in network.modules() if isinstance(part, Blocks)]
    return [p for part in layers for p in part.parameters() if p.requires_grad and p.dim() == 2]


class InTurn(Optimizer):
    """Several optimizers that take a step one after the other, and look like one: with the groups and the state of all of them."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        super().__init__([group for one in optimizers for group in one.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let each optimizer work on its part of the common groups, and all on the common state."""
        first = 0
        for one in self.optimizers:
            last = first + len(one.param_groups)
            one.param_groups, one.state = self.param_groups[first:last], self.state
            first = last

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for one in self.optimizers:
            one.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()


class WeightAverage:
    """The exponential moving average of a network's weights and running statistics.

    A mean over about 1 / (1 - decay) steps; over fewer at first, where there are none so old.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.network, self.decay = network, decay
        self.steps = 0
        """Optimizer steps that the average is of; 0: there is none."""
        self._average: dict[str, Tensor] = {}
        self._raw: dict[str, Tensor] | None = None
        """The network's own weights, as long as the average is in their place."""

    def start_over(self) -> None:
        """Begin again from the weights that the network has next, as they are not what was averaged so far."""
        self.steps = 0
        self._average = {}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after an optimizer step."""
        own = self._own()
        if not self.steps:
            self._average = {name: value.clone() for name, value in own.items()}
        self._follow(own)
        self.steps += 1
        decay = min(self.decay, self.steps / (self.steps + 9))
        torch._foreach_lerp_([self._average[name] for name in own], list(own.values()), 1 - decay)

    @torch.no_grad()
    def put_in_force(self) -> None:
        """Let the network have the average, until `put_back`."""
        if self.steps and self._raw is None:
            own = self._own()
            with torch.inference_mode(False):
                self._raw = {name: value.clone() for name, value in own.items()}
            self._follow(own)
            for name, value in own.items():
                value.copy_(self._average[name])

    @torch.no_grad()
    def put_back(self) -> None:
        """Let the network have its own weights again."""
        if self._raw is not None:
            for name, value in self._own().items():
                value.copy_(self._raw[name])
            self._raw = None

    # --- Checkpoints --------------------------------------------------------------------------------------------------

    def save(self, checkpoint: dict[str, Any], prefix: str) -> None:
        """Let a checkpoint hold the average where every reader looks for weights, and the network's own beside it."""
        if not self.steps:
            return
        weights, names = checkpoint["state_dict"], self._average
        raw = self._raw or {name: weights[prefix + name] for name in names}
        checkpoint["state_dict"] = {**weights, **{prefix + name: names[name] for name in names}}
        checkpoint["average"] = {"steps": self.steps, "raw": raw}

    def load(self, checkpoint: dict[str, Any], prefix: str) -> None:
        """Go on with the average of a checkpoint, whose own weights become those that are loaded."""
        self.start_over()
        average = checkpoint.get("average")
        if average is not None:
            self.steps = average["steps"]
            self._average = {name: checkpoint["state_dict"][prefix + name].clone() for name in average["raw"]}

    def _follow(self, own: dict[str, Tensor]) -> None:
        """Keep the average on the device of the weights, which Lightning moves."""
        self._average = {name: value.to(own[name].device) for name, value in self._average.items()}

    def _own(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.network.state_dict().items() if value.is_floating_point()}


def with_own_weights(checkpoint: dict[str, Any], prefix: str) -> None:
    """Let a checkpoint that holds an average hold the network's own weights in its place, to train on from."""
    if "average" in checkpoint:
        own = {prefix + name: value for name, value in checkpoint["average"]["raw"].items()}
        checkpoint["state_dict"] = {**checkpoint["state_dict"], **own}
