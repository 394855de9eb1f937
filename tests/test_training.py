"""The objective, the Lightning module and the run: exact sums, honest KL, the same run twice, files that say what happened."""

import csv
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
import yaml
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from models.sequence_vae import SequenceVAE, VAEOutput
from models.settings import ModelSettings
from monitors.formulas import gaussian_kl
from sequences.batches import TokenBatch
from sequences.description import DataDescription
from sequences.settings import BatchSettings, CacheSettings
from training.exit_codes import UsageError
from training.module import TRAINING, VALIDATION, TrainingModule, noise_seed
from training.objective import kl_weight_at, negative_elbo
from training.precision import precision_in_force
from training.progress import COLUMNS
from training.run import fit, make_run_directory
from training.schedules import cosine_with_warmup, planned_steps
from training.settings import ObjectiveSettings, OptimizerSettings, RunSettings, TrainingSettings

# Lightning 2.6.6 asks torch 2.13 in a way that torch calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*")

WORDS = DataDescription(kind="tokens", vocabulary_size=6)
TINY = ModelSettings(width=16, depth=1, heads=2, latent_size=2, dropout=0.0)


# --- The objective --------------------------------------------------------------------------------------------------


def output_of(mean_BZ: Tensor, logvar_BZ: Tensor, nll_B: list[float], steps_B: list[int]) -> VAEOutput:
    return VAEOutput(mean_BZ, logvar_BZ, torch.tensor(nll_B), torch.tensor(steps_B))


def test_gaussian_kl_is_that_of_torch_distributions():
    torch.manual_seed(0)
    mean_BZ, logvar_BZ = torch.randn(5, 3), torch.randn(5, 3)
    posterior = torch.distributions.Normal(mean_BZ, torch.exp(0.5 * logvar_BZ))
    expected_BZ = torch.distributions.kl_divergence(posterior, torch.distributions.Normal(0.0, 1.0))
    torch.testing.assert_close(gaussian_kl(mean_BZ, logvar_BZ), expected_BZ)


def test_gaussian_kl_keeps_its_digits_next_to_the_prior():
    assert gaussian_kl(torch.zeros(1), torch.tensor([1e-4])).item() == pytest.approx(2.5e-9, rel=0.05)


def test_the_loss_at_weight_one_without_free_bits_is_the_negative_elbo():
    mean_BZ = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    objective = negative_elbo(output_of(mean_BZ, torch.zeros(2, 2), [3.0, 4.0], [5, 5]), kl_weight=1.0, free_bits=0.0)
    assert objective.loss.item() == pytest.approx(3 + 4 + 0.5 + 2)
    assert (objective.nll.item(), objective.kl.item()) == (7.0, 2.5)


def test_free_bits_raise_what_is_paid_and_never_what_is_reported():
    mean_BZ = torch.tensor([[2.0, 0.1], [2.0, 0.1]], requires_grad=True)
    objective = negative_elbo(output_of(mean_BZ, torch.zeros(2, 2), [0.0, 0.0], [5, 5]), kl_weight=1.0, free_bits=0.5)
    assert objective.loss.item() == pytest.approx(2 * 2 + 2 * 0.5)
    assert objective.kl.item() == pytest.approx(2 * 2 + 2 * 0.005)
    (gradient_BZ,) = torch.autograd.grad(objective.loss, mean_BZ)
    assert gradient_BZ[:, 0].tolist() == [2.0, 2.0]
    assert not gradient_BZ[:, 1].any()


def test_a_sequence_of_length_zero_has_no_share_in_the_objective():
    mean_BZ = torch.tensor([[1.0, 0.0], [9.0, 9.0]])
    both = negative_elbo(output_of(mean_BZ, torch.zeros(2, 2), [3.0, 0.0], [5, 0]), kl_weight=1.0, free_bits=0.2)
    alone = negative_elbo(output_of(mean_BZ[:1], torch.zeros(1, 2), [3.0], [5]), kl_weight=1.0, free_bits=0.2)
    assert both == alone


def test_the_weight_of_the_kl_rises_evenly_and_stays():
    settings = ObjectiveSettings(beta=0.5, kl_warmup=0.4)
    assert [kl_weight_at(step, 10, settings) for step in range(6)] == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5, 0.5])
    assert kl_weight_at(0, 10, ObjectiveSettings(kl_warmup=0)) == 1.0
    assert kl_weight_at(2, 10, ObjectiveSettings(kl_warmup=30)) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("max_epochs", "max_steps", "tokens", "expected"),
    [
        (None, None, 1_000_000, 3 * 50),
        (None, None, 300_000, 10 * 50),
        (None, None, 1_000, 30 * 50),
        (None, None, 100_000_000, 3 * 50),
        (2, None, 1_000, 100),
        (None, 5_000, 100_000_000, 5_000),
        (2, 5_000, 1_000, 100),
        (2, 70, 1_000, 70),
    ],
)
def test_a_run_is_as_long_as_asked_or_else_as_the_data_need(max_epochs, max_steps, tokens, expected):
    steps = planned_steps(max_epochs, max_steps, optimizer_steps_per_epoch=50, sequence_steps_per_epoch=tokens)
    assert steps == expected


def test_the_learning_rate_never_exceeds_its_maximum_and_ends_at_zero():
    factors = [cosine_with_warmup(step, warmup=10, total_steps=100) for step in range(101)]
    assert max(factors) == factors[9] == 1.0
    assert factors[100] == pytest.approx(0)


@pytest.mark.parametrize(
    ("settings", "change", "flag"),
    [
        (ObjectiveSettings(), {"beta": -1.0}, "--beta"),
        (ObjectiveSettings(), {"free_bits": math.nan}, "--free_bits"),
        (OptimizerSettings(), {"lr": 0.0}, "--lr"),
        (RunSettings(), {"max_steps": 0}, "--max_steps"),
        (RunSettings(), {"run_name": "../elsewhere"}, "--run_name"),
    ],
)
def test_impossible_settings_are_refused_by_flag(settings, change, flag):
    with pytest.raises(ValueError, match=flag):
        replace(settings, **change)


# --- The module under a Trainer -------------------------------------------------------------------------------------


def make_batches(sizes: list[int], step_tokens: list[int]) -> list[TokenBatch]:
    """Random words of 3 to 8 letters, one batch for each size."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for position, (size, tokens) in enumerate(zip(sizes, step_tokens, strict=True)):
        lengths_B = torch.randint(3, 9, (size,), generator=generator)
        tokens_BT = torch.randint(0, 6, (size, 8), generator=generator) * (torch.arange(8) < lengths_B[:, None])
        batches.append(TokenBatch(tokens_BT, lengths_B, torch.arange(size), None, tokens, position))
    return batches


def make_module(**changes: Any) -> TrainingModule:
    torch.manual_seed(0)
    optimizer = OptimizerSettings(lr=0.01, warmup=0, **changes)
    network = SequenceVAE(WORDS, TINY)
    return TrainingModule(
        network, ObjectiveSettings(), optimizer, total_steps=10, seed=3, origin={"made": "for a test"}
    )


class Loader:
    """Lightning would take a list of batches for a list of loaders."""

    def __init__(self, batches: list[TokenBatch]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[TokenBatch]:
        return iter(self.batches)


def make_trainer(folder: Path, **changes: Any) -> lightning.Trainer:
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "max_epochs": 1,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    return lightning.Trainer(**{**options, **changes})


def train(module: TrainingModule, batches: list[TokenBatch], folder: Path, **changes: Any) -> None:
    trainer = make_trainer(folder, limit_val_batches=0, **changes)
    trainer.fit(module, train_dataloaders=Loader(batches), val_dataloaders=Loader(batches))


def weights_of(module: TrainingModule) -> Tensor:
    return torch.nn.utils.parameters_to_vector(module.network.parameters()).detach().clone()


def test_two_accumulated_batches_make_the_same_step_as_one_batch_of_both(tmp_path, monkeypatch):
    monkeypatch.setattr("models.sequence_vae.draw", lambda posterior: posterior.mean_BZ)
    first, second = make_batches([3, 9], [0, 0])
    tokens_BT, lengths_B = (
        torch.cat((first.tokens_BT, second.tokens_BT)),
        torch.cat((first.lengths_B, second.lengths_B)),
    )
    together = TokenBatch(tokens_BT, lengths_B, torch.arange(12), None, step_tokens=0, position=0)
    tokens = int(lengths_B.sum())
    apart, joint = make_module(gradient_clip=0.0), make_module(gradient_clip=0.0)
    apart.objective = joint.objective = ObjectiveSettings(free_bits=0.0)
    batches = [batch._replace(step_tokens=tokens) for batch in (first, second)]
    train(apart, batches, tmp_path, accumulate_grad_batches=2)
    train(joint, [together._replace(step_tokens=tokens)], tmp_path)
    torch.testing.assert_close(apart.gradient_norm, joint.gradient_norm)
    torch.testing.assert_close(weights_of(apart), weights_of(joint), rtol=0, atol=2e-5)


def test_an_empty_batch_in_a_step_changes_nothing(tmp_path):
    (batch,) = make_batches([4], [20])
    nothing = TokenBatch(torch.zeros(1, 1).long(), torch.zeros(1).long(), -torch.ones(1).long(), None, 20, 1)
    with_nothing, alone = make_module(), make_module()
    train(with_nothing, [batch, nothing], tmp_path, accumulate_grad_batches=2)
    train(alone, [batch], tmp_path)
    torch.testing.assert_close(weights_of(with_nothing), weights_of(alone), rtol=0, atol=1e-6)


def test_the_same_seed_gives_the_same_weights_and_another_seed_does_not(tmp_path):
    batches = make_batches([4, 4, 4], [20, 20, 20])
    runs = [make_module() for _ in range(3)]
    runs[2].seed = 4
    for run in runs:
        train(run, batches, tmp_path)
    assert torch.equal(weights_of(runs[0]), weights_of(runs[1]))
    assert not torch.equal(weights_of(runs[0]), weights_of(runs[2]))


def test_noise_differs_between_seeds_streams_and_positions():
    seeds = [noise_seed(s, stream, p) for s in range(3) for stream in (TRAINING, VALIDATION) for p in range(50)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**32 for seed in seeds)


def give_trainer(module: Any, plugin: MixedPrecision | None) -> None:
    """As much of a Trainer as clipping looks at. Any, because it is none."""
    module.trainer = SimpleNamespace(precision_plugin=plugin)


@pytest.mark.parametrize("loss_scale", [None, 1024.0])
def test_gradients_are_clipped_in_their_own_units_whatever_the_loss_scale(loss_scale):
    module = make_module(gradient_clip=0.5)
    scaler = None if loss_scale is None else torch.amp.GradScaler("cpu", init_scale=loss_scale)
    scale = 1.0 if scaler is None else scaler.scale(torch.ones(())).item()
    plugin = MixedPrecision("16-mixed" if scaler else "bf16-mixed", "cpu", scaler)
    give_trainer(module, plugin)
    for parameter in module.network.parameters():
        parameter.grad = torch.full_like(parameter, scale)
    count = sum(parameter.numel() for parameter in module.network.parameters())
    module.configure_gradient_clipping(torch.optim.AdamW(module.network.parameters(), fused=True))
    assert module.gradient_norm.item() == pytest.approx(math.sqrt(count), rel=1e-4)
    clipped = torch.cat([p.grad.flatten() for p in module.network.parameters() if p.grad is not None])
    assert clipped.norm().item() == pytest.approx(0.5, rel=1e-4)


def test_without_clipping_gradients_stay_as_they_are():
    module = make_module(gradient_clip=0.0)
    give_trainer(module, None)
    for parameter in module.network.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    module.configure_gradient_clipping(torch.optim.AdamW(module.network.parameters(), fused=True))
    assert all((p.grad == 7.0).all() for p in module.network.parameters() if p.grad is not None)


def test_weight_decay_pulls_on_matrices_alone():
    matrices, vectors = make_module(weight_decay=0.3).configure_optimizers()["optimizer"].param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert all(p.dim() >= 2 for p in matrices["params"])
    assert all(p.dim() < 2 for p in vectors["params"])


def test_what_callbacks_see_is_detached(tmp_path):
    seen: list[dict[str, Any]] = []

    class Spy(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(outputs)

    train(make_module(), make_batches([4], [20]), tmp_path, callbacks=[Spy()])
    (outputs,) = seen
    assert outputs["posterior_mean"].shape == outputs["posterior_logvar"].shape == (4, 2)
    tensors = [value for value in [*outputs.values(), *outputs["sums"]] if isinstance(value, Tensor)]
    assert not any(tensor.requires_grad for tensor in tensors)


def test_validation_adds_up_over_batches_of_unequal_size(tmp_path):
    module, batches = make_module(), make_batches([2, 5], [1, 1])
    trainer = make_trainer(tmp_path)
    trainer.validate(module, dataloaders=Loader(batches), verbose=False)
    nll = kl = 0.0
    with torch.no_grad():
        for batch in batches:
            torch.manual_seed(noise_seed(3, VALIDATION, batch.position))
            output = module.network(batch)
            nll += output.nll_B.sum().item()
            kl += gaussian_kl(output.posterior_mean_BZ, output.posterior_logvar_BZ).sum().item()
    steps = sum(int(batch.lengths_B.sum()) + len(batch.lengths_B) for batch in batches)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    assert metrics["valid_elbo"] == pytest.approx(-(nll + kl) / 7, rel=1e-5)
    assert metrics["valid_kl"] == pytest.approx(kl / 7, rel=1e-5)
    assert metrics["valid_nll_per_step"] == pytest.approx(nll / steps, rel=1e-5)


# --- Precision and the run directory --------------------------------------------------------------------------------


@pytest.mark.parametrize(("has_units", "expected"), [(True, "bf16-mixed"), (False, "32-true")])
def test_16_mixed_on_a_cpu_becomes_what_the_cpu_can_do(monkeypatch, has_units, expected):
    monkeypatch.setattr("training.precision.cpu_has_bf16_units", lambda: has_units)
    in_force = precision_in_force("16-mixed", "cpu")
    assert in_force.precision == expected
    assert in_force.reason


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("asked", ["32-true", "bf16-mixed"])
def test_other_precisions_run_as_asked(asked, device):
    assert precision_in_force(asked, device).precision == asked


def test_a_run_is_never_written_over(tmp_path):
    run = RunSettings(output_dir=str(tmp_path), run_name="first")
    assert make_run_directory(run, WORDS) == tmp_path / "first"
    with pytest.raises(UsageError, match="--run_name first"):
        make_run_directory(run, WORDS)


def test_a_run_on_demo_data_leaves_its_files_and_a_checkpoint_that_loads_as_plain_weights(tmp_path, capsys):
    settings = TrainingSettings(
        cache=CacheSettings(cache_dir=str(tmp_path / "cache")),
        model=TINY,
        batches=BatchSettings(tokens_per_batch=20_000),
        run=RunSettings(max_steps=4, log_every_n_steps=1, output_dir=str(tmp_path), run_name="demo"),
    )
    result = fit(settings)
    assert math.isfinite(result.valid_elbo)
    written = yaml.safe_load((tmp_path / "demo" / "config.yaml").read_text())
    assert (written["width"], written["max_steps"], written["run_name"]) == (16, 4, "demo")
    with (tmp_path / "demo" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert [row["step"] for row in rows] == ["1", "2", "3", "4", "4"]
    assert all(float(row["nll_per_step"]) > 0 and float(row["gradient_norm"]) > 0 for row in rows[:-1])
    assert float(rows[-1]["valid_elbo"]) == pytest.approx(result.valid_elbo, rel=1e-5)
    checkpoint = torch.load(tmp_path / "demo" / "checkpoints" / "last.ckpt", weights_only=True)
    description = DataDescription(**checkpoint["origin"]["description"])
    rebuilt = SequenceVAE(description, ModelSettings(**{f: checkpoint["origin"]["settings"][f] for f in vars(TINY)}))
    weights = {name.removeprefix("network."): value for name, value in checkpoint["state_dict"].items()}
    rebuilt.load_state_dict(weights)
    printed = capsys.readouterr().out
    assert "parameters" in printed
    assert "step 4/4" in printed
