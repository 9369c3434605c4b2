"""Decides with all ranks, before any buffer is made, whether this run's transfers use the copy engines.

Ranks of a node write each other's memory after an exchange of handles, which containers may block: file
descriptors must pass between processes, and the driver must open what they stand for. A small trial finds
that out. Every rank takes each of its steps, and an integer that is summed over all ranks says whether all
succeeded. So one rank that fails makes every rank use NCCL's kernels.
"""

import os
import socket
import tempfile
from array import array
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.options import option_error
from megatron_zpp.distributed.symmetric_memory import (
    SymmetricMemory,
    check_nccl,
    missing_for_copy_engines,
    peer_memory,
)
from megatron_zpp.distributed.topology import Topology

_PATIENCE = 20.0  # seconds in which a rank of the same node must answer
_TRIED_BYTES = 1 << 16

Steps = Generator[Callable[[], None], None, None]


def choose_copy_engines(
    setting: Literal["auto", "on", "off"],
    topology: Topology,
    device: torch.device,
    timeout: timedelta | None,
    say: Callable[[str], None],
) -> bool:
    """Whether collectives inside a node use the copy engines (--zero-copy-engines); alike on every rank.

    `auto` answers no where they cannot be used. Where only the trial shows it, rank 0 says one line. Raises
    ValueError on every rank for `on` where they cannot be used.
    """
    if setting == "off":
        return False
    if problem := missing_for_copy_engines(topology, device):
        if setting == "on":
            raise option_error("--zero-copy-engines", "on", problem)
        return False
    return decide(setting, topology, device, _trial(topology, device, timeout), say)


def decide(
    setting: Literal["auto", "on"],
    topology: Topology,
    device: torch.device,
    steps: Steps,
    say: Callable[[str], None],
) -> bool:
    """Whether every rank can take all `steps`. Raises ValueError on every rank if not and `on` is given.

    No rank takes a step before all have taken the one before, and none takes another after one failed. A step
    must not wait for ever for ranks that fail in it.
    """
    with closing(steps):
        for step in steps:
            problem = None
            try:
                step()
            except Exception as error:  # whatever the driver, NCCL or the system says: it is the reason
                problem = f"{one_line(error)} [rank {topology.rank}]"
            problem = first_problem(problem, topology, device)
            if problem is None:
                continue
            if setting == "on":
                raise option_error("--zero-copy-engines", "on", problem)
            if topology.rank == 0:
                say(f"warning: transfers inside nodes use NCCL's kernels, not the copy engines: {problem}")
            return False
    return True


def first_problem(problem: str | None, topology: Topology, device: torch.device) -> str | None:
    """The problem of the first rank that has one, on every rank."""
    failed = torch.tensor(0 if problem is None else 1, device=device)
    dist.all_reduce(failed)
    if failed.item() == 0:
        return None
    problems: list[str | None] = [None] * topology.world_size
    dist.all_gather_object(problems, problem)
    return next(found for found in problems if found is not None)


def _trial(topology: Topology, device: torch.device, timeout: timedelta | None) -> Steps:
    """A little of all that the copy engines need. What it makes is gone at the end or after a failed step."""
    yield check_nccl
    pids = [0] * topology.world_size
    dist.all_gather_object(pids, os.getpid())
    yield from descriptor_steps([pids[rank] for rank in topology.node_ranks], topology.local_rank)
    made: list[SymmetricMemory] = []
    yield lambda: made.append(SymmetricMemory(topology.node_ranks, device, timeout))
    (memory,) = made
    registered: list[Tensor] = []
    try:
        yield lambda: registered.append(_register(memory, device))
        if memory.peers_write:
            yield lambda: _write_peers(memory, device)
    except GeneratorExit:  # a rank failed and takes no part in anything that ends this in order
        memory.abort()
        raise
    memory.close()
    dist.destroy_process_group(memory.group)


def descriptor_steps(pids: list[int], place: int, patience: float = _PATIENCE) -> Steps:
    """Passes a file descriptor around the ring of a node's processes, of which this one is at `place`.

    It goes the way of torch's symmetric memory: through sockets that are files of the temporary directory
    and are named by process. That one waits for ever for a process that cannot send; here `patience` seconds
    are the limit.
    """
    path = _socket_path(pids[place])
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as mine:
        mine.settimeout(patience)

        def bind() -> None:
            try:
                mine.bind(path)
            except OSError as error:
                raise OSError(f"cannot make the socket {path} ({error.strerror or error})") from None

        try:
            yield bind
            yield lambda: _pass_descriptor(mine, pids[(place + 1) % len(pids)], pids[place - 1])
        finally:
            Path(path).unlink(missing_ok=True)


def _socket_path(pid: int) -> str:
    return str(Path(tempfile.gettempdir(), f"zpp_copy_engines-{pid}"))


def _pass_descriptor(mine: socket.socket, following: int, preceding: int) -> None:
    """Sends a file descriptor to a process and receives another's. Raises OSError if either fails."""
    with open(os.devnull, "rb") as null:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [null.fileno()]))
        try:
            mine.sendmsg([b"fd"], [rights], 0, _socket_path(following))
        except OSError as error:
            reason = error.strerror or error
            raise OSError(f"cannot pass a file descriptor to process {following} ({reason})") from None
    try:
        _, descriptors, _, _ = socket.recv_fds(mine, 2, 1)
    except TimeoutError:
        raise OSError(
            f"no file descriptor came from process {preceding} in {mine.gettimeout():g} s"
        ) from None
    for descriptor in descriptors:
        os.close(descriptor)
    if not descriptors:
        raise OSError(f"a message from process {preceding} came without its file descriptor")


def _register(memory: SymmetricMemory, device: torch.device) -> Tensor:
    """Registers a buffer. A rank that fails ends its communicator, so that ranks waiting there fail too."""
    try:
        with memory.allocating():
            buffer = torch.zeros(_TRIED_BYTES, dtype=torch.uint8, device=device)
        memory.register()
    except Exception:
        memory.abort()
        raise
    return buffer


def _write_peers(memory: SymmetricMemory, device: torch.device) -> None:
    """A rank that fails leaves others waiting at the store, for `_PATIENCE` at most."""
    with _patience_of(memory.group):
        buffers = peer_memory(memory.group, device, _TRIED_BYTES)
    for buffer in buffers:
        buffer.zero_()
    torch.cuda.synchronize(device)


@contextmanager
def _patience_of(group: dist.ProcessGroup) -> Iterator[None]:
    store = dist.distributed_c10d._get_process_group_store(group)
    before = store.timeout  # type: ignore[attr-defined]  # missing from torch's stubs
    store.set_timeout(timedelta(seconds=_PATIENCE))
    try:
        yield
    finally:
        store.set_timeout(before)
