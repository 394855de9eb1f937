"""A command with faults in it: `python -m tests.faults.faulty '[{"fault": "kill", "hook": "on_train_batch_start", "at": 5}]'
train_optimized.py ...`. The command is the real one, in a process of its own; what goes wrong is put in from outside, before it
starts, by replacing what it calls. The product itself has no door for that.

Each fault is a dict with its name under "fault" and the arguments of the function below that has this name.
"""

import json
import os
import resource
import runpy
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}


def main() -> None:
    faults, command, *words = sys.argv[1:]
    sys.argv = [command, *words]
    sys.path.insert(0, str(ROOT))
    from seqvae.console import share_machine

    share_machine()  # as the command does, before torch is imported
    for arguments in json.loads(faults):
        FAULTS[arguments.pop("fault")](**arguments)
    runpy.run_path(str(ROOT / command), run_name="__main__")


def send(name: str, hook: str, at: int, to_group: bool = False, twice: bool = False) -> None:
    """A signal in a hook of Lightning's, the `at`-th time that it is called, from 0 on."""

    def act() -> None:
        if to_group:
            os.killpg(0, SIGNALS[name])
        else:
            os.kill(os.getpid(), SIGNALS[name])
        if twice:
            time.sleep(1.1)  # sooner it counts as the same signal, passed on by a launcher
            os.kill(os.getpid(), SIGNALS[name])
            print("still here after the second signal")

    in_hook(hook, at, act)


def kill(hook: str, at: int) -> None:
    send("kill", hook, at)


def kill_while_saving(save: int, share: float) -> None:
    """When so much of the file is written."""
    import torch

    whole, saves = torch.save, counter()

    def half(checkpoint: Any, file: Any) -> None:
        whole(checkpoint, file)
        if saves() == save:
            file.truncate(int(file.tell() * share))
            os.kill(os.getpid(), signal.SIGKILL)

    put(torch, "save", half)


def kill_between_names(rename: int) -> None:
    """Right behind the given renaming of a file in checkpoints/: new to last, last to previous ..."""
    replace, renames = Path.replace, counter()

    def then_die(path: Path, target: Any) -> Path:
        done = replace(path, target)
        if path.parent.name == "checkpoints" and renames() == rename:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    put(Path, "replace", then_die)


def nan(positions: list[int], times: int = 1, above_lr: float = 0.0) -> None:
    """Micro-batches at these positions come to NaN, the first so many times, as long as the rate is above one."""
    from seqvae.training.module import TrainingModule

    network_of, seen = TrainingModule.compute, dict[int, int]()

    def spoilt(module: Any, batch: Any, *of_parts: Any) -> Any:
        rate = module.optimizer.lr
        seen[batch.position] = seen.get(batch.position, 0) + 1
        if batch.position not in positions or seen[batch.position] > times or rate <= above_lr:
            return network_of(module, batch, *of_parts)
        handle = module.network.register_forward_hook(
            lambda _, __, output: output._replace(nll_B=output.nll_B * float("nan"))
        )
        try:
            return network_of(module, batch, *of_parts)
        finally:
            handle.remove()

    put(TrainingModule, "compute", spoilt)


def out_of_memory(most_padded_steps: int, on_the_way: str = "forward", from_position: int = 0) -> None:
    """There is room for so many padded steps and no more. A CPU's allocator says it in these words."""
    import torch

    from seqvae.data.batch import padded_steps
    from seqvae.training.module import TrainingModule

    compute = TrainingModule.compute
    words = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, loss: torch.Tensor) -> torch.Tensor:
            return loss.clone()

        @staticmethod
        def backward(context: Any, *gradient: torch.Tensor) -> Any:
            raise RuntimeError(words)

    def tight(module: Any, batch: Any, *of_parts: Any) -> Any:
        is_too_much = padded_steps(batch) > most_padded_steps and batch.position >= from_position
        if is_too_much and on_the_way == "forward":
            raise RuntimeError(words)
        told = compute(module, batch, *of_parts)
        if is_too_much:
            early = next(iter(module.network.parameters()))  # its gradient is there before the rest fails
            told["loss"] = told["loss"] + 0 * Fails.apply(early.sum())
        return told

    put(TrainingModule, "compute", tight)


def full_disk(most_bytes: int, hook: str = "on_fit_start", at: int = 0, until: int | None = None) -> None:
    """No file may grow beyond so many bytes from the `at`-th call of a hook on, until that many calls later."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # Python does so itself; written down, as all of this rests on it
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    if hook == "now":
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
        return
    in_hook(hook, at, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard)))
    if until is not None:
        in_hook(hook, until, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard)))


def impatient(seconds: float = 0.0) -> None:
    """What cannot be written ends a run after a few tries, however short a time they took."""
    from seqvae import files as patience

    patience.LEAST_SECONDS = seconds


def gather(what: str, at: int) -> None:
    """The loader's `at`-th batch: its maker raises, hangs, or its process dies; once."""
    from seqvae.data.dataset import SequenceSet

    make, calls = SequenceSet.gather, counter()
    parent = os.getpid()

    def faulty(sequences: Any, *arguments: Any) -> Any:
        if os.getpid() == parent and threading.current_thread() is threading.main_thread():
            return make(sequences, *arguments)  # a monitor's sample, or a preview: nobody waits for those elsewhere
        if calls() == at and not (marker := Path(os.environ["FAULT_MARKER"])).exists():
            marker.touch()  # processes have counters of their own
            if what == "raise":
                raise OSError(5, "Input/output error")
            if what == "hang":
                time.sleep(10_000)
            if os.getpid() != parent:
                os.kill(os.getpid(), signal.SIGKILL)
        return make(sequences, *arguments)

    put(SequenceSet, "gather", faulty)


def slow_build(seconds: float) -> None:
    """A cache that takes so long to be built."""
    from seqvae.data import datamodule

    prepare = vars(datamodule)["prepare_cache"]

    def slow(*arguments: Any) -> Any:
        time.sleep(seconds)
        return prepare(*arguments)

    put(datamodule, "prepare_cache", slow)


def few_files(most: int) -> None:
    """So many files may be open at once."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def remove(path: str, hook: str, at: int) -> None:
    """A file or a directory goes while a run goes on."""
    there = Path(path)
    in_hook(hook, at, lambda: shutil.rmtree(there) if there.is_dir() else there.unlink())


def wait(path: str, hook: str, at: int) -> None:
    """Until somebody makes a file."""

    def until_there() -> None:
        while not Path(path).exists():
            time.sleep(0.05)

    in_hook(hook, at, until_there)


def no_figures() -> None:
    """They take half of so short a run's time, and are not what is looked at."""
    from seqvae.monitors.drawing import Drawing

    put(Drawing, "start", lambda *_, **__: False)


def often_shown() -> None:
    """Previews come as often in a run of some thousand tokens as in a long one."""
    from seqvae.training.callbacks import previews

    previews.TOKENS_BETWEEN = 5000


def in_hook(hook: str, at: int, act: Callable[[], Any]) -> None:
    from lightning import Callback

    from seqvae.training.fit import _Run

    calls = counter()

    class InHook(Callback):
        pass

    def call(self: Any, *_: Any, **__: Any) -> None:
        if calls() == at:
            act()

    setattr(InHook, hook, call)
    before = _Run._callbacks_around
    put(_Run, "_callbacks_around", lambda run, module: [InHook(), *before(run, module)])


def put(owner: Any, name: str, by: Any) -> None:
    setattr(owner, name, by)


def counter() -> Callable[[], int]:
    """0, 1, 2 ..."""
    count = -1

    def next_one() -> int:
        nonlocal count
        count += 1
        return count

    return next_one


FAULTS: dict[str, Callable[..., None]] = {
    each.__name__: each
    for each in (
        *(send, kill, kill_while_saving, kill_between_names, nan, out_of_memory),
        *(full_disk, impatient, gather, slow_build, few_files, remove, wait, no_figures, often_shown),
    )
}

if __name__ == "__main__":
    main()
