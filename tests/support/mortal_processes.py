"""What processes of `seqvae.profiling.trials.Trials` do in tests: they die, each in its own way. As each starts anew, next
to nothing is imported here."""

import os
import signal
import sys
from multiprocessing.connection import Connection

from seqvae.errors import DataError, ExitCode
from seqvae.profiling.trials import Ready

BYTES_PER_SEQUENCE = 100


def answer(connection: Connection, directory: str, most: int, ending: str, can_reset: bool = True) -> None:
    """As many bytes as there are sequences, times 100; of more than `most` sequences this process dies."""
    connection.send(Ready(can_reset, least_sequences=1, device_bytes=os.getpid()))
    try:
        while True:
            wanted = connection.recv()
            if len(wanted.sequences_B) > most:
                end(connection, ending)
            connection.send(BYTES_PER_SEQUENCE * len(wanted.sequences_B))
    except EOFError:
        pass


def end(connection: Connection, ending: str) -> None:
    match ending:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "out of memory":
            sys.exit(ExitCode.OUT_OF_MEMORY)
        case "bug":
            os._exit(1)
        case "data":
            connection.send(DataError("train.parquet is gone"))
            sys.exit()


def die_at_once(connection: Connection, directory: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
