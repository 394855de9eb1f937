"""What the zoo does to its networks, and that a run is trained, recorded and measured."""

from pathlib import Path

import pytest
import torch

from benchmarks.detection import zoo_runs, zoo_species
from benchmarks.detection.zoo_files import BASELINE_SEEDS, baseline_path, read_json
from benchmarks.detection.zoo_replay import record_from
from benchmarks.detection.zoo_runs import FIXED_LOGVAR, embody, record
from benchmarks.detection.zoo_species import all_species
from seqvae.models.vae import SequenceVAE
from tests.support.small_models import DESCRIPTIONS, SMALL, make_batch

BATCH = make_batch("vectors", [3, 5, 4])


def network(body: zoo_species.Body) -> SequenceVAE:
    torch.manual_seed(0)
    return embody(SequenceVAE(DESCRIPTIONS["vectors"], SMALL), body)


def has_gradient(part: torch.nn.Module) -> bool:
    return any(weight.grad is not None and bool(weight.grad.any()) for weight in part.parameters())


def test_a_fixed_variance_stays_while_the_means_move() -> None:
    output = network("fixed variance")(BATCH)
    assert torch.all(output.posterior_logvar == FIXED_LOGVAR)
    assert output.posterior_mean.std() > 0


def test_no_gradient_reaches_a_dead_encoder_but_its_posterior_learns() -> None:
    dead = network("dead encoder")
    output = dead(BATCH)
    (output.nll_B.sum() + output.posterior_mean.square().sum()).backward()
    assert has_gradient(dead.posterior)
    assert not has_gradient(dead.encoder)


def test_a_decoder_that_is_cut_off_says_the_same_whatever_z_is_and_the_others_do_not() -> None:
    z, other = torch.randn(2, 3, SMALL.latent_size)
    deaf, listening = network("told z = 0"), network("as it is")
    assert torch.equal(deaf.nll_given_z(BATCH, z), deaf.nll_given_z(BATCH, other))
    assert not torch.equal(listening.nll_given_z(BATCH, z), listening.nll_given_z(BATCH, other))


def test_a_decoder_that_is_told_noise_gets_no_gradient_from_z() -> None:
    z = torch.randn(3, SMALL.latent_size, requires_grad=True)
    network("told noise").nll_given_z(BATCH, z).sum().backward()
    assert z.grad is not None
    assert not z.grad.any()


def test_a_run_is_recorded_once_with_its_baselines_and_leaves_no_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (zoo_species, zoo_runs):
        monkeypatch.setattr(module, "STEPS", 6)
    monkeypatch.setattr(zoo_runs, "DEMO_SEQUENCES", 320)
    species = next(one for one in all_species() if one.treatment == "weight-4" and one.data == "demo-tokens")
    stored = read_json(record(species, tmp_path))
    assert [reading.step for reading in record_from(stored).readings] == list(range(1, 7))
    assert stored["measured"]["sequences"] == 32
    assert stored["diverged_at_step"] is None
    assert all(baseline_path(species, tmp_path, seed).exists() for seed in BASELINE_SEEDS)
    assert list((tmp_path / "runs").iterdir()) == []
    assert read_json(record(species, tmp_path)) == stored
