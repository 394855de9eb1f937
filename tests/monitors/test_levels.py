"""Two levels of latents in a run: each has readings, a probe and a verdict of its own, and a report names both.

Shapes: B sequences, S steps, Z dimensions of the sequence's latent, Y of a step's.
"""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning import Callback

from seqvae.api import Run
from seqvae.config.training import ObjectiveSettings, OptimizerSettings
from seqvae.models.vae import SequenceVAE
from seqvae.monitors import PosteriorMetricsMonitor, read_readings
from seqvae.monitors.contract import HasLevels, StepOutputs
from seqvae.monitors.decoder_use import decoder_use, posterior_of
from seqvae.monitors.escape import why_unreadable
from seqvae.monitors.reading import NAME
from seqvae.reports.read_run import read_run
from seqvae.reports.run_page import report_page
from seqvae.reports.story import story_of
from seqvae.training.module import TrainingModule
from seqvae.verdicts import Circumstances, advice_on
from tests.models.test_levels import make_levels
from tests.support.short_runs import DESCRIPTION, MODEL, STEPS, Kill, assert_same, last_of, train
from tests.support.small_models import make_batch
from tests.support.tiny_vaes import TinyVAE

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*")


def two_levels() -> TrainingModule:
    torch.manual_seed(0)
    settings = replace(MODEL, latent_scope="both", step_latent_size=3)
    network = SequenceVAE(DESCRIPTION, settings)
    origin: dict[str, Any] = {"settings": vars(settings), "description": {}, "data": {}}
    return TrainingModule(
        network, ObjectiveSettings(), OptimizerSettings(warmup=2), total_steps=STEPS, seed=0, origin=origin
    )


def monitors(directory: Path) -> list[Callback]:
    options: dict[str, Any] = {"update_frequency": 2, "plot_frequency": None, "log_dir": directory}
    return [PosteriorMetricsMonitor(level=level, **options) for level in (None, "step")]


def test_each_level_has_readings_of_its_own(tmp_path, capsys):
    train(tmp_path, monitors(tmp_path), module=two_levels())
    own, below = (read_readings(folder / NAME) for folder in (tmp_path, tmp_path / "step_level"))
    assert [reading.step for reading in own] == [reading.step for reading in below] == list(range(1, STEPS + 1))
    assert {(reading.scope, len(reading.kl_per_dim)) for reading in own} == {("sequence", 2)}
    assert {(reading.scope, len(reading.kl_per_dim)) for reading in below} == {("step", 3)}
    assert all(reading.decoder_use is not None for reading in (*own, *below))
    assert own[-1].decoder_use != below[-1].decoder_use
    assert own[-1].nll == below[-1].nll
    printed = capsys.readouterr().out
    assert "sequence latents: warming up since" in printed or "sequence latents: cannot tell since" in printed
    assert "step latents: warming up since" in printed or "step latents: cannot tell since" in printed
    assert "posterior: " not in printed


def test_a_resumed_run_reads_both_levels_as_the_unbroken_one(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    unbroken = train(whole, monitors(whole), module=two_levels())
    train(broken, [*monitors(broken), Kill("on_train_batch_start", 15)], module=two_levels())
    assert last_of(broken) is not None
    resumed = train(broken, monitors(broken), module=two_levels(), checkpoint=last_of(broken))
    assert_same(resumed, unbroken)
    for name in (NAME, f"step_level/{NAME}"):
        assert (broken / name).read_text() == (whole / name).read_text()


@pytest.mark.slow
def test_monitors_change_nothing_of_what_is_learned(tmp_path):
    assert_same(train(tmp_path / "with", monitors(tmp_path), module=two_levels()), train(tmp_path, module=two_levels()))


# --- The probe of one level -----------------------------------------------------------------------------------------


def probed(vae: SequenceVAE, level: str | None, batch: Any) -> float:
    """Return what the latents of others cost a sequence, of one level."""
    module = TrainingModule(
        vae, ObjectiveSettings(), OptimizerSettings(), total_steps=1, seed=0, origin={"settings": {}}
    )
    assert isinstance(module, HasLevels)
    subject: Any = module if level is None else module.latent_level(level)
    with torch.no_grad():
        use = decoder_use(subject, batch, posterior_of(subject, batch), partners=3)
    return float(use.nll_lost / use.sequences)


def test_only_the_latents_of_one_level_are_exchanged():
    batch = make_batch("vectors", [6] * 8)
    vae = make_levels("vectors")
    with torch.no_grad():
        vae.decoder.latent.weight[:, 3:] = 0  # a decoder that sees no latent of a step
    assert probed(vae, "step", batch) == 0
    assert abs(probed(vae, None, batch)) > 1e-3
    vae = make_levels("vectors")
    with torch.no_grad():
        vae.decoder.latent.weight[:, :3] = 0  # nor sees the sequence's, but for the prior that it gives the steps
    through_the_prior = probed(vae, None, batch)
    assert abs(through_the_prior) > 1e-3
    assert vae.step_level is not None
    with torch.no_grad():
        for weight in vae.step_level.prior_moments.parameters():
            weight.zero_()
    assert probed(vae, None, batch) == 0
    assert abs(probed(vae, "step", batch)) > 1e-3


def test_no_escape_threshold_is_read_where_there_are_two_levels():
    module = two_levels()
    outputs = StepOutputs(torch.zeros(2, 2), torch.zeros(2, 2))
    assert why_unreadable(module, outputs) == "it is defined for one level of latents, and there are more"


def test_a_module_without_levels_is_refused_in_one_line():
    monitor = PosteriorMetricsMonitor(level="step")
    trainer: Any = SimpleNamespace(default_root_dir=".", world_size=1, global_step=0)
    with pytest.raises(ValueError, match=r"has no method latent_level\(name\), so that level 'step' cannot be read"):
        monitor.on_train_start(trainer, TinyVAE())


# --- Verdicts and advice --------------------------------------------------------------------------------------------


def test_advice_names_the_flags_of_the_level():
    circumstances = Circumstances(level="step")
    advice = " ".join(advice_on("collapsed", active=0, scope="step", kl_weight=1.0, circumstances=circumstances))
    assert "--step_free_bits 0.019" in advice
    assert "--free_bits" not in advice.replace("--step_free_bits", "")
    assert "--target_kl" not in advice
    shrink = advice_on("partly_collapsed", active=3, circumstances=circumstances)
    assert shrink[0].startswith("--step_latent_size 3")
    assert "--target_kl 5" in " ".join(advice_on("collapsed", active=0, kl_weight=1.0, circumstances=Circumstances()))


def write_level(directory: Path, verdict: str, evidence: str, advice: list[str]) -> None:
    directory.mkdir(exist_ok=True)
    reading = {
        "step": 90,
        "scope": "sequence",
        "rate": 1.0,
        "kl_per_dim": [1.0, 0.0],
        "active_units": 1,
        "mutual_information": 0.9,
        "mutual_information_cap": 4.0,
        "verdict": verdict,
    }
    event = {"time": "2026-01-01T00:00:00.000Z", "step": 90, "event": "verdict", "verdict": verdict, "since_step": 90}
    (directory / NAME).write_text(json.dumps(reading) + "\n")
    (directory / "events.jsonl").write_text(json.dumps(event | {"evidence": evidence, "advice": advice}) + "\n")


def test_a_report_names_the_verdict_on_each_level(tmp_path):
    write_level(tmp_path, "healthy", "the latent carries something and the decoder uses it", [])
    write_level(tmp_path / "step_level", "collapsed", "no information", ["--step_free_bits 0.02 (a floor)"])
    story = story_of(read_run(tmp_path), now=0)
    assert story.tone == "bad"
    assert story.verdict == Run(tmp_path).verdict == "sequence latents: healthy, step latents: collapsed"
    assert story.sentence == "Step latents: the posterior has collapsed: the decoder does without the latent"
    assert "Step latents, collapsed: Since step 90: no information." in story.why
    assert "Step latents: --step_free_bits 0.02 (a floor)" in story.next
    page = report_page(read_run(tmp_path), now=0)
    assert "<h2>Step latents</h2>" in page
    assert len(Run(tmp_path).step_readings) == 1


def test_levels_that_agree_share_one_verdict(tmp_path):
    for directory in (tmp_path, tmp_path / "step_level"):
        write_level(directory, "healthy", "the latent carries something and the decoder uses it", [])
    story = story_of(read_run(tmp_path), now=0)
    assert (story.tone, story.verdict) == ("good", "healthy")


def test_a_run_that_either_level_stopped_is_stopped(tmp_path):
    write_level(tmp_path, "healthy", "the latent carries something and the decoder uses it", [])
    write_level(tmp_path / "step_level", "collapsed", "no information", [])
    row = {"time": "2026-01-02T00:00:00.000Z", "step": 90, "event": "stopped", "verdict": "collapsed"}
    with (tmp_path / "step_level" / "events.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    assert story_of(read_run(tmp_path), now=0).state == "Stopped at step 90, as --on_collapse stop says."
