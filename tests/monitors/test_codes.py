"""Readings of codes against direct counts, through a run's end and its continuation; the verdict that they lead to, and no other.

Shapes: B sequences, S steps, H codebooks, K codes.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from seqvae.monitors import PosteriorMetricsMonitor, StepOutputs, code_outputs, read_readings
from seqvae.monitors.codes import DEAD_AFTER, ENOUGH, CodeWindow
from seqvae.monitors.contract import fault_of, step_outputs_of
from seqvae.monitors.decoder_use import decoder_use
from seqvae.monitors.detector import Detector, KLSchedule
from seqvae.monitors.reading import Reading, describe_reading, from_row, to_row
from seqvae.verdicts import Circumstances, advice_on
from tests.support.foreign_vaes import QUIET
from tests.support.tiny_vaes import Batches, make_batches, make_trainer

pytestmark = QUIET


def test_a_reading_counts_what_was_pushed():
    window, generator = CodeWindow(), torch.Generator().manual_seed(0)
    codes_NBH = torch.randint(0, 5, (6, 10, 2), generator=generator)
    mask_NB = torch.rand(6, 10, generator=generator) < 0.8
    for codes_BH, mask_B in zip(codes_NBH, mask_NB, strict=True):
        window.push(codes_BH, 16, mask_B, nll_B=codes_BH[:, 0].float())
    reading = window.take_reading(30, 1, kl_weight=1.0)
    real_RH = codes_NBH[mask_NB]
    assert (reading.posteriors, reading.code_latents) == (len(real_RH), len(real_RH))
    assert (reading.codebooks, reading.codebook_size) == (2, 16)
    used = [set(real_RH[:, book].tolist()) for book in range(2)]
    assert reading.codes_in_use == pytest.approx((len(used[0]) + len(used[1])) / 32, rel=1e-5)
    entropies = []
    for book in range(2):
        shares = [float((real_RH[:, book] == code).double().mean()) for code in used[book]]
        entropies.append(-sum(share * math.log(share) for share in shares))
    assert reading.code_perplexity == pytest.approx(math.exp(sum(entropies) / 2), rel=1e-5)
    pairs = [tuple(row) for row in real_RH.tolist()]
    joint = -sum(pairs.count(pair) / len(pairs) * math.log(pairs.count(pair) / len(pairs)) for pair in set(pairs))
    assert reading.mutual_information == pytest.approx(joint, rel=1e-5)
    assert reading.rate == pytest.approx(2 * math.log(16), rel=1e-5)
    assert reading.nll == pytest.approx(float(real_RH[:, 0].float().mean()), rel=1e-5)
    assert reading.codes_in_use_expected == pytest.approx(1 - (15 / 16) ** len(real_RH), rel=1e-5)


def test_idle_codes_are_those_that_nothing_has_fallen_to_since():
    window, size = CodeWindow(), 4
    batches = {10: [0, 1, 2, 3], 20: [0] * DEAD_AFTER * size, 30: [1, 0]}
    for step, codes in batches.items():
        window.push(torch.tensor(codes)[:, None], size)
        reading = window.take_reading(step, 0)
    assert reading.code_idle_steps == (0, 0, 20, 20)
    assert (reading.dead_codes, reading.dead_code_steps) == (2, 20)


def test_the_share_in_use_is_of_the_last_latents_that_are_enough():
    window = CodeWindow()
    window.push(torch.tensor([[0], [1], [2], [3]]), 4)
    window.take_reading(10, 0)
    for step in (20, 30):
        window.push(torch.zeros(ENOUGH * 4, 1, dtype=torch.int64), 4)
        reading = window.take_reading(step, 0)
    assert (reading.code_latents, reading.codes_in_use) == (ENOUGH * 4, 0.25)


def test_a_window_goes_on_from_its_state():
    whole, first, second = CodeWindow(64), CodeWindow(64), CodeWindow(64)
    batches = torch.randint(0, 9, (8, 5, 3, 2), generator=torch.Generator().manual_seed(3))
    readings: list[Reading] = []
    for number, codes_BSH in enumerate(batches):
        window = first if number < 5 else second
        if number == 5:
            second.load_state_dict(first.state_dict())
        for one in (whole, window):
            one.push(codes_BSH, 9, nll_B=torch.ones(5))
        if number % 2:
            readings = [one.take_reading(number, 0) for one in (whole, window)]
            assert readings[0] == readings[1]
    assert readings[0].scope == "step"


def test_a_row_of_a_reading_reads_back():
    window = CodeWindow()
    window.push(torch.tensor([[0], [1]]), 4)
    reading = window.take_reading(10, 0)
    assert from_row(to_row(reading))._replace(effective_dimensions=0.0) == reading._replace(effective_dimensions=0.0)
    assert "50.0 % of 4 codes in use, perplexity 2" in describe_reading(reading)
    assert "active units" not in describe_reading(reading)


# --- What a module hands over -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codes", "size", "fault"),
    [
        (torch.zeros(4, 1), 8, "not whole numbers"),
        (torch.zeros(4, dtype=torch.int64), 8, "codes of shape"),
        (torch.zeros(4, 1, dtype=torch.int64), 1, "a codebook_size of 1"),
        (torch.zeros(4, 1, dtype=torch.int64), 8, None),
    ],
)
def test_codes_are_checked(codes, size, fault):
    found = fault_of(code_outputs(codes, size))
    assert found is None if fault is None else fault in (found or "")


def test_a_code_beyond_its_codebook_is_refused():
    with pytest.raises(ValueError, match="codes from 1 to 8 for a codebook_size of 8"):
        CodeWindow().push(torch.tensor([[1], [8]]), 8)


def test_codes_without_their_number_are_refused():
    with pytest.raises(ValueError, match="no codebook_size"):
        step_outputs_of(object(), {"loss": 0, "codes": torch.zeros(2, 1, dtype=torch.int64)}, None)


class Table:
    """Decodes code c of a sequence as the number c."""

    def nll_given_z(self, batch: Tensor, z: Tensor) -> Tensor:
        assert not z.is_floating_point()
        return (batch - z[:, 0]).abs().float()


def test_decoder_use_exchanges_codes():
    codes_BH = torch.tensor([[0], [5], [9], [9]])
    mask_B = torch.tensor([True, True, True, False])
    use = decoder_use(Table(), codes_BH[:, 0], code_outputs(codes_BH, 10, mask_B))
    # In a ring of three, each code is given to another sequence: whichever way round, the differences are 5, 4 and 9.
    assert (float(use.nll_lost), int(use.sequences)) == (18.0, 3)


# --- Verdicts -------------------------------------------------------------------------------------------------------------


class CodeVAE(lightning.LightningModule):
    """Hands over codes that follow from the input; its decoder uses them or not."""

    def __init__(self, codes_of: Callable[[Tensor], Tensor], *, uses: bool = True) -> None:
        super().__init__()
        self.codes_of, self.uses, self.weight = codes_of, uses, nn.Parameter(torch.ones(()))

    def posterior_of(self, batch: Tensor) -> StepOutputs:
        return code_outputs(self.codes_of(batch), 64)

    def nll_given_z(self, batch: Tensor, z: Tensor) -> Tensor:
        own = self.codes_of(batch)
        return 1.0 + self.uses * (own != z).float().sum(dim=1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        codes_BH = self.codes_of(batch)
        nll_B = self.weight * torch.ones(len(batch))
        return {"loss": nll_B.mean(), "codes": codes_BH, "codebook_size": 64, "nll": nll_B.detach()}

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.0)


def all_codes(batch: Tensor) -> Tensor:
    return (1e4 * batch[:, :1]).long() % 64


def few_codes(batch: Tensor) -> Tensor:
    return all_codes(batch) % 8


@pytest.mark.parametrize(
    ("codes_of", "uses", "verdict"),
    [
        (all_codes, True, "healthy"),
        (few_codes, True, "codebook_collapsed"),
        (all_codes, False, "decoder_ignores_z"),
    ],
)
def test_a_foreign_module_may_hand_codes_over(codes_of, uses, verdict, tmp_path):
    monitor = PosteriorMetricsMonitor(update_frequency=10, log_dir=tmp_path, plot_frequency=None)
    trainer = make_trainer(tmp_path, callbacks=[monitor], max_steps=300)
    trainer.fit(CodeVAE(codes_of, uses=uses), Batches(make_batches(300)))
    assert monitor.verdict.name == verdict
    assert not any("KL" in line or "free_bits" in line or "beta" in line for line in monitor.verdict.advice)
    reading = read_readings(tmp_path / "posterior.jsonl")[-1]
    assert reading.codes_in_use == (0.125 if codes_of is few_codes else 1.0)
    assert reading.active_units is None


def reading_at(step: int, in_use: float, **changes: Any) -> Reading:
    window = CodeWindow()
    window.push(torch.arange(1000)[:, None] % 64, 64)
    return window.take_reading(step, 0)._replace(
        codes_in_use=in_use, decoder_use=5.0, decoder_use_error=0.5, decoder_use_sequences=100, **changes
    )


def test_codes_that_come_into_use_are_not_called_dead():
    detector = Detector(schedule=KLSchedule(1000, lambda step: 1.0))
    found = [detector.judge(reading_at(step, 0.02 * 1.06 ** (step // 10))).name for step in range(10, 500, 10)]
    assert "codebook_collapsed" not in found


def test_codes_that_no_latent_could_meet_so_far_are_not_missed():
    detector = Detector(schedule=KLSchedule(1000, lambda step: 1.0))
    readings = [reading_at(step, 0.1, codes_in_use_expected=0.12) for step in range(10, 500, 10)]
    assert [detector.judge(reading).name for reading in readings][-1] == "healthy"


def test_advice_on_a_collapsed_codebook_leaves_out_what_is_in_force():
    vq = Circumstances(codebook="vq", revives_codes=True)
    found = advice_on("codebook_collapsed", active=0, codes=512, perplexity=31.0, circumstances=vq)
    assert [line.partition(" (")[0] for line in found] == ["--codes 32", "--latent discrete --codebook fsq"]
    bare = Circumstances(codebook="vq", revives_codes=False)
    assert advice_on("codebook_collapsed", active=0, codes=8, perplexity=7.0, circumstances=bare)[0].startswith(
        "--revive_codes"
    )
    grid = Circumstances(codebook="fsq")
    assert [
        line.partition(" (")[0]
        for line in advice_on("codebook_collapsed", active=0, codes=512, perplexity=3.0, circumstances=grid)
    ] == ["--codes 4"]


def test_a_run_of_codes_goes_on_from_a_checkpoint_to_the_same_readings(tmp_path: Path):
    def run(directory: Path, steps: int, checkpoint: Path | None = None) -> list[Reading]:
        monitor = PosteriorMetricsMonitor(update_frequency=10, log_dir=directory, plot_frequency=None)
        trainer = make_trainer(directory, callbacks=[monitor], max_steps=steps)
        trainer.fit(CodeVAE(few_codes), Batches(make_batches(100)), ckpt_path=checkpoint)
        trainer.save_checkpoint(directory / "end.ckpt")
        return read_readings(directory / "posterior.jsonl")

    whole = run(tmp_path / "whole", 100)
    run(tmp_path / "parts", 50)
    parts = run(tmp_path / "parts", 100, tmp_path / "parts" / "end.ckpt")
    assert [as_read(one) for one in parts[-3:]] == [as_read(one) for one in whole[-3:]]


def as_read(reading: Reading) -> Reading:
    """Without what a number of batches makes of an epoch, and NaN, which equals nothing."""
    return reading._replace(epoch=0, effective_dimensions=0.0)
