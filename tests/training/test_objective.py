"""The objective: exact sums, an honest KL, free bits that are paid and never reported, labels."""

import math

import pytest
import torch
from torch import Tensor

from seqvae.config.model import ModelSettings
from seqvae.config.training import ObjectiveSettings, TrainingSettings
from seqvae.models.vae import VAEOutput
from seqvae.monitors.formulas import gaussian_kl
from seqvae.training.objective import (
    FREE_BITS,
    WholeBatch,
    classification_loss,
    contrast_of_parts,
    contrastive_loss,
    find_above_floor,
    negative_elbo,
    resolve_free_bits,
    share_of_contrast,
)


def output_of(
    mean: Tensor, nll_B: list[float], mask: Tensor | None = None, scores_BC: Tensor | None = None
) -> VAEOutput:
    """Posteriors of variance 1."""
    mask = torch.ones(mean.shape[:-1], dtype=torch.bool) if mask is None else mask
    return VAEOutput(mean, torch.zeros_like(mean), mask, torch.tensor(nll_B), torch.ones(len(nll_B)), scores_BC)


def test_gaussian_kl_is_that_of_torch_distributions():
    torch.manual_seed(0)
    mean_BZ, logvar_BZ = torch.randn(5, 3), torch.randn(5, 3)
    posterior = torch.distributions.Normal(mean_BZ, torch.exp(0.5 * logvar_BZ))
    expected_BZ = torch.distributions.kl_divergence(posterior, torch.distributions.Normal(0.0, 1.0))
    torch.testing.assert_close(gaussian_kl(mean_BZ, logvar_BZ), expected_BZ)


def test_gaussian_kl_keeps_its_digits_next_to_the_prior():
    assert gaussian_kl(torch.zeros(1), torch.tensor([1e-4])).item() == pytest.approx(2.5e-9, rel=0.05)


# --- The negative ELBO ------------------------------------------------------------------------------------------------


def test_the_loss_at_weight_one_without_free_bits_is_the_negative_elbo():
    mean_BZ = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    objective = negative_elbo(output_of(mean_BZ, [3.0, 4.0]), kl_weight=1.0, free_bits=0.0)
    assert objective.loss.item() == pytest.approx(3 + 4 + 0.5 + 2)
    assert (objective.nll.item(), objective.kl.item()) == (7.0, 2.5)


@pytest.mark.parametrize("weight", [0.5, torch.tensor(0.5)])
def test_the_weight_scales_the_kl_in_the_loss_and_not_the_one_reported(weight):
    objective = negative_elbo(output_of(torch.tensor([[2.0]]), [3.0]), weight, free_bits=0.0)
    assert (objective.loss.item(), objective.kl.item()) == (3 + 0.5 * 2, 2.0)
    assert objective.kl_weight is weight


def test_free_bits_raise_what_is_paid_and_never_what_is_reported():
    mean_BZ = torch.tensor([[2.0, 0.1], [2.0, 0.1]], requires_grad=True)
    objective = negative_elbo(output_of(mean_BZ, [0.0, 0.0]), kl_weight=1.0, free_bits=0.5)
    assert objective.loss.item() == pytest.approx(2 * 2 + 2 * 0.5)
    assert objective.kl.item() == pytest.approx(2 * 2 + 2 * 0.005)
    (gradient_BZ,) = torch.autograd.grad(objective.loss, mean_BZ)
    assert gradient_BZ[:, 0].tolist() == [2.0, 2.0]
    assert not gradient_BZ[:, 1].any()


def test_free_bits_look_at_the_mean_of_a_dimension_over_the_batch_not_at_each_sequence():
    mean_BZ = torch.tensor([[2.0], [0.0]], requires_grad=True)  # 2 nats and 0, on average 1
    above = negative_elbo(output_of(mean_BZ, [0.0, 0.0]), kl_weight=1.0, free_bits=0.9)
    below = negative_elbo(output_of(mean_BZ, [0.0, 0.0]), kl_weight=1.0, free_bits=1.1)
    assert (above.loss.item(), below.loss.item()) == pytest.approx((2.0, 2.2))
    (gradient_BZ,) = torch.autograd.grad(below.loss, mean_BZ)
    assert not gradient_BZ.any()


def test_losses_and_gradients_of_parts_that_know_the_whole_add_up_to_the_whole():
    """The first dimension is above its floor, the second below; of single sequences it is often the other way round."""
    mean_BZ = torch.tensor([[2.0, 1.0], [0.1, 0.1], [1.5, 0.2], [0.3, 0.0]], requires_grad=True)
    nll_B = [1.0, 2.0, 3.0, 4.0]
    whole = negative_elbo(output_of(mean_BZ, nll_B), kl_weight=0.7, free_bits=0.5)
    bounds = [(0, 1), (1, 2), (2, 4)]
    outputs = [output_of(mean_BZ[first:last], nll_B[first:last]) for first, last in bounds]
    posteriors = outputs
    above_floor_Z = find_above_floor(posteriors, 0.5)
    assert above_floor_Z.tolist() == [True, False]
    parts = torch.stack([negative_elbo(output, 0.7, 0.5, above_floor_Z).loss for output in outputs]).sum()
    assert parts.item() == pytest.approx(whole.loss.item(), rel=1e-6)
    (of_parts,) = torch.autograd.grad(parts, mean_BZ)
    (of_whole,) = torch.autograd.grad(whole.loss, mean_BZ)
    torch.testing.assert_close(of_parts, of_whole)
    alone = torch.stack([negative_elbo(output, 0.7, 0.5).loss for output in outputs]).sum()
    assert alone.item() > whole.loss.item() + 0.1  # each part would pay its own floor


@pytest.mark.parametrize(
    ("shared_by", "expected", "pays"),
    [
        (1, 2 + 0.3 + 0.5, [True, False, True]),
        (2, (2 + 0.02) + 0.5, [True, True, True]),
        (3, 2 + 0.02 + 0.5, [True, True, True]),
    ],
)
def test_dimensions_that_have_their_free_bits_together_pay_where_their_sum_costs_more(shared_by, expected, pays):
    """KLs of 2, 0.02 and 0.5 nats, of which 0.3 of each dimension are free: by dimension, by two and one, and in total."""
    mean_BZ = torch.tensor([[2.0, 0.2, 1.0]]).expand(4, 3).clone().requires_grad_()
    objective = negative_elbo(output_of(mean_BZ, [0.0] * 4), 1.0, 0.3, shared_by=shared_by)
    assert objective.loss.item() == pytest.approx(4 * expected)
    assert objective.kl.item() == pytest.approx(4 * 2.52)
    (gradient_BZ,) = torch.autograd.grad(objective.loss, mean_BZ)
    assert (gradient_BZ[0] != 0).tolist() == pays
    free = negative_elbo(output_of(mean_BZ, [0.0] * 4), 1.0, 0.9, shared_by=3)
    assert free.loss.item() == pytest.approx(4 * 2.7)
    assert not torch.autograd.grad(free.loss, mean_BZ)[0].any()


def test_a_kl_of_all_dimensions_together_has_the_free_bits_of_all_of_them_however_they_are_shared():
    output = output_of(torch.zeros(2, 4), [0.0, 0.0])._replace(kl=torch.tensor([[0.5], [1.5]]))
    losses = {negative_elbo(output, 1.0, 0.5, shared_by=shared_by).loss.item() for shared_by in (1, 2, 4)}
    assert losses == {2 * 4 * 0.5}


@pytest.mark.parametrize("shared_by", [2, 3, 4])
def test_parts_that_know_which_groups_of_the_whole_are_above_their_floor_add_up_to_the_whole(shared_by):
    torch.manual_seed(0)
    mean_BZ = torch.randn(6, 4, requires_grad=True)
    with torch.no_grad():
        mean_BZ[:, 2:] *= 0.1
    whole = negative_elbo(output_of(mean_BZ, [1.0] * 6), 0.7, 0.2, shared_by=shared_by)
    outputs = [output_of(mean_BZ[first : first + 2], [1.0] * 2) for first in (0, 2, 4)]
    above_floor_G = find_above_floor(outputs, 0.2, shared_by)
    assert len(above_floor_G) == -(-4 // shared_by)
    parts = torch.stack(
        [negative_elbo(one, 0.7, 0.2, above_floor_G, shared_by=shared_by).loss for one in outputs]
    ).sum()
    assert parts.item() == pytest.approx(whole.loss.item(), rel=1e-6)
    gradients = [torch.autograd.grad(loss, mean_BZ)[0] for loss in (parts, whole.loss)]
    torch.testing.assert_close(*gradients)


def test_groups_of_free_bits_are_those_that_the_flags_name():
    assert ObjectiveSettings().free_bits_shared_by(16) == 1
    assert ObjectiveSettings(free_bits_by="total").free_bits_shared_by(16) == 16
    assert ObjectiveSettings(free_bits_by="group", free_bits_group=5).free_bits_shared_by(16) == 5
    for wrong in ({"free_bits_by": "group"}, {"free_bits_group": 2}, {"free_bits_by": "total", "free_bits_group": 2}):
        with pytest.raises(ValueError, match="need each other"):
            ObjectiveSettings(**wrong)


def test_a_sequence_of_length_zero_has_no_share_in_the_objective():
    mean_BZ = torch.tensor([[1.0, 0.0], [9.0, 9.0]])
    real_B = torch.tensor([True, False])
    both = negative_elbo(output_of(mean_BZ, [3.0, 0.0], real_B), kl_weight=1.0, free_bits=0.2)
    alone = negative_elbo(output_of(mean_BZ[:1], [3.0]), kl_weight=1.0, free_bits=0.2)
    assert both == alone


def test_a_batch_of_nothing_real_costs_nothing_whatever_the_free_bits():
    nothing = output_of(torch.ones(1, 2, requires_grad=True), [0.0], torch.tensor([False]))
    assert negative_elbo(nothing, kl_weight=1.0, free_bits=0.5).loss.item() == 0


def test_with_a_latent_for_each_step_the_kl_is_summed_over_real_steps_and_each_has_its_floor():
    mean_BSZ = torch.tensor([[[2.0, 0.0], [2.0, 0.0]], [[2.0, 0.0], [9.0, 9.0]]])
    real_BS = torch.tensor([[True, True], [True, False]])
    objective = negative_elbo(output_of(mean_BSZ, [1.0, 1.0], real_BS), kl_weight=1.0, free_bits=0.25)
    assert objective.kl.item() == 3 * 2
    assert objective.loss.item() == pytest.approx(2 + 3 * 2 + 3 * 0.25)


@pytest.mark.parametrize(
    ("settings", "scope", "expected"),
    [
        (ObjectiveSettings(free_bits=0.3, target_kl=2.0), "sequence", 0.3),
        (ObjectiveSettings(free_bits=0.0), "sequence", 0.0),
        (ObjectiveSettings(target_kl=2.0), "sequence", 0.0),
        (ObjectiveSettings(), "sequence", FREE_BITS["sequence"]),
        (ObjectiveSettings(), "step", FREE_BITS["step"]),
    ],
)
def test_free_bits_are_the_requested_ones_or_else_those_that_protect(settings, scope, expected):
    assert resolve_free_bits(settings, scope) == expected


# --- The contrastive loss ---------------------------------------------------------------------------------------------


def test_the_contrastive_loss_is_the_cross_entropy_of_naming_the_sequence_of_each_latent():
    torch.manual_seed(0)
    mean_BZ, logvar_BZ = torch.randn(6, 3), torch.randn(6, 3) - 1
    torch.manual_seed(1)
    found = contrastive_loss(mean_BZ, logvar_BZ)
    torch.manual_seed(1)
    deviation_BZ = torch.exp(0.5 * logvar_BZ.double())
    z_BZ = mean_BZ.double() + deviation_BZ * torch.randn(6, 3, dtype=torch.float64)
    log_q_BB = torch.distributions.Normal(mean_BZ.double(), deviation_BZ).log_prob(z_BZ[:, None]).sum(dim=-1)
    expected = torch.nn.functional.cross_entropy(log_q_BB, torch.arange(6), reduction="sum")
    torch.testing.assert_close(found, expected)


def test_the_contrastive_loss_is_nothing_where_latents_name_their_sequences_and_all_of_it_at_collapse():
    apart_BZ, alike_BZ = 100.0 * torch.arange(8.0)[:, None].expand(8, 2), torch.zeros(8, 2)
    assert contrastive_loss(apart_BZ, torch.zeros(8, 2)).item() == pytest.approx(0, abs=1e-9)
    assert contrastive_loss(alike_BZ, torch.zeros(8, 2)).item() == pytest.approx(8 * math.log(8))
    assert contrastive_loss(torch.ones(1, 2), torch.zeros(1, 2)).item() == 0  # a batch of one, or of nothing


def test_shares_of_the_contrastive_loss_add_up_to_it_and_so_do_their_gradients():
    torch.manual_seed(0)
    mean_BZ, nothing_B = torch.randn(5, 2, requires_grad=True), [0.0] * 5
    whole = output_of(mean_BZ, nothing_B)
    parts = [output_of(mean_BZ[first:last], nothing_B[first:last]) for first, last in ((0, 2), (2, 5))]
    torch.manual_seed(1)
    expected = contrastive_loss(whole.posterior_mean, whole.posterior_logvar)
    torch.manual_seed(1)
    contrast = WholeBatch(None, contrast_of_parts(parts))
    known = [contrast.of_part(0, 2).contrast, contrast.of_part(2, 5).contrast]
    shares = [share_of_contrast(part, one) for part, one in zip(parts, known, strict=True) if one is not None]
    torch.testing.assert_close(sum(shares), expected.float())
    (of_parts,) = torch.autograd.grad(torch.stack(shares).sum(), mean_BZ)
    (of_whole,) = torch.autograd.grad(expected, mean_BZ)
    torch.testing.assert_close(of_parts, of_whole)


def test_a_contrast_of_sequences_is_refused_where_each_step_has_a_latent():
    with pytest.raises(ValueError, match="--contrastive_weight"):
        TrainingSettings(model=ModelSettings(latent_scope="step"), objective=ObjectiveSettings(contrastive_weight=1.0))


# --- Labels -----------------------------------------------------------------------------------------------------------


def test_the_classification_loss_sums_over_the_sequences_that_have_a_label():
    scores_BC = torch.tensor([[2.0, 0.0], [5.0, 1.0], [0.0, 1.0]], requires_grad=True)
    loss = classification_loss(output_of(torch.zeros(3, 1), [0.0] * 3, scores_BC=scores_BC), torch.tensor([0, -1, 1]))
    expected = -scores_BC.log_softmax(dim=1)[[0, 2], [0, 1]].sum()
    torch.testing.assert_close(loss, expected)
    (gradient_BC,) = torch.autograd.grad(loss, scores_BC)
    assert not gradient_BC[1].any()


def test_without_any_label_the_classification_loss_is_zero_and_so_are_its_gradients():
    scores_BC = torch.ones(2, 3, requires_grad=True)
    loss = classification_loss(output_of(torch.zeros(2, 1), [0.0] * 2, scores_BC=scores_BC), torch.tensor([-1, -1]))
    (gradient_BC,) = torch.autograd.grad(loss, scores_BC)
    assert loss.item() == 0
    assert not gradient_BC.any()


@pytest.mark.parametrize(("scores_BC", "labels_B"), [(None, torch.tensor([1])), (torch.ones(1, 2), None)])
def test_where_there_are_no_labels_or_no_head_the_classification_loss_is_zero(scores_BC, labels_B):
    assert classification_loss(output_of(torch.zeros(1, 1), [0.0], scores_BC=scores_BC), labels_B).item() == 0
