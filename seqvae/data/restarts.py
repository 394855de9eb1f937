"""All batches of an epoch in spite of trouble: when one is not made, the workers are thrown away and begin anew at that very batch.

In: workers, and the requests by number. Out: every batch once, in order, the same as without trouble; one line for each restart;
after three failures at one batch, a DataError that names the sequences, their files and their row groups.
"""

import logging
import threading
from collections.abc import Callable, Generator
from contextlib import closing
from queue import Empty, SimpleQueue

import numpy as np

from seqvae.data.batches import Batch
from seqvae.data.making import NotMade
from seqvae.data.places import UNREADABLE
from seqvae.data.workers import Workers
from seqvae.errors import DataError

log = logging.getLogger(__name__)
TRIES = 3
"""At one and the same batch: what fails so often will fail again."""
NAMING_SECONDS = 10.0
"""Where sequences came from stands on disks, and a disk that hangs may be why it is asked for."""


def warn(line: str) -> None:
    log.warning("%s", line)


class Restarts:
    """Stands between a loader and its workers."""

    def __init__(
        self, workers: Workers, place_of: Callable[[np.ndarray], str], on_trouble: Callable[[str], None] = warn
    ) -> None:
        """`place_of` says which sequences a request asks for and where they came from, `on_trouble` is told of each restart."""
        self._workers, self._place_of, self._on_trouble = workers, place_of, on_trouble

    def make(
        self, request: Callable[[int], np.ndarray], numbers: range, name: Callable[[int], str]
    ) -> Generator[Batch]:
        """Yield the batch of each number; `name` is what messages call it."""
        done = failures = 0
        while True:
            try:
                with closing(self._workers.make(request(number) for number in numbers[done:])) as batches:
                    for batch in batches:
                        done, failures = done + 1, 0
                        yield batch
                return
            except NotMade as trouble:
                failures += 1
                self._tell_or_give_up(trouble, failures, name(numbers[done]), request(numbers[done]))

    def _tell_or_give_up(self, trouble: NotMade, failures: int, name: str, sequences_B: np.ndarray) -> None:
        place = _within(NAMING_SECONDS, lambda: self._place_of(sequences_B))
        if failures == TRIES:
            raise DataError(
                f"{name} could not be made, {TRIES} times in a row: {trouble.reason}. It holds {place}. {trouble.advice}."
            ) from trouble
        self._on_trouble(
            f"{name} was not made: {trouble.reason}. It holds {place}. The loader starts anew from this batch "
            f"(try {failures + 1} of {TRIES})"
        )


def _within(seconds: float, say: Callable[[], str]) -> str:
    """What `say` returns, if it does so in time."""
    said: SimpleQueue[str] = SimpleQueue()

    def look_up() -> None:
        try:
            said.put(say())
        except (*UNREADABLE, ValueError, LookupError) as error:  # what lies there may be damaged, too
            said.put(f"sequences that cannot be looked up ({error})")

    threading.Thread(target=look_up, name="place", daemon=True).start()
    try:
        return said.get(timeout=seconds)
    except Empty:
        return f"sequences that could not be looked up within {seconds:g} s"
