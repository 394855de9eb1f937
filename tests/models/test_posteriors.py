"""The posterior: what --posterior batch_norm promises (Zhu et al. 2020), and what the supervised head reads.

Shapes: B sequences, S steps, W width, Z latent dimensions, C classes.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from seqvae.models.posteriors import DEVIATION, MOMENTUM, BatchNormPosterior, Posterior, draw
from seqvae.models.vae import SequenceVAE
from seqvae.monitors.formulas import gaussian_kl
from tests.support.small_models import DESCRIPTIONS, KINDS, SMALL, make_batch, make_vae


def make_batch_norm(seed: int = 0) -> BatchNormPosterior:
    torch.manual_seed(seed)
    return BatchNormPosterior(width=8, latent_size=3)


def moments(posterior: Posterior) -> tuple[Tensor, Tensor]:
    """Mean and deviation, over what is real, of the posterior means."""
    real_NZ = posterior.mean[posterior.mask]
    return real_NZ.mean(dim=0), real_NZ.std(dim=0, correction=0)


def all_real(hidden: Tensor) -> Tensor:
    return torch.ones(hidden.shape[:-1], dtype=torch.bool)


# --- Batch-normalised means -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 8), (50, 8), (4, 7, 8)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_normalised_means_have_mean_zero_and_deviation_point_six(shape, scale):
    hidden = 5 * scale + scale * torch.randn(shape)
    mean_Z, deviation_Z = moments(make_batch_norm()(hidden, all_real(hidden)))
    torch.testing.assert_close(mean_Z, torch.zeros(3), rtol=0, atol=1e-4)
    torch.testing.assert_close(deviation_Z, torch.full((3,), DEVIATION), rtol=1e-4, atol=0)


def test_the_kl_of_a_batch_has_a_floor_whatever_the_encoder_does():
    layer = make_batch_norm()
    optimizer, hidden_BW = torch.optim.Adam(layer.parameters(), lr=0.03), torch.randn(64, 8)
    for _ in range(300):
        posterior = layer(hidden_BW, all_real(hidden_BW))
        kl = gaussian_kl(posterior.mean, posterior.logvar).sum() / 64
        optimizer.zero_grad()
        kl.backward()
        optimizer.step()
    assert 3 * DEVIATION**2 / 2 - 1e-4 < kl.item() < 3 * DEVIATION**2 / 2 + 0.01


def test_what_is_not_real_neither_counts_nor_learns():
    layer, other = make_batch_norm(), make_batch_norm()
    hidden_BSW = torch.randn(3, 5, 8)
    mask_BS = torch.arange(5) < torch.tensor([5, 2, 0])[:, None]
    garbage_BSW = torch.where(mask_BS[..., None], hidden_BSW, 1e3)
    one, another = layer(hidden_BSW, mask_BS), other(garbage_BSW, mask_BS)
    torch.testing.assert_close(another.mean[mask_BS], one.mean[mask_BS])
    torch.testing.assert_close(dict(other.named_buffers()), dict(layer.named_buffers()))
    mean_Z, deviation_Z = moments(one)
    torch.testing.assert_close(mean_Z, torch.zeros(3), rtol=0, atol=1e-5)
    torch.testing.assert_close(deviation_Z, torch.full((3,), DEVIATION))


def test_evaluation_uses_running_statistics_and_each_sequence_alone():
    layer = make_batch_norm()
    hidden_BW = 3 + 2 * torch.randn(400, 8)
    for _ in range(100):
        trained = layer(hidden_BW, all_real(hidden_BW))
    layer.eval()
    together, alone = layer(hidden_BW, all_real(hidden_BW)), layer(hidden_BW[:1], all_real(hidden_BW[:1]))
    torch.testing.assert_close(together.mean, trained.mean, rtol=0, atol=1e-3)
    torch.testing.assert_close(alone.mean, together.mean[:1])


def test_running_statistics_move_towards_each_batch_and_lie_in_the_state():
    layer, hidden_BW = make_batch_norm(), torch.randn(9, 8)
    raw_BZ = layer.mean(hidden_BW).detach()
    layer(hidden_BW, all_real(hidden_BW))
    state = layer.state_dict()
    torch.testing.assert_close(state["mean_Z"], MOMENTUM * raw_BZ.mean(dim=0))
    torch.testing.assert_close(state["variance_Z"], 1 - MOMENTUM + MOMENTUM * raw_BZ.var(dim=0, correction=0))


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_leaves_the_statistics_alone_and_has_finite_gradients(kind):
    vae = make_vae(kind, posterior="batch_norm").train()
    before = {name: value.clone() for name, value in vae.posterior.named_buffers()}
    output = vae(make_batch(kind, [0]))
    (output.nll_B.sum() + output.posterior_mean.sum() + output.posterior_logvar.sum()).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in vae.parameters())
    assert not output.posterior_mask.any()
    torch.testing.assert_close(dict(vae.posterior.named_buffers()), before, rtol=0, atol=0)


def test_a_training_batch_of_one_sequence_is_refused():
    vae = make_vae("tokens", posterior="batch_norm")
    assert vae.posterior.least_sequences == 2
    assert make_vae("tokens").posterior.least_sequences == 1
    vae.eval()(make_batch("tokens", [5]))
    with pytest.raises(ValueError, match="two sequences or more"):
        vae.train()(make_batch("tokens", [5]))


def test_means_that_are_all_alike_stay_finite():
    layer, hidden_BW = make_batch_norm(), torch.ones(4, 8, requires_grad=True)
    posterior = layer(hidden_BW, all_real(hidden_BW))
    posterior.mean.square().sum().backward()
    assert posterior.mean.isfinite().all()
    assert hidden_BW.grad is not None
    assert hidden_BW.grad.isfinite().all()


def test_two_processes_that_share_statistics_are_one(tmp_path):
    """The second process has a batch of one sequence, and then an empty one."""
    hidden_BW = torch.randn(6, 8)
    whole = make_batch_norm()
    for count in (6, 5):
        posterior = whole(hidden_BW[:count], all_real(hidden_BW[:count]))
        loss(posterior).backward()
    torch.save(hidden_BW, tmp_path / "hidden.pt")
    spawn(train_a_share, args=(tmp_path,), nprocs=2)
    shares = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(shares[0]["gradients"][name] + shares[1]["gradients"][name], parameter.grad)
    for share in shares:
        torch.testing.assert_close(share["buffers"], dict(whole.named_buffers()))
    torch.testing.assert_close(shares[0]["mean"], posterior.mean.detach())


def loss(posterior: Posterior) -> Tensor:
    """Not symmetric, so that the statistics' own gradients count; nothing where nothing is real."""
    return ((posterior.mean.exp() + posterior.logvar.square()) * posterior.mask[:, None]).sum()


def train_a_share(rank: int, directory: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=2)
    layer = make_batch_norm()
    layer.synchronised = True
    hidden_BW = torch.load(directory / "hidden.pt")
    mine_BW = hidden_BW[:5] if rank == 0 else hidden_BW[5:]
    for real in (True, rank == 0):
        posterior = layer(mine_BW, all_real(mine_BW) & real)
        loss(posterior).backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    result = {"gradients": gradients, "buffers": dict(layer.named_buffers()), "mean": posterior.mean.detach()}
    torch.save(result, directory / f"{rank}.pt")
    torch.distributed.destroy_process_group()


# --- Draws and the supervised head ----------------------------------------------------------------------------------


def test_draws_have_the_posteriors_moments_and_carry_gradients():
    torch.manual_seed(0)
    mean_BZ = torch.tensor([[2.0, -1.0]]).expand(40_000, 2).clone().requires_grad_()
    logvar_BZ = torch.tensor([[0.0, -2.0]]).expand(40_000, 2).clone().requires_grad_()
    z_BZ = draw(Posterior(mean_BZ, logvar_BZ, torch.ones(40_000, dtype=torch.bool)))
    torch.testing.assert_close(z_BZ.mean(dim=0), torch.tensor([2.0, -1.0]), rtol=0, atol=0.03)
    torch.testing.assert_close(z_BZ.var(dim=0).log(), torch.tensor([0.0, -2.0]), rtol=0, atol=0.03)
    z_BZ.sum().backward()
    assert mean_BZ.grad is not None
    assert torch.equal(mean_BZ.grad, torch.ones(40_000, 2))
    torch.testing.assert_close(logvar_BZ.grad, ((z_BZ - mean_BZ) / 2).detach())


@pytest.mark.parametrize("scope", ["sequence", "step"])
def test_class_scores_are_linear_in_the_mean_of_the_real_posterior_means(scope):
    torch.manual_seed(0)
    description = replace(DESCRIPTIONS["tokens"], classes=("a", "b", "c", "d"))
    vae = SequenceVAE(description, replace(SMALL, latent_scope=scope)).eval()
    output = vae(make_batch("tokens", [6, 3, 0]))
    means_BZ = output.posterior_mean
    if scope == "step":
        means_BZ = torch.stack([output.posterior_mean[0].mean(0), output.posterior_mean[1, :4].mean(0), torch.zeros(3)])
    assert isinstance(vae.classifier, nn.Linear)
    torch.testing.assert_close(output.class_scores_BC, vae.classifier(means_BZ))


def test_without_classes_there_are_no_scores():
    assert make_vae("tokens")(make_batch("tokens", [3])).class_scores_BC is None
