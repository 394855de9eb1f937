"""The escape threshold: against closed forms, against perfect decoders, on models of all kinds, and inside of a run."""

import math
from dataclasses import replace
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from seqvae.models.vae import SequenceVAE
from seqvae.monitors.contract import StepOutputs
from seqvae.monitors.escape import (
    FEWEST_SEQUENCES,
    EscapeThreshold,
    LatentScores,
    ThresholdReader,
    escape_threshold,
    latent_scores,
    why_unreadable,
)
from tests.support.small_models import DESCRIPTIONS, KINDS, SMALL, make_batch, make_vae

SEQUENCES, DIMENSIONS, STEPS = 4000, 10, 20


def within(found: float, error: float, truth: float, errors: float = 3.0) -> bool:
    return abs(found - truth) < errors * error


def normal(*shape: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def test_a_factorised_gaussian_has_the_threshold_of_probabilistic_pca() -> None:
    """The decoder knows each variance; what z can tell are the correlations (Lucas et al. 2019)."""
    rng = np.random.default_rng(0)
    factors = rng.normal(size=(DIMENSIONS, 2)) * [1.0, 0.5]
    covariance = factors @ factors.T + np.diag(rng.uniform(0.5, 2, DIMENSIONS))
    variance = np.diag(covariance).copy()
    truth = float(np.linalg.eigvalsh(covariance / np.sqrt(np.outer(variance, variance)))[-1])
    values = torch.from_numpy(rng.multivariate_normal(np.zeros(DIMENSIONS), covariance, SEQUENCES))
    drawn = torch.from_numpy(rng.normal(size=(4, SEQUENCES, DIMENSIONS)) / np.sqrt(variance))
    found = escape_threshold(LatentScores((values / torch.from_numpy(variance))[None], drawn, values))
    assert truth == pytest.approx(3.64, abs=0.01)
    assert within(found.ideal, found.ideal_error, truth)
    assert within(found.value, found.error, truth)  # a linear encoder that sees the values is an ideal one


@pytest.mark.parametrize(("order", "truth"), [(0, 5.40), (1, 3.48), (3, 1.92), (6, 1.20), (19, 1.00)])
def test_the_better_an_autoregressive_decoder_the_lower_the_threshold(order: int, truth: float) -> None:
    """Sequences with a level of their own, c + noise, under least squares on the last `order` steps; z shifts all steps alike."""
    rng = np.random.default_rng(1)
    values = rng.normal(size=(SEQUENCES, 1)) * math.sqrt(0.3) + rng.normal(size=(SEQUENCES, STEPS))
    residuals, variances = np.empty((SEQUENCES, STEPS)), np.empty(STEPS)
    for step in range(STEPS):
        before = values[:, max(0, step - order) : step]
        fitted = before @ np.linalg.lstsq(before, values[:, step], rcond=None)[0] if before.shape[1] else 0.0
        residuals[:, step] = values[:, step] - fitted
        variances[step] = (residuals[:, step] ** 2).mean()
    scores = torch.from_numpy((residuals / variances).sum(axis=1))[None, :, None]
    drawn = torch.from_numpy((rng.normal(size=(4, SEQUENCES, STEPS)) / np.sqrt(variances)).sum(axis=2))[..., None]
    found = escape_threshold(LatentScores(scores, drawn, torch.from_numpy(values)))
    exact = float(scores.square().mean() / (1 / variances).sum())
    assert within(found.ideal, found.ideal_error, exact)
    assert exact == pytest.approx(truth, abs=0.25)


@pytest.mark.parametrize(("sequences", "places"), [(256, 24), (256, 128), (512, 128)])
def test_a_perfect_decoder_reads_1_where_the_eigenvalue_of_the_sample_reads_2_or_more(
    sequences: int, places: int
) -> None:
    data, drawn = normal(1, sequences, places, seed=2), normal(2, sequences, places, seed=3)
    found = escape_threshold(LatentScores(data, drawn, normal(sequences, 8, seed=4)))
    flat = drawn.flatten(0, 1)
    in_sample = torch.linalg.eigvals(torch.linalg.solve(flat.T @ flat / len(flat), data[0].T @ data[0] / sequences))
    assert within(found.ideal, found.ideal_error, 1.0)
    assert float(in_sample.real.max()) > (1.6 if places == 24 else 2.0)


def test_features_that_know_nothing_of_the_scores_leave_no_threshold() -> None:
    strong = 3 * normal(1, 512, 4, seed=5)
    found = escape_threshold(LatentScores(strong, normal(2, 512, 4, seed=6), normal(512, 8, seed=7)))
    assert found.ideal > 5
    assert found.value < 0.2


def test_what_is_common_to_all_sequences_is_no_news_of_one() -> None:
    scores = LatentScores(normal(1, 512, 4, seed=8), normal(2, 512, 4, seed=9), normal(512, 8, seed=10))
    shifted = scores._replace(data_PNM=scores.data_PNM + 7.0)
    assert escape_threshold(shifted) == pytest.approx(escape_threshold(scores))


def test_the_noise_of_a_dropout_mask_does_not_count() -> None:
    """Each pass adds noise of its own, nine times as strong as what the sequences have in common."""
    common = normal(1, 4000, 2, seed=11)
    passes = common + 3 * normal(4, 4000, 2, seed=12)
    found = escape_threshold(LatentScores(passes, normal(4, 4000, 2, seed=13), common[0]))
    assert within(found.ideal, found.ideal_error, 1.0)


def test_nothing_of_z_reaching_the_decoder_is_a_threshold_of_0() -> None:
    nothing = torch.zeros(2, 64, 4)
    assert escape_threshold(LatentScores(nothing, nothing, normal(64, 8, seed=14))) == EscapeThreshold(0, 0, 0, 0)


@pytest.mark.parametrize("spoilt", ["few", "not finite"])
def test_what_cannot_be_estimated_is_nan(spoilt: str) -> None:
    scores = LatentScores(normal(1, 64, 4, seed=15), normal(2, 64, 4, seed=16), normal(64, 8, seed=17))
    if spoilt == "few":
        few = FEWEST_SEQUENCES - 1
        scores = LatentScores(scores.data_PNM[:, :few], scores.drawn_KNM[:, :few], scores.features_NF[:few])
    else:
        scores.data_PNM[0, 0, 0] = math.inf
    assert all(math.isnan(number) for number in escape_threshold(scores))


# --- Scores of a model --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decoder", ["transformer", "lstm", "tcn", "parallel"])
def test_scores_are_the_gradients_of_the_likelihood_by_what_z_adds(kind: str, decoder: str) -> None:
    network, batch = make_vae(kind, decoder=decoder).eval(), make_batch(kind, [5, 3, 7, 1])
    data_PBM, drawn_KBM, features_BW = network.latent_scores(batch, draws=2)
    z_BZ = torch.zeros(len(batch.lengths_B), network.settings.latent_size, requires_grad=True)
    (expected_BZ,) = torch.autograd.grad(-network.nll_given_z(batch, z_BZ).sum(), z_BZ)
    torch.testing.assert_close(data_PBM[0] @ network.decoder.latent.weight, expected_BZ, rtol=1e-3, atol=1e-3)
    assert data_PBM.shape == (1, *drawn_KBM.shape[1:])
    assert len(drawn_KBM) == 2
    assert features_BW.shape == (len(batch.lengths_B), network.settings.width)


@pytest.mark.parametrize("unknown_share", [0.0, 0.2])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_drawn_targets_are_0_in_the_mean(kind: str, unknown_share: float) -> None:
    """As they are of any model at its own distribution; targets drawn from another one would show here."""
    torch.manual_seed(0)
    network = SequenceVAE(replace(DESCRIPTIONS[kind], unknown_share=unknown_share), SMALL).eval()
    batch = make_batch(kind, [5, 3, 7, 1])
    drawn_KBM = network.latent_scores(batch, draws=400)[1].double()
    sums_KM = drawn_KBM.sum(dim=1)
    errors_M = sums_KM.std(dim=0) / math.sqrt(len(sums_KM))
    assert float((sums_KM.mean(dim=0) / errors_M).abs().max()) < 4.5


@pytest.mark.parametrize("kind", KINDS)
def test_each_draw_has_a_dropout_mask_of_its_own_and_nothing_is_left_behind(kind: str) -> None:
    network, batch = make_vae(kind, dropout=0.3).eval(), make_batch(kind, [5, 3, 7, 1])
    network.encoder.train()
    modes = [part.training for part in network.modules()]
    data_PBM, drawn_KBM, features_BW = network.latent_scores(batch, draws=2)
    assert data_PBM.shape == drawn_KBM.shape
    assert not torch.equal(data_PBM[0], data_PBM[1])
    assert [part.training for part in network.modules()] == modes
    assert all(weights.grad is None for weights in network.parameters())
    assert not any(part.requires_grad for part in (data_PBM, drawn_KBM, features_BW))


# --- In a run -----------------------------------------------------------------------------------------------------------


class LinearVAE(LightningModule):
    """A linear decoder of a variance that is known, whose latent is silent: nothing is trained."""

    def __init__(self, variance_D: Tensor) -> None:
        super().__init__()
        dimensions = len(variance_D)
        self.encoder = nn.Linear(dimensions, dimensions)
        self.decoder = nn.Linear(dimensions, dimensions, bias=False)
        self.variance_D: Tensor
        self.register_buffer("variance_D", variance_D)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return 0 * self.nll_given_z(batch, self.encoder(batch)).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None: ...

    def posterior_of(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.encoder(batch)
        return mean, torch.zeros_like(mean)

    def nll_given_z(self, batch: Tensor, z: Tensor) -> Tensor:
        return 0.5 * ((batch - self.decoder(z)).square() / self.variance_D).sum(dim=1)

    def nll_of_drawn(self, batch: Tensor, z: Tensor) -> Tensor:
        mean = self.decoder(z)
        drawn = mean.detach() + self.variance_D.sqrt() * torch.randn_like(mean)
        return self.nll_given_z(drawn, z)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Reads(lightning.Callback):
    def __init__(self) -> None:
        self.reader = ThresholdReader()
        self.found: list[EscapeThreshold] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        before = torch.get_rng_state()
        self.found.append(self.reader.read(trainer, pl_module))
        assert torch.equal(torch.get_rng_state(), before)


def first_of(rows: list[tuple[Tensor]]) -> Tensor:
    return torch.stack([row for (row,) in rows])


@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*")  # Lightning 2.6.6 calls torch 2.13 so
def test_another_module_offers_its_threshold_by_drawing_targets() -> None:
    rng = np.random.default_rng(0)
    factors = np.ones((4, 1))
    covariance = factors @ factors.T + np.diag(rng.uniform(0.5, 1.0, 4))
    variance = np.diag(covariance).copy()
    truth = float(np.linalg.eigvalsh(covariance / np.sqrt(np.outer(variance, variance)))[-1])
    values = torch.from_numpy(rng.multivariate_normal(np.zeros(4), covariance, 256)).float()
    torch.manual_seed(0)
    module, reads = LinearVAE(torch.from_numpy(variance).float()), Reads()
    loader: DataLoader[Any] = DataLoader(TensorDataset(values), batch_size=32, collate_fn=first_of)
    options: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = lightning.Trainer(
        max_steps=2, accelerator="cpu", enable_model_summary=False, callbacks=[reads], **options
    )
    trainer.fit(module, loader, loader)
    first, again = reads.found
    assert again != first  # of other draws
    assert again.ideal == pytest.approx(first.ideal, abs=3 * first.ideal_error)
    assert within(first.ideal, first.ideal_error, truth)
    assert within(first.value, first.error, truth)


@pytest.mark.parametrize("missing", ["nll_of_drawn", "nll_given_z", "posterior_of", "nothing"])
def test_what_a_module_lacks_is_named(missing: str) -> None:
    kept = {
        name: getattr(LinearVAE, name) for name in ("nll_of_drawn", "nll_given_z", "posterior_of") if name != missing
    }
    module = type("Other", (LightningModule,), kept)()
    reason = why_unreadable(module, StepOutputs(torch.zeros(2, 3), torch.zeros(2, 3)))
    if missing == "nothing":
        assert reason is None
    else:
        assert reason is not None
        assert missing in reason


def test_a_latent_of_each_step_and_a_learned_prior_have_no_threshold() -> None:
    module = LinearVAE(torch.ones(3))
    zeros_BZ, zeros_BSZ = torch.zeros(2, 3), torch.zeros(2, 4, 3)
    assert why_unreadable(module, StepOutputs(zeros_BZ, zeros_BZ)) is None
    assert "each step" in str(why_unreadable(module, StepOutputs(zeros_BSZ, zeros_BSZ)))
    with_prior = StepOutputs(zeros_BZ, zeros_BZ, prior_mean=zeros_BZ, prior_logvar=zeros_BZ)
    assert "N(0, I)" in str(why_unreadable(module, with_prior))


class DeafVAE(LinearVAE):
    """Its decoder does not look at z."""

    def nll_given_z(self, batch: Tensor, z: Tensor) -> Tensor:
        return 0.5 * (batch.square() / self.variance_D).sum(dim=1)


def test_a_module_whose_decoder_ignores_z_altogether_has_the_threshold_0() -> None:
    module = DeafVAE(torch.ones(3))
    scores = latent_scores(module, normal(64, 3, seed=18).float())
    assert escape_threshold(scores) == EscapeThreshold(0, 0, 0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_compiled_blocks_are_those_of_the_blocks_themselves(kind: str) -> None:
    """Code that torch compiled cannot go backward twice."""
    network, batch = make_vae(kind).eval(), make_batch(kind, [5, 3, 7, 1])

    def refuse(*_: Any) -> None:
        raise RuntimeError("compiled with non-empty donated buffers")

    torch.manual_seed(0)
    expected = network.latent_scores(batch, draws=2)
    for block in network.decoder.blocks:
        block._compiled_call_impl = refuse
    torch.manual_seed(0)
    found = network.latent_scores(batch, draws=2)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert all(block._compiled_call_impl is refuse for block in network.decoder.blocks)


@pytest.mark.parametrize(("places", "truth"), [(128, 2.0), (64, 1.0), (128, 4.0)])
def test_the_error_of_few_sequences_says_how_much_more_there_may_be(places: int, truth: float) -> None:
    """White scores: there is no better direction than any other, which is as hard to find as can be."""
    shortfalls = []
    for seed in range(8):
        data = math.sqrt(truth) * normal(1, 256, places, seed=100 + seed)
        found = escape_threshold(LatentScores(data, normal(2, 256, places, seed=200 + seed), data[0]))
        shortfalls.append((truth - found.ideal) / found.ideal_error)
    assert max(shortfalls) < 3.5
