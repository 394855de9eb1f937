"""How well the supervised head tells the classes apart: AUROC and AUPRC over a whole validation, by torchmetrics.

In: the head's scores and the labels, batch by batch. Out: two numbers. Of two classes they are those of the second; of more,
the mean over the classes that occur, and do not alone occur: the others have neither.

Shapes: B sequences, C classes.
"""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAUROC, MulticlassAveragePrecision

from seqvae.training.objective import NO_LABEL


class ClassCounts(Metric):
    """How often each class came, over batches and processes."""

    counts_C: Tensor

    def __init__(self, classes: int, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("counts_C", torch.zeros(classes, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, scores_BC: Tensor, labels_B: Tensor) -> None:
        classes_C = torch.arange(len(self.counts_C), device=labels_B.device)
        self.counts_C += (labels_B[:, None] == classes_C).sum(dim=0)

    def compute(self) -> Tensor:
        return self.counts_C


class LabelMetrics(nn.Module):
    """Nothing at all where there are fewer than two classes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.metrics: MetricCollection | None = None
        if classes >= 2:
            options: dict[str, Any] = {"num_classes": classes, "average": None, "ignore_index": NO_LABEL}
            self.metrics = MetricCollection(
                {
                    "valid_auroc": MulticlassAUROC(**options),
                    "valid_auprc": MulticlassAveragePrecision(**options),
                    "counts": ClassCounts(classes),
                },
                compute_groups=False,
            )

    def update(self, scores_BC: Tensor | None, labels_B: Tensor | None) -> None:
        if self.metrics is not None and scores_BC is not None and labels_B is not None:
            self.metrics.update(scores_BC.float().softmax(dim=-1), labels_B)

    def compute_and_reset(self) -> dict[str, Tensor]:
        """Over all batches and processes since the last time; NaN where the labels that came are all of one class."""
        if self.metrics is None:
            return {}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="torchmetrics")  # of classes that did not come, which are left out
            values = self.metrics.compute()
        self.metrics.reset()
        counts_C = values.pop("counts")
        told_apart_C = (counts_C > 0) & (counts_C < counts_C.sum())
        if len(counts_C) == 2:
            told_apart_C[0] = False
        return {name: value_C.float()[told_apart_C].mean() for name, value_C in values.items()}
