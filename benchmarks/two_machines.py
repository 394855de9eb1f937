"""Two machines out of one: network namespaces that a virtual cable joins, each with names, a hostname and a directory of its own.

In: the directory of each, and the speed of the cable. Out: what to put before a command so that it runs there. Needs Linux, root,
`ip`, and for a speed `tc`.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

NAMES, ADDRESSES = ("node-a", "node-b"), ("10.55.0.1", "10.55.0.2")


class Machine(NamedTuple):
    """One of the two."""

    name: str
    address: str
    folder: Path
    namespace: str
    before: tuple[str, ...]
    """Words that begin each command on it."""
    variables: dict[str, str]
    """By which torch finds the cable."""

    def sent_bytes(self) -> int:
        """Return what the machine has sent so far."""
        command = ["ip", "netns", "exec", self.namespace, "cat", "/sys/class/net/cable/statistics/tx_bytes"]
        return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


def why_not() -> str:
    """Return why there can be no two machines here; an empty text where there can."""
    if not shutil.which("ip"):
        return "`ip` (iproute2) is not installed"
    if os.geteuid() != 0:
        return "network namespaces take root"
    name = f"seqvae-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode == 0:
        subprocess.run(["ip", "netns", "delete", name], check=False)
        return ""
    return f"no network namespaces: {tried.stderr.strip()}"


@contextmanager
def two_machines(folders: Sequence[Path], megabits: int | None = None) -> Iterator[list[Machine]]:
    """Yield two machines, neither of which sees the folder of the other. `megabits`: what the cable takes a second, each way."""
    spaces = [f"seqvae-{os.getpid()}-{name}" for name in NAMES]
    hosts = folders[0].parent / "hosts"
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for a, n in zip(ADDRESSES, NAMES, strict=True)))
    try:
        for space in spaces:
            run("ip", "netns", "add", space)
        run(*f"ip link add cable netns {spaces[0]} type veth peer name cable netns {spaces[1]}".split())
        machines = []
        for number, (space, name, address) in enumerate(zip(spaces, NAMES, ADDRESSES, strict=True)):
            within = ("ip", "netns", "exec", space)
            run(*within, "ip", "address", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                run(*within, "ip", "link", "set", device, "up")
            if megabits is not None:
                shape = f"tc qdisc add dev cable root tbf rate {megabits}mbit burst 256kb latency 50ms"
                run(*within, *shape.split())
            own, other = folders[number], folders[1 - number]
            own.mkdir(exist_ok=True)
            other.mkdir(exist_ok=True)
            script = (
                f'mount --bind "{hosts}" /etc/hosts && hostname {name} && mount -t tmpfs none "{other}" && exec "$@"'
            )
            before = (*within, "unshare", "--mount", "--uts", "sh", "-c", script, "sh")
            variables = {"GLOO_SOCKET_IFNAME": "cable", "TP_SOCKET_IFNAME": "cable"}
            machines.append(Machine(name, address, own, space, before, variables))
        yield machines
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
