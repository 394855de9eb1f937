"""The DataModule under a real Trainer: epochs, exact resume, validation, several processes."""

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import Callback

from seqvae.config.data import BatchSettings, CacheSettings, LoadingSettings, SourceSettings
from seqvae.data.batching import plan_epoch
from seqvae.data.cache import SequenceData
from seqvae.data.datamodule import SequenceDataModule, choose_sample
from seqvae.data.description import DataDescription
from seqvae.errors import DataError
from seqvae.monitors.decoder_use import OffersProbeBatches
from tests.support.fake_sequences import FakeSequences, log_normal_lengths

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*")  # Lightning's way to walk through a batch
ROOT = Path(__file__).parent.parent.parent
TRAIN, VALID = log_normal_lengths(150, cap=100), log_normal_lengths(60, seed=1, cap=100)
BATCHES = BatchSettings(tokens_per_batch=1000)


class InMemoryData(SequenceDataModule):
    """The DataModule over sequences that need no files."""

    def __init__(self, splits: dict[str, np.ndarray] | None = None, **options: Any) -> None:
        super().__init__(SourceSettings(), batches=options.pop("batches", BATCHES), **options)
        sets: Any = {name: FakeSequences(lengths) for name, lengths in (splits or SPLITS).items()}
        description = DataDescription(kind="tokens", vocabulary_size=2000)
        self.data = SequenceData(Path(), description, sets, "tokens: in memory", (), {})

    def prepare_data(self) -> None:
        pass


SPLITS = {"train": TRAIN, "valid": VALID}


class Recorder(lightning.LightningModule):
    """Writes down what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[tuple] = []
        self.validated: list[list[tuple]] = []

    def training_step(self, batch, batch_idx):
        self.seen.append(record(batch))
        return self.weight * batch.lengths_B.sum() / batch.step_tokens

    def on_validation_start(self):
        self.validated.append([])

    def validation_step(self, batch, batch_idx):
        self.validated[-1].append(record(batch))

    def test_step(self, batch, batch_idx):
        self.seen.append(record(batch))

    def predict_step(self, batch, batch_idx):
        return batch.sequences_B

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Save(Callback):
    """Saves a checkpoint in one hook, at the `at`-th time that it is called."""

    def __init__(self, hook: str, at: int, path: Path) -> None:
        self.calls = itertools.count()
        self.at, self.path = at, path
        setattr(self, hook, self._save)

    def _save(self, trainer, *_):
        if next(self.calls) == self.at:
            trainer.save_checkpoint(self.path)


def record(batch) -> tuple:
    return batch.position, batch.sequences_B.tolist(), batch.step_tokens


def sequences_of(batches: list[tuple]) -> list[int]:
    """The sequences of recorded batches, sorted; the -1 of empty batches left out."""
    return sorted(sequence for _, sequences, _ in batches for sequence in sequences if sequence >= 0)


def make_trainer(**options) -> lightning.Trainer:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    defaults = {"accelerator": "cpu", "devices": 1, "max_epochs": 3, "num_sanity_val_steps": 0, **quiet}
    return lightning.Trainer(**{**defaults, **options})


def fit(data: SequenceDataModule | None = None, checkpoint: Path | None = None, **options) -> Recorder:
    module = Recorder()
    data = data or InMemoryData(accumulate=options.get("accumulate_grad_batches", 1))
    make_trainer(**options).fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
    return module


def test_every_epoch_has_every_sequence_once_in_another_order():
    seen = fit().seen
    count = InMemoryData().cut.batches
    epochs = [seen[start : start + count] for start in range(0, len(seen), count)]
    assert [position for position, *_ in seen] == list(range(3 * count))
    assert all(sequences_of(epoch) == list(range(len(TRAIN))) for epoch in epochs)
    assert epochs[0][0][1] != epochs[1][0][1] != epochs[2][0][1]


COUNT = InMemoryData().cut.batches
POSITIONS = [0, 3, COUNT - 1, COUNT, 2 * COUNT - 1, 2 * COUNT + 1]


@pytest.mark.parametrize("at", POSITIONS)
@pytest.mark.parametrize("length", [{"max_epochs": 3}, {"max_epochs": -1, "max_steps": 3 * COUNT}], ids=str)
def test_a_run_saved_after_any_batch_goes_on_exactly(at, length, tmp_path):
    path = tmp_path / "run.ckpt"
    unbroken = fit(callbacks=[Save("on_train_batch_end", at, path)], **length).seen
    assert fit(checkpoint=path, **length).seen == unbroken[at + 1 :]


@pytest.mark.parametrize("at", [1, 3, COUNT - 1, COUNT + 1, 2 * COUNT - 1])
def test_a_run_that_accumulates_goes_on_exactly(at, tmp_path):
    path = tmp_path / "run.ckpt"
    unbroken = fit(callbacks=[Save("on_train_batch_end", at, path)], accumulate_grad_batches=2).seen
    assert fit(checkpoint=path, accumulate_grad_batches=2).seen == unbroken[at + 1 :]


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end"])
@pytest.mark.parametrize("at", [0, 1, 2, 3, 4])
def test_a_run_that_validates_within_the_epoch_goes_on_exactly(hook, at, tmp_path):
    path = tmp_path / "run.ckpt"
    every = 3
    unbroken = fit(callbacks=[Save(hook, at, path)], val_check_interval=every)
    resumed = fit(checkpoint=path, val_check_interval=every)
    done = at + 1 if hook == "on_train_batch_end" else trained_before_validation(at, every)
    assert resumed.seen == unbroken.seen[done:]


def trained_before_validation(number: int, every: int) -> int:
    per_epoch = COUNT // every
    return number // per_epoch * COUNT + (number % per_epoch + 1) * every


@pytest.mark.parametrize("at", [0, 1])
def test_a_run_saved_at_an_epochs_end_goes_on_with_the_next(at, tmp_path):
    path = tmp_path / "run.ckpt"
    unbroken = fit(callbacks=[Save("on_train_epoch_end", at, path)]).seen
    assert fit(checkpoint=path).seen == unbroken[(at + 1) * COUNT :]


def test_a_run_can_be_resumed_twice(tmp_path):
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    unbroken = fit(callbacks=[Save("on_train_batch_end", 2, first)]).seen
    fit(checkpoint=first, callbacks=[Save("on_train_batch_end", 2, second)])
    assert fit(checkpoint=second).seen == unbroken[6:]


def test_a_run_goes_on_exactly_where_the_loader_is_requested_early_and_twice(tmp_path):
    class Early(Recorder):
        def configure_optimizers(self):
            data.train_dataloader()
            assert self.trainer.estimated_stepping_batches == 3 * COUNT  # asks for the loader, too
            return super().configure_optimizers()

    path = tmp_path / "run.ckpt"
    unbroken = fit(callbacks=[Save("on_train_batch_end", COUNT + 2, path)]).seen
    module, data = Early(), InMemoryData()
    make_trainer().fit(module, datamodule=data, ckpt_path=path, weights_only=True)
    assert module.seen == unbroken[COUNT + 3 :]


@pytest.mark.parametrize("worker_type", ["thread", "process"])
def test_a_run_with_workers_goes_on_exactly(worker_type, tmp_path):
    def data():
        return InMemoryData(loading=LoadingSettings(worker_type=worker_type, num_workers=2))

    path = tmp_path / "run.ckpt"
    unbroken = fit(data(), callbacks=[Save("on_train_batch_end", COUNT + 1, path)]).seen
    assert unbroken == fit().seen
    assert fit(data(), checkpoint=path).seen == unbroken[COUNT + 2 :]


def test_a_second_run_with_the_same_module_begins_at_the_beginning(tmp_path):
    path = tmp_path / "run.ckpt"
    unbroken = fit(callbacks=[Save("on_train_batch_end", 2, path)]).seen
    data = InMemoryData()
    fit(data, checkpoint=path)
    assert fit(data).seen == unbroken


def test_the_position_in_a_checkpoint_is_json(tmp_path):
    path = tmp_path / "run.ckpt"
    fit(callbacks=[Save("on_train_batch_end", 2, path)])
    state = torch.load(path, weights_only=True)["InMemoryData"]
    assert json.loads(json.dumps(state)) == {
        "seed": 0,
        "shortest_last": None,
        "epoch": 0,
        "delivered": 3,
        "batches": COUNT,
        "world": 1,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [({"seed": 1}, "shuffled with --seed 0"), ({"batches": BatchSettings(batch_size=1)}, f"epoch of {COUNT} batches")],
    ids=["seed", "batches"],
)
def test_a_position_within_an_epoch_is_refused_where_the_epoch_is_another(options, message, tmp_path):
    path = tmp_path / "run.ckpt"
    fit(callbacks=[Save("on_train_batch_end", 2, path)])
    with pytest.raises(ValueError, match=message):
        fit(InMemoryData(**options), checkpoint=path)


def test_other_batches_are_accepted_from_an_epochs_end_on(tmp_path):
    path = tmp_path / "run.ckpt"
    fit(callbacks=[Save("on_train_batch_end", COUNT - 1, path)])
    data = InMemoryData(batches=BatchSettings(batch_size=4))
    seen = fit(data, checkpoint=path).seen
    assert [position for position, *_ in seen] == list(range(data.cut.batches, 3 * data.cut.batches))


def test_each_validation_goes_through_the_same_share_of_the_sequences():
    data = InMemoryData(limit_val_batches=0.5, batches=BatchSettings(tokens_per_batch=200))
    validated = fit(data, max_epochs=2).validated
    assert validated[0] == validated[1]
    assert len(sequences_of(validated[0])) == len(VALID) / 2


def test_no_flag_of_seed_or_batches_changes_the_sequences_that_are_validated_on():
    def chosen(**options: Any) -> list[int]:
        loader = InMemoryData(limit_val_batches=0.2, **options).val_dataloader()
        return sequences_of([record(batch) for batch in loader])

    expected = chosen()
    assert len(expected) == 12
    assert chosen(seed=1) == expected
    for batches in (BatchSettings(batch_size=3), BatchSettings(tokens_per_batch=100), BatchSettings(bucketing=False)):
        assert chosen(batches=batches) == expected


def test_without_a_limit_a_validation_is_on_every_sequence():
    assert sequences_of(fit(max_epochs=1).validated[0]) == list(range(len(VALID)))


def test_a_small_fraction_of_validation_is_still_one_sequence():
    assert len(sequences_of(fit(InMemoryData(limit_val_batches=0.001), max_epochs=1).validated[0])) == 1


def test_a_missing_test_split_is_named():
    with pytest.raises(DataError, match="the data have no test split, only train and valid: add test/"):
        make_trainer().test(Recorder(), datamodule=InMemoryData(), verbose=False)


def test_testing_takes_every_sequence_once():
    module = Recorder()
    make_trainer().test(module, datamodule=InMemoryData({**SPLITS, "test": VALID}), verbose=False)
    assert sequences_of(module.seen) == list(range(len(VALID)))


def test_a_checkpoint_can_be_tested_with_other_batches(tmp_path):
    path = tmp_path / "run.ckpt"
    fit(callbacks=[Save("on_train_batch_end", 2, path)])
    data = InMemoryData({**SPLITS, "test": VALID}, batches=BatchSettings(batch_size=1), seed=5)
    make_trainer().test(Recorder(), datamodule=data, ckpt_path=path, verbose=False, weights_only=True)


def test_prediction_goes_through_the_chosen_split_in_stored_order():
    data = InMemoryData(predict_split="valid")
    predicted: Any = make_trainer().predict(Recorder(), datamodule=data)
    assert torch.cat(predicted).tolist() == list(range(len(VALID)))


def test_an_epoch_has_as_many_optimizer_steps_as_it_says():
    trainer = make_trainer(accumulate_grad_batches=4, max_epochs=1)
    data = InMemoryData(accumulate=4)
    trainer.fit(Recorder(), datamodule=data)
    assert trainer.global_step == data.steps_per_epoch()


@pytest.mark.parametrize("batches", [BatchSettings(batch_size=8), BatchSettings(batch_size=8, drop_last=True), BATCHES])
def test_a_nat_weighs_the_same_in_batches_of_short_and_of_long_sequences(batches):
    """Divided by its own steps, one of the shortest tenth weighed 17.5 times as much as one of the longest."""
    seen = fit(InMemoryData(batches=batches, accumulate=2), accumulate_grad_batches=2, max_epochs=1).seen
    (divisor,) = {step_tokens for *_, step_tokens in seen}
    steps_of_sequences = sum(int(TRAIN[sequences].sum()) for _, sequences, _ in seen)
    assert divisor == steps_of_sequences / (-(-len(seen) // 2))


def test_an_epoch_that_an_earlier_version_began_goes_on_in_its_order():
    splits = {"train": log_normal_lengths(132, cap=100), "valid": VALID}
    data = InMemoryData(splits, batches=BatchSettings(batch_size=4))
    old, new = (plan_epoch(data.cut, 0, 0, shortest_last=shortest_last) for shortest_last in (True, False))
    assert [old.batch(k).tolist() for k in range(33)] != [new.batch(k).tolist() for k in range(33)]
    state = {"seed": 0, "epoch": 0, "delivered": 20, "batches": 33, "world": 1}
    for delivered in (20, 25):  # and again, once this version has saved it
        data.load_state_dict(state)
        loader = data.train_dataloader()
        expected = [old.batch(k).tolist() for k in range(delivered, 33)]
        for batch, sequences in zip(loader, expected, strict=True):
            assert batch.sequences_B.tolist() == sequences
            if loader.delivered == 25:
                state = data.state_dict()
    loader.set_epoch(1)
    later = plan_epoch(data.cut, 0, 1)
    assert [batch.sequences_B.tolist() for batch in loader] == [later.batch(k).tolist() for k in range(33)]


@given(lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=200))
def test_a_sample_for_monitors_has_sequences_of_all_lengths_and_few_steps(lengths):
    lengths_N = np.array(lengths, dtype=np.int32)
    sample = choose_sample(lengths_N)
    chosen = np.concatenate(sample.batches).tolist()
    small = sample.batches[: min(3, max(1, len(lengths) // 2))]
    assert min(6, len(lengths)) <= sum(map(len, small)) <= 30
    assert len(set(chosen)) == len(chosen) <= 120
    assert sample.most_steps >= np.median(lengths_N)
    steps_N = np.minimum(lengths_N, sample.most_steps)
    cost = sum(len(batch) * steps_N[batch].max() for batch in small)
    assert cost <= 6 * max(170, np.ceil(np.median(lengths_N)))
    parts = np.array_split(np.sort(steps_N), len(small))
    for batch, part in zip(small, parts, strict=True):
        assert part[0] <= steps_N[batch].min() <= steps_N[batch].max() <= part[-1]


def test_a_sample_for_monitors_is_as_large_as_short_sequences_allow():
    def sizes(length: int) -> list[int]:
        return [len(batch) for batch in choose_sample(np.full(1000, length)).batches]

    assert sizes(32) == [10] * 3 + [30] * 3
    assert sizes(64) == [5] * 3 + [15] * 3
    assert sizes(1000) == [2] * 3 + [6] * 3


def test_a_batch_of_a_sample_for_monitors_is_of_like_length():
    lengths_N = log_normal_lengths(5000, cap=2000)
    sample = choose_sample(lengths_N)
    steps_N = np.minimum(lengths_N, sample.most_steps)
    assert len(sample.batches) == 6
    assert all(steps_N[batch].max() <= 1.02 * steps_N[batch].min() for batch in sample.batches)


def probed_of(sequences: FakeSequences) -> np.ndarray:
    data = InMemoryData({"train": TRAIN})
    data.data.splits["valid"] = sequences  # type: ignore[assignment]
    return np.concatenate([batch.sequences_B.numpy() for batch in data.probe_batches()])


def test_a_sample_for_monitors_takes_no_two_windows_of_one_sequence_where_there_are_others():
    owners_N = np.repeat(np.arange(12), 50)
    chosen = probed_of(FakeSequences(np.full(600, 20), owners=owners_N))
    assert len(set(owners_N[chosen])) == len(chosen) == 12
    assert len(probed_of(FakeSequences(np.full(600, 20), owners=np.zeros(600, np.int64)))) == 120


def test_a_sample_for_monitors_takes_no_two_sequences_of_the_same_content():
    chosen = probed_of(FakeSequences(np.full(970, 20)))  # each content ten times
    assert len(set(chosen % 97)) == len(chosen) == 97


def test_the_data_offer_a_monitor_a_few_batches_of_validation_sequences_whatever_the_seed():
    data = InMemoryData()
    batches = data.probe_batches()
    assert isinstance(data, OffersProbeBatches)
    assert len(batches) == 6
    for batch, again in zip(batches, InMemoryData(seed=5).probe_batches(), strict=True):
        assert batch.sequences_B.tolist() == again.sequences_B.tolist()
        assert batch.lengths_B.tolist() == np.minimum(VALID[batch.sequences_B], 170).tolist()
        assert batch.step_tokens == batch.lengths_B.sum()
    assert InMemoryData({"train": TRAIN}).probe_batches() == []


def test_the_summary_says_what_will_run():
    data = InMemoryData(batches=BatchSettings(batch_size=2), loading=LoadingSettings(num_workers=0))
    layout, sequences, batches, hint = data.summary()
    assert layout == data.data.layout
    assert sequences.startswith("150 training sequences (mean ")
    assert sequences.endswith("60 valid")
    assert batches.startswith("75 batches per epoch, at most 200 tokens and 2 sequences, padding efficiency 0.9")
    assert hint.startswith("hint: --batch_size 2: the same memory holds")


def test_parquet_goes_through_the_trainer(tmp_path):
    for split, number in (("train", 80), ("valid", 20)):
        tokens = [[index % 7] * (1 + index % 13) for index in range(number)]
        pq.write_table(pa.table({"tokens": pa.array(tokens, pa.list_(pa.int32()))}), tmp_path / f"{split}.parquet")
    source, cache = SourceSettings(data_dir=str(tmp_path)), CacheSettings(cache_dir=str(tmp_path / "cache"))
    module = Recorder()
    make_trainer(max_epochs=1).fit(module, datamodule=SequenceDataModule(source, cache=cache, batches=BATCHES))
    assert sequences_of(module.seen) == list(range(80))
    assert sequences_of(module.validated[0]) == list(range(20))


ONE_OF_TWO = """
import json, sys
import torch
import tests.data.test_dataset as t

torch.set_num_threads(1)
directory, rank = t.Path(sys.argv[1]), sys.argv[2]
two = dict(devices=2, strategy="ddp")
save = t.Save("on_train_batch_end", t.SAVED_BY_TWO, directory / "two.ckpt")
module = t.fit(max_epochs=2, callbacks=[save], **two)
resumed = t.fit(max_epochs=2, checkpoint=directory / "one.ckpt", **two)
(directory / f"{rank}.json").write_text(json.dumps([module.seen, module.validated, resumed.seen]))
"""
SAVED_BY_ONE = COUNT + 2
"""Of two epochs' batches, the one after which one process saves."""
SAVED_BY_TWO = -(-COUNT // 2) + 1
"""Of two epochs' rounds, the one after which two processes save."""


class TwoProcesses(NamedTuple):
    """What each of two gloo processes saw."""

    directory: Path
    seen: list[list]
    validated: list[list]
    resumed: list[list]
    """After the checkpoint of one process."""


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    directory = tmp_path_factory.mktemp("two")
    fit(max_epochs=2, callbacks=[Save("on_train_batch_end", SAVED_BY_ONE, directory / "one.ckpt")])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = []
    with contextlib.ExitStack() as stack:
        for rank in ("0", "1"):
            command = [sys.executable, "-c", ONE_OF_TWO, str(directory), rank]
            environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": rank}
            processes.append(stack.enter_context(subprocess.Popen(command, cwd=ROOT, env=environment)))
        assert [process.wait(120) for process in processes] == [0, 0]
    ranks = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]
    return TwoProcesses(directory, *(list(part) for part in zip(*ranks, strict=True)))


def positions_and_sequences(batches: list) -> list[tuple]:
    return sorted((position, tuple(sequences)) for position, sequences, _ in batches if sequences != [-1])


def test_two_processes_see_every_sequence_once_an_epoch(two_processes):
    turns = len(two_processes.seen[0]) // 2
    for first in (0, turns):
        batches = [batch for seen in two_processes.seen for batch in seen[first : first + turns]]
        assert sequences_of(batches) == list(range(len(TRAIN)))


def test_two_processes_validate_every_sequence_once(two_processes):
    batches = [batch for validated in two_processes.validated for batch in validated[0]]
    assert sequences_of(batches) == list(range(len(VALID)))


def test_two_processes_see_the_batches_that_one_process_sees(two_processes):
    together = [batch for seen in two_processes.seen for batch in seen]
    assert positions_and_sequences(together) == positions_and_sequences(fit(max_epochs=2).seen)


def test_one_process_goes_on_where_two_stopped(two_processes):
    before = [batch for seen in two_processes.seen for batch in seen[: SAVED_BY_TWO + 1]]
    after = fit(checkpoint=two_processes.directory / "two.ckpt").seen
    assert positions_and_sequences([*before, *after]) == positions_and_sequences(fit().seen)


def test_two_processes_go_on_where_one_stopped(two_processes):
    unbroken = fit(max_epochs=2).seen
    after = [batch for seen in two_processes.resumed for batch in seen]
    assert positions_and_sequences(after) == positions_and_sequences(unbroken[SAVED_BY_ONE + 1 :])
