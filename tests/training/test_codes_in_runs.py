"""Runs whose latents are codes: to the bit after an interruption, the same in parts, and what revival does to a real one."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from seqvae.config.data import BatchSettings
from seqvae.config.model import ModelSettings
from seqvae.config.monitoring import MonitoringSettings
from seqvae.config.run import RunSettings
from seqvae.config.training import ReferenceSettings
from seqvae.files import read_rows
from seqvae.models.code_prior import RecurrentCodes
from seqvae.monitors import read_readings
from seqvae.training.fit import fit
from seqvae.training.network import CODE_PRIOR
from seqvae.training.run_directory.checkpoint_file import AtomicCheckpointIO
from tests.support.short_runs import MODEL, Kill, Run, ShortData, assert_same, last_of, short_module, train

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*")
CODES = replace(MODEL, latent="discrete", codes=4, codebooks=2)
GRID = replace(CODES, codebook="fsq")


@pytest.mark.parametrize("model", [CODES, replace(CODES, latent_scope="step"), replace(GRID, codes=4, latent_size=4)])
def test_a_run_of_codes_that_was_killed_goes_on_exactly(model, tmp_path):
    unbroken = train(tmp_path / "unbroken", module=short_module(model=model))
    train(tmp_path / "killed", [Kill("on_train_batch_start", 13)], module=short_module(model=model))
    after = train(tmp_path / "killed", module=short_module(model=model), checkpoint=last_of(tmp_path / "killed"))
    assert_same(after, unbroken)


def test_a_run_goes_on_without_the_prior_that_was_fitted_to_its_checkpoint(tmp_path):
    unbroken = train(tmp_path / "unbroken", module=short_module(model=CODES))
    train(tmp_path / "killed", [Kill("on_train_batch_start", 13)], module=short_module(model=CODES))
    checkpoint = last_of(tmp_path / "killed")
    assert checkpoint is not None
    prior = {name: weight.detach() for name, weight in RecurrentCodes(4, 2, 3).state_dict().items()}
    content = torch.load(checkpoint, weights_only=True) | {CODE_PRIOR: prior}
    AtomicCheckpointIO().save_checkpoint(content, checkpoint)
    after = train(tmp_path / "killed", module=short_module(model=CODES), checkpoint=checkpoint)
    assert_same(after, unbroken)
    newest = last_of(tmp_path / "killed")
    assert newest is not None
    assert CODE_PRIOR not in torch.load(newest, weights_only=True)


def test_a_codebook_learns_the_same_of_a_batch_in_parts(tmp_path):
    def trained(parts: dict[str, int]) -> Run:
        module = short_module(model=replace(CODES, dropout=0.0, word_dropout=0.0))
        module.micro_batches.parts.load_state_dict(parts)
        data = ShortData(batches=BatchSettings(batch_size=4, bucketing=False), accumulate=1)
        return train(tmp_path / str(len(parts)), module=module, data=data, max_steps=3, accumulate_grad_batches=1)

    whole, parts = (run.trainer.lightning_module.state_dict() for run in (trained({}), trained({"1": 2})))
    assert whole.keys() == parts.keys()
    for name, weight in whole.items():
        torch.testing.assert_close(parts[name], weight, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("revives", [False, True])
def test_a_codebook_collapses_where_dead_codes_are_left_alone(revives, tmp_path: Path):
    settings = ReferenceSettings(
        batches=BatchSettings(),
        model=ModelSettings(latent="discrete", width=32, depth=1, revive_codes=revives),
        monitoring=MonitoringSettings(fast_detection=True),
        run=RunSettings(max_steps=300, output_dir=str(tmp_path), run_name="codes"),
    )
    fit(settings)
    last = read_readings(tmp_path / "codes" / "posterior.jsonl")[-1]
    verdicts = [row["verdict"] for row in read_rows(tmp_path / "codes" / "events.jsonl") if row["event"] == "verdict"]
    assert last.codes_in_use is not None
    if revives:
        assert last.codes_in_use >= 0.95
        assert verdicts[-1] == "healthy"
        assert "codebook_collapsed" not in verdicts
    else:
        assert last.codes_in_use < 0.5
        assert verdicts[-1] == "codebook_collapsed"
