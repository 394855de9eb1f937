"""Batches that do not fit: parts that add up to the whole, there and back, forward and backward."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning import Callback
from torch import Tensor

from seqvae.config.data import BatchSettings
from seqvae.config.training import ObjectiveSettings
from seqvae.data.batch import padded_length, part_of
from seqvae.errors import is_out_of_memory
from seqvae.monitors.formulas import mutual_information
from seqvae.training.micro_batches import Parts, joined, run_or_none_on_oom
from seqvae.training.module import TrainingModule
from tests.support.short_runs import MODEL, STEPS, Kill, ShortData, assert_same, last_of, short_module, train
from tests.support.small_models import KINDS, make_batch, make_vae

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*")
BARE = ObjectiveSettings(kl_schedule="constant", free_bits=0.0)
FREE_BITS = ObjectiveSettings(kl_schedule="constant", free_bits=0.02)
TOTAL_FREE_BITS = replace(FREE_BITS, free_bits_by="total")
CONTRAST = replace(FREE_BITS, contrastive_weight=0.5)
"""Some dimensions of some batches are above it, and others below."""
MODEL_WITHOUT_NOISE = replace(MODEL, dropout=0.0, word_dropout=0.0)
WORDS = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"


# --- Parts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bounds", [(0, 2, 5), (0, 1, 2, 3, 4, 5)])
def test_what_a_model_makes_of_parts_is_what_it_makes_of_the_whole(kind, bounds):
    vae = make_vae(kind).eval()
    batch = make_batch(kind, [7, 3, 0, 5, 1])
    parts = [part_of(batch, first, last) for first, last in pairwise(bounds)]
    assert [padded_length(part) for part in parts] == [7] * len(parts)
    whole = vae.encode(batch).mean
    torch.testing.assert_close(torch.cat([vae.encode(part).mean for part in parts]), whole)
    z = torch.zeros_like(whole)
    nll_B = torch.cat([vae.nll_given_z(part, z[: len(part.lengths_B)]) for part in parts])
    torch.testing.assert_close(nll_B, vae.nll_given_z(batch, z))


def test_batches_as_long_as_one_that_did_not_fit_are_split_and_shorter_ones_are_not():
    parts = Parts()
    long, longer, short = (make_batch("tokens", [steps] * 6) for steps in (20, 30, 10))
    assert [parts.of(batch) for batch in (long, longer, short)] == [1, 1, 1]
    assert parts.double(long)
    assert [parts.of(batch) for batch in (long, longer, short)] == [2, 2, 1]
    assert parts.double(longer)
    assert [parts.of(batch) for batch in (long, longer, short)] == [2, 4, 1]
    assert [len(part.lengths_B) for part in parts.split(longer)] == [1, 2, 1, 2]


def test_a_single_sequence_cannot_be_split():
    parts = Parts()
    assert not parts.double(make_batch("tokens", [20]))
    three = make_batch("tokens", [20] * 3)
    assert [parts.double(three) for _ in range(3)] == [True, True, False]
    assert parts.of(three) == 3


def test_parts_hold_as_many_sequences_as_the_posterior_needs_together():
    parts = Parts(least_sequences=2)
    five, three = make_batch("tokens", [20] * 5), make_batch("tokens", [20] * 3)
    assert not parts.double(three)
    assert [parts.double(five) for _ in range(2)] == [True, False]
    assert [len(part.lengths_B) for part in parts.split(five)] == [2, 3]
    assert parts.split(three) == [three]


def test_parts_outlive_a_checkpoint():
    parts, other = Parts(), Parts()
    batch = make_batch("tokens", [20] * 6)
    parts.double(batch)
    other.load_state_dict(parts.state_dict())
    assert other.of(batch) == 2


def test_outputs_of_parts_add_up():
    outputs = [
        {"kl_weight": 0.5, "nll": torch.ones(2), "real_steps": torch.tensor(3), "padded_steps": 4},
        {"kl_weight": 0.5, "nll": torch.zeros(1), "real_steps": torch.tensor(2), "padded_steps": 2},
    ]
    whole = joined(outputs)
    assert whole["kl_weight"] == 0.5
    assert whole["nll"].tolist() == [1, 1, 0]
    assert (int(whole["real_steps"]), whole["padded_steps"]) == (5, 6)


@pytest.mark.parametrize("words", ["could not create a primitive", "std::bad_alloc", "can't start new thread", WORDS])
def test_what_libraries_say_of_a_lack_of_memory_is_a_lack_of_memory(words):
    def fails() -> None:
        raise RuntimeError(words)

    assert run_or_none_on_oom(fails) is None


def test_what_failed_for_another_reason_is_not_tried_again():
    def fails() -> None:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        run_or_none_on_oom(fails)


def test_nothing_is_held_of_what_did_not_fit():
    freed = []

    class Large:
        def __del__(self) -> None:
            freed.append(True)

    def fails() -> None:
        _large = Large()
        raise MemoryError

    assert run_or_none_on_oom(fails) is None
    assert freed == [True]


# --- Runs -----------------------------------------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    """The backward pass breaks off here."""

    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(context: Any, *gradient: Tensor) -> Any:
        raise RuntimeError(WORDS)


class Tight(TrainingModule):
    """Has room for one sequence, where two make a batch, in some micro-batches."""

    positions: frozenset[int] = frozenset()
    on_the_way = "forward"

    room = 1

    def compute(self, batch: Any, part: int, *more: Any) -> dict[str, Any]:
        if len(batch.lengths_B) <= self.room or batch.position not in self.positions:
            return super().compute(batch, part, *more)
        if self.on_the_way == "forward":
            raise RuntimeError(WORDS)
        outputs = super().compute(batch, part, *more)
        first = next(iter(self.network.parameters()))
        return outputs | {"loss": outputs["loss"] + 0 * Fails.apply(first.sum())}


def tight(positions: set[int], on_the_way: str) -> TrainingModule:
    module = short_module()
    module.__class__ = type("Tight", (Tight,), {"positions": frozenset(positions), "on_the_way": on_the_way})
    return module


def with_the_same_noise(mean_NZ: Tensor, logvar_NZ: Tensor) -> Tensor:
    return mutual_information(mean_NZ, logvar_NZ, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("on_the_way", ["forward", "backward"])
@pytest.mark.parametrize("position", [6, 7])
@pytest.mark.parametrize(
    "objective", [BARE, FREE_BITS, TOTAL_FREE_BITS, CONTRAST], ids=["bare", "free bits", "in total", "contrast"]
)
def test_the_first_or_second_batch_of_a_step_in_parts_gives_the_gradients_of_the_whole(
    on_the_way, position, objective, tmp_path, monkeypatch
):
    monkeypatch.setattr("seqvae.models.posteriors.draw", lambda posterior, noise: posterior.mean)
    monkeypatch.setattr("seqvae.training.objective.mutual_information", with_the_same_noise)
    monkeypatch.setattr("tests.support.short_runs.MODEL", MODEL_WITHOUT_NOISE)
    options: dict[str, Any] = {"max_steps": 4, "limit_val_batches": 0}
    module = tight({position}, on_the_way)
    module.objective = objective
    whole = short_module()
    whole.objective = objective
    train(tmp_path / "parts", module=module, **options)
    train(tmp_path / "whole", module=whole, **options)
    for name, weight in whole.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], weight, rtol=0, atol=2e-5)
    assert len(module.micro_batches.parts.state_dict()) == 1


def test_two_levels_of_latents_in_parts_give_the_gradients_of_the_whole(tmp_path, monkeypatch):
    for place in ("posteriors", "levels"):
        monkeypatch.setattr(f"seqvae.models.{place}.draw", lambda posterior, noise: posterior.mean)
    model = replace(MODEL_WITHOUT_NOISE, latent_scope="both", step_latent_size=3)
    monkeypatch.setattr("tests.support.short_runs.MODEL", model)
    runs = []
    for directory, module in ((tmp_path / "parts", tight({6, 7}, "forward")), (tmp_path / "whole", short_module())):
        module.objective = replace(FREE_BITS, step_free_bits=0.01)
        train(directory, module=module, max_steps=4, limit_val_batches=0)
        runs.append(module)
    for name, weight in runs[1].state_dict().items():
        torch.testing.assert_close(runs[0].state_dict()[name], weight, rtol=0, atol=2e-5)
    assert len(runs[0].micro_batches.parts.state_dict()) == 1


def batch_norm_module() -> TrainingModule:
    """Has room for two of four sequences, and its posterior needs as many."""
    module = tight(set(range(100)), "forward")
    module.__class__.room = 2  # type: ignore[attr-defined]
    return module


def test_batch_normalised_means_do_not_end_a_run_in_parts_and_their_statistics_are_updated_once_a_part(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("tests.support.short_runs.MODEL", replace(MODEL, posterior="batch_norm"))
    module, updates = batch_norm_module(), []
    posterior: Any = module.network.posterior
    update = posterior.update_statistics

    def counted(*arguments: Any) -> Any:
        before = posterior.mean_Z.clone()
        updates.append(before)
        return update(*arguments)

    monkeypatch.setattr(posterior, "update_statistics", counted)
    four = BatchSettings(batch_size=4, bucketing=False)
    train(
        tmp_path,
        module=module,
        data=ShortData(batches=four, accumulate=1),
        max_steps=1,
        limit_val_batches=0,
        accumulate_grad_batches=1,
    )
    looked_1, looked_2, learned_1, learned_2 = updates
    assert torch.equal(looked_1, learned_1)  # what the look ahead moved is back
    assert not torch.equal(looked_2, looked_1)
    assert not torch.equal(learned_2, learned_1)


@pytest.mark.parametrize("on_the_way", ["forward", "backward"])
def test_a_run_in_parts_goes_on_exactly(on_the_way, tmp_path):
    some = set(range(9, 100))
    unbroken = train(tmp_path / "unbroken", module=tight(some, on_the_way))
    train(tmp_path, [Kill("on_train_batch_start", 15)], module=tight(some, on_the_way))
    resumed = train(tmp_path, checkpoint=last_of(tmp_path), module=tight(some, on_the_way))
    assert_same(resumed, unbroken)


def test_callbacks_receive_for_a_batch_in_parts_what_they_receive_for_a_whole_one(tmp_path):
    seen: list[dict[str, Any]] = []

    class Spy(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
            seen.append(outputs)

    train(tmp_path, [Spy()], module=tight({3}, "forward"), max_steps=4, limit_val_batches=0)
    in_parts, whole = seen[3], seen[1]
    assert in_parts.keys() == whole.keys()
    for name in ("posterior_mean", "posterior_logvar", "nll", "steps_B"):
        assert in_parts[name].shape == whole[name].shape
        assert not in_parts[name].requires_grad
    assert int(in_parts["sequences"]) == int(whole["sequences"]) == 2
    assert not in_parts["loss"].requires_grad


def test_a_validation_that_does_not_fit_is_computed_in_parts(tmp_path, monkeypatch):
    module = short_module()
    validate, counts = module._validate, []

    def tight_validation(batch: Any, part: int) -> Any:
        counts.append(len(batch.lengths_B))
        if len(batch.lengths_B) > 1:
            raise RuntimeError(WORDS)
        return validate(batch, part)

    monkeypatch.setattr(module, "_validate", tight_validation)
    run = train(tmp_path, module=module, max_steps=2)
    assert counts == [2, 1, 1, 1, 1, 1, 1]
    assert run.validations[0][1]["valid_sequences"] == 6


def test_where_a_single_sequence_does_not_fit_memory_is_out(tmp_path):
    class Hopeless(Tight):
        def compute(self, batch: Any, part: int, *more: Any) -> dict[str, Any]:
            raise RuntimeError(WORDS)

    module = short_module()
    module.__class__ = Hopeless
    with pytest.raises(MemoryError, match="with a single sequence of 5 steps: lower --max_sequence_length") as raised:
        train(tmp_path, module=module)
    assert is_out_of_memory(raised.value)


def test_where_the_question_is_how_much_fits_nothing_is_split(tmp_path):
    module = tight({0}, "forward")
    module.micro_batches.may_split = False
    with pytest.raises(RuntimeError, match="can't allocate"):
        train(tmp_path, module=module, data=ShortData(), max_steps=STEPS)


def test_the_scale_of_a_loss_reaches_every_part(tmp_path):
    """With 16-mixed, gradients come multiplied; those of parts just as those of the whole."""
    norms = {}
    for name, positions in (("parts", {0, 1}), ("whole", set())):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        plugin = lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler)
        module = tight(positions, "forward")
        module.objective = BARE
        train(Path(tmp_path / name), module=module, max_steps=1, limit_val_batches=0, plugins=[plugin])
        norms[name] = float(module.gradient_norm)
    assert norms["parts"] == pytest.approx(norms["whole"], rel=0.3)  # the latents drawn are others
