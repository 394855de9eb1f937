"""The epochs' plans and a split -> the batches of one process, epoch after epoch, from any position on.

All processes see one plan and take turns: in each round, process r takes the r-th of the next `world` batches. Where the
batches do not come out even, the last round is filled with empty ones (one sequence of length 0), since every process has to
take part in every step. A position is (epoch, batches delivered by all processes), so a run can go on with another number
of processes.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np

from seqvae.data.batches import Batch
from seqvae.data.building.moments import some
from seqvae.data.making import Gathers
from seqvae.data.plan import Plan
from seqvae.data.restarts import Restarts, warn
from seqvae.data.workers import Loading, Workers
from seqvae.errors import SettingsError

SHOWN = 5
NO_SEQUENCES = np.empty(0, dtype=np.int64)
"""Asks for an empty batch."""


class BatchLoader:
    """An iterable over one process's batches of an epoch.

    With `reshuffled`, it is its own `sampler`: that is how Lightning comes to call `set_epoch`. Nothing runs before the first
    batch is asked for, as Lightning also makes iterators that it never uses. A batch's position is the same whatever the
    number of processes; that of an empty batch runs on into the next epoch's, where it does no harm.
    """

    def __init__(
        self,
        sequences: Gathers,
        plan_of_epoch: Callable[[int], Plan],
        batches: int,
        loading: Loading,
        *,
        pad_to: int | None = None,
        rank: int = 0,
        world: int = 1,
        accumulate: int = 1,
        reshuffled: bool = False,
        start_method: str | None = None,
        place_of: Callable[[np.ndarray], str] | None = None,
        on_trouble: Callable[[str], None] = warn,
    ) -> None:
        """Every epoch's plan has `batches` batches; `accumulate` rounds make one optimizer step.

        `place_of` says where sequences came from; `on_trouble` gets a line each time that the workers start anew.
        """
        self.batches, self.rank, self.world, self.accumulate = batches, rank, world, accumulate
        self.epoch = 0
        self.delivered = 0
        self._start = 0
        self._lengths_N = sequences.lengths_N
        self._plan_of_epoch = plan_of_epoch
        self._workers = Workers(sequences, loading, pad_to, start_method)
        self._restarts = Restarts(self._workers, place_of or _numbers, on_trouble)
        if reshuffled:  # Lightning asks an evaluation loader that has a sampler for more than we are
            self.sampler = self

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; nothing changes where it is the present one, so that a resumed position holds."""
        if epoch != self.epoch:
            self.epoch, self.delivered, self._start = epoch, 0, 0

    def __len__(self) -> int:
        """Rounds of an epoch."""
        return rounds(self.batches, self.world)

    @property
    def rounds_done(self) -> int:
        """Rounds of the present epoch that have gone by, as many as leave enough for the rest."""
        return len(self) - rounds(self.batches - self.delivered, self.world)

    def __iter__(self) -> Iterator[Batch]:
        epoch, start, self._start = self.epoch, self._start, 0
        self.delivered = start
        plan = self._plan_of_epoch(epoch)
        turns = range(self.rounds_done, len(self))
        origin = start - turns.start * self.world  # where the epoch's round 0 began, seen from here
        numbers = range(start + self.rank, start + self.rank + len(turns) * self.world, self.world)
        step_tokens = 0
        named = partial(_named, epoch * self.batches)
        with closing(self._restarts.make(partial(self._request, plan), numbers, named)) as batches:
            for turn, number in zip(turns, numbers, strict=True):
                if turn == turns.start or turn % self.accumulate == 0:
                    step_tokens = self._step_tokens(plan, origin, turn)
                position = epoch * self.batches + number
                batch = _next_named(batches, position)
                self.delivered = min(self.batches, number - self.rank + self.world)
                yield batch._replace(step_tokens=step_tokens, position=position)

    def _request(self, plan: Plan, number: int) -> np.ndarray:
        return plan.batch(number) if number < self.batches else NO_SEQUENCES

    def _step_tokens(self, plan: Plan, origin: int, turn: int) -> int:
        """Real steps of all batches, of all processes, in the optimizer step that this round belongs to."""
        first = origin + turn // self.accumulate * self.accumulate * self.world
        numbers = range(max(0, first), min(self.batches, first + self.accumulate * self.world))
        return sum(int(self._lengths_N[plan.batch(number)].sum()) for number in numbers)

    def state_dict(self) -> dict[str, Any]:
        """Batches that are prepared but not yet handed out do not count as delivered."""
        return {"epoch": self.epoch, "delivered": self.delivered, "batches": self.batches, "world": self.world}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another loader was; after an epoch's last batch, with the next epoch."""
        epoch, delivered = state["epoch"], state["delivered"]
        if delivered >= state["batches"]:
            epoch, delivered = epoch + 1, 0
        if delivered and state["batches"] != self.batches:
            raise SettingsError(
                f"the checkpoint stands within an epoch of {state['batches']:,} batches, these settings make "
                f"{self.batches:,}: resume with the data and the flags for batches that it was made with"
            )
        self.epoch, self.delivered, self._start = epoch, delivered, delivered

    def close(self) -> None:
        """End the worker processes."""
        self._workers.close()


def rounds(batches: int, world: int) -> int:
    """Return how often each of `world` processes has to take a batch until none is left."""
    return -(-batches // world)


def _next_named(batches: Iterator[Batch], position: int) -> Batch:
    """Return the next batch; an error says which one it was."""
    try:
        return next(batches)
    except BaseException as error:
        error.add_note(f"while making {_named(0, position)}")
        raise


def _named(first: int, number: int) -> str:
    return f"batch {first + number:,} (counted through all epochs)"


def _numbers(sequences_B: np.ndarray) -> str:
    return f"sequences {some([str(number) for number in sequences_B], SHOWN)} by number"
