"""The callback that ends a run whose validations no longer get better.

In: the validations of a run. Out: the end of training, between two optimizer steps.
"""

from collections.abc import Callable
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch import callbacks
from torch import Tensor, tensor


class EarlyStopping(callbacks.EarlyStopping):
    """Callback that stops after `patience` validations in a row without a better ELBO.

    It counts those under the KL's full weight: while the weight rises, the model is pulled from one objective to another, and the
    ELBO, which is at weight 1, may fall for a while. Where a run goes on with other validation sequences, it counts anew. It has
    the name of Lightning's class, which checkpoints of earlier versions know its state by.
    """

    def __init__(self, patience: int, is_counted: Callable[[int], bool]) -> None:
        """`is_counted` says whether the KL has its full weight in an optimizer step, counted from 0."""
        super().__init__("valid_elbo", mode="max", patience=patience, check_on_train_epoch_end=False)
        self.is_counted = is_counted
        self.sequences: int | None = None
        """How many the best ELBO so far was validated on."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._should_skip_check(trainer) or not self.is_counted(trainer.global_step - 1):
            return
        sequences = int(trainer.callback_metrics["valid_sequences"])
        if sequences != self.sequences:
            self.sequences, self.wait_count, self.best_score = sequences, 0, NOTHING_YET
        super().on_validation_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"sequences": self.sequences}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting, by the patience that this session was given."""
        super().load_state_dict(state_dict | {"patience": self.patience})
        self.sequences = state_dict.get("sequences")  # older ones counted from the beginning of the run


NOTHING_YET: Tensor = tensor(float("-inf"))
