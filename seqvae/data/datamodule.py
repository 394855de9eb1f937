"""The LightningDataModule over Parquet: settings in, batches of any split out, and an exact position in checkpoints.

    data = SequenceDataModule(SourceSettings(data_dir="my_data"), accumulate=2)
    module = MyModule(data.description)
    Trainer(accumulate_grad_batches=2).fit(module, datamodule=data)

It needs no DistributedSampler: every process takes its turns of a plan that all of them compute alike.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import lightning
import numpy as np
import torch

from seqvae.config.data import BatchSettings, CacheSettings, LengthSettings, LoadingSettings, SourceSettings
from seqvae.data.batch import Batch, Gathers
from seqvae.data.batching import (
    Cut,
    Limits,
    Plan,
    choose_and_cut,
    choose_sequences,
    cut_batches,
    gather_batch,
    grid_efficiency,
    grid_lengths,
    padding_efficiency,
    plan_epoch,
    plan_in_order,
    resolve_evaluation_limits,
    resolve_limits,
    some_batches,
    spread_out,
    with_last_shape,
)
from seqvae.data.cache import SequenceData, open_cache, prepare_cache, stream_cache
from seqvae.data.dataset import SequenceSet, origin_of, same_content
from seqvae.data.description import DataDescription, FittedPreprocessing
from seqvae.data.loader import BatchLoader, resolve_loading, rounds
from seqvae.data.parquet.side_tables import read_variable_embeddings
from seqvae.data.stream import Followed, GroupedCut
from seqvae.errors import DataError, SettingsError
from seqvae.text import counted

log = logging.getLogger(__name__)
PROBE_BATCHES = 3
"""Batches of a small sample for monitors, one from each third of the sequences by length."""
MOST_OF_PROBE_BATCH, LEAST_OF_PROBE_BATCH = 10, 2
PROBE_STEPS = 1024
"""Steps of the small sample, padding included; of long sequences more, where half of them would have to be cut short."""
CLOSER_LOOK = 3
"""Sequences of the second sample for each of the first, for a monitor that looks closely: 30 and 90."""
PROBE_CANDIDATES = 1024
"""Sequences that such a sample is chosen from: neighbours in length are then alike, and all are looked at in 0.03 s."""
SCORED_SEQUENCES = 256
"""Training sequences that monitors take gradients on."""

EFFICIENCY_BATCHES = 1000
"""Enough to tell two digits of the padding efficiency; all batches of ten million sequences would take a quarter of a second."""


class SequenceDataModule(lightning.LightningDataModule):
    """Batches of the splits of one data set.

    `accumulate` is the Trainer's accumulate_grad_batches: a batch carries the steps of its whole optimizer step. `batches_per_step`
    is the same over all processes, by which small sets are cut; default: `accumulate`.
    `limit_val_batches` stands in for the Trainer's: a fraction of the validation sequences, or as many as a number of batches
    holds, chosen once, alike for every seed (to switch validation off, give the Trainer its own limit_val_batches=0).
    `attention_steps`, of the model, is where --level_cost lets attention cost as much as all else.
    `preprocessing` is what a trained network knows of such data, which are then read with its vocabulary and moments.
    `predict_split` is what `Trainer.predict` goes through, in stored order.
    """

    def __init__(
        self,
        source: SourceSettings,
        lengths: LengthSettings | None = None,
        cache: CacheSettings | None = None,
        batches: BatchSettings | None = None,
        loading: LoadingSettings | None = None,
        *,
        seed: int = 0,
        accumulate: int = 1,
        batches_per_step: int | None = None,
        limit_val_batches: float | int = 1.0,
        predict_split: str = "test",
        attention_steps: float | None = None,
        preprocessing: FittedPreprocessing | None = None,
    ) -> None:
        super().__init__()
        self.source = source
        self.lengths = lengths or LengthSettings()
        self.cache = cache or CacheSettings()
        self.batches = batches or BatchSettings()
        self.loading = resolve_loading(loading or LoadingSettings())
        self.seed, self.accumulate = seed, accumulate
        self.batches_per_step = batches_per_step or accumulate
        self.limit_val_batches, self.predict_split = limit_val_batches, predict_split
        self.preprocessing = preprocessing
        self._quadratic = attention_steps if self.batches.level_cost else None
        self.on_trouble: Callable[[str], None] = log.warning
        """Gets a line each time that the workers of a loader had to start again; loaders take it over when they are made."""
        self.order: Literal["shuffled", "spread"] = "shuffled"
        """How training batches follow each other. spread: every stretch holds long and short ones alike, for measuring a part."""
        self._loaders: dict[str, BatchLoader] = {}
        self._by_group: dict[str, GroupedCut] = {}
        self._kept: set[str] = set()
        """Splits of which a part was fetched to stay."""
        self._resumed: dict[str, Any] | None = None
        self._planned: tuple[tuple[int, str, bool], Plan] | None = None
        self._shortest_last: int | None = None
        """An epoch that an earlier version began, which had the shortest batches last: it goes on in the order that it began in."""

    @cached_property
    def data(self) -> SequenceData:
        """The opened cache, built first where there is none."""
        if self.cache.stream:
            if self.loading.worker_type == "process" or self.loading.workers > 1:
                raise SettingsError(
                    "--stream goes with one thread that makes batches: leave --worker_type and --num_workers out"
                )
            return stream_cache(self.source, self.cache, self.lengths, self.preprocessing)
        return open_cache(
            prepare_cache(self.source, self.cache, self.preprocessing), self.lengths, self.cache.cache_data
        )

    @property
    def description(self) -> DataDescription:
        """Return what a model has to know about the data."""
        return self.data.description

    def variable_vectors(self) -> np.ndarray | None:
        """Return the vectors that the variables' embeddings start from, in the order of the names; None without a file of them."""
        path = self.source.variable_embeddings_path
        if path is None:
            return None
        if self.description.kind != "events":
            raise DataError(
                f"--variable_embeddings_path is for events, but these are {self.data.layout}. Leave it out."
            )
        return read_variable_embeddings(path, self.description.names)

    def split(self, name: str) -> SequenceSet:
        """Return a split; where there is none, the DataError names those there are and how to get it."""
        if name in self.data.splits:
            return self.data.splits[name]
        raise DataError(
            f"the data have no {name} split, only {' and '.join(self.data.splits)}: add {name}/ beside train/, "
            f"or keep a share of a pool of files with --{'test' if name == 'test' else 'validation'}_fraction"
        )

    @property
    def limits(self) -> Limits:
        """Return the limits of a training batch."""
        return self._limits_and_cut[0]

    @property
    def cut(self) -> Cut:
        """Return the cut that the training epochs share."""
        return self._limits_and_cut[1]

    @cached_property
    def _limits_and_cut(self) -> tuple[Limits, Cut]:
        train, settings = self.split("train"), self.batches
        lengths_N = train.lengths_N
        limits = resolve_limits(lengths_N, settings, self.lengths.max_sequence_length, self.batches_per_step)
        limits = limits._replace(quadratic=self._quadratic, grid=self._grid)
        if (by_group := self._cut_by_group("train", limits)) is not None:
            return limits, by_group.whole
        bucketing, drop_last = settings.bucketing, settings.drop_last
        cut = train.share(
            "cut",
            ("training", limits, bucketing, drop_last),
            lambda: cut_batches(lengths_N, limits, bucketing=bucketing, drop_last=drop_last),
        )
        return with_last_shape(limits, Cut(*cut)), Cut(*cut)

    def _cut_by_group(self, split: str, limits: Limits) -> GroupedCut | None:
        """Return the cut of a split that is fetched group by group; None where all of it is here."""
        sequences = self.split(split)
        if sequences.stream is None:
            return None
        if split not in self._by_group:
            if self.batches.drop_last:
                raise SettingsError(
                    "--drop_last leaves out the last batch of an epoch, and --stream has one in each of its groups"
                )
            group_N = sequences.stream.group_of(sequences.owners(np.arange(len(sequences))))
            self._by_group[split] = GroupedCut(sequences.lengths_N, group_N, limits, bucketing=self.batches.bucketing)
        return self._by_group[split]

    @cached_property
    def _grid(self) -> tuple[int, ...]:
        """The lengths that training batches are padded to; (): as it comes."""
        shapes = self.batches.pad_grid
        return grid_lengths(self.split("train").lengths_N, shapes) if shapes else ()

    def plan_of_epoch(self, epoch: int) -> Plan:
        """Return the training batches of an epoch, planned once for all requests in a row, as those of header and loader."""
        by_group, stream = self._cut_by_group("train", self.limits), self.split("train").stream
        if by_group is not None and stream is not None:
            stream.follow(by_group.groups(self.seed, epoch))
        key = epoch, self.order, epoch == self._shortest_last
        if self._planned is None or self._planned[0] != key:
            self._planned = None  # two plans of a million sequences would be 8 MB
            cut, settings = self.cut, self.batches

            def plan() -> Plan:
                planned = plan_epoch(cut, self.seed, epoch, shortest_last=epoch == self._shortest_last)
                return spread_out(planned) if self.order == "spread" else planned

            if by_group is not None:
                self._planned = key, by_group.plan(self.seed, epoch)
            else:
                whole_key = ("training", self.limits, settings.bucketing, settings.drop_last, self.seed, *key)
                self._planned = key, Plan(*self.split("train").share("plan", whole_key, plan))
        return self._planned[1]

    @property
    def longest(self) -> int:
        """Return the steps of the longest training sequence, as it is padded."""
        return self.limits.pad_to or int(self.split("train").lengths_N.max())

    @property
    def fewest_sequences(self) -> int:
        """Return how many sequences the smallest training batch holds."""
        return int(np.diff(self.cut.starts_K1).min())

    def batches_per_epoch(self, world: int = 1) -> int:
        """Return the batches that each of `world` processes takes in an epoch."""
        return rounds(self.cut.batches, world)

    def steps_per_epoch(self, world: int = 1) -> int:
        """Return the optimizer steps of an epoch with `world` processes (Lightning's own count loses a resumed position)."""
        return rounds(self.batches_per_epoch(world), self.accumulate)

    def summary(self) -> list[str]:
        """Return lines for a header: what was detected, how it is cut into batches, notes on the data, and hints."""
        lengths_N, limits = self.split("train").lengths_N, self.limits
        if limits.grid:
            efficiency = grid_efficiency(lengths_N, self.cut, limits)
        else:
            looked_at = some_batches(self.plan_of_epoch(0), EFFICIENCY_BATCHES)
            efficiency = padding_efficiency(lengths_N, looked_at, limits.pad_to)
        splits = self.data.splits
        others = ", ".join(f"{len(splits[name]):,} {name}" for name in ("valid", "test") if name in splits)
        unit = self.description.unit
        most = f"at most {limits.tokens_per_batch:,} {unit}s"
        if limits.batch_size is not None:
            most += f" and {counted(limits.batch_size, 'sequence')}"
        workers = f"{counted(self.loading.workers, 'worker')} ({self.loading.worker_type})"
        return [
            self.data.layout,
            f"{len(lengths_N):,} training sequences (mean {lengths_N.mean():.1f} {unit}s, longest "
            f"{lengths_N.max():,}), {others}",
            f"{self.cut.batches:,} batches per epoch, {most}, padding efficiency {efficiency:.2f}, {workers}",
            *(note if note.startswith("warning: ") else f"note: {note}" for note in self.data.notes),
            *(f"hint: {hint}" for hint in (limits.hint, self.loading.hint) if hint),
        ]

    def prepare_data(self) -> None:
        """Build the cache where there is none."""
        _ = self.data

    def setup(self, stage: str) -> None:
        """Forget the position of an earlier run; that of a checkpoint is loaded after this."""
        self._resumed = self._shortest_last = None

    def teardown(self, stage: str) -> None:
        """End the worker processes."""
        for loader in self._loaders.values():
            loader.close()

    def train_dataloader(self) -> BatchLoader:
        """Return the training loader, at the position of the checkpoint where there is one. May be called more than once."""
        trainer, state = self.trainer, self._resumed
        if trainer is not None and trainer.accumulate_grad_batches != self.accumulate:
            raise ValueError(
                f"the Trainer accumulates {trainer.accumulate_grad_batches} batches, SequenceDataModule "
                f"{self.accumulate}: set both to the same number"
            )
        loader = self._make_loader("train", "train", self.plan_of_epoch, self.cut.batches, self.limits)
        if state is None:
            return loader
        loader.load_state_dict(state)
        if loader.delivered and state["seed"] != self.seed:
            raise SettingsError(
                f"the checkpoint stands within an epoch that was shuffled with --seed {state['seed']}: resume with the same"
            )
        if trainer is not None and (state["world"], state["batches"]) != (loader.world, loader.batches):
            # Lightning counts each process's batches and believes its own count, not the loader's: with another number of processes
            # than before, an epoch would end too early or too late.
            done = len(loader) if state["delivered"] >= state["batches"] else loader.rounds_done
            progress = trainer.fit_loop.epoch_loop.batch_progress.current
            ahead = done - progress.ready
            for counter in dataclasses.fields(progress):
                setattr(progress, counter.name, getattr(progress, counter.name) + ahead)
        return loader

    def val_dataloader(self) -> BatchLoader:
        return self._evaluation_loader("val", "valid", self.limit_val_batches)

    def test_dataloader(self) -> BatchLoader:
        return self._evaluation_loader("test", "test")

    def predict_dataloader(self) -> BatchLoader:
        return self._evaluation_loader("predict", self.predict_split)

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        """Move a batch. On a CPU it is there already, and need not be taken apart and put together again (25 us)."""
        if device.type == "cpu":
            return batch
        moved: Batch = super().transfer_batch_to_device(batch, device, dataloader_idx)
        return moved

    def probe_batches(self) -> list[Batch]:
        """Return a small sample of the validation sequences in a few batches of like length, and three times as many in as many
        batches again, the same in all runs on these data.

        It is for monitors that evaluate the model on a few sequences again and again, and let those of a batch exchange their
        latents. So no two are windows of one sequence, or of the same content, unless all are.
        """
        if "valid" not in self.data.splits:
            return []
        stored = self.split("valid")
        [candidates_C] = stored.share(
            "candidates", (), lambda: [np.random.default_rng(0).permutation(len(stored))[:PROBE_CANDIDATES]]
        )
        owners_N = stored.windows.owners_N
        if stored.stream is not None:  # all at once, not one by one
            with stored.stream.here(stored.owners(candidates_C)):
                pass
        alike_C = same_content(stored, candidates_C) if owners_N is None else owners_N[candidates_C]
        firsts = np.sort(np.unique(alike_C, return_index=True)[1])
        if len(firsts) > 1:
            candidates_C = candidates_C[firsts]
        sample = choose_sample(np.asarray(stored.lengths_N)[candidates_C])
        batches = [stored.cropped(sample.most_steps).gather(candidates_C[chosen_B]) for chosen_B in sample.batches]
        return [batch._replace(step_tokens=int(batch.lengths_B.sum())) for batch in batches]

    def score_batches(self) -> list[Batch]:
        """Return training sequences of all lengths in a few batches, the same in all runs on these data.

        They are for monitors that need the decoder's gradients on a sample of what it learns from.
        """
        sequences = self.split("train")
        lengths_N = sequences.lengths_N
        number, owners_N = min(SCORED_SEQUENCES, len(lengths_N)), sequences.windows.owners_N
        [chosen_C] = sequences.share("chosen", (number,), lambda: [choose_sequences(lengths_N, owners_N, number)])
        limits = self.limits  # those of training, since gradients take as much room
        plan = plan_epoch(cut_batches(lengths_N[chosen_C], limits), seed=0, epoch=0)
        return [
            gather_batch(sequences, limits, chosen_C[batch_B])
            for batch_B in np.split(plan.order_N, plan.starts_K1[1:-1])
        ]

    def state_dict(self) -> dict[str, Any]:
        if "train" not in self._loaders:
            return self._resumed or {}
        return {"seed": self.seed, "shortest_last": self._shortest_last, **self._loaders["train"].state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the position for the training loader, which Lightning requests later; testing has no use for it."""
        self._resumed = state
        self._shortest_last = state.get("shortest_last", state.get("epoch"))  # earlier versions do not say

    def _evaluation_loader(self, stage: str, split: str, limit: float | int = 1.0) -> BatchLoader:
        sequences = self.split(split)
        lengths_N = sequences.lengths_N
        limits = resolve_evaluation_limits(lengths_N, self.batches, self.lengths.max_sequence_length)
        if stage == "predict":
            if sequences.stream is not None:
                raise SettingsError("--stream is for training: leave it out to go through data in their order")
            plan = Plan(*sequences.share("plan", ("in order", limits), lambda: plan_in_order(lengths_N, limits)))
        else:
            grid, shapes = self._grid, self.batches.pad_grid
            if shapes and lengths_N.max() > grid[-1]:  # what training's shapes hold needs no others
                grid = grid_lengths(lengths_N, shapes)
            limits = limits._replace(quadratic=self._quadratic, grid=grid)
            owners_N, bucketing, uncut = sequences.windows.owners_N, self.batches.bucketing, limits
            is_whole = isinstance(limit, float) and limit == 1
            if is_whole and (by_group := self._cut_by_group(split, limits)) is not None:
                in_groups = by_group.plan(0, 0)
                return self._make_loader(
                    stage, split, lambda _: in_groups, in_groups.batches, limits, by_group.groups(0, 0)
                )
            key = ("evaluation", limits, bucketing, limit)
            cut = Cut(
                *sequences.share(
                    "cut", key, lambda: choose_and_cut(lengths_N, owners_N, limit, uncut, bucketing=bucketing)
                )
            )
            self._keep(split, cut.order_N)
            limits = with_last_shape(limits, cut)
            plan = Plan(*sequences.share("plan", key, lambda: plan_epoch(cut, seed=0, epoch=0)))
        return self._make_loader(stage, split, lambda _: plan, plan.batches, limits)

    def _keep(self, split: str, chosen_C: np.ndarray) -> None:
        """Fetch sequences to validate on, which stay."""
        sequences, train = self.split(split), self.split("train").stream
        if sequences.stream is None or train is None or split in self._kept:
            return
        stored_C = np.unique(sequences.owners(np.asarray(chosen_C, np.int64)))
        needed = sequences.stream.bytes_of(stored_C)
        if train.room_bytes - needed < train.least_bytes:
            raise SettingsError(
                f"--local_limit {self.cache.local_limit}: the sequences to validate on do not fit beside two groups of those to "
                "train on: lower --limit_val_batches, or raise it"
            )
        self._kept.add(split)
        train.room_bytes -= needed
        with sequences.stream.here(stored_C):
            pass

    def close(self) -> None:
        """Fetch nothing any more, where data are streamed."""
        if "data" in vars(self):
            for split in self.data.splits.values():
                if split.stream is not None:
                    split.stream.close()

    def _make_loader(
        self,
        stage: str,
        split: str,
        plan_of_epoch: Callable[[int], Plan],
        batches: int,
        limits: Limits,
        groups: Sequence[int] = (),
    ) -> BatchLoader:
        """`groups`: those that an evaluation goes through, where it is fetched group by group."""
        sequences = self.split(split)
        source: Gathers = sequences
        if sequences.stream is not None and (groups or stage == "train"):
            source = Followed(sequences, sequences.stream, sequences.owners)
            if groups:
                sequences.stream.follow(groups)
        self._loaders[stage] = BatchLoader(
            source,
            limits,
            plan_of_epoch,
            batches,
            self.loading,
            rank=self.trainer.global_rank if self.trainer else 0,
            world=self.trainer.world_size if self.trainer else 1,
            accumulate=self.accumulate if stage == "train" else 1,
            reshuffled=stage == "train",
            origin_of=partial(origin_of, self.split(split)),
            on_trouble=self.on_trouble,
        )
        return self._loaders[stage]


class Sample(NamedTuple):
    """A small sample of sequences of all lengths."""

    most_steps: int
    """Steps that longer sequences are cut to."""
    batches: list[np.ndarray]
    """The sequences of each batch, of like length."""


def choose_sample(lengths_N: np.ndarray) -> Sample:
    """Choose as many sequences from each third by length: in each, those that are next to a random one in length. After these
    batches come larger ones, from the middle of each third.

    Sequences come in random order. The same lengths make the same choice. Half of the sequences are whole, or more.
    """
    fewest = PROBE_BATCHES * LEAST_OF_PROBE_BATCH
    most_steps = max(PROBE_STEPS // fewest, int(np.ceil(np.median(lengths_N))))
    steps_N = np.minimum(lengths_N, most_steps)
    order_N = np.argsort(steps_N, kind="stable")
    thirds = np.array_split(order_N, min(PROBE_BATCHES, max(1, len(order_N) // LEAST_OF_PROBE_BATCH)))
    places = np.random.default_rng(0).random(len(thirds))
    for size in range(MOST_OF_PROBE_BATCH, LEAST_OF_PROBE_BATCH - 1, -1):
        firsts = [int(place * max(1, len(third) - size + 1)) for place, third in zip(places, thirds, strict=True)]
        batches = [third[first : first + size] for first, third in zip(firsts, thirds, strict=True)]
        if sum(len(batch) * int(steps_N[batch[-1]]) for batch in batches) <= fewest * most_steps:
            break
    for third, batch in zip(thirds, list(batches), strict=True):
        others = third[~np.isin(third, batch)]
        first = max(0, len(others) - CLOSER_LOOK * len(batch)) // 2  # at the ends of a third, lengths differ most
        more = others[first : first + CLOSER_LOOK * len(batch)]
        batches += [more] if len(more) >= LEAST_OF_PROBE_BATCH else []
    return Sample(most_steps, batches)
