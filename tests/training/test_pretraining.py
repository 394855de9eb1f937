"""An autoencoder that is pretrained: what weighs when, what starts from scratch, and that a run goes on exactly through its end."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn

from seqvae.config.training import ObjectiveSettings, OptimizerSettings
from seqvae.errors import Stopped, UsageError
from seqvae.models.backbones import Decoder
from seqvae.training.callbacks.pretraining import PRETRAINED, EndOfPretraining
from seqvae.training.module import TrainingModule
from seqvae.training.run_directory.records import RunEvents
from seqvae.training.schedules import KLWeight, Steering, has_full_kl_weight, scheduled_kl_weight
from tests.support.short_runs import MODEL, STEPS, Ask, Kill, Run, assert_same, last_of, short_module, train

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*")
ENDS = 5
PRETRAINED_FOR_5 = ObjectiveSettings(pretrain_autoencoder=ENDS, reset_decoder=True)


# --- Schedules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["constant", "linear", "sigmoid", "cyclical"])
def test_the_kl_has_no_weight_until_the_schedule_of_the_rest_begins(schedule):
    settings = ObjectiveSettings(kl_schedule=schedule, pretrain_autoencoder=300)
    plain = ObjectiveSettings(kl_schedule=schedule)
    assert {scheduled_kl_weight(step, 1000, settings) for step in range(300)} == {0.0}
    for step in range(300, 1000, 7):
        assert scheduled_kl_weight(step, 1000, settings) == scheduled_kl_weight(step - 300, 700, plain)
        assert has_full_kl_weight(step, 1000, settings) == has_full_kl_weight(step - 300, 700, plain)
    assert not any(has_full_kl_weight(step, 1000, settings) for step in range(300))


def test_a_controller_begins_behind_the_pretraining():
    weight = KLWeight(ObjectiveSettings(target_kl=3.0, pretrain_autoencoder=10), 100)
    assert weight(9) == 0.0
    assert float(weight(10)) == float(KLWeight(ObjectiveSettings(target_kl=3.0), 90)(0))


def test_the_learning_rate_rises_in_the_pretraining_and_once_more_behind_it():
    module = short_module(100, ObjectiveSettings(pretrain_autoencoder=40))
    factors = [module.learning_rate_factor(step) for step in range(100)]
    assert factors[:3] == [0.5, 1.0, 1.0]  # --warmup 2
    assert factors[39] == 1.0
    assert factors[40:] == [short_module(60).learning_rate_factor(step) for step in range(60)]


def test_a_rescue_does_not_pretrain_again():
    steering = Steering(kl_weight=0.5, free_bits=0.1, target_kl=None, since_step=3, added_steps=0)
    in_force = steering.objective(PRETRAINED_FOR_5)
    assert (in_force.pretrain_autoencoder, in_force.reset_decoder) == (0, False)
    assert scheduled_kl_weight(0, 100, in_force) == 0.5


def test_a_decoder_is_reset_after_a_pretraining_only():
    with pytest.raises(ValueError, match="--reset_decoder needs --pretrain_autoencoder"):
        ObjectiveSettings(reset_decoder=True)


# --- Runs -------------------------------------------------------------------------------------------------------------


class See(Callback):
    """The decoder, the encoder and the number of its moments at the begin of each step."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[float, Tensor, Tensor, int]] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        network: Any = pl_module.network
        (optimizer,) = trainer.optimizers
        moments = sum(weight in optimizer.state for weight in network.decoder.parameters())
        decoder, encoder = (next(part.parameters()).detach().clone() for part in (network.decoder, network.encoder))
        assert isinstance(pl_module, TrainingModule)
        weight = float(pl_module.kl_weight(trainer.global_step))
        self.rows.setdefault(trainer.global_step, (weight, decoder, encoder, moments))


def run(directory: Path, *callbacks: Callback, checkpoint: Path | None = None) -> Run:
    end = EndOfPretraining([], ENDS, resets_decoder=True)
    module = short_module(STEPS, PRETRAINED_FOR_5, ema=0.9)
    module.events = RunEvents(directory)
    return train(directory, [*callbacks, end], checkpoint=checkpoint, every_n_steps=1, module=module)


def test_at_its_end_the_decoder_starts_from_scratch_and_nothing_else_does(tmp_path):
    see = See()
    run(tmp_path, see)
    torch.manual_seed(0)  # the run's --seed
    fresh = next(Decoder(MODEL).parameters())
    weights = [see.rows[step][0] for step in range(STEPS)]
    assert weights[:ENDS] == [0.0] * ENDS
    assert weights[-1] == 1.0
    (_, _, encoder_before, moments_before), (_, decoder, encoder, moments) = see.rows[ENDS - 1], see.rows[ENDS]
    assert (moments_before > 0, moments) == (True, 0)
    assert torch.equal(decoder, fresh)
    assert not torch.equal(encoder, encoder_before)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("unbroken"))


def few(*batches: int) -> list[Any]:
    """Return all of them, of which those around the end of the pretraining are for the fast tests."""
    return [batch if batch == 2 * ENDS else pytest.param(batch, marks=pytest.mark.slow) for batch in batches]


@pytest.mark.parametrize("batch", few(7, 8, 9, 10, 11))
@pytest.mark.parametrize("way", [Ask, Kill])
def test_a_run_goes_on_exactly_through_the_end_of_the_pretraining(way, batch, unbroken, tmp_path):
    before = run(tmp_path / "broken", way("on_train_batch_start", batch))
    assert before.ended_by is not None
    assert isinstance(before.ended_by, Stopped) == (way is Ask)
    after = run(tmp_path / "broken", checkpoint=last_of(tmp_path / "broken"))
    assert_same(after, unbroken)
    assert (tmp_path / "broken" / "events.jsonl").read_text().count(PRETRAINED) == 1


def test_what_is_not_ours_has_no_decoder_to_reset():
    module = TrainingModule(
        nn.Linear(1, 1), PRETRAINED_FOR_5, OptimizerSettings(), total_steps=STEPS, seed=0, origin={}
    )
    with pytest.raises(UsageError, match="--reset_decoder: Linear has no decoder of ours"):
        EndOfPretraining([], ENDS, resets_decoder=True).setup(
            Trainer(logger=False, enable_checkpointing=False), module, "fit"
        )
