"""The monitor on modules that share nothing with ours: right numbers, and not a trace of its questions."""

import math
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import Callback
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from seqvae.monitors import PosteriorMetricsMonitor, StepOutputs, read_readings
from seqvae.monitors.contract import step_outputs_of
from seqvae.monitors.decoder_use import z_of_another
from tests.support.foreign_vaes import (
    LSTMVAE,
    QUIET,
    ImageVAE,
    PosteriorImageVAE,
    ProbeableImageVAE,
    Sentences,
    pictures,
    q_of,
    watched,
)
from tests.support.tiny_vaes import make_trainer

pytestmark = QUIET


@pytest.fixture(autouse=True)
def same_weights() -> None:
    torch.manual_seed(0)


class Recorded(Callback):
    """Keeps the outputs of each step."""

    def __init__(self, read: Callable[..., StepOutputs]) -> None:
        self.read = read
        self.steps: list[StepOutputs] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append(self.read(pl_module, outputs, batch))


# --- The right numbers ----------------------------------------------------------------------------------------------

SENTENCES = Sentences(5, 16)


@pytest.mark.parametrize(
    ("make", "loader", "read"),
    [
        (ImageVAE, pictures(80, 16), step_outputs_of),
        (LSTMVAE, SENTENCES, q_of),
        (partial(LSTMVAE, per_step=True), SENTENCES, q_of),
    ],
    ids=["images", "lstm", "lstm per step"],
)
def test_the_rate_is_the_kl_of_all_posteriors_of_the_steps(make, loader, read, tmp_path):
    recorded = Recorded(read)
    monitor = PosteriorMetricsMonitor(read_outputs=read, probe_decoder=False)
    reading = watched(tmp_path, make(), [loader], monitor, recorded)
    masks = [... if one.posterior_mask is None else one.posterior_mask for one in recorded.steps]
    mean_NZ = torch.cat([one.posterior_mean[mask] for one, mask in zip(recorded.steps, masks, strict=True)]).detach()
    logvar_NZ = torch.cat(
        [one.posterior_logvar[mask] for one, mask in zip(recorded.steps, masks, strict=True)]
    ).detach()
    kl_NZ = kl_divergence(Normal(mean_NZ, (0.5 * logvar_NZ).exp()), Normal(0.0, 1.0))
    assert reading.posteriors == len(kl_NZ)
    assert reading.kl_per_dim == pytest.approx(kl_NZ.mean(dim=0).tolist(), rel=1e-4)
    assert reading.rate == pytest.approx(float(kl_NZ.sum(dim=1).mean()), rel=1e-4)
    assert reading.active_units == int((mean_NZ.var(dim=0) >= 0.01).sum())
    assert reading.kl_weight == pytest.approx(recorded.steps[-1].kl_weight)


def test_the_nll_is_the_mean_over_all_steps(tmp_path):
    recorded = Recorded(step_outputs_of)
    reading = watched(tmp_path, ImageVAE(), [pictures(80, 16)], PosteriorMetricsMonitor(), recorded)
    nll_N = torch.cat([one.nll for one in recorded.steps if one.nll is not None]).detach()
    assert len(nll_N) == 80
    assert reading.nll == pytest.approx(float(nll_N.mean()), rel=1e-5)


@torch.no_grad()
def lost(module: Any, batches: list[Any], z: Tensor, lengths: list[int] | None = None) -> list[float]:
    """By the definition, one sequence after the other; the steps of a shorter one repeat."""
    differences, count = [], len(batches)
    partners = z_of_another(torch.arange(count)[:, None], torch.ones(count, dtype=torch.bool)).flatten().tolist()
    for i, (batch, j) in enumerate(zip(batches, partners, strict=True)):
        steps = range(z.shape[1])
        other = z[j] if lengths is None else torch.stack([z[j, step % lengths[j]] for step in steps])
        differences.append(float(module.nll_given_z(batch, other[None]) - module.nll_given_z(batch, z[i, None])))
    return differences


def noise_like(mean: Tensor) -> Tensor:
    return torch.randn(mean.shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("make", [ProbeableImageVAE, PosteriorImageVAE])
def test_the_decoder_use_of_pictures_is_read_with_nll_given_z_alone_or_with_posterior_of(make, tmp_path):
    module = make()
    reading = watched(tmp_path, module, [pictures(80, 16), pictures(40, 40)], PosteriorMetricsMonitor())
    mean, logvar = module.eval().encoder(next(iter(pictures(40, 40)))[0]).detach().chunk(2, dim=1)
    expected = lost(module, list(pictures(40, 1)), mean + noise_like(mean) * torch.exp(logvar / 2))
    assert reading.decoder_use == pytest.approx(np.mean(expected), rel=1e-3)
    assert reading.decoder_use_error == pytest.approx(np.std(expected, ddof=1) / math.sqrt(40), rel=1e-3)


@pytest.mark.parametrize("per_step", [False, True])
def test_the_decoder_use_of_an_lstm_is_read_with_nll_given_z_alone(per_step, tmp_path):
    module, validation = LSTMVAE(per_step=per_step), Sentences(1, 32)
    reading = watched(tmp_path, module, [SENTENCES, validation], PosteriorMetricsMonitor(read_outputs=q_of))
    (batch,) = validation
    mean, sigma = (part.detach() for part in module.infer(batch))
    batches = [{name: part[i, None] for name, part in batch.items()} for i in range(32)]
    lengths = batch["lengths"].tolist() if per_step else None
    expected = lost(module, batches, mean + noise_like(mean) * sigma, lengths)
    assert reading.decoder_use == pytest.approx(np.mean(expected), rel=1e-3, abs=1e-5)
    assert reading.decoder_use_error == pytest.approx(np.std(expected, ddof=1) / math.sqrt(32), rel=1e-3)


class DeafVAE(ProbeableImageVAE):
    def likelihood(self, x: Tensor, z: Tensor) -> Tensor:
        return super().likelihood(x, 0 * z)


def test_a_module_that_has_learnt_the_factor_reads_so_and_a_deaf_decoder_reads_zero(tmp_path):
    loaders = [pictures(512, 32), pictures(64, 32)]
    trained, deaf = (
        watched(tmp_path, module, loaders, PosteriorMetricsMonitor(posteriors=256), max_steps=150)
        for module in (ProbeableImageVAE(), DeafVAE())
    )
    assert trained.decoder_use is not None
    assert trained.decoder_use_error is not None
    assert trained.decoder_use > 5 * trained.decoder_use_error > 0
    assert trained.mutual_information > 1
    assert (deaf.decoder_use, deaf.decoder_use_error) == (0.0, 0.0)


def test_without_nll_given_z_no_decoder_use_is_read(tmp_path):
    watched(tmp_path, ImageVAE(), [pictures(80, 16), pictures(40, 40)], PosteriorMetricsMonitor())
    assert {reading.decoder_use for reading in read_readings(tmp_path / "posterior.jsonl")} == {None}


# --- Not a trace ----------------------------------------------------------------------------------------------------


class Spy(CSVLogger):
    """Keeps what the module logs."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.calls: list[tuple[dict[str, float], int | None]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        own = {name: value for name, value in metrics.items() if not name.startswith("posterior/")}
        if own:
            self.calls.append((own, step))


class DirectLoggingVAE(ProbeableImageVAE):
    """Goes to the logger itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.logger is not None
        self.logger.log_metrics({"direct": float(self.steps_taken)}, step=self.global_step)
        return super().training_step(batch, batch_idx)


def everything_after(directory: Path, make: Any, read: Any, loaders: Any, monitored: bool, **options: Any) -> Any:
    """All that a run leaves, in a form that can be compared bit by bit."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    module, spy = make(), Spy(directory)
    monitor = PosteriorMetricsMonitor(update_frequency=1, read_outputs=read)
    trainer = make_trainer(directory, [monitor] if monitored else [], 6, logger=spy, log_every_n_steps=1, **options)
    trainer.fit(module, *loaders())
    if monitored:
        assert all(one.decoder_use is not None for one in read_readings(directory / "posterior.jsonl"))
    plain = {name: value for name, value in vars(module).items() if isinstance(value, int | float | list | bool)}
    return repr(
        (
            [(name, value.double().tolist()) for name, value in module.state_dict().items()],
            [[state.tolist() for state in one.values()] for one in trainer.optimizers[0].state.values()],
            [parameter.grad is None for parameter in module.parameters()],
            [part.training for part in module.modules()],
            sorted(vars(module)),
            (plain, spy.calls, {name: value.tolist() for name, value in trainer.callback_metrics.items()}),
            (torch.rand(2).tolist(), random.random(), np.random.rand()),
        )
    )


def shuffled_pictures() -> Any:
    return [pictures(64, 16, shuffle=True), pictures(20, 10, shuffle=True)]


@pytest.mark.parametrize(
    ("make", "read", "loaders"),
    [
        (ProbeableImageVAE, step_outputs_of, shuffled_pictures),
        (PosteriorImageVAE, step_outputs_of, shuffled_pictures),
        (DirectLoggingVAE, step_outputs_of, shuffled_pictures),
        (LSTMVAE, q_of, lambda: [Sentences(4, 8), Sentences(2, 8)]),
        (ProbeableImageVAE, step_outputs_of, lambda: [pictures(64, 16, shuffle=True)]),
    ],
    ids=["nll_given_z alone", "posterior_of too", "logging", "lstm", "no validation"],
)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_run_is_the_same_to_the_last_bit_with_and_without_the_monitor(make, read, loaders, precision, tmp_path):
    options = {"precision": precision, "accumulate_grad_batches": 2}
    alone = everything_after(tmp_path / "alone", make, read, loaders, False, **options)
    monitored = everything_after(tmp_path / "monitored", make, read, loaders, True, **options)
    assert monitored == alone


def test_the_fixed_batches_are_the_same_whenever_they_are_chosen_from_a_shuffled_validation(tmp_path):
    probed: list[Tensor] = []

    class Noting(PosteriorImageVAE):
        def nll_given_z(self, batch: Any, z: Tensor) -> Tensor:
            probed.append(batch[1])
            return super().nll_given_z(batch, z)

    for seed in (1, 2):
        torch.manual_seed(seed)
        loaders = [pictures(64, 16), pictures(64, 32, shuffle=True)]
        watched(tmp_path, Noting(), loaders, PosteriorMetricsMonitor(), max_steps=1)
    first, _, second, _ = probed
    assert torch.equal(first, second)


# --- Another prior, and a loss that tells of a mistake -----------------------------------------------------------------


class LearnedPriorVAE(ImageVAE):
    """Its posteriors are `apart` standard deviations from priors of their own, far from N(0, I)."""

    apart = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        mean, logvar = 3 + outputs["posterior_mean"].detach(), outputs["posterior_logvar"].detach() - 2
        prior = {"prior_mean": mean - self.apart * torch.exp(logvar / 2), "prior_logvar": logvar}
        return outputs | {"posterior_mean": mean, "posterior_logvar": logvar} | prior


@pytest.mark.parametrize("apart", [0.0, 2.0])
def test_the_rate_is_the_kl_to_a_prior_that_was_handed_over(apart, tmp_path):
    """A learned prior read healthy at a true KL of 0."""
    module = LearnedPriorVAE()
    module.apart = apart
    reading = watched(tmp_path, module, [pictures(80, 16)], PosteriorMetricsMonitor(probe_decoder=False))
    assert reading.rate == pytest.approx(0.5 * apart**2 * len(reading.kl_per_dim), abs=1e-4)
    assert reading.mutual_information == pytest.approx(0.0, abs=1e-3)


class DeviationVAE(ImageVAE):
    """Hands over standard deviations; its loss is that of the log-variances."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        mean, logvar = outputs["posterior_mean"], outputs["posterior_logvar"]
        kl_B = 0.5 * (mean**2 + logvar.exp() - 1 - logvar).sum(dim=1)
        loss = (outputs["nll"] + outputs["kl_weight"] * kl_B).mean()
        handed = torch.exp(logvar / 2) if self.hands_deviations else logvar
        return outputs | {"loss": loss, "posterior_logvar": handed}

    hands_deviations = True


@pytest.mark.parametrize("hands_deviations", [True, False])
def test_standard_deviations_handed_over_as_log_variances_are_noticed_once(hands_deviations, tmp_path, capsys):
    module = DeviationVAE()
    module.hands_deviations = hands_deviations
    watched(tmp_path, module, [pictures(80, 16)], PosteriorMetricsMonitor(update_frequency=1, probe_decoder=False))
    said = capsys.readouterr().out.count("DeviationVAE: posterior_logvar seems to hold standard deviations")
    assert said == int(hands_deviations)


class MeanVAE(ImageVAE):
    """Its loss takes the NLL as a mean over so many values, and the KL as a sum."""

    values = 64

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        mean, logvar = outputs["posterior_mean"], outputs["posterior_logvar"]
        kl_B = 0.5 * (mean**2 + logvar.exp() - 1 - logvar).sum(dim=1)
        return outputs | {"loss": (outputs["nll"] / self.values + outputs["kl_weight"] * kl_B).mean()}


@pytest.mark.parametrize(("values", "accumulated", "said"), [(64, 1, 1), (1, 1, 0), (1, 4, 0)])
def test_a_loss_that_is_a_mean_is_noticed_once(values, accumulated, said, tmp_path, capsys):
    module, monitor = MeanVAE(), PosteriorMetricsMonitor(update_frequency=1, probe_decoder=False)
    module.values = values
    trainer = make_trainer(tmp_path, [monitor], 4, accumulate_grad_batches=accumulated)
    trainer.fit(module, pictures(320, 16))
    assert capsys.readouterr().out.replace("\n", " ").count("as if it were a mean over steps or values") == said


@pytest.mark.parametrize(("make", "said"), [(ImageVAE, 1), (LearnedPriorVAE, 0)])
def test_the_prior_that_is_assumed_is_said_once(make, said, tmp_path, capsys):
    monitor = PosteriorMetricsMonitor(update_frequency=1, probe_decoder=False)
    watched(tmp_path, make(), [pictures(80, 16)], monitor)
    assert capsys.readouterr().out.replace("\n", " ").count("the prior is taken to be N(0, I)") == said


class AlternatingVAE(ImageVAE):
    """Steps two optimizers by hand at each batch, one for the encoder and one for the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(outputs["loss"])
        for optimizer in optimizers:
            optimizer.step()
        return outputs

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=0.01) for part in (self.encoder, self.decoder)]


def test_two_optimizers_that_take_turns_make_one_step(tmp_path):
    monitor = PosteriorMetricsMonitor(update_frequency=1, probe_decoder=False)
    trainer = make_trainer(tmp_path, [monitor], -1, max_epochs=1)
    trainer.fit(AlternatingVAE(), pictures(80, 16))
    assert trainer.global_step == 10
    assert [one.step for one in read_readings(tmp_path / "posterior.jsonl")] == [1, 2, 3, 4, 5]
