"""Two network namespaces with one link between them, which can be cut, slowed down and made to lose packets.

Needs root. A rank enters a node's namespace before it opens a connection.
"""

import ctypes
import os
import subprocess
from pathlib import Path

_CLONE_NEWNET = 0x40000000
FAULTS = ("cut", "cut for 3 s", "one-way", "slow", "lossy")


class Link:
    """The link of two nodes, 0 and 1."""

    def __init__(self, name: str) -> None:
        self._names = [f"{name}-{node}" for node in (0, 1)]
        self.remove()
        for node in self._names:
            _run("ip", "netns", "add", node)
            _run("ip", "-n", node, "link", "set", "lo", "up")
        first, second = self._names
        _run("ip", "-n", first, "link", "add", "uplink", "type", "veth", "peer", "uplink", "netns", second)
        for number, node in enumerate(self._names):
            _run("ip", "-n", node, "address", "add", f"{self.address(number)}/24", "dev", "uplink")
        self.mend()

    @staticmethod
    def address(node: int) -> str:
        """The address of a node."""
        return f"10.77.1.{node + 1}"

    def enter(self, node: int) -> None:
        """Move this process to a node."""
        descriptor = os.open(f"/run/netns/{self._names[node]}", os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)

    def fail(self, fault: str, node: int) -> None:
        """Let a fault of `FAULTS` begin, at one node's end."""
        name = self._names[node]
        if fault.startswith("cut"):
            _run("ip", "-n", name, "link", "set", "uplink", "down")
        elif fault == "one-way":  # what this node sends is lost
            _run("ip", "-n", name, "route", "add", "blackhole", f"{self.address(1 - node)}/32")
        elif fault == "slow":
            _shape(name, "rate", "200kbit", "burst", "4kb", "latency", "500ms")
        else:  # a queue of two packets: the third is lost
            _shape(name, "rate", "20mbit", "burst", "2kb", "limit", "3kb")

    def mend(self) -> None:
        """Let the link be as at the start."""
        for number, name in enumerate(self._names):
            _run("ip", "-n", name, "link", "set", "uplink", "up")
            gone = f"{self.address(1 - number)}/32"
            subprocess.run(["ip", "-n", name, "route", "del", "blackhole", gone], stderr=subprocess.DEVNULL)
            subprocess.run(
                ["tc", "-n", name, "qdisc", "del", "dev", "uplink", "root"], stderr=subprocess.DEVNULL
            )

    def remove(self) -> None:
        """Remove what is there of it."""
        for name in self._names:
            if Path(f"/run/netns/{name}").exists():
                _run("ip", "netns", "del", name)


def _shape(namespace: str, *limits: str) -> None:
    _run("tc", "-n", namespace, "qdisc", "replace", "dev", "uplink", "root", "tbf", *limits)


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, stderr=subprocess.PIPE)
