"""A Ray cluster on this machine whose nodes are processes: `python -m tests.support.ray_cluster NODES`.

Prints its address, removes the last node at each line that it reads, and ends with its input.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tests.support.launched import ROOT, environment


class Nodes(NamedTuple):
    """A cluster that runs."""

    process: "Popen[str]"
    variables: dict[str, str]
    """Of the environment, for commands that are to find it."""

    def remove_last(self) -> None:
        """Let a node vanish with all of its processes."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("remove\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "removed\n"


@contextmanager
def cluster(nodes: int) -> Iterator[Nodes]:
    """Start a cluster of nodes with room for one process each."""
    # Short, because the names of its sockets may have 107 bytes.
    with TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        own = {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
        line = [sys.executable, "-m", "tests.support.ray_cluster", str(nodes)]
        with (Path(folder) / "errors").open("w") as errors:
            process = Popen(line, cwd=ROOT, env=environment(own), stdin=PIPE, stdout=PIPE, stderr=errors, text=True)
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            assert address, (Path(folder) / "errors").read_text()
            yield Nodes(process, own | {"RAY_ADDRESS": address})
        finally:
            try:
                process.communicate(timeout=60)
            finally:
                process.kill()


def main() -> None:
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "include_dashboard": False}
    own = Cluster(initialize_head=True, head_node_args=head)
    others = [own.add_node(num_cpus=1) for _ in range(int(sys.argv[1]) - 1)]
    print(own.address, flush=True)
    for _ in sys.stdin:
        own.remove_node(others.pop(), allow_graceful=False)
        print("removed", flush=True)
    own.shutdown()


if __name__ == "__main__":
    main()
