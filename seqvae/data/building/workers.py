"""Parts of a cache side by side, in processes of this machine.

In: how many. Out: what calls a function with each part and yields the results in their order (`parts.Each`).
"""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from seqvae.data.building.parts import Each
from seqvae.errors import StorageError


@contextmanager
def side_by_side(workers: int) -> Iterator[Each]:
    """Yield what works on so many parts at a time; of the errors of several, that of the first part is raised."""
    if workers == 1:
        yield map
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy the locks of pyarrow's threads, held or not
    with ProcessPoolExecutor(workers, context, pa.set_cpu_count, (1,)) as pool:

        def each(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
            try:
                yield from pool.map(function, items)
            except BrokenProcessPool as error:
                raise StorageError(
                    f"one of {workers} processes that build the cache was killed, most often as memory ran out: lower --workers"
                ) from error

        yield each
