"""The monitor under a real Trainer: when it reads, what it writes, and that training does not notice."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from seqvae.files import read_rows
from seqvae.monitors import PosteriorMetricsMonitor, Reading, StepOutputs, read_readings
from seqvae.monitors.callback import planned_steps, steps_between_readings
from seqvae.monitors.detector import Detector
from seqvae.monitors.reading import to_row
from tests.support.tiny_vaes import (
    LATENT,
    Batches,
    FrozenVAE,
    OpaqueVAE,
    SaveAt,
    SilentVAE,
    TinyStepVAE,
    TinyVAE,
    make_batches,
    make_trainer,
    mask_of,
    train_shared,
)

pytestmark = [
    # Lightning 2.6.6 asks torch 2.13 in a way that torch calls deprecated.
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*"),
    # Most runs here train without validation.
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]


def rows_of(directory: Path) -> list[Reading]:
    return read_readings(directory / "posterior.jsonl")


def test_readings_come_at_optimizer_steps_whatever_the_accumulation(tmp_path):
    monitor = PosteriorMetricsMonitor(update_frequency=3)
    trainer = make_trainer(tmp_path, [monitor], max_steps=200, accumulate_grad_batches=2, limit_val_batches=0)
    trainer.fit(TinyVAE(), Batches(make_batches(40, size=2)))
    readings = rows_of(tmp_path)
    assert [reading.step for reading in readings] == [*range(3, 200, 3), 200]
    assert [reading.posteriors for reading in readings[:2]] == [3 * 2 * 2, 6 * 2 * 2]  # of all micro-batches
    assert readings[0].kl_weight == 0.6
    assert readings[-1] == monitor.reading


@pytest.mark.parametrize(
    ("update_frequency", "last_step", "expected"),
    [
        (100, None, 100),
        (100, 10_000, 100),
        (100, 5_000, 100),
        (100, 4_999, 99),
        (100, 500, 10),
        (100, 7, 1),
        (5, 500, 5),
    ],
)
def test_a_run_of_known_length_is_read_fifty_times_or_at_each_step(update_frequency, last_step, expected):
    every = steps_between_readings(update_frequency, last_step)
    assert every == expected
    assert last_step is None or last_step // every >= min(50, last_step)


@pytest.mark.parametrize(("max_steps", "max_epochs", "expected"), [(7, -1, 7), (-1, 3, 3 * 2), (4, 3, 4), (9, 3, 6)])
def test_the_length_of_a_run_is_known_from_its_steps_or_its_epochs(tmp_path, max_steps, max_epochs, expected):
    """Three micro-batches, two to a step, make two steps an epoch."""
    trainer = make_trainer(tmp_path, [], max_steps, accumulate_grad_batches=2, max_epochs=max_epochs)
    trainer.fit(TinyVAE(), Batches(make_batches(3)))
    assert planned_steps(trainer) == trainer.global_step == expected


def test_a_healthy_vae_and_a_collapsed_one_read_as_such(tmp_path):
    for name in ("healthy", "dead"):
        trainer = make_trainer(tmp_path / name, [PosteriorMetricsMonitor()], max_steps=8)
        trainer.fit(FrozenVAE(dead=name == "dead"), Batches(make_batches(8)), Batches(make_batches(1)))
    healthy, dead = rows_of(tmp_path / "healthy")[-1], rows_of(tmp_path / "dead")[-1]
    assert healthy.mutual_information > 1
    assert healthy.decoder_use is not None
    assert healthy.decoder_use > 1
    assert healthy.active_units == LATENT
    assert dead.mutual_information == pytest.approx(0, abs=1e-9)
    assert (dead.rate, dead.active_units, dead.decoder_use) == (0.0, 0, 0.0)


def test_posteriors_of_steps_are_read_without_their_padding(tmp_path):
    batches = make_batches(4, size=6, steps=5)
    trainer = make_trainer(tmp_path, [PosteriorMetricsMonitor()], max_steps=4)
    trainer.fit(TinyStepVAE(), Batches(batches), Batches(batches[:1]))
    last = rows_of(tmp_path)[-1]
    assert (last.scope, last.posteriors) == ("step", 4 * int(mask_of(batches[0]).sum()))
    assert math.isfinite(last.rate)
    assert last.nll is None
    assert last.decoder_use is not None
    assert last.decoder_use > 0


def test_a_module_that_returns_nothing_learns_at_the_first_step_what_to_return(tmp_path):
    trainer = make_trainer(tmp_path, [PosteriorMetricsMonitor()], max_steps=4, accumulate_grad_batches=3)
    with pytest.raises(
        ValueError, match=r"SilentVAE.training_step returned .*Let training_step return a dict with"
    ) as refused:
        trainer.fit(SilentVAE(), Batches(make_batches(4)))
    assert trainer.global_step == 0  # at the first micro-batch of the first step
    for name in StepOutputs._fields:
        assert f'"{name}"' in str(refused.value)


def test_a_function_may_find_the_posterior_for_a_module_that_does_not_return_it(tmp_path):
    def look(module: Any, outputs: Any, batch: Any) -> StepOutputs:
        return StepOutputs(*module.posterior_of(batch))

    trainer = make_trainer(tmp_path, [PosteriorMetricsMonitor(read_outputs=look)], max_steps=2)
    trainer.fit(SilentVAE(), Batches(make_batches(4)))
    assert [reading.posteriors for reading in rows_of(tmp_path)] == [16, 32]


def test_training_is_the_same_with_and_without_the_monitor(tmp_path):
    weights = []
    for callbacks in ([], [PosteriorMetricsMonitor(update_frequency=1)]):
        torch.manual_seed(3)
        module = TinyVAE()
        trainer = make_trainer(tmp_path, list(callbacks), max_steps=6, val_check_interval=2)
        trainer.fit(module, Batches(make_batches(6)), Batches(make_batches(2)))
        assert module.dropout.training
        weights.append((torch.cat([p.detach().flatten() for p in module.parameters()]), torch.rand(1)))
    assert rows_of(tmp_path)[0].decoder_use is not None  # it did run, dropout, noise and all
    assert torch.equal(weights[0][0], weights[1][0])
    assert weights[0][1] == weights[1][1]


@pytest.mark.parametrize("micro_batch", [15, 16, 17])
def test_a_resumed_run_has_the_readings_of_an_unbroken_one_without_doubles_or_holes(tmp_path, micro_batch):
    batches, validation, options = make_batches(40), make_batches(1), {"max_steps": 20, "accumulate_grad_batches": 2}
    save = SaveAt(tmp_path / "saved.ckpt", micro_batch)

    def monitor() -> PosteriorMetricsMonitor:
        return PosteriorMetricsMonitor(update_frequency=3, posteriors=100)

    make_trainer(tmp_path, [monitor(), save], **options).fit(FrozenVAE(), Batches(batches), Batches(validation))
    unbroken = rows_of(tmp_path)
    resumed = make_trainer(tmp_path, [monitor()], **options)
    resumed.fit(
        FrozenVAE(), Batches(batches), Batches(validation), ckpt_path=tmp_path / "saved.ckpt", weights_only=True
    )
    assert rows_of(tmp_path) == unbroken
    assert [reading.step for reading in unbroken] == list(range(1, 21))


def test_among_another_number_of_processes_a_window_begins_empty(tmp_path):
    train_shared(tmp_path, posteriors=64)
    checkpoint = torch.load(tmp_path / "saved.ckpt", weights_only=True)
    windows = checkpoint["callbacks"]["PosteriorMetricsMonitor"]["windows"]
    windows |= {name: value.repeat(2, *[1] * (value.dim() - 1)) for name, value in windows.items()}
    torch.save(checkpoint, tmp_path / "saved.ckpt")
    train_shared(tmp_path, posteriors=64, ckpt_path=tmp_path / "saved.ckpt")
    assert [reading.posteriors for reading in rows_of(tmp_path)] == [16, 32, 16, 32]


def test_a_new_run_in_the_directory_of_another_begins_a_new_file(tmp_path):
    monitor = PosteriorMetricsMonitor(log_dir=tmp_path / "elsewhere")
    for _ in range(2):
        make_trainer(tmp_path, [monitor], max_steps=3).fit(TinyVAE(), Batches(make_batches(4)))
    readings = rows_of(tmp_path / "elsewhere")
    assert [(reading.step, reading.posteriors) for reading in readings] == [(1, 16), (2, 32), (3, 48)]


def test_the_decoder_is_probed_at_the_first_every_nth_and_the_last_reading(tmp_path, monkeypatch):
    monkeypatch.setattr(Detector, "wants_decoder_use", lambda *_: False)
    monitors = {
        "at every third": PosteriorMetricsMonitor(probe_every_n_readings=3),
        "on suspicion": PosteriorMetricsMonitor(probe_every_n_readings=None),
        "never": PosteriorMetricsMonitor(probe_decoder=False),
    }
    probed = {}
    for name, monitor in monitors.items():
        trainer = make_trainer(tmp_path / name, [monitor], max_steps=8)
        trainer.fit(TinyVAE(), Batches(make_batches(8)), Batches(make_batches(1)))
        probed[name] = [reading.step for reading in rows_of(tmp_path / name) if reading.decoder_use is not None]
    assert probed == {"at every third": [1, 3, 6, 8], "on suspicion": [1], "never": []}


def test_a_given_batch_is_probed_on_without_any_validation(tmp_path):
    monitor = PosteriorMetricsMonitor(probe_batch=make_batches(1)[0])
    make_trainer(tmp_path, [monitor], max_steps=2).fit(TinyVAE(), Batches(make_batches(4)))
    assert all(reading.decoder_use is not None for reading in rows_of(tmp_path))


def test_readings_go_to_the_logger_in_one_call_each_and_to_the_console_when_verbose(tmp_path, capsys):
    calls: list[tuple[dict[str, float], int | None]] = []

    class Spy(CSVLogger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            calls.append((dict(metrics), step))

    monitor = PosteriorMetricsMonitor(verbose=True, probe_decoder=False)
    trainer = make_trainer(tmp_path, [monitor], max_steps=2, logger=Spy(tmp_path), log_every_n_steps=1)
    trainer.fit(TinyVAE(), Batches(make_batches(4)))
    assert [step for _, step in calls] == [1, 2]
    assert {"posterior/rate", "posterior/mutual_information", "posterior/kl_weight", "posterior/nll"} <= set(
        calls[0][0]
    )
    assert not {"posterior/step", "posterior/decoder_use", "posterior/scope"} & set(calls[0][0])
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines() if "rate" in line] == [
        "posterior: step 1",
        "posterior: step 2",
    ]


def test_it_is_reported_once_that_a_module_has_no_method_for_decoder_use(tmp_path, capsys):
    trainer = make_trainer(tmp_path, [PosteriorMetricsMonitor()], max_steps=2)
    trainer.fit(OpaqueVAE(), Batches(make_batches(4)), Batches(make_batches(1)))
    said = "OpaqueVAE has no nll_given_z(batch, z), so decoder use is not read"
    assert capsys.readouterr().out.count(said) == 1
    assert [said in event["said"] for event in read_rows(tmp_path / "events.jsonl") if "said" in event] == [True]
    assert [reading.decoder_use for reading in rows_of(tmp_path)] == [None, None]


@pytest.mark.slow
def test_two_processes_read_what_one_reads(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    train_shared(one, posteriors=256, accumulate_grad_batches=2)
    train_shared(two, posteriors=256, devices=2, strategy="ddp_spawn")
    assert [reading.posteriors for reading in rows_of(two)] == [32, 64, 96, 128]
    first, second = (torch.load(two / f"process{rank}.pt") for rank in (0, 1))
    assert first == second == to_row(rows_of(two)[-1])
    assert_alike(rows_of(two)[-1], rows_of(one)[-1])


@pytest.mark.slow
def test_two_processes_go_on_with_the_windows_of_both(tmp_path):
    options: dict[str, Any] = {"posteriors": 64, "devices": 2, "strategy": "ddp_spawn"}
    train_shared(tmp_path, **options)
    unbroken = rows_of(tmp_path)
    train_shared(tmp_path, ckpt_path=tmp_path / "saved.ckpt", **options)
    assert rows_of(tmp_path) == unbroken


def assert_alike(two: Reading, one: Reading) -> None:
    """Of the same posteriors in another order: equal to rounding, but for the information, where other noise meets them."""
    noisy = ("mutual_information", "aggregate_kl")
    for name, value in one._asdict().items():
        if value is None or name == "scope":
            assert getattr(two, name) == value, name
        else:
            assert getattr(two, name) == pytest.approx(value, rel=1e-5, abs=0.1 if name in noisy else 0), name


@pytest.mark.parametrize(
    ("options", "total_steps", "words"),
    [
        ({}, 10_000, "a reading of up to 1,024 posteriors every 100 steps, decoder use at each reading"),
        ({}, 1_000, "every 20 steps (in place of 100, as the run is short), decoder use at each reading"),
        (
            {"probe_every_n_readings": 10},
            60,
            "every step (in place of 100, as the run is short), decoder use at one reading in 10 and on suspicion",
        ),
        ({"probe_every_n_readings": None}, 60, "decoder use on suspicion"),
        ({"on_collapse": "stop"}, 60, "decoder use at each reading, stops when the posterior has collapsed"),
        ({"probe_decoder": False, "update_frequency": 20}, 10_000, "every 20 steps, without decoder use"),
    ],
)
def test_a_monitor_describes_itself_in_a_line(options, total_steps, words):
    assert PosteriorMetricsMonitor(**options).describe(total_steps).endswith(words)


@pytest.mark.parametrize("name", ["update_frequency", "posteriors", "probe_every_n_readings"])
def test_impossible_frequencies_are_refused(name):
    options: dict[str, Any] = {name: 0}
    with pytest.raises(ValueError, match=f"{name} must be 1 or more, got 0"):
        PosteriorMetricsMonitor(**options)
