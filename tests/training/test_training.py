"""Settings, the Lightning module and the run: exact sums, the same run twice, files that say what happened."""

import csv
import itertools
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

from seqvae.config.data import BatchSettings, CacheSettings, LengthSettings, SourceSettings
from seqvae.config.model import ModelSettings
from seqvae.config.run import RunSettings, ValidationSettings
from seqvae.config.training import (
    ComputeSettings,
    ObjectiveSettings,
    OptimizedSettings,
    OptimizerSettings,
    TrainingSettings,
)
from seqvae.config.yaml_files import to_flat_dict
from seqvae.data.batch import TokenBatch
from seqvae.data.demo import write_demo
from seqvae.data.description import DataDescription
from seqvae.errors import UsageError
from seqvae.models.vae import SequenceVAE
from seqvae.monitors.formulas import gaussian_kl
from seqvae.reports.run_files import read_events
from seqvae.training.callbacks.progress import COLUMNS
from seqvae.training.distributed import resolve_precision
from seqvae.training.fit import defaults_of, fit, make_data, prepare_settings
from seqvae.training.module import TRAINING, VALIDATION, TrainingModule, seed_noise
from seqvae.training.network import rebuild_network
from seqvae.training.run_directory.checkpoint_file import read_lazily
from seqvae.training.schedules import plan_run

# Lightning 2.6.6 asks torch 2.13 in a way that torch calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*")

WORDS = DataDescription(kind="tokens", vocabulary_size=6)
TINY = ModelSettings(width=16, depth=1, heads=2, latent_size=2, dropout=0.0)


@pytest.mark.parametrize(
    ("settings", "change", "flag"),
    [
        (ObjectiveSettings(), {"beta": -1.0}, "--beta"),
        (ObjectiveSettings(), {"kl_schedule": "cyclical", "kl_warmup": 500, "kl_cycle": 100}, "--kl_warmup 500"),
        (ObjectiveSettings(), {"free_bits": math.nan}, "--free_bits"),
        (OptimizerSettings(), {"lr": 0.0}, "--lr"),
        (RunSettings(), {"max_steps": 0}, "--max_steps"),
        (RunSettings(), {"run_name": "../elsewhere"}, "--run_name"),
        (RunSettings(), {"run_name": 300 * "x"}, "--run_name"),
        (RunSettings(), {"resume": "a.ckpt", "init_from": "b.ckpt"}, "--init_from"),
        (RunSettings(), {"max_time": "soon"}, "--max_time"),
        (ValidationSettings(), {"val_check_interval": 1.5}, "--val_check_interval"),
        (ValidationSettings(), {"limit_val_batches": 0, "early_stopping_patience": 3}, "--early_stopping_patience"),
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


def make_module(objective: ObjectiveSettings | None = None, **changes: Any) -> TrainingModule:
    torch.manual_seed(0)
    optimizer = OptimizerSettings(lr=0.01, warmup=0, **changes)
    network = SequenceVAE(WORDS, TINY)
    return TrainingModule(
        network, objective or ObjectiveSettings(), optimizer, total_steps=10, seed=3, origin={"made": "for a test"}
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
    monkeypatch.setattr("seqvae.models.posteriors.draw", lambda posterior, noise: posterior.mean)
    first, second = make_batches([3, 9], [0, 0])
    tokens_BT, lengths_B = (
        torch.cat((first.tokens_BT, second.tokens_BT)),
        torch.cat((first.lengths_B, second.lengths_B)),
    )
    together = TokenBatch(tokens_BT, lengths_B, torch.arange(12), None, step_tokens=0, position=0)
    tokens = int(lengths_B.sum())
    bare = ObjectiveSettings(kl_schedule="constant", free_bits=0.0)  # free bits are of a batch, so they do not add up
    apart, joint = make_module(bare, gradient_clip=0.0), make_module(bare, gradient_clip=0.0)
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
    seeds = []
    for seed, stream, position in itertools.product(range(3), (TRAINING, VALIDATION), range(50)):
        seed_noise(seed, stream, position, device=torch.device("cpu"))
        seeds.append(torch.initial_seed())
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**32 for seed in seeds)


def give_trainer(module: Any, plugin: MixedPrecision | None) -> None:
    """As much of a Trainer as clipping looks at. Any, because it is none."""
    module.trainer = SimpleNamespace(precision_plugin=plugin, world_size=1)
    module.judge.add(torch.ones(()), torch.zeros(1))


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
            seed_noise(3, VALIDATION, batch.position, device=torch.device("cpu"))
            output = module.network(batch)
            nll += output.nll_B.sum().item()
            kl += gaussian_kl(output.posterior_mean, output.posterior_logvar).sum().item()
    steps = sum(int(batch.lengths_B.sum()) + len(batch.lengths_B) for batch in batches)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    assert metrics["valid_elbo"] == pytest.approx(-(nll + kl) / 7, rel=1e-5)
    assert metrics["valid_kl"] == pytest.approx(kl / 7, rel=1e-5)
    assert metrics["valid_nll_per_step"] == pytest.approx(nll / steps, rel=1e-5)


# --- Precision and the run directory --------------------------------------------------------------------------------


@pytest.mark.parametrize(("has_units", "expected"), [(True, "bf16-mixed"), (False, "32-true")])
def test_16_mixed_on_a_cpu_becomes_what_the_cpu_can_do(monkeypatch, has_units, expected):
    monkeypatch.setattr("seqvae.training.distributed.cpu_has_bf16_units", lambda: has_units)
    in_force = resolve_precision("16-mixed", "cpu")
    assert in_force.precision == expected
    assert in_force.reason


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("asked", ["32-true", "bf16-mixed"])
def test_other_precisions_run_as_asked(asked, device):
    assert resolve_precision(asked, device).precision == asked


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return write_demo(tmp_path_factory.mktemp("demo"), "tokens", sequences=300, mean_length=15)


def tiny_run(folder: Path, data_dir: Path, *, max_steps: int) -> TrainingSettings:
    return TrainingSettings(
        source=SourceSettings(data_dir=str(data_dir)),
        cache=CacheSettings(cache_dir=str(data_dir / "cache")),
        model=TINY,
        batches=BatchSettings(tokens_per_batch=600),
        run=RunSettings(max_steps=max_steps, log_every_n_steps=1, output_dir=str(folder), run_name="demo"),
    )


def test_a_run_on_demo_data_leaves_its_files_and_a_checkpoint_that_loads_as_plain_weights(tmp_path, data_dir, capsys):
    result = fit(tiny_run(tmp_path, data_dir, max_steps=4))
    assert math.isfinite(result.valid_elbo)
    written = yaml.safe_load((tmp_path / "demo" / "config.yaml").read_text())
    assert (written["width"], written["max_steps"], written["run_name"]) == (16, 4, "demo")
    with (tmp_path / "demo" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert [row["step"] for row in rows] == ["1", "2", "3", "4", "4"]
    assert all(float(row["nll_per_step"]) > 0 and float(row["gradient_norm"]) > 0 for row in rows[:-1])
    assert float(rows[-1]["valid_elbo"]) == pytest.approx(result.valid_elbo, rel=1e-5)
    assert isinstance(rebuild_network(tmp_path / "demo" / "checkpoints" / "last.ckpt"), SequenceVAE)
    assert [event["event"] for event in read_events(tmp_path / "demo")] == ["started", "finished"]
    printed = capsys.readouterr().out
    assert "parameters" in printed
    assert "step 4/4" in printed


def test_a_finished_run_says_so_and_does_nothing(tmp_path, data_dir, capsys):
    settings = tiny_run(tmp_path, data_dir, max_steps=2)
    first = fit(settings)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "demo").rglob("*")}
    capsys.readouterr()
    assert fit(settings) == first
    assert "is finished (step 2 of 2" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "demo").rglob("*")} == before


def test_a_finished_run_goes_on_where_more_steps_are_asked_for(tmp_path, data_dir):
    fit(tiny_run(tmp_path, data_dir, max_steps=2))
    fit(tiny_run(tmp_path, data_dir, max_steps=3))
    assert [(e["event"], e["step"]) for e in read_events(tmp_path / "demo")][-2:] == [("resumed", 2), ("finished", 3)]


def test_a_run_in_the_place_of_other_data_is_refused(tmp_path, data_dir):
    fit(tiny_run(tmp_path, data_dir, max_steps=1))
    with pytest.raises(UsageError, match="--max_sequence_length"):
        fit(replace(tiny_run(tmp_path, data_dir, max_steps=2), lengths=LengthSettings(max_sequence_length=500)))


def test_the_rate_is_scaled_to_the_tokens_of_a_step(tmp_path, data_dir):
    settings = tiny_run(tmp_path, data_dir, max_steps=1)
    plan = plan_run(replace(settings, optimizer=OptimizerSettings(lr=0.01, scale_lr=True)), make_data(settings), 2)
    lengths_N = make_data(settings).split("train").lengths_N
    assert plan.tokens_per_step == pytest.approx(lengths_N.sum() / plan.steps_per_epoch)
    assert plan.lr == pytest.approx(0.01 * plan.tokens_per_step / 8_000)


def test_the_rate_is_scaled_from_the_users_own_base_and_the_header_names_both(tmp_path, data_dir, capsys):
    settings = tiny_run(tmp_path, data_dir, max_steps=1)
    settings = replace(settings, optimizer=OptimizerSettings(lr=5e-4, scale_lr=True, lr_base_tokens=6_400))
    assert settings.optimizer.rate(12_800) == pytest.approx(1e-3)
    fit(settings)
    rate = plan_run(settings, make_data(settings), 1).lr
    assert f"lr {rate:.3g} (0.0005 at 6,400 tokens, --scale_lr), cosine" in capsys.readouterr().out


def test_a_base_that_nothing_is_scaled_from_is_refused():
    with pytest.raises(ValueError, match=r"^--lr_base_tokens needs --scale_lr"):
        OptimizerSettings(lr_base_tokens=4_000)


def test_the_default_rate_is_lower_for_small_steps_and_never_higher():
    rates = [OptimizerSettings().rate(tokens) for tokens in (80, 500, 8_000, 64_000)]
    assert rates == pytest.approx([3e-3 * 0.01**0.25, 1.5e-3, 3e-3, 3e-3])
    assert OptimizerSettings(lr=0.1).rate(80) == 0.1
    assert OptimizerSettings(scale_lr=True).rate(16_000) == pytest.approx(6e-3)


def test_a_short_look_takes_two_steps_and_one_validation_batch(tmp_path, data_dir):
    settings = tiny_run(tmp_path, data_dir, max_steps=50)
    fit(replace(settings, run=replace(settings.run, fast_dev_run=True)))
    with (tmp_path / "demo" / "metrics.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["1", "2", "2"]


def test_a_run_without_validations_still_ends_with_one(tmp_path, data_dir):
    settings = tiny_run(tmp_path, data_dir, max_steps=2)
    result = fit(replace(settings, validation=ValidationSettings(limit_val_batches=0)))
    assert math.isfinite(result.valid_elbo)


def test_weights_alone_can_be_taken_from_another_run(tmp_path, data_dir):
    fit(tiny_run(tmp_path, data_dir, max_steps=3))
    settings = tiny_run(tmp_path, data_dir, max_steps=1)
    source = tmp_path / "demo" / "checkpoints" / "last.ckpt"
    run = replace(settings.run, run_name="second", init_from=str(source))
    fit(replace(settings, run=run, optimizer=OptimizerSettings(lr=1e-9)))
    taken = rebuild_network(tmp_path / "second" / "checkpoints" / "last.ckpt")
    for name, weights in rebuild_network(source).state_dict().items():
        torch.testing.assert_close(taken.state_dict()[name], weights, rtol=0, atol=1e-6)


def test_a_batch_normalised_posterior_is_refused_where_a_batch_can_hold_one_sequence(tmp_path, data_dir):
    settings = replace(tiny_run(tmp_path, data_dir, max_steps=1), batches=BatchSettings(batch_size=1))
    with pytest.raises(UsageError, match="--posterior batch_norm needs 2 sequences"):
        fit(replace(settings, model=replace(TINY, posterior="batch_norm")))


def test_synchronised_batch_norm_needs_nobody_else_where_there_is_one_process(tmp_path, data_dir):
    settings = tiny_run(tmp_path, data_dir, max_steps=1)
    fit(
        replace(
            settings,
            batches=BatchSettings(batch_size=8, drop_last=True),
            model=replace(TINY, posterior="batch_norm"),
            compute=ComputeSettings(sync_batchnorm=True),
        )
    )


@pytest.mark.parametrize("accumulate", [1, 16])
def test_a_run_that_ends_by_the_clock_is_saved_where_it_ended_and_says_so(tmp_path, data_dir, capsys, accumulate):
    settings = tiny_run(tmp_path, data_dir, max_steps=100_000)
    settings = replace(
        settings,
        run=replace(settings.run, max_time="0:00:01", log_every_n_steps=10**6),
        optimizer=OptimizerSettings(gradient_accumulation_steps=accumulate),
        batches=BatchSettings(tokens_per_batch=300),
        validation=ValidationSettings(limit_val_batches=0),
    )
    fit(settings)
    last = torch.load(tmp_path / "demo" / "checkpoints" / "last.ckpt", weights_only=True)
    finished = read_events(tmp_path / "demo")[-1]
    assert (finished["event"], finished["ended_by"], finished["step"]) == ("finished", "max_time", last["global_step"])
    assert "as --max_time says" in capsys.readouterr().out
    fit(settings)
    assert "A larger --max_time goes on" in capsys.readouterr().out


def test_a_run_that_no_longer_gets_better_ends_early_and_says_so(tmp_path, data_dir, capsys):
    settings = tiny_run(tmp_path, data_dir, max_steps=300)
    fit(
        replace(
            settings,
            optimizer=OptimizerSettings(lr=1e-12),
            validation=ValidationSettings(early_stopping_patience=2, val_check_interval=1),
        )
    )
    event = read_events(tmp_path / "demo")[-1]
    assert (event["ended_by"], event["step"]) == ("early_stopping_patience", 63)  # the weight is full from step 60 on
    assert "as --early_stopping_patience says" in capsys.readouterr().out


def test_however_little_is_validated_on_the_way_the_end_is_on_all(tmp_path, data_dir):
    elbos = []
    for number, limit in enumerate((1, 2, 0.5, 1.0)):
        settings = tiny_run(tmp_path, data_dir, max_steps=2)
        run = replace(settings.run, run_name=f"run{number}")
        elbos.append(fit(replace(settings, run=run, validation=ValidationSettings(limit_val_batches=limit))).valid_elbo)
    assert elbos == [elbos[-1]] * 4


@pytest.mark.parametrize("given", [{}, {"precision": "32-true"}])
def test_what_a_run_sets_by_itself_is_no_difference_from_the_defaults(given):
    def differing(settings: TrainingSettings) -> set[str]:
        settings = prepare_settings(settings)
        defaults = defaults_of(settings)
        return {name for name, value in to_flat_dict(settings).items() if value != defaults[name]}

    recipe = replace(OptimizedSettings(), compute=replace(OptimizedSettings().compute, **given))
    assert differing(recipe) == set(given)
    assert differing(replace(recipe, run=RunSettings(fast_dev_run=True))) == {*given, "fast_dev_run"}
    assert differing(replace(recipe, batches=BatchSettings(pad_grid=5))) == {*given, "pad_grid"}


def test_the_best_checkpoint_is_that_of_the_validations_on_the_way(tmp_path, data_dir):
    settings = tiny_run(tmp_path, data_dir, max_steps=6)
    fit(replace(settings, validation=ValidationSettings(limit_val_batches=0.5, val_check_interval=1)))
    with (tmp_path / "demo" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["valid_elbo"]]
    *on_the_way, last = rows
    assert {row["valid_sequences"] for row in on_the_way} != {last["valid_sequences"]}
    best = max(on_the_way, key=lambda row: float(row["valid_elbo"]))
    assert read_lazily(tmp_path / "demo" / "checkpoints" / "best.ckpt")["global_step"] == int(best["step"])


def test_a_finished_run_of_other_data_is_refused_too(tmp_path, data_dir):
    fit(tiny_run(tmp_path, data_dir, max_steps=1))
    with pytest.raises(UsageError, match="--width"):
        fit(replace(tiny_run(tmp_path, data_dir, max_steps=1), model=replace(TINY, width=8)))


def test_a_run_cannot_be_made_shorter_than_it_is(tmp_path, data_dir):
    fit(tiny_run(tmp_path, data_dir, max_steps=3))
    settings = tiny_run(tmp_path, data_dir, max_steps=2)
    run = replace(settings.run, run_name="other", resume=str(tmp_path / "demo" / "checkpoints" / "last.ckpt"))
    with pytest.raises(UsageError, match="is at step 3"):
        fit(replace(settings, run=run))


@pytest.mark.parametrize(
    "change",
    [
        {"run": {"init_from": "nowhere.ckpt"}},
        {"compute": {"strategy": "nonsense"}},
        {"run": {"resume": "nowhere.ckpt"}},
    ],
)
def test_a_refusal_leaves_no_directory_behind(tmp_path, data_dir, change):
    settings = tiny_run(tmp_path, data_dir, max_steps=1)
    groups = {name: replace(getattr(settings, name), **values) for name, values in change.items()}
    with pytest.raises(UsageError, match=r"--(init_from|strategy|resume)"):
        fit(replace(settings, **groups))
    assert not (tmp_path / "demo").exists()
