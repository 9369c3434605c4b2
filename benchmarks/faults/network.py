"""Two network namespaces with one link between them: cut, slow, with a delay, or losing packets.

Needs root. A rank enters a node's namespace before it opens a connection. For a delay packets are led
through two tun devices, between which a process keeps each for a while: not every kernel has netem.
"""

import ctypes
import fcntl
import os
import selectors
import signal
import struct
import subprocess
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
DELAYED_BY = 0.1  # seconds in each direction
DELAYED = "delayed"
FAULTS = ("cut", "cut for 3 s", "one-way", "slow", "lossy", DELAYED)


class Link:
    """The link of two nodes, 0 and 1."""

    INTERFACE: ClassVar = "uplink"  # on both nodes

    def __init__(self, name: str) -> None:
        self._names = [f"{name}-{node}" for node in (0, 1)]
        self._relay: int | None = None  # the process that delays packets
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

    def slow(self, rate: str) -> None:
        """Limit what each node sends, in the words of tc."""
        for name in self._names:
            _shape(name, "rate", rate, "burst", "64kb", "latency", "200ms")

    def fail(self, fault: str, node: int) -> None:
        """Let a fault of `FAULTS` begin, at one node's end."""
        name = self._names[node]
        if fault.startswith("cut"):
            _run("ip", "-n", name, "link", "set", "uplink", "down")
        elif fault == "one-way":  # what this node sends is lost
            _run("ip", "-n", name, "route", "add", "blackhole", f"{self.address(1 - node)}/32")
        elif fault == "slow":
            _shape(name, "rate", "200kbit", "burst", "4kb", "latency", "500ms")
        elif fault == DELAYED:
            self._delay()
        else:  # a queue of two packets: the third is lost
            _shape(name, "rate", "20mbit", "burst", "2kb", "limit", "3kb")

    def mend(self) -> None:
        """Let the link be as at the start."""
        if self._relay is not None:
            os.kill(self._relay, signal.SIGKILL)  # its devices end with it, and their routes
            os.waitpid(self._relay, 0)
            self._relay = None
        for number, name in enumerate(self._names):
            _run("ip", "-n", name, "link", "set", "uplink", "up")
            gone = f"{self.address(1 - number)}/32"
            subprocess.run(["ip", "-n", name, "route", "del", "blackhole", gone], stderr=subprocess.DEVNULL)
            subprocess.run(
                ["tc", "-n", name, "qdisc", "del", "dev", "uplink", "root"], stderr=subprocess.DEVNULL
            )

    def remove(self) -> None:
        """Remove what is there of it."""
        if self._relay is not None:
            self.mend()
        for name in self._names:
            if Path(f"/run/netns/{name}").exists():
                _run("ip", "netns", "del", name)

    def _delay(self) -> None:
        """Lead all packets through a process that keeps each for a while."""
        ready, told = os.pipe()
        self._relay = os.fork()
        if not self._relay:
            try:
                ends = []
                for node in (0, 1):
                    self.enter(node)
                    ends.append(_tun("delay"))
                os.write(told, b".")
                _relay(ends[0], ends[1])
            finally:
                os._exit(1)
        os.close(told)
        assert os.read(ready, 1) == b".", "no tun device: /dev/net/tun is needed"
        os.close(ready)
        for node, name in enumerate(self._names):
            _run("ip", "-n", name, "link", "set", "delay", "up")
            route = [f"{self.address(1 - node)}/32", "dev", "delay", "src", self.address(node)]
            _run("ip", "-n", name, "route", "add", *route)


def _tun(name: str) -> int:
    """A descriptor of a new device in this process's namespace; each read and write is one packet."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return descriptor


def _relay(first: int, second: int) -> None:
    """Pass packets on between two devices, each after `DELAYED_BY`; never returns."""
    selector = selectors.DefaultSelector()
    waiting: deque[tuple[float, int, bytes]] = deque()  # in the order in which they are due
    for source, target in ((first, second), (second, first)):
        selector.register(source, selectors.EVENT_READ, target)
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, target, packet = waiting.popleft()
            with suppress(OSError):  # lost: a device that is not up yet
                os.write(target, packet)
        for key, _ in selector.select(waiting[0][0] - now if waiting else None):
            try:
                waiting.append((time.monotonic() + DELAYED_BY, key.data, os.read(key.fd, 1 << 16)))
            except BlockingIOError:
                continue


def _shape(namespace: str, *limits: str) -> None:
    _run("tc", "-n", namespace, "qdisc", "replace", "dev", "uplink", "root", "tbf", *limits)


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, stderr=subprocess.PIPE)
