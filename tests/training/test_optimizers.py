"""Optimizers and the average of weights: what they compute, and that a run with them goes on exactly."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon

from seqvae.config.training import ComputeSettings, OptimizerSettings, TrainingSettings
from seqvae.errors import UsageError
from seqvae.training.optimizers import MUON_RATE, InTurn, WeightAverage, hidden_matrices, make_optimizer
from tests.support.short_runs import STEPS, Ask, Kill, assert_same, last_of, short_module, train
from tests.support.small_models import make_vae

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*")


# --- Optimizers in turn -----------------------------------------------------------------------------------------------


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def make_in_turn(network: nn.Sequential) -> InTurn:
    return InTurn([AdamW(network[0].parameters(), lr=0.1), SGD(network[1].parameters(), lr=0.2, momentum=0.9)])


def take_steps(network: nn.Sequential, *optimizers: Any, steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        network(torch.randn(5, 4, generator=generator)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, other.state_dict()[name])


def test_optimizers_in_turn_do_what_each_does_by_itself():
    together, apart = two_layers(), two_layers()
    take_steps(together, make_in_turn(together))
    take_steps(apart, *make_in_turn(apart).optimizers)
    assert_equal(together, apart)


def test_optimizers_in_turn_go_on_from_their_state_exactly():
    unbroken, broken = two_layers(), two_layers()
    before = make_in_turn(unbroken)
    take_steps(unbroken, before)
    state = deepcopy(before.state_dict())
    broken.load_state_dict(unbroken.state_dict())
    after = make_in_turn(broken)
    after.load_state_dict(state)
    assert all(one.state is after.state for one in after.optimizers)
    take_steps(unbroken, before)
    take_steps(broken, after)
    assert_equal(unbroken, broken)
    after.param_groups[1]["lr"] = 0.0  # as a schedule sets it
    weight = broken.get_parameter("1.weight").clone()
    take_steps(broken, after)
    assert torch.equal(broken.get_parameter("1.weight"), weight)


def test_a_closure_is_called_once_and_its_loss_returned():
    network, calls = two_layers(), []
    optimizer = make_in_turn(network)

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        loss = network(torch.ones(1, 4)).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [True]
    assert isinstance(loss, Tensor)


# --- Muon -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["transformer", "lstm"])
def test_muon_moves_the_matrices_inside_the_layers_and_adamw_all_else(architecture):
    vae = make_vae("tokens", encoder=architecture, decoder=architecture)
    optimizer = make_optimizer(vae, OptimizerSettings(optimizer="muon", lr=1e-3, weight_decay=0.04))
    assert isinstance(optimizer, InTurn)
    adamw, muon = optimizer.optimizers
    assert (type(adamw), type(muon)) == (AdamW, Muon)
    names = {id(weight): name for name, weight in vae.named_parameters()}
    of_muon, of_adamw = ([names[id(w)] for g in one.param_groups for w in g["params"]] for one in (muon, adamw))
    assert sorted(of_muon + of_adamw) == sorted(name for name, weight in vae.named_parameters() if weight.requires_grad)
    assert of_muon
    assert all(".blocks." in name and vae.get_parameter(name).dim() == 2 for name in of_muon)
    assert not any(".blocks." in name and vae.get_parameter(name).dim() == 2 for name in of_adamw)
    assert muon.param_groups[0]["lr"] == pytest.approx(MUON_RATE * 1e-3)
    assert muon.param_groups[0]["lr"] * muon.param_groups[0]["weight_decay"] == pytest.approx(1e-3 * 0.04)
    assert optimizer.param_groups[0]["lr"] == 1e-3  # what is shown as the rate


def test_a_step_of_muon_is_orthogonal_and_as_large_as_its_rate_says():
    vae = make_vae("tokens", width=32, decoder="lstm")
    optimizer = make_optimizer(vae, OptimizerSettings(optimizer="muon", lr=1e-3, weight_decay=0.0))
    matrix = next(one for one in hidden_matrices(vae) if one.shape[0] >= 32)
    before = matrix.detach().clone()
    torch.manual_seed(0)
    matrix.grad = torch.randn_like(matrix)
    optimizer.step()
    moved = before - matrix.detach()
    sizes = torch.linalg.svdvals(moved) / (MUON_RATE * 1e-3 * 0.2 * max(moved.shape) ** 0.5)
    assert float(sizes.min()) > 0.5
    assert float(sizes.max()) < 1.3  # the iteration brings singular values near 1, no closer


def test_a_network_without_layers_of_ours_is_no_case_for_muon():
    with pytest.raises(UsageError, match="--optimizer muon: Linear has no layers of ours"):
        make_optimizer(nn.Linear(3, 3), OptimizerSettings(optimizer="muon"))


@pytest.mark.parametrize("given", [{"optimizer": "muon"}, {"ema": 0.9}])
@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed"])
def test_what_needs_whole_weights_is_refused_where_they_are_shared_out(given, strategy):
    with pytest.raises(ValueError, match=f"needs whole weights in each process, and --strategy {strategy}"):
        TrainingSettings(optimizer=OptimizerSettings(**given), compute=ComputeSettings(strategy=strategy))


# --- The average ------------------------------------------------------------------------------------------------------


def test_the_average_is_the_recurrence_of_its_decay_which_rises_as_there_is_more_to_average():
    network, expected, decays = nn.Linear(1, 1, bias=False), 0.0, []
    average = WeightAverage(network, decay=0.8)
    for step, value in enumerate([3.0, -1.0, 5.0, 2.0, *range(60)], start=1):
        with torch.no_grad():
            network.weight.fill_(value)
        average.update()
        decays.append(min(0.8, step / (step + 9)))
        expected = value if step == 1 else decays[-1] * expected + (1 - decays[-1]) * value
    assert decays[-1] == 0.8
    average.put_in_force()
    assert network.weight.item() == pytest.approx(expected, rel=1e-5)
    average.put_back()
    assert network.weight.item() == 59.0
    average.start_over()
    average.put_in_force()  # there is none
    assert network.weight.item() == 59.0


class Weights(Ask):
    """Callback that keeps the weights that are validated."""

    def act(self) -> None: ...

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.seen = {name: value.clone() for name, value in pl_module.state_dict().items()}


def test_training_is_the_same_to_the_bit_and_the_average_is_what_is_validated_and_saved(tmp_path):
    plain = train(tmp_path / "plain")
    weights = Weights("on_fit_end", 0)
    averaged = train(tmp_path / "averaged", [weights], module=short_module(ema=0.9))
    assert_same(plain, averaged)
    assert plain.validations != averaged.validations
    saved = torch.load(tmp_path / "averaged" / "last.ckpt", weights_only=True)
    own = averaged.trainer.lightning_module.state_dict()
    assert all(torch.equal(value, weights.seen[name]) for name, value in saved["state_dict"].items())
    assert saved["average"]["steps"] == STEPS
    assert all(torch.equal(value, own[f"network.{name}"]) for name, value in saved["average"]["raw"].items())
    assert not all(torch.equal(value, own[name]) for name, value in saved["state_dict"].items())


def average_of(run: Any) -> dict[str, Tensor]:
    module = run.trainer.lightning_module
    module.average.put_in_force()
    averaged = {name: value.clone() for name, value in module.state_dict().items()}
    module.average.put_back()
    return averaged


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    "stop",
    [Ask("on_train_batch_start", 9), Ask("on_validation_batch_start", 4), Kill("on_train_batch_start", 15)],
    ids=["signal", "signal in a validation", "kill"],
)
def test_a_run_goes_on_exactly(optimizer, stop, tmp_path):
    def module() -> Any:
        return short_module(optimizer=optimizer, ema=0.9)

    stop.calls = 0
    unbroken = train(tmp_path / "unbroken", module=module())
    before = train(tmp_path / "broken", [stop], module=module())
    assert before.ended_by is not None
    after = train(tmp_path / "broken", checkpoint=last_of(tmp_path / "broken"), module=module())
    assert_same(after, unbroken)
    assert after.validations == unbroken.validations[-len(after.validations) :]
    kept, other = average_of(after), average_of(unbroken)
    assert all(torch.equal(value, other[name]) for name, value in kept.items())


def test_a_run_that_goes_on_without_the_average_goes_on_from_its_own_weights(tmp_path):
    plain = train(tmp_path / "plain")
    before = train(tmp_path / "broken", [Ask("on_train_batch_start", 9)], module=short_module(ema=0.9))
    assert before.ended_by is not None
    after = train(tmp_path / "broken", checkpoint=last_of(tmp_path / "broken"))
    assert_same(after, plain)
    assert "average" not in torch.load(last_of(tmp_path / "broken") or Path(), weights_only=True)
