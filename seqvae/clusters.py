"""Ray, where it is wanted: a connection with a cluster, and work in pieces that its tasks do.

In: a function and items. Out: what it returns of each, in their order. Ray is an extra, and imported when it is used.
"""

import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TypeVar

from seqvae.errors import UsageError

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def refuse_without_ray(wanted_by: str) -> None:
    """Refuse what needs Ray where it is not installed."""
    if find_spec("ray") is None:
        raise UsageError(f"{wanted_by} needs the extra 'ray': pip install -e '.[ray]'")


@contextmanager
def connected() -> Iterator[None]:
    """Connect, unless it is, with the cluster of RAY_ADDRESS or of this machine, else with one that ends with the block."""
    import ray

    if ray.is_initialized():
        yield
        return
    # Nothing told to its makers, no line printed twice, no other directory than the command's.
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_TRAIN_ENABLE_PRINT_PATCH", "RAY_CHDIR_TO_TRIAL_DIR"):
        os.environ.setdefault(name, "0")
    ray.init(include_dashboard=False, logging_level=logging.WARNING)
    try:
        yield
    finally:
        ray.shutdown()


def run_on_ray(
    function: Callable[[Item], Answer],
    items: Iterable[Item],
    *,
    at_once: int | None = None,
    in_order: bool = True,
    use_gpus: bool = False,
) -> Iterator[Answer]:
    """Return what the function returns of each item, in their order or as they are done; tasks of Ray compute it, one core each,
    and with `use_gpus` one GPU where the cluster has any.

    At most `at_once` are under way or wait to be taken, by default two for each core of the cluster. A task whose process is lost
    is run again; one that raises an error ends the others with it.
    """
    refuse_without_ray("work by tasks of Ray")
    import ray

    with connected():
        gpus = 1 if use_gpus and ray.cluster_resources().get("GPU", 0) else 0
        task: Any = ray.remote(num_cpus=1, num_gpus=gpus)(lambda item: function(item))  # Ray takes no partial functions
        limit = at_once or max(1, int(2 * ray.cluster_resources().get("CPU", 1)))
        rest, waiting = iter(items), deque[Any]()
        try:
            while True:
                waiting.extend(task.remote(item) for item in itertools.islice(rest, limit - len(waiting)))
                if not waiting:
                    return
                done = waiting[0] if in_order else ray.wait(list(waiting), num_returns=1)[0][0]
                yield ray.get(done)
                waiting.remove(done)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        finally:
            for one in waiting:
                ray.cancel(one)


@contextmanager
def tasks_of_ray() -> Iterator[Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]]:
    """Yield `run_on_ray` for several calls over one connection."""
    refuse_without_ray("--launcher ray")
    with connected():
        yield run_on_ray
