"""The monitor of speed: exact rates on a clock of its own, no wait for a device between reports, FLOPs as counted by hand."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lightning
import pytest
import torch
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from seqvae.files import read_rows
from seqvae.monitors.contract import Counts, check_counts, counts_of
from seqvae.monitors.hardware import (
    MORE_PRODUCTS,
    FlopCount,
    Machine,
    Spent,
    difference,
    has_compiled_parts,
    product_peak,
)
from seqvae.monitors.throughput import Throughput, ThroughputMonitor, TrainingTime
from tests.support.scripted_training import Recorder
from tests.support.tiny_vaes import Batches, SharedData, TinyVAE, make_batches, make_trainer

pytestmark = [
    # Lightning 2.6.6 asks torch 2.13 in a way that torch calls deprecated.
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*"),
    # Most runs here train without validation.
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]

CPU = torch.device("cpu")
LOADING, STEP, VALIDATION, SAVING, FIRST = 1.0, 3.0, 1000.0, 500.0, 50.0
"""Seconds that things take, on the clock of `Scripted`."""


class ScriptedMachine(Machine):
    """Four cores. This process keeps two of them at work, all processes together three, of which one was busy to begin with."""

    seconds = 1e6

    def now(self) -> float:
        return self.seconds

    def spent(self) -> Spent:
        return Spent(self.seconds, 2 * self.seconds, 3 * self.seconds, 4 * self.seconds)

    def cores(self) -> int:
        return 4

    def peak_memory_gib(self) -> float | None:
        return 1.5

    def gpu_peak_memory_gib(self, device: torch.device) -> float | None:
        return 0.25

    def gpu_utilisation(self, device: torch.device) -> float | None:
        return 0.75


class ScriptedBatches(Batches):
    """Takes a second to load a batch."""

    def __init__(self, machine: ScriptedMachine, count: int) -> None:
        super().__init__([torch.tensor(float(number)) for number in range(count)])
        self.machine = machine

    def __iter__(self) -> Iterator[Tensor]:
        for batch in super().__iter__():
            self.machine.seconds += LOADING
            yield batch


class Scripted(lightning.LightningModule):
    """Micro-batches of 10 steps, n % 4 + 4 of them real, in 2 sequences. The first one of a session takes much longer."""

    def __init__(self, machine: ScriptedMachine) -> None:
        super().__init__()
        self.machine = machine
        self.weight = nn.Parameter(torch.zeros(()))
        self.is_first = True

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.machine.seconds += FIRST if self.is_first else STEP
        self.is_first = False
        return {
            "loss": 0 * self.weight,
            "real_steps": real_steps(int(batch)),
            "padded_steps": 10,
            "sequences": torch.tensor(2, dtype=torch.int32),
        }

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.machine.seconds += VALIDATION

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.machine.seconds += SAVING

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def real_steps(number: int) -> Tensor:
    return torch.tensor(number % 4 + 4)


class SaveAtStep(lightning.Callback):
    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path)


def rows_of(directory: Path) -> list[Throughput]:
    return [Throughput(**{**EMPTY, **row}) for row in read_rows(directory / "throughput.jsonl")]


EMPTY = dict.fromkeys(Throughput._fields)


def train(directory: Path, max_steps: int, *before: lightning.Callback, every: int = 4, **options: Any) -> Any:
    machine = ScriptedMachine()
    monitor = ThroughputMonitor(every_n_steps=every, measure_peak=False, machine=machine)
    trainer = make_trainer(directory, [*before, monitor], max_steps, **options)
    trainer.fit(Scripted(machine), ScriptedBatches(machine, 24), ScriptedBatches(machine, 1))
    return monitor


# --- Rates ----------------------------------------------------------------------------------------------------------


def test_a_report_is_exact_on_a_clock_of_its_own(tmp_path):
    recorder = Recorder()
    monitor = train(tmp_path, 10, limit_val_batches=0, logger=recorder, log_every_n_steps=4)
    first, second, last = rows_of(tmp_path)
    assert [row.step for row in (first, second, last)] == [4, 8, 10]
    assert last == monitor.throughput
    assert second == Throughput(
        step=8,
        seconds=16.0,
        real_steps_per_second=(4 + 5 + 6 + 7) / 16,
        sequences_per_second=8 / 16,
        padding_share=0.45,
        waiting_share=0.25,
        cpu_utilisation=0.5,
        machine_cpu_utilisation=0.75,
        gpu_utilisation=0.75,
        peak_memory_gib=1.5,
        gpu_peak_memory_gib=0.25,
        flops_per_second=None,
        share_of_peak=None,
    )
    assert (first.seconds, first.real_steps_per_second) == (12.0, (5 + 6 + 7) / 12)  # the very first one is left out
    assert last.seconds == 8.0
    logged = [(step, set(row)) for step, row in recorder.rows if any(name.startswith("throughput/") for name in row)]
    names = {f"throughput/{name}" for name, value in second._asdict().items() if value is not None and name != "step"}
    assert logged == [(4, names), (8, names), (10, names)]


def test_steps_are_optimizer_steps_whatever_the_accumulation(tmp_path):
    train(tmp_path, 8, accumulate_grad_batches=3, limit_val_batches=0)
    assert [(row.step, row.seconds) for row in rows_of(tmp_path)] == [(4, 11 * 4.0), (8, 12 * 4.0)]
    assert rows_of(tmp_path)[1].sequences_per_second == 0.5


def test_validation_is_no_training_time(tmp_path):
    train(tmp_path, 8, val_check_interval=2)
    assert [row.seconds for row in rows_of(tmp_path)] == [12.0, 16.0]
    assert [row.waiting_share for row in rows_of(tmp_path)] == [0.25, 0.25]
    assert [row.cpu_utilisation for row in rows_of(tmp_path)] == [0.5, 0.5]


def test_an_epoch_may_end_anywhere(tmp_path):
    train(tmp_path, 30, every=10, limit_val_batches=0)
    assert [row.seconds for row in rows_of(tmp_path)] == [36.0, 40.0, 40.0]


@pytest.mark.parametrize(("saves_last", "seconds"), [(False, [12.0, 16.0]), (True, [12.0, 15.0])])
def test_a_save_is_no_training_time_whichever_callback_makes_it(tmp_path, saves_last, seconds):
    """Nothing tells a callback when a save is done: of one that comes after it, the loading of the next batch is lost, too."""
    save, machine = SaveAtStep(tmp_path / "saved.ckpt", 6), ScriptedMachine()
    monitor = ThroughputMonitor(every_n_steps=4, measure_peak=False, machine=machine)
    callbacks = [monitor, save] if saves_last else [save, monitor]
    trainer = make_trainer(tmp_path, callbacks, 8, limit_val_batches=0)
    trainer.fit(Scripted(machine), ScriptedBatches(machine, 24))
    assert (tmp_path / "saved.ckpt").exists()
    assert [row.seconds for row in rows_of(tmp_path)] == seconds


def test_a_pause_begins_with_a_save_and_ends_with_the_next_micro_batch():
    machine = ScriptedMachine()
    time = TrainingTime(machine)
    time.pause()
    time.go_on()
    time.wait()  # nothing of this counts, since training has not begun
    machine.seconds += 7
    time.begin()
    time.wait()
    machine.seconds += 1
    time.pause()
    time.pause()
    machine.seconds += 500
    time.go_on()
    machine.seconds += 3
    lap, waited = time.end_lap()
    assert (lap.wall, lap.process, waited) == (4.0, 8.0, 1.0)
    machine.seconds += 2
    assert time.end_lap()[0].wall == 2.0


def test_a_resumed_run_drops_the_rows_beyond_its_checkpoint_and_counts_its_own_time_only(tmp_path):
    saved = tmp_path / "saved.ckpt"
    train(tmp_path, 12, SaveAtStep(saved, 6), limit_val_batches=0)
    before = rows_of(tmp_path)
    with (tmp_path / "throughput.jsonl").open("a") as file:
        file.write('{"step": 5, "cut sh')
    machine = ScriptedMachine()
    monitor = ThroughputMonitor(every_n_steps=4, measure_peak=False, machine=machine)
    trainer = make_trainer(tmp_path, [monitor], 12, limit_val_batches=0)
    trainer.fit(Scripted(machine), ScriptedBatches(machine, 24), ckpt_path=saved, weights_only=True)
    after = rows_of(tmp_path)
    assert [row.step for row in after] == [4, 8, 12]
    assert after[0] == before[0]
    assert (after[1].seconds, after[2].seconds) == (4.0, 16.0)  # step 7 is the first of the session


def test_a_new_run_begins_a_new_file(tmp_path):
    train(tmp_path, 8, limit_val_batches=0)
    train(tmp_path, 4, limit_val_batches=0)
    assert [row.step for row in rows_of(tmp_path)] == [4]


def test_rates_are_those_of_all_processes_and_flops_those_of_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr("seqvae.monitors.throughput.product_peak", lambda device, dtype: 1e9)
    reports: list[Throughput] = []
    module: Any = SimpleNamespace(named_modules=list, automatic_optimization=True)
    for processes in (1, 3):
        machine = ScriptedMachine()
        monitor = ThroughputMonitor(every_n_steps=5, log_dir=tmp_path, machine=machine)
        trainer = fake_trainer(processes)
        monitor.on_fit_start(trainer, module)
        monitor.on_train_start(trainer, module)
        step_through(monitor, trainer, module, steps=5, machine=machine)
        assert monitor.throughput is not None
        reports.append(monitor.throughput)
    alone, together = reports
    assert together == alone._replace(
        real_steps_per_second=3 * alone.real_steps_per_second, sequences_per_second=3 * alone.sequences_per_second
    )
    assert alone.flops_per_second == 3 * 2 * 3**3 / (LOADING + STEP)


@pytest.mark.slow
def test_two_processes_report_the_steps_of_both_in_one_file(tmp_path):
    monitor = ThroughputMonitor(every_n_steps=2, count=count_rows)
    trainer = make_trainer(tmp_path, [monitor], 4, devices=2, strategy="ddp_spawn")
    trainer.fit(TinyVAE(), datamodule=SharedData())
    rows = rows_of(tmp_path)
    assert [row.step for row in rows] == [2, 4]
    for row, micro_batches in zip(rows, (1, 2), strict=True):  # of each process; the first one of all is left out
        assert row.real_steps_per_second * row.seconds == pytest.approx(2 * 16 * micro_batches, rel=1e-4)
        assert row.padding_share == 0.2
    assert rows[1].share_of_peak is not None


# --- What a module hands over ---------------------------------------------------------------------------------------


def test_a_module_that_returns_no_counts_learns_at_the_first_step_what_to_return(tmp_path):
    trainer = make_trainer(tmp_path, [ThroughputMonitor(measure_peak=False)], 4)
    with pytest.raises(ValueError, match=r'TinyVAE.training_step returned "loss".* and no real_steps') as refused:
        trainer.fit(TinyVAE(), Batches(make_batches(4)))
    assert trainer.global_step == 1
    for word in ('"real_steps"', '"padded_steps"', '"sequences"', "count=f"):
        assert word in str(refused.value)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_batch_that_a_module_leaves_out_in_mid_run_ends_nothing(tmp_path):
    class LeavesOut(Scripted):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return None if batch_idx in (1, 5) else super().training_step(batch, batch_idx)

    machine = ScriptedMachine()
    monitor = ThroughputMonitor(every_n_steps=1, measure_peak=False, machine=machine)
    trainer = make_trainer(tmp_path, [monitor], max_steps=6)
    trainer.fit(LeavesOut(machine), ScriptedBatches(machine, 10))
    assert monitor.throughput is not None
    assert monitor.throughput.step == 6


def count_rows(module: Any, outputs: Any, batch: Tensor) -> Counts:
    return Counts(len(batch), len(batch) + 4, 1)


def test_a_function_may_count_for_a_module_that_does_not(tmp_path):
    monitor = ThroughputMonitor(every_n_steps=2, measure_peak=False, count=count_rows)
    make_trainer(tmp_path, [monitor], 4).fit(TinyVAE(), Batches(make_batches(4)))
    last = rows_of(tmp_path)[-1]
    assert (last.padding_share, last.gpu_utilisation, last.gpu_peak_memory_gib) == (0.2, None, None)
    assert last.real_steps_per_second == pytest.approx(16 * last.sequences_per_second, rel=1e-5)
    assert last.peak_memory_gib is not None
    assert 0.01 < last.peak_memory_gib < 1000
    assert 0 <= last.waiting_share <= 1


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        (torch.zeros(()), "returned a Tensor"),
        ({}, "returned nothing, and no real_steps and no padded_steps and no sequences"),
        ({"real_steps": 1.0, "padded_steps": 2, "sequences": 1}, r"a count \(real\) that is a float"),
        ({"real_steps": True, "padded_steps": 2, "sequences": 1}, r"a count \(real\) that is a bool"),
        ({"real_steps": 1, "padded_steps": torch.zeros(()), "sequences": 1}, r"\(padded\) of shape \(\) and torch.fl"),
        ({"real_steps": 1, "padded_steps": 2, "sequences": torch.ones(3).long()}, r"\(sequences\) of shape \(3,\)"),
    ],
)
def test_what_is_no_count_is_refused(outputs, words):
    with pytest.raises(ValueError, match=words):
        check_counts(object(), counts_of(object(), outputs, None))


def test_more_real_steps_than_steps_are_refused(tmp_path):
    monitor = ThroughputMonitor(every_n_steps=2, measure_peak=False, count=lambda *_: Counts(9, 8, 1))
    with pytest.raises(ValueError, match="9 real steps among 8 with padding cannot be"):
        make_trainer(tmp_path, [monitor], 4).fit(TinyVAE(), Batches(make_batches(4)))


def test_of_no_steps_at_all_no_share_is_padding(tmp_path):
    monitor = ThroughputMonitor(every_n_steps=2, measure_peak=False, count=lambda *_: Counts(0, 0, 1))
    make_trainer(tmp_path, [monitor], 2).fit(TinyVAE(), Batches(make_batches(2)))
    assert monitor.throughput is not None
    assert math.isnan(monitor.throughput.padding_share)


def test_an_impossible_frequency_is_refused():
    with pytest.raises(ValueError, match="every_n_steps must be 1 or more, got 0"):
        ThroughputMonitor(every_n_steps=0)


# --- What it costs --------------------------------------------------------------------------------------------------


def test_between_two_reports_nothing_waits_for_the_device_and_a_report_waits_once(tmp_path, monkeypatch):
    monitor = ThroughputMonitor(every_n_steps=5, log_dir=tmp_path)
    trainer = fake_trainer()
    module: Any = SimpleNamespace(named_modules=list, automatic_optimization=True)
    monitor.on_fit_start(trainer, module)
    monitor.on_train_start(trainer, module)
    calls: list[str] = []

    def listened_to(name: str, original: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            calls.append(name)
            return original(*arguments, **named)

        return call

    for name in ("item", "tolist", "cpu", "numpy", "__float__", "__bool__", "__int__", "__index__"):
        monkeypatch.setattr(Tensor, name, listened_to(name, getattr(Tensor, name)))
    for expected in (0, 0, 0, 0, 1, 1, 1, 1, 1, 2):
        step_through(monitor, trainer, module)
        assert calls == ["tolist"] * expected
    assert monitor.throughput is not None
    assert monitor.throughput.share_of_peak is not None  # the FLOPs of the 4th micro-batch were counted


def fake_trainer(processes: int = 1) -> Any:
    """As much of a Trainer as the monitor looks at, among processes that all do the same."""
    strategy = SimpleNamespace(root_device=CPU, reduce=lambda tensor, reduce_op: processes * tensor)
    return SimpleNamespace(
        global_step=0,
        is_global_zero=True,
        loggers=[],
        max_steps=99,
        max_epochs=-1,
        num_training_batches=math.inf,
        precision_plugin=Precision(),
        strategy=strategy,
    )


def step_through(
    monitor: ThroughputMonitor, trainer: Any, module: Any, steps: int = 1, machine: ScriptedMachine | None = None
) -> None:
    """A product of two matrices of which both want a gradient, in each step."""
    outputs = {"real_steps": torch.tensor(1), "padded_steps": 4, "sequences": torch.tensor(1)}
    weight_NN = torch.ones(3, 3, requires_grad=True)
    for _ in range(steps):
        monitor.on_train_batch_start(trainer, module, None, 0)
        (weight_NN @ weight_NN).sum().backward()
        monitor.on_after_backward(trainer, module)
        if machine is not None:
            machine.seconds += LOADING + STEP
        trainer.global_step += 1
        monitor.on_train_batch_end(trainer, module, outputs, None, 0)


# --- The machine ----------------------------------------------------------------------------------------------------


def test_the_real_machine_measures_what_it_spends():
    machine, start = Machine(), Machine().spent()
    while machine.spent().process < start.process + 0.05:
        """At work."""
    wall, process, busy, total = difference(machine.spent(), start)
    assert 0.05 <= process <= machine.cores() * wall + 0.1
    assert 0 <= busy <= total
    assert machine.cores() >= 1


@pytest.mark.parametrize(("package", "expected"), [("pynvml", 0.37), ("another", None)])
def test_the_utilisation_of_a_gpu_is_known_where_the_package_for_it_is_installed(monkeypatch, package, expected):
    calls: list[torch.device] = []

    def utilisation(device: torch.device) -> int:
        calls.append(device)
        return 37

    monkeypatch.setattr("seqvae.monitors.hardware.find_spec", lambda name: name if name == package else None)
    monkeypatch.setattr(torch.cuda, "utilization", utilisation)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**29)
    gpu = torch.device("cuda", 1)
    assert Machine().gpu_utilisation(gpu) == expected
    assert calls == [gpu] * (expected is not None)
    assert Machine().gpu_peak_memory_gib(gpu) == 0.5
    assert (Machine().gpu_utilisation(CPU), Machine().gpu_peak_memory_gib(CPU)) == (None, None)


def test_a_run_on_a_gpu_says_which_package_its_utilisation_wants(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("seqvae.monitors.hardware.find_spec", lambda name: None)
    assert Machine().missing_package(CPU) == ""
    assert Machine().missing_package(torch.device("cuda", 1)) == "nvidia-ml-py"
    monkeypatch.setattr(Machine, "missing_package", lambda self, device: "nvidia-ml-py")
    caplog.set_level("INFO", "seqvae")
    machine = ScriptedMachine()
    monitor = ThroughputMonitor(measure_peak=False, machine=machine)
    make_trainer(tmp_path, [monitor], max_steps=1).fit(Scripted(machine), ScriptedBatches(machine, 1))
    assert "how busy the GPU is will not be measured, for want of a package: pip install nvidia-ml-py" in caplog.text


# --- FLOPs ----------------------------------------------------------------------------------------------------------


class Words(lightning.LightningModule):
    """Batches of word numbers, 0 for padding, through layers of which all but the first meet each step with all their weights."""

    def __init__(self, *, broken_at: int = -1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 12)
        self.layers = nn.Sequential(
            nn.Linear(12, 20, bias=False), nn.Tanh(), nn.Dropout(0.2), nn.Linear(20, 5, bias=False)
        )
        self.broken_at = broken_at

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx == self.broken_at:
            raise KeyError("broken")
        loss = self.layers(self.embedding(batch)).float().square().mean()
        real = (batch > 0).sum()
        return {"loss": loss, "real_steps": real, "padded_steps": batch.numel(), "sequences": len(batch)}

    def configure_optimizers(self) -> Optimizer:
        return AdamW(self.parameters(), lr=0.01, fused=True)


def word_batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 7, (4, 6 + number % 5), generator=generator) for number in range(count)]


class ProbeEverything(lightning.Callback):
    """Multiplies for itself where the monitor must not count it."""

    def on_train_batch_end(self, *_: Any) -> None:
        torch.ones(64, 64) @ torch.ones(64, 64)


@pytest.mark.parametrize(
    ("precision", "accumulate"),
    [("32-true", 1), ("32-true", 2), ("bf16-mixed", 1)],
)
def test_the_flops_of_an_mlp_are_six_times_its_weights_a_step(tmp_path, monkeypatch, precision, accumulate):
    monkeypatch.setattr("seqvae.monitors.throughput.product_peak", lambda device, dtype: 1e9)
    batches, monitor = word_batches(17), ThroughputMonitor(every_n_steps=4)
    trainer = make_trainer(
        tmp_path,
        [ProbeEverything(), monitor],
        16 // accumulate,
        precision=precision,
        accumulate_grad_batches=accumulate,
    )
    module = Words()
    trainer.fit(module, Batches(batches))
    weights = sum(p.numel() for p in module.layers.parameters())
    counted = [batches[number - 1] for number in (4, 16)]
    real = sum(int((batch > 0).sum()) for batch in counted)
    last = rows_of(tmp_path)[-1]
    assert last.flops_per_second is not None
    assert last.share_of_peak is not None
    per_real_step = last.flops_per_second / last.real_steps_per_second
    assert per_real_step == pytest.approx(6 * weights * sum(batch.numel() for batch in counted) / real, rel=1e-5)
    assert last.share_of_peak == pytest.approx(last.flops_per_second / 1e9, rel=1e-5)


def test_training_is_the_same_with_and_without_the_monitor(tmp_path):
    weights = []
    for callbacks in ([], [ThroughputMonitor(every_n_steps=1)]):
        torch.manual_seed(3)
        module = Words()
        trainer = make_trainer(
            tmp_path, list(callbacks), 9, precision="bf16-mixed", accumulate_grad_batches=2, gradient_clip_val=None
        )
        trainer.fit(module, Batches(word_batches(18)))
        weights.append((torch.cat([p.detach().flatten() for p in module.parameters()]), torch.rand(1)))
    assert torch.equal(weights[0][0], weights[1][0])
    assert weights[0][1] == weights[1][1]


def test_counting_ends_where_a_step_breaks(tmp_path):
    monitor = ThroughputMonitor()
    with pytest.raises(KeyError, match="broken"):
        make_trainer(tmp_path, [monitor], 4).fit(Words(broken_at=3), Batches(word_batches(4)))
    assert monitor._flop_count.end() is None


def counted(network: nn.Module, inputs: Tensor) -> int | None:
    count = FlopCount()
    count.begin()
    output = network(inputs)
    (output[0] if isinstance(output, tuple) else output).sum().backward()
    return count.end()


@pytest.mark.parametrize("bf16", [False, True])
def test_attention_is_counted_with_its_scores_computed_a_second_time(bf16):
    layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=32, dropout=0.0, batch_first=True)
    inputs = torch.randn(3, 10, 16, requires_grad=True)
    matrices = sum(p.numel() for p in layer.parameters() if p.dim() > 1)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        flops = counted(layer, inputs)
    assert flops == 6 * matrices * 3 * 10 + 14 * 3 * 10 * 10 * 16


def test_recurrent_layers_are_counted_on_cpus_and_gpus_alike():
    lstm = nn.LSTM(8, 16, 2, batch_first=True, bidirectional=True)
    shapes = [tuple(p.shape) for p in lstm.parameters()]
    matrices = sum(p.numel() for p in lstm.parameters() if p.dim() > 1)
    assert counted(lstm, torch.randn(3, 10, 8)) == 6 * matrices * 30
    aten = torch.ops.aten
    assert MORE_PRODUCTS[aten._cudnn_rnn]((3, 10, 8), shapes, 4, None) == 2 * matrices * 30
    assert MORE_PRODUCTS[aten._cudnn_rnn_backward]((3, 10, 8), shapes, 4, None) == 4 * matrices * 30


def test_an_end_without_a_beginning_counts_nothing():
    assert FlopCount().end() is None


def test_compiled_parts_are_seen_whichever_way_they_were_compiled():
    whole, part, wrapped = (nn.Sequential(nn.Linear(2, 2)) for _ in range(3))
    assert not has_compiled_parts(whole)
    whole.compile(backend="eager")
    part[0].compile(backend="eager")
    wrapped.add_module("compiled", cast(nn.Module, torch.compile(nn.Linear(2, 2), backend="eager")))
    assert all(has_compiled_parts(module) for module in (whole, part, wrapped))


def test_of_a_compiled_module_there_is_no_share_of_the_peak(tmp_path):
    module = Words()
    module.layers.compile(backend="eager")
    make_trainer(tmp_path, [ThroughputMonitor(every_n_steps=4)], 4).fit(module, Batches(word_batches(4)))
    (row,) = rows_of(tmp_path)
    assert (row.flops_per_second, row.share_of_peak) == (None, None)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("32-true", torch.float32)])
def test_products_are_timed_in_the_precision_of_training(tmp_path, monkeypatch, precision, dtype):
    dtypes: list[torch.dtype] = []

    def peak(device: torch.device, dtype: torch.dtype) -> float:
        dtypes.append(dtype)
        return 1e9

    monkeypatch.setattr("seqvae.monitors.throughput.product_peak", peak)
    trainer = make_trainer(tmp_path, [ThroughputMonitor()], 1, precision=precision)
    trainer.fit(Words(), Batches(word_batches(1)))
    assert dtypes == [dtype]


def test_the_peak_is_the_median_of_a_few_products():
    times = iter([0.0, 9.0, 0.0, 9.0, *(second for n in (5, 1, 2, 4, 3, 1, 2, 2, 9) for second in (0.0, n / 1e3))])
    assert product_peak(CPU, torch.float32, lambda: next(times)) == pytest.approx(2 * 1024**3 / 5e-3)


# --- What it says ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "total_steps", "words"),
    [
        ({}, 1000, "speed, waiting, padding and memory every 100 steps, beside the peak of the machine"),
        ({"measure_peak": False}, 50, "speed, waiting, padding and memory every 50 steps"),
        ({"every_n_steps": 1, "measure_peak": False}, 50, "speed, waiting, padding and memory every step"),
    ],
)
def test_a_monitor_describes_itself_in_a_line(options, total_steps, words):
    assert ThroughputMonitor(**options).describe(total_steps) == words


def test_a_row_is_json_and_holds_what_is_known(tmp_path):
    train(tmp_path, 4, limit_val_batches=0)
    (line,) = (tmp_path / "throughput.jsonl").read_text().splitlines()
    assert set(json.loads(line)) == set(Throughput._fields) - {"flops_per_second", "share_of_peak"}
