"""AUROC and AUPRC of the supervised head, held against their definitions."""

import math

import pytest
import torch

from seqvae.training.module import LabelMetrics


def test_auroc_is_the_share_of_pairs_in_the_right_order_and_unlabelled_sequences_do_not_count():
    scores_BC = torch.tensor([[0.0, 2.0], [0.0, -1.0], [0.0, 1.0], [0.0, 0.0], [0.0, 9.0]])
    labels_B = torch.tensor([1, 0, 0, 1, -1])
    metrics = LabelMetrics(2)
    metrics.update(scores_BC[:2], labels_B[:2])
    metrics.update(scores_BC[2:], labels_B[2:])
    values = metrics.compute_and_reset()
    assert values["valid_auroc"].item() == pytest.approx(3 / 4)
    assert values["valid_auprc"].item() == pytest.approx((1 / 1 + 2 / 3) / 2)


def test_each_validation_counts_anew():
    metrics = LabelMetrics(2)
    for wrong in (False, True):
        metrics.update(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([0, 1] if wrong else [1, 0]))
        assert metrics.compute_and_reset()["valid_auroc"].item() == (0.0 if wrong else 1.0)


def test_several_classes_are_averaged_and_one_that_does_not_occur_is_left_out():
    scores_BC = torch.tensor([[5.0, 0.0, 0.0, 0.0], [0.0, 5.0, 0.0, 0.0], [0.0, 0.0, 5.0, 0.0]])
    metrics = LabelMetrics(4)
    metrics.update(scores_BC, torch.tensor([0, 1, 2]))
    values = metrics.compute_and_reset()
    assert all(math.isclose(value.item(), 1.0) for value in values.values())


def test_data_without_labels_have_no_such_metrics():
    metrics = LabelMetrics(0)
    metrics.update(None, None)
    assert metrics.compute_and_reset() == {}


def test_labels_of_one_class_alone_say_nothing():
    metrics = LabelMetrics(2)
    metrics.update(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([1, 1]))
    assert all(math.isnan(value.item()) for value in metrics.compute_and_reset().values())
