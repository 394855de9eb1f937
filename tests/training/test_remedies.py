"""Each remedy against a collapsed posterior does what its paper claims, in real trainings beside one that does collapse.

Two small worlds. In the linear one the best KL is known for every weight. In the other a sequence of ten letters repeats one
letter and errs now and then: a recurrent decoder learns the letter from the steps before as well as from a latent, so that without
a remedy it leaves the latent alone.

Shapes: B sequences, D values of a vector, Z latent dimensions, L training steps.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from seqvae.config.model import ModelSettings
from seqvae.config.training import ObjectiveSettings
from seqvae.data.batch import TokenBatch
from seqvae.data.description import DataDescription
from seqvae.models.posteriors import DEVIATION
from seqvae.models.vae import SequenceVAE, VAEOutput
from seqvae.monitors.formulas import gaussian_kl
from seqvae.training import schedules as kl_weight
from seqvae.training.objective import contrastive_loss, negative_elbo, resolve_free_bits
from seqvae.training.schedules import KLWeight

PLAIN: dict[str, Any] = {"kl_schedule": "constant", "free_bits": 0.0}
"""The evidence lower bound and nothing else."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Networks as small as these gain nothing from a second thread, and beside other processes wait for it 40 times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class History(NamedTuple):
    """Of each training step."""

    kl_L: Tensor
    weight_L: Tensor


def train(
    network: nn.Module, draw_batch: Callable[[], Any], objective: ObjectiveSettings, steps: int, lr: float
) -> History:
    """A bare loop. The loss is per sequence."""
    weight = KLWeight(objective, steps)
    optimizer = torch.optim.Adam(network.parameters(), lr=lr, betas=(0.9, 0.98))
    kls, weights = [], []
    for step in range(steps):
        output: VAEOutput = network(draw_batch())
        together = objective.free_bits_shared_by(output.posterior_mean.shape[-1])
        result = negative_elbo(output, weight(step), resolve_free_bits(objective, "sequence"), shared_by=together)
        loss, sequences = result.loss, output.posterior_mask.sum()
        if objective.contrastive_weight:
            contrast = contrastive_loss(output.posterior_mean, output.posterior_logvar)
            loss = loss + objective.contrastive_weight * contrast
        (loss / sequences).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        weight.update(result.kl.detach() / sequences)
        kls.append(result.kl.detach() / sequences)
        weights.append(torch.as_tensor(result.kl_weight))
    return History(torch.stack(kls), torch.stack(weights))


# --- The linear world ---------------------------------------------------------------------------------------------------

VARIANCES_D = torch.tensor([20.0, 10.0, 5.0, 3.0, 0.5, 0.3, 0.2, 0.1])
"""Of the data, along each of their axes; the decoder's noise has variance 1."""


class LinearVAE(nn.Module):
    """The VAE whose optimum is probabilistic PCA (Lucas et al. 2019)."""

    def __init__(self, size: int, latent_size: int) -> None:
        super().__init__()
        self.mean = nn.Linear(size, latent_size, bias=False)
        nn.init.normal_(self.mean.weight, std=0.01)  # a KL of next to 0 to begin with
        self.logvar_Z = nn.Parameter(torch.zeros(latent_size))
        self.decoder = nn.Linear(latent_size, size, bias=False)

    def forward(self, values_BD: Tensor) -> VAEOutput:
        mean_BZ = self.mean(values_BD)
        logvar_BZ = self.logvar_Z.expand_as(mean_BZ)
        z_BZ = mean_BZ + torch.exp(0.5 * logvar_BZ) * torch.randn_like(mean_BZ)
        nll_B = 0.5 * ((values_BD - self.decoder(z_BZ)).square() + math.log(2 * math.pi)).sum(dim=1)
        real_B = torch.ones(len(values_BD), dtype=torch.bool)
        return VAEOutput(mean_BZ, logvar_BZ, real_B, nll_B, real_B.long())


def best_kl(variances_D: Tensor, latent_size: int, weight: float) -> float:
    """A weight w on the KL is worth a noise of variance w: the KL of a dimension is log(variance / w) / 2."""
    largest_Z = variances_D.sort(descending=True).values[:latent_size]
    return float(0.5 * (largest_Z / weight).log().clamp(min=0).sum())


def train_linear(
    *,
    variances_D: Tensor = VARIANCES_D,
    batch: int = 64,
    steps: int = 800,
    lr: float = 0.01,
    freeze: int = 0,
    **settings: Any,
) -> History:
    """The posterior does not learn in the first `freeze` steps."""
    torch.manual_seed(0)
    axes_DD = torch.linalg.qr(torch.randn(len(variances_D), len(variances_D))).Q
    network = LinearVAE(len(variances_D), latent_size=len(variances_D) // 2)
    calls = iter(range(steps))

    def draw_batch() -> Tensor:
        learns = next(calls) >= freeze
        network.mean.requires_grad_(learns)
        network.logvar_Z.requires_grad_(learns)
        return (torch.randn(batch, len(variances_D)) * variances_D.sqrt()) @ axes_DD.T

    return train(network, draw_batch, ObjectiveSettings(**{**PLAIN, **settings}), steps, lr)


@pytest.mark.parametrize("beta", [0.25, 1.0, 4.0])
def test_beta_brings_the_kl_to_its_value_in_theory(beta):
    history = train_linear(beta=beta)
    assert history.kl_L[-200:].mean().item() == pytest.approx(best_kl(VARIANCES_D, 4, beta), rel=0.08)


# --- The controller -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "batch", "lr"), [(1.0, 4, 0.01), (3.0, 2, 0.01), (3.0, 64, 0.002), (10.0, 4, 0.01), (10.0, 64, 0.01)]
)
def test_the_controller_reaches_its_set_point_within_5_percent(target, batch, lr):
    history = train_linear(target_kl=target, batch=batch, lr=lr)
    assert history.kl_L[-300:].mean().item() == pytest.approx(target, rel=0.05)


@pytest.mark.parametrize(("target", "batch"), [(1.0, 64), (30.0, 8), (50.0, 64)])
def test_the_controller_reaches_set_points_whose_weights_lie_powers_of_ten_apart(target, batch):
    variances_D = 1000 / 1.5 ** torch.arange(16)
    history = train_linear(variances_D=variances_D, target_kl=target, batch=batch)
    assert history.kl_L[-300:].mean().item() == pytest.approx(target, rel=0.05)


def test_the_controller_settles_within_300_steps_on_the_weight_that_theory_knows():
    history = train_linear(target_kl=3.0)
    means_of_50 = history.kl_L[300:].unfold(0, 50, 1).mean(dim=1)
    assert ((means_of_50 - 3).abs() < 0.1 * 3).all()
    weight = history.weight_L[-300:].log().mean().exp().item()
    assert best_kl(VARIANCES_D, 4, weight) == pytest.approx(3.0, rel=0.1)


def test_after_a_time_without_influence_anti_windup_bounds_the_overshoot_and_the_way_back(monkeypatch):
    frozen, target = 400, 3.0

    def overshoot_and_steps_back() -> tuple[float, int]:
        history = train_linear(target_kl=target, steps=frozen + 500, freeze=frozen)
        assert history.kl_L[:frozen].max() < 0.1  # the weight is at its lower bound and cannot do anything
        kl_after = history.kl_L[frozen:]
        off = ((kl_after.unfold(0, 20, 1).mean(dim=1) - target).abs() > 0.2 * target).nonzero()
        return float(kl_after.max()), int(off[-1])

    overshoot, steps_back = overshoot_and_steps_back()
    monkeypatch.setattr(kl_weight, "pushes_outwards", lambda log_weight, error: torch.zeros((), dtype=torch.bool))
    overshoot_without, steps_back_without = overshoot_and_steps_back()
    assert overshoot < 0.8 * overshoot_without
    assert steps_back < 0.7 * steps_back_without


# --- The letters ----------------------------------------------------------------------------------------------------------


LETTERS, STEPS = 8, 10


def draw_letters(sequences: int, generator: torch.Generator) -> TokenBatch:
    """Each sequence has its letter, and each of its steps is that letter in 7 of 8 cases, nearly."""
    letter_B1 = torch.randint(LETTERS, (sequences, 1), generator=generator)
    is_letter_BT = torch.rand(sequences, STEPS, generator=generator) < 0.85
    others_BT = torch.randint(LETTERS, (sequences, STEPS), generator=generator)
    lengths_B = torch.full((sequences,), STEPS)
    tokens_BT = torch.where(is_letter_BT, letter_B1, others_BT)
    return TokenBatch(tokens_BT, lengths_B, torch.arange(sequences), None, sequences * STEPS, 0)


class Trained(NamedTuple):
    """What a training on letters came to, on sequences that it has not seen."""

    kl_Z: Tensor
    decoder_use: float
    history: History


def train_letters(
    *, steps: int = 400, batch: int = 32, model: dict[str, Any] | None = None, **settings: Any
) -> Trained:
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "encoder": "lstm",
        "decoder": "lstm",
        "width": 32,
        "depth": 1,
        "heads": 2,
        "latent_size": 4,
    }
    network = SequenceVAE(
        DataDescription(kind="tokens", vocabulary_size=LETTERS), ModelSettings(**shape, dropout=0.0, **(model or {}))
    )
    generator = torch.Generator().manual_seed(1)
    objective = ObjectiveSettings(**{**PLAIN, **settings})
    history = train(network, lambda: draw_letters(batch, generator), objective, steps, lr=0.005)
    return read(network.eval(), draw_letters(1024, generator), history)


@torch.no_grad()
def read(network: SequenceVAE, batch: TokenBatch, history: History) -> Trained:
    posterior = network.encode(batch)
    z_BZ = posterior.mean + torch.exp(0.5 * posterior.logvar) * torch.randn_like(posterior.mean)
    with_own, with_another = (network.nll_given_z(batch, z).mean() for z in (z_BZ, z_BZ.roll(1, dims=0)))
    return Trained(gaussian_kl(posterior.mean, posterior.logvar).mean(dim=0), float(with_another - with_own), history)


@pytest.fixture(scope="module")
def collapsed() -> Trained:
    """Without a remedy."""
    return train_letters()


def test_without_a_remedy_the_posterior_collapses(collapsed):
    assert collapsed.kl_Z.sum() < 0.2
    assert collapsed.decoder_use < 0.4


def test_free_bits_keep_the_kl_of_each_dimension_at_its_floor_and_the_decoder_uses_it(collapsed):
    kept = train_letters(free_bits=0.2)
    assert (kept.kl_Z > 0.85 * 0.2).all()
    assert (collapsed.kl_Z < 0.5 * 0.2).any()
    assert kept.decoder_use > 4 * collapsed.decoder_use
    assert kept.decoder_use > 1


@pytest.mark.slow
def test_free_bits_in_total_keep_the_same_nats_and_leave_it_to_the_latent_in_which_dimensions(collapsed):
    kept = train_letters(free_bits=0.2, free_bits_by="total")
    assert kept.kl_Z.sum() > 0.85 * 4 * 0.2
    assert kept.kl_Z.min() < 0.5 * 0.2
    assert kept.decoder_use > max(1, 4 * collapsed.decoder_use)


@pytest.mark.slow
def test_a_contrastive_loss_makes_latents_tell_sequences_apart_and_the_decoder_uses_it(collapsed):
    kept = train_letters(contrastive_weight=0.5)
    assert kept.kl_Z.sum() > max(1, 4 * collapsed.kl_Z.sum())
    assert kept.decoder_use > max(1, 4 * collapsed.decoder_use)


def test_a_batch_normalised_posterior_keeps_the_kl_of_each_dimension_above_the_floor_that_its_deviation_sets():
    kept = train_letters(model={"posterior": "batch_norm"})
    assert kept.history.kl_L.min() > 4 * DEVIATION**2 / 2 - 1e-3  # of every training batch
    assert (kept.kl_Z > 0.9 * DEVIATION**2 / 2).all()
    assert kept.decoder_use > 1


def test_word_dropout_makes_the_decoder_use_the_latent_for_what_it_cannot_look_up(collapsed):
    kept = train_letters(model={"word_dropout": 0.6})
    assert kept.kl_Z.sum() > 1
    assert kept.decoder_use > max(3, 4 * collapsed.decoder_use)


@pytest.mark.parametrize("batch", [8, 32])
def test_the_controller_keeps_a_sequence_model_at_its_target_within_5_percent(batch):
    kept = train_letters(target_kl=1.5, batch=batch)
    assert kept.history.kl_L[-200:].mean().item() == pytest.approx(1.5, rel=0.05)
    assert kept.decoder_use > 2


def test_each_cycle_of_a_cyclical_schedule_opens_the_latent_again():
    cycle = 100
    history = train_letters(kl_schedule="cyclical", kl_cycle=cycle, kl_warmup=0.5).history
    assert history.weight_L[::cycle].tolist() == [0.0] * 4
    assert (history.weight_L.reshape(4, cycle)[:, cycle // 2 :] == 1).all()
    at_the_end_of_a_cycle = history.kl_L.reshape(4, cycle)[:, -10:].mean(dim=1)
    while_the_weight_is_low = history.kl_L.reshape(4, cycle)[:, : cycle // 2].max(dim=1).values
    assert (while_the_weight_is_low[1:] > 2 * at_the_end_of_a_cycle[:-1]).all()
