"""Which process of a run this is, and what all of them agree on.

In: what a launcher wrote into the environment: torchrun, SLURM, or anything else that sets RANK and WORLD_SIZE, as Ray and Kubeflow
do. Out: a `Launch`; a connection of all processes before any of them touches data or directories; decisions of the first process
that all know; and, where one does not come or is lost, an error that names it.
"""

import atexit
import json
import os
import re
import shutil
import socket
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from seqvae.errors import ProcessesError, UsageError

Decision = TypeVar("Decision")

DECISION = "SEQVAE_DECISION"
"""Variable of the environment that carries a decision to the processes that Lightning starts."""

LAUNCHER = "SEQVAE_LAUNCHER"
"""Variable of the environment that names a launcher which we start ourselves."""

RANKS = ("LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")
"""Variables that launchers number processes with where none of them sets RANK."""

BEAT_SECONDS = 2.0
"""Between two signs of life of a process."""
POLL_SECONDS = 0.2
TAIL_BYTES = 2**16
"""At the end of a checkpoint, where the checksums of all that it holds stand."""
PIECE_BYTES = 2**26
"""Of a file that is sent to another machine at once."""

LOST = re.compile(
    r"Timed out waiting|Connection (?:closed|reset) by peer|Connection was likely closed|Broken pipe|Socket Timeout"
    r"|Application timeout|[Ww]atchdog|does not answer"
)
"""What torch says where another process did not answer."""


# --- Who this is --------------------------------------------------------------------------------------------------------


class Launch(NamedTuple):
    """The processes that a launcher has started, of which this is one."""

    launcher: str
    environment: ClusterEnvironment
    per_node: int | None
    """None: it does not say."""


def find_launch() -> Launch | None:
    """Return what the environment says of a launcher; None: this command was typed, or started by Lightning."""
    if LAUNCHER in os.environ:  # first, because Ray may itself run in a job of SLURM
        return Launch(os.environ[LAUNCHER], TorchElasticEnvironment(), _number("LOCAL_WORLD_SIZE"))
    if TorchElasticEnvironment.detect():
        return Launch("torchrun", TorchElasticEnvironment(), _number("LOCAL_WORLD_SIZE"))
    if "SLURM_NTASKS" in os.environ and SLURMEnvironment.detect():
        per_node = _number("SLURM_NTASKS_PER_NODE") if "SLURM_NTASKS_PER_NODE" in os.environ else None
        return Launch("SLURM", SLURMEnvironment(auto_requeue=False), per_node)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, world = _number("RANK"), _number("WORLD_SIZE")
        if rank >= world:
            raise UsageError(f"RANK={rank} and WORLD_SIZE={world}: processes are numbered from 0 to {world - 1}")
        per_node = _number("LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in os.environ else None
        return Launch("RANK and WORLD_SIZE", TorchElasticEnvironment(), per_node)
    return None


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise UsageError(f"{name}={text!r}: a launcher sets it to a number; unset it to train in one process")
    return int(text)


def is_first_process() -> bool:
    """Return whether this is the first process of a run; known before Lightning has made its strategy, too."""
    names = ("RANK",) if "RANK" in os.environ else RANKS
    return all(int(os.environ.get(name, "0")) == 0 for name in names)


# --- Connection ---------------------------------------------------------------------------------------------------------


class Connection(NamedTuple):
    """The processes of a launcher, connected."""

    store: Store
    rank: int
    world: int
    timeout: timedelta

    def host_of(self, rank: int) -> str:
        return self.store.get(f"host_{rank}").decode()

    def names_of(self, ranks: list[int]) -> str:
        """Return `process 1 (node-a) and process 3`, with the machines of those that have been there."""
        texts = []
        for rank in ranks:
            host = f" ({self.host_of(rank)})" if self.store.check([f"host_{rank}"]) else ""
            texts.append(f"process {rank}{host}")
        return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)

    def beats(self) -> dict[int, str]:
        """Return the newest sign of life of each process that has given one."""
        keys = {rank: f"beat_{rank}" for rank in range(self.world)}
        return {rank: self.store.get(key).decode() for rank, key in keys.items() if self.store.check([key])}

    def silent(self) -> list[int]:
        """Return the processes that give no sign of life. Takes a few seconds."""
        before = self.beats()
        time.sleep(3 * BEAT_SECONDS)
        after = self.beats()
        return [rank for rank in range(self.world) if rank != self.rank and before.get(rank) == after.get(rank)]


_connection: Connection | None = None
"""Of this process; None: no launcher has started it, or it is alone."""
_meetings = 0
"""The number of times that the processes have met."""


def answer_of(ask: Callable[[], Decision], seconds: float) -> Decision:
    """Return what the store answers. It lives in the first process, and a call waits for ever where that is frozen."""
    answers: list[Decision] = []
    errors: list[RuntimeError] = []

    def run() -> None:
        try:
            answers.append(ask())
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise RuntimeError("the store of the first process does not answer")
    return answers[0]


def connect(backend: str, timeout: timedelta, per_node: int) -> None:
    """Connect this process with the others that a launcher started, `per_node` on each machine, once."""
    global _connection
    launch = find_launch()
    if launch is None or _connection is not None or launch.environment.world_size() == 1:
        return
    if launch.launcher == "RANK and WORLD_SIZE":
        if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
            raise UsageError(
                f"RANK={os.environ['RANK']} and WORLD_SIZE={os.environ['WORLD_SIZE']} say that this is one process of several, "
                f"but {' and '.join(missing)} of the first one is not set. Set it, or unset both to train in one process"
            )
        os.environ.setdefault("LOCAL_RANK", str(int(os.environ["RANK"]) % per_node))
        os.environ.setdefault("GROUP_RANK", str(int(os.environ["RANK"]) // per_node))
    place = launch.environment
    rank, world, address = place.global_rank(), place.world_size(), (place.main_address, place.main_port)
    if backend == "nccl":
        torch.cuda.set_device(place.local_rank())
    is_of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_host = rank == 0 and not is_of_agent
    try:
        server: Any = TCPStore(*address, world, is_host, timeout, wait_for_workers=False, multi_tenant=True)
    except RuntimeError as error:
        if is_host:
            raise ProcessesError(f"port {address[1]} (MASTER_PORT) cannot be opened: {error}") from error
        raise ProcessesError(
            f"process {rank} of {world}: the first one has not answered at {address[0]}:{address[1]} within {timeout} "
            "(--distributed_timeout). Is it running, and may these machines connect?"
        ) from error
    # torchrun keeps its own store when it starts all again: what the last attempt wrote must not count.
    prefix = f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}" if is_of_agent else "run"
    store = PrefixStore(prefix, server)
    connection = Connection(store, rank, world, timeout)
    store.set(f"host_{rank}", socket.gethostname())
    try:
        store.wait([f"host_{other}" for other in range(world)], timeout)
    except RuntimeError as error:
        try:
            absent = connection.names_of([other for other in range(world) if not store.check([f"host_{other}"])])
        except RuntimeError:  # the first process has given up sooner, and the store went with it
            absent = "the first process or another one"
        raise ProcessesError(
            f"process {rank} of {world}: {absent}, of those that {launch.launcher} says there are, did not come within {timeout} "
            "(--distributed_timeout)"
        ) from error
    if not torch.distributed.is_initialized():  # Ray has done that
        group = PrefixStore("group", store)
        torch.distributed.init_process_group(backend, store=group, rank=rank, world_size=world, timeout=timeout)
    own = PrefixStore(prefix, server.clone())  # one that waits for a key would keep the other from beating
    threading.Thread(target=_beat, args=(own, rank), name="seqvae-beat", daemon=True).start()
    _connection = connection


def _beat(store: Store, rank: int) -> None:
    """Give a sign of life again and again; a process that is stopped gives none."""
    number = 0
    while True:
        try:
            store.set(f"beat_{rank}", str(number))
        except RuntimeError:  # the first process has ended, and the store with it
            return
        number += 1
        time.sleep(BEAT_SECONDS)


def meet(place: str) -> None:
    """Wait until all processes have come to a place, however long their work takes, as long as they give signs of life."""
    global _meetings
    connection = _connection
    if connection is None:
        return
    _meetings += 1
    store, limit, name = connection.store, connection.timeout.total_seconds(), f"meeting_{_meetings}"
    heard: dict[int, tuple[str | None, float]] = {}

    def look() -> tuple[list[int], dict[int, str]]:
        store.set(f"{name}_{connection.rank}", "here")
        absent = [rank for rank in range(connection.world) if not store.check([f"{name}_{rank}"])]
        return absent, connection.beats() if absent else {}

    while True:
        try:
            missing, beats = answer_of(look, limit)
        except RuntimeError as error:
            raise ProcessesError(f"the first process was lost before {place} ({str(error).splitlines()[0]})") from error
        if not missing:
            return
        now = time.monotonic()
        heard = {
            rank: heard[rank] if rank in heard and heard[rank][0] == beats.get(rank) else (beats.get(rank), now)
            for rank in missing
        }
        if lost := [rank for rank in missing if now - heard[rank][1] > limit]:
            raise ProcessesError(
                f"{connection.names_of(lost)} gave no sign of life for {connection.timeout} (--distributed_timeout) before "
                f"{place}"
            )
        time.sleep(POLL_SECONDS)


def lost_processes(error: BaseException) -> ProcessesError | None:
    """Return what to say where an error means that another process did not answer; None: it means something else."""
    if not (isinstance(error, RuntimeError) and torch.distributed.is_initialized() and LOST.search(str(error))):
        return None
    said, who = str(error).splitlines()[0], "another process"
    if _connection is not None:
        try:
            if silent := answer_of(_connection.silent, 10 * BEAT_SECONDS):
                who = f"{_connection.names_of(silent)} of {_connection.world}"
        except RuntimeError:
            who = "the first process"
    return ProcessesError(
        f"{who} did not answer any more ({said}). All that was saved is whole: start the processes again, and the run goes on"
    )


# --- Agreement ----------------------------------------------------------------------------------------------------------


def decide_in_first_process(decide: Callable[[], dict[str, str | None]], world: int) -> dict[str, str | None]:
    """Return what `decide` returns in the first process, before a Trainer exists.

    Lightning starts the other processes of one machine itself, with the same command and the environment of the first: the decision
    travels there. A launcher starts all of them at once: they are connected, and it is broadcast.
    """
    if world == 1 or torch.distributed.is_initialized():
        return decide_together(decide)
    if "LOCAL_RANK" in os.environ and DECISION in os.environ:
        text = os.environ[DECISION]  # which anyone may have set
        try:
            read = json.loads(text)
        except (ValueError, RecursionError):
            read = None
        if not isinstance(read, dict) or not all(isinstance(value, str | None) for value in read.values()):
            raise UsageError(f"{DECISION}, which a run sets for its own processes, holds {text[:40]!r}: unset it")
        return read
    decision = decide()
    os.environ[DECISION] = json.dumps(decision)
    return decision


def decide_together(decide: Callable[[], Decision]) -> Decision:
    """Return what `decide` returns in the first process, while the processes of a run are connected.

    Where it raises an error there, the others end with its words.
    """
    if not torch.distributed.is_initialized():
        return decide()
    if is_first_process():
        try:
            decision = decide()
        except Exception as error:
            torch.distributed.broadcast_object_list([str(error) or type(error).__name__, None], src=0)
            raise
        torch.distributed.broadcast_object_list([None, decision], src=0)
        return decision
    received: list[Any] = [None, None]
    torch.distributed.broadcast_object_list(received, src=0)
    if received[0] is not None:
        raise UsageError(f"the first process ended: {received[0]}")
    decided: Decision = received[1]
    return decided


def refuse_differences(what: str, own: dict[str, Any], remedy: str) -> None:
    """Refuse to go on where processes have found different things; each says which. `remedy`: what to give alike."""
    if _connection is None:
        return
    everyones: list[Any] = [None] * _connection.world
    torch.distributed.all_gather_object(everyones, own)
    for rank, others in enumerate(everyones):
        if others == everyones[0]:
            continue
        name = next(name for name in own if others[name] != everyones[0][name])
        hosts = _connection.host_of(0), _connection.host_of(rank)
        raise UsageError(
            f"the processes of this run have other {what}: {name} is {everyones[0][name]} in process 0 ({hosts[0]}) and "
            f"{others[name]} in process {rank} ({hosts[1]}). Give all machines the same {remedy}"
        )


def shared_file(path: Path) -> Path:
    """Return where this process finds a file of the first one: under its path, or, where it has none or another, as a copy."""
    if _connection is None:
        return path
    marks: list[Any] = [None] * _connection.world
    torch.distributed.all_gather_object(marks, _mark_of(path))
    if all(mark == marks[0] for mark in marks):
        return path
    if marks[0] is None:
        raise UsageError(f"{path}: the first process has no such file, and another one has")
    size, lacks_it = marks[0][0], marks[_connection.rank] != marks[0]
    target = path
    if lacks_it:
        folder = Path(tempfile.mkdtemp(prefix="seqvae-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        target = folder / path.name
    with path.open("rb") if _connection.rank == 0 else target.open("wb" if lacks_it else "rb") as file:
        for begin in range(0, size, PIECE_BYTES):
            length = min(PIECE_BYTES, size - begin)
            piece = [file.read(length) if _connection.rank == 0 else b""]
            torch.distributed.broadcast_object_list(piece, src=0)
            if lacks_it:
                file.write(piece[0])
    return target


def _mark_of(path: Path) -> tuple[int, int] | None:
    """Return what tells a checkpoint from others: its size, and a checksum of its end."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(max(0, size - TAIL_BYTES))
            return size, zlib.crc32(file.read())
    except OSError:
        return None
