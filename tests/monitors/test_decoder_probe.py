"""Which batches decoder use is read on, and the messages where it cannot be read."""

from typing import Any

import lightning
import numpy as np
import pytest
import torch
from torch import Tensor

from seqvae.data.batch import TokenBatch
from seqvae.data.datamodule import choose_sample
from seqvae.monitors import PosteriorMetricsMonitor
from seqvae.monitors.contract import StepOutputs
from seqvae.monitors.decoder_use import decoder_use
from seqvae.monitors.reading import read_readings
from tests.support.fake_sequences import FakeSequences
from tests.support.foreign_vaes import QUIET, PosteriorImageVAE, ProbeableImageVAE, pictures, watched
from tests.support.tiny_vaes import make_trainer

pytestmark = QUIET


class CountingVAE(PosteriorImageVAE):
    """Notes the size of each batch that its decoder is probed with."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def nll_given_z(self, batch: Any, z: Tensor) -> Tensor:
        self.sizes.append(len(z))
        return super().nll_given_z(batch, z)


class OfferingData(lightning.LightningDataModule):
    def train_dataloader(self) -> Any:
        return pictures(80, 16)

    def val_dataloader(self) -> Any:
        return pictures(64, 64)

    def probe_batches(self) -> list[Any]:
        return list(pictures(8, 4))


class OfferingNothing(OfferingData):
    def probe_batches(self) -> list[Any]:
        return []


PROBE_BATCH = next(iter(pictures(5, 5)))


@pytest.mark.parametrize(
    ("loaders", "probe_batch", "expected"),
    [
        ([pictures(80, 16), pictures(64, 12)], None, [12, 12, 12]),
        ([pictures(80, 16), pictures(64, 4)], None, [4] * 8),
        ([pictures(80, 16), pictures(64, 64)], None, [64]),
        ([pictures(80, 16), pictures(64, 2)], None, [2] * 16),
        ([pictures(80, 16), pictures(9, 8)], None, [8]),
        ([pictures(80, 16), pictures(64, 1)], None, [16]),
        ([pictures(80, 16)], None, [16]),
        ([pictures(80, 16), []], None, [16]),
        ([pictures(80, 16), pictures(64, 12)], PROBE_BATCH, [5]),
        ([OfferingData()], None, [4, 4]),
        ([OfferingData()], PROBE_BATCH, [5]),
        ([OfferingNothing()], None, [64]),
    ],
)
def test_probes_take_given_batches_or_offered_ones_or_the_first_of_validation_or_the_one_at_hand(
    loaders, probe_batch, expected, tmp_path
):
    module, monitor = CountingVAE(), PosteriorMetricsMonitor(probe_batch=probe_batch)
    trainer = make_trainer(tmp_path, [monitor], max_steps=1)
    if isinstance(loaders[0], lightning.LightningDataModule):
        trainer.fit(module, datamodule=loaders[0])
    else:
        trainer.fit(module, *loaders)
    assert module.sizes[::2] == module.sizes[1::2] == expected  # each is probed twice, with its own z and another's


class UndecidedVAE(CountingVAE):
    """Uses its latent too little for a few sequences to show it."""

    def nll_given_z(self, batch: Any, z: Tensor) -> Tensor:
        mixed = float((z.abs() * torch.arange(1, len(z) + 1)[:, None]).sum())  # another order of z is another number
        noise_B = torch.randn(len(z), generator=torch.Generator().manual_seed(int(1e4 * mixed)))
        return 0 * super().nll_given_z(batch, z) + 5 * noise_B


def test_what_a_few_sequences_do_not_decide_is_read_on_many_with_three_partners_each(tmp_path):
    torch.manual_seed(0)
    module, monitor = UndecidedVAE(), PosteriorMetricsMonitor(update_frequency=2)
    trainer = make_trainer(tmp_path, [monitor], max_steps=150)
    trainer.fit(module, pictures(320, 16), pictures(200, 16))
    readings = read_readings(tmp_path / "posterior.jsonl")
    assert {reading.decoder_use_sequences for reading in readings} == {32, 128}
    close = sum(reading.decoder_use_sequences == 128 for reading in readings)
    assert len(module.sizes) == 2 * 2 * len(readings) + 4 * 8 * close
    assert close <= len(readings) / 4


def test_what_a_few_sequences_decide_is_not_read_on_more(tmp_path):
    torch.manual_seed(0)
    module = CountingVAE()
    watched(tmp_path, module, [pictures(512, 32), pictures(200, 16)], PosteriorMetricsMonitor(), max_steps=100)
    late = read_readings(tmp_path / "posterior.jsonl")[20:]
    assert {reading.decoder_use_sequences for reading in late} == {32}


class KnowsTheSequence:
    """A decoder that loses a nat a step with the latent of another sequence."""

    def nll_given_z(self, batch: TokenBatch, z: Tensor) -> Tensor:
        return batch.lengths_B * (z[:, 0].round() != batch.sequences_B)

    def steps_of(self, batch: TokenBatch) -> Tensor:
        return batch.lengths_B


@pytest.mark.parametrize("length", [60, 300])
def test_stubs_among_the_sequences_do_not_hide_that_the_decoder_uses_the_latent(length):
    sequences = FakeSequences(np.where(np.arange(2000) % 25 < 3, 2, length))  # 12 % of two tokens
    true_use = float(sequences.lengths_N.mean())
    sample, uses = choose_sample(sequences.lengths_N), []
    for chosen_B in sample.batches:
        batch = sequences.cropped(sample.most_steps).gather(chosen_B)
        mean_B1 = batch.sequences_B[:, None].double()
        uses.append(decoder_use(KnowsTheSequence(), batch, StepOutputs(mean_B1, torch.full_like(mean_B1, -30.0))))
    lost, squares, count, steps, wins = (float(torch.stack(column).sum()) for column in zip(*uses, strict=True))
    error = (max(0.0, squares / count - (lost / count) ** 2) / (count - 1)) ** 0.5
    assert lost / count > 3 * error
    assert lost / count == pytest.approx(true_use, rel=0.3)
    assert steps == lost
    assert wins == count


class ManualVAE(ProbeableImageVAE):
    """Takes its optimizer steps itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(outputs["loss"])
        optimizer.step()
        return outputs

    def nll_given_z(self, batch: Any, z: Tensor) -> Tensor:
        self.sizes.append(len(batch[0]))
        return super().nll_given_z(batch, z)


def test_a_module_that_optimizes_by_hand_is_probed_with_the_batch_at_hand(tmp_path):
    module = ManualVAE()
    reading = watched(tmp_path, module, [pictures(80, 16), pictures(64, 32)], PosteriorMetricsMonitor())
    assert module.steps_taken == 5
    assert module.sizes == [16] * 10
    assert reading.decoder_use is not None


def test_a_module_that_optimizes_by_hand_cannot_be_probed_with_a_given_batch_alone(tmp_path):
    monitor = PosteriorMetricsMonitor(probe_batch=PROBE_BATCH)
    with pytest.raises(ValueError, match=r"to read decoder use on probe_batch, ManualVAE needs posterior_of\(batch\)"):
        watched(tmp_path, ManualVAE(), [pictures(80, 16)], monitor)


def test_a_step_that_fails_in_a_probe_names_the_monitor_and_the_remedy(tmp_path):
    class Strict(ProbeableImageVAE):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if not torch.is_grad_enabled():
                raise RuntimeError("this step needs gradients")
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="this step needs gradients") as failed:
        watched(tmp_path, Strict(), [pictures(80, 16), pictures(64, 32)], PosteriorMetricsMonitor())
    (note,) = failed.value.__notes__
    assert note.startswith("This was the monitor, which called Strict.training_step in eval mode")
    assert "Give Strict a method posterior_of(batch)" in note


class MeanVAE(ProbeableImageVAE):
    """Returns one NLL for all sequences."""

    def nll_given_z(self, batch: Any, z: Tensor) -> Tensor:
        return super().nll_given_z(batch, z).mean()


def test_what_is_no_nll_of_each_sequence_is_refused_at_the_first_reading(tmp_path):
    module = MeanVAE()
    words = r"MeanVAE.nll_given_z returned shape \(\) for a batch of 32: let it return \(32,\)"
    with pytest.raises(ValueError, match=words):
        watched(tmp_path, module, [pictures(80, 16), pictures(64, 32)], PosteriorMetricsMonitor())
    assert module.steps_taken == 1
