"""Decides with all ranks, before buffers are allocated, whether transfers inside nodes use the copy engines.

Ranks of a node write each other's memory after exchanging handles, which containers may prevent: file
descriptors must pass between processes, and the driver must accept them. A small trial finds out. Every rank
performs each step of the trial, and a sum over all ranks of a failure flag tells whether all have succeeded.
If one rank fails, every rank uses NCCL's kernels.
"""

import os
import socket
import tempfile
import time
from array import array
from collections.abc import Callable, Generator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.config.command_line import one_line
from megatron_zpp.distributed.symmetric_memory import (
    OFF,
    SymmetricMemory,
    check_nccl,
    may_have_copy_engines,
    peer_memory,
)
from megatron_zpp.mesh import Mesh

_PATIENCE = 20.0  # seconds in which a rank of the same node must answer
_TRIED_BYTES = 1 << 16

Steps = Generator[Callable[[], None], None, None]


def choose_copy_engines(
    mesh: Mesh, device: torch.device, timeout: timedelta | None, say: Callable[[str], None]
) -> bool:
    """Return, equally on every rank, whether collectives inside a node use the copy engines.

    If the trial fails, rank 0 says why. Raises ValueError on a rank that others wait for in vain; see
    `decide`.
    """
    if not may_have_copy_engines(mesh, device):
        return False
    return decide(mesh, device, _trial(mesh, device, timeout), say)


def decide(
    mesh: Mesh,
    device: torch.device,
    steps: Steps,
    say: Callable[[str], None],
    patience: float = 3 * _PATIENCE,
) -> bool:
    """Return whether all `steps` succeed on every rank; otherwise rank 0 says why not.

    No rank starts a step before all have finished the previous one, and none continues after a failure. A
    rank that has failed raises ValueError if others do not end the step in `patience` seconds. That is longer
    than any step waits for another rank, so they must be in a call of NCCL that nothing ends. `steps` stays
    open then, because cleaning up would wait for the others: the caller has to end the process with os._exit
    while it handles the error.
    """
    summing = False
    try:
        for step in steps:
            failure, began = None, time.monotonic()
            try:
                step()
            except Exception as error:  # any error of the driver, NCCL or the system is a reason
                failure = Failure(int(time.monotonic() - began), f"{one_line(error)} [rank {mesh.rank}]")
            failed, summing = torch.tensor(0 if failure is None else 1, device=device), True
            counted = dist.all_reduce(failed, async_op=True)
            assert counted is not None  # None is of ranks outside the group
            if failure is not None and not _ends(counted, patience):
                raise ValueError(
                    f"trial of copy engines: {failure.problem}; other ranks still wait for it; set "
                    f"{OFF}=0 on all ranks"
                )
            counted.wait()
            failures, summing = failed.item(), False
            if failures == 0:
                continue
            problem = first_problem(failure, mesh)
            if mesh.rank == 0:
                say(f"warning: transfers inside nodes use NCCL's kernels, not the copy engines: {problem}")
            return False
    finally:
        if not summing:  # while this GPU is in the sum above, freeing its memory would wait for the sum's end
            steps.close()
    return True


def _ends(work: dist.Work, patience: float) -> bool:
    """Whether a collective ends in so many seconds."""
    deadline = time.monotonic() + patience
    while not work.is_completed():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


class Failure(NamedTuple):
    """Why a step failed on this rank, and how many whole seconds after it began."""

    seconds: int
    problem: str


def first_problem(failure: Failure | None, mesh: Mesh) -> str:
    """Return, on every rank, the problem of the rank that failed soonest; at least one has failed.

    All ranks begin a step together, so a rank that waited in vain for the one with the cause failed later. Of
    several ranks that fail within the same second, it is the first.
    """
    failures: list[Failure | None] = [None] * mesh.world_size
    dist.all_gather_object(failures, failure)
    return min((found for found in failures if found is not None), key=lambda found: found.seconds).problem


def _trial(mesh: Mesh, device: torch.device, timeout: timedelta | None) -> Steps:
    """Yield steps that try, in small, all that copy engines need; clean up at the end or after a failure.

    Registering comes last. A rank that fails in it leaves the others waiting in NCCL, which returns only when
    all ranks of the node have called it, even if a communicator is aborted. What can fail on one rank alone,
    the allocation and the exchange of handles, has been tried before.
    """
    yield check_nccl
    pids = [0] * mesh.world_size
    dist.all_gather_object(pids, os.getpid())
    node_ranks = mesh.ranks(*mesh.inside_node)
    yield from descriptor_steps([pids[rank] for rank in node_ranks], mesh.index(*mesh.inside_node))
    made: list[SymmetricMemory] = []
    yield lambda: made.append(SymmetricMemory(node_ranks, device, timeout))
    (memory,) = made
    allocated: list[Tensor] = []
    try:
        yield lambda: allocated.append(_allocate(memory, device))
        if memory.peers_write:
            yield lambda: _write_peers(memory, device)
        yield memory.register
    except GeneratorExit:  # a rank failed, so a collective shutdown would hang
        memory.abort()
        raise
    memory.close()
    dist.destroy_process_group(memory.group)


def descriptor_steps(pids: list[int], local_rank: int, patience: float = _PATIENCE) -> Steps:
    """Yield steps that pass a file descriptor around the ring of a node's processes.

    `pids` are the processes by local rank. As in torch's symmetric memory, descriptors travel through sockets
    in the temporary directory that are named by process id. Torch waits forever for a process that cannot
    send; this trial waits `patience` seconds.
    """
    path = _socket_path(pids[local_rank])
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as mine:
        mine.settimeout(patience)

        def bind() -> None:
            try:
                mine.bind(path)
            except OSError as error:
                raise OSError(f"cannot create the socket {path} ({error.strerror or error})") from None

        try:
            yield bind
            following, preceding = pids[(local_rank + 1) % len(pids)], pids[local_rank - 1]
            yield lambda: _pass_descriptor(mine, following, preceding)
        finally:
            Path(path).unlink(missing_ok=True)


def _socket_path(pid: int) -> str:
    return str(Path(tempfile.gettempdir(), f"zpp_copy_engines-{pid}"))


def _pass_descriptor(mine: socket.socket, following: int, preceding: int) -> None:
    """Send a file descriptor to `following` and receive one from `preceding`. Raises OSError."""
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
            f"no file descriptor arrived from process {preceding} within {mine.gettimeout():g} s"
        ) from None
    for descriptor in descriptors:
        os.close(descriptor)
    if not descriptors:
        raise OSError(f"a message from process {preceding} arrived without its file descriptor")


def _allocate(memory: SymmetricMemory, device: torch.device) -> Tensor:
    with memory.allocating():
        return torch.zeros(_TRIED_BYTES, dtype=torch.uint8, device=device)


def _write_peers(memory: SymmetricMemory, device: torch.device) -> None:
    """Write to the memory of all peers. If a rank fails, others wait at the store for at most `_PATIENCE`."""
    store = dist.distributed_c10d._get_process_group_store(memory.group)
    before = store.timeout  # type: ignore[attr-defined]  # missing from torch's stubs
    store.set_timeout(timedelta(seconds=_PATIENCE))
    try:
        buffers = peer_memory(memory.group, device, _TRIED_BYTES)
    finally:
        store.set_timeout(before)
    for buffer in buffers:
        buffer.zero_()
    torch.cuda.synchronize(device)
