"""Streams and exchanges of a plan between real ranks: what they allocate and send; a link that is held."""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.distributed.comm_stream import CommStream, Pending, TrafficLedger
from megatron_zpp.exchange.route import SentBytes
from megatron_zpp.mesh import Mesh
from megatron_zpp.ops.operations import Operations
from megatron_zpp.zero.communication import Communication
from megatron_zpp.zero.communication_plan import CommunicationPlan
from tests.support import nightly
from tests.zero.engines import copy_engines, this_device
from tests.zero.ranks import SharedMemoryStream

Sizes = tuple[int, int, int]  # nodes, data ranks of a node, tensor ranks
GRIDS = [  # lists of sizes, each of as many ranks
    [(1, 1, 1)],
    [(1, 4, 1), (2, 2, 1), (2, 1, 2)],
    [(3, 2, 1)],
    [(2, 4, 1)],
    nightly([(4, 1, 1)]),
    nightly([(2, 3, 1)]),
    nightly([(2, 2, 2), (1, 4, 2), (4, 1, 2)]),
]
# Groups of processes that cases have left on this rank, which later cases take: to connect one takes longest.
LEFT: dict[tuple[int, ...], list[dist.ProcessGroup]] = defaultdict(list)
SECONDS, GRACE = 60.0, 0.2  # until a held exchange gives up; for others that should not begin, but would


def mesh_of(sizes: Sizes, rank: int = 0) -> Mesh:
    """The mesh as a rank sees it."""
    nodes, local, tensor = sizes
    return Mesh(nodes=nodes, local_ranks=local, tensor_ranks=tensor, rank=rank)


class Opened:
    """What `plan` names, on this rank of a job. Its streams allocate what the plan says."""

    def __init__(self, plan: CommunicationPlan, kernels: Operations, watch: "Watch | None" = None) -> None:
        mesh = plan.mesh
        self._ledger, self.allocated = TrafficLedger(mesh), list[int]()
        kind: Callable[..., CommStream] = CommStream
        if watch is not None:
            kind = partial(HeldStream, watch=watch)
        shared = plan.copy_engines and watch is None and this_device().type == "cpu"

        def stream(ranks: Any) -> CommStream:
            engines = copy_engines(mesh)
            its_kind = SharedMemoryStream if shared and mesh.share_a_node(ranks) else kind
            made = its_kind(ranks, mesh, this_device(), self._ledger, None, copy_engines=engines)
            zeros, peer_buffers = made.zeros, made.peer_buffers

            def counted(numel: int, dtype: torch.dtype) -> Tensor:
                self.allocated = [*self.allocated, numel * dtype.itemsize]
                return zeros(numel, dtype)

            def counted_peer_buffers(nbytes: int) -> list[Tensor]:
                before = self.allocated  # the few bytes of barriers do not count
                buffers, self.allocated = peer_buffers(nbytes), [*before, nbytes]
                return buffers

            made.zeros, made.peer_buffers = counted, counted_peer_buffers  # type: ignore[method-assign]
            return made

        self._groups = list[tuple[tuple[int, ...], dist.ProcessGroup]]()

        def group(ranks: tuple[int, ...], **settings: Any) -> dist.ProcessGroup:
            left = LEFT[ranks] if this_device().type == "cpu" else []
            taken = left.pop() if left else new_group(ranks, **settings)
            self._groups.append((ranks, taken))
            return taken

        new_group = dist.new_group
        with patch.object(dist, "new_group", group):
            self.communication = Communication(plan, stream, kernels)
        assert sum(self.allocated) == plan.arena_bytes
        for comm_stream in self.communication.comm_streams:
            comm_stream.ready()

    def close(self) -> SentBytes:
        """End the streams; return what this rank has sent."""
        for comm_stream in self.communication.comm_streams:
            comm_stream.settle()
            comm_stream.close()
        for ranks, group in self._groups:
            LEFT[ranks].append(group)
        return SentBytes(*self._ledger.take())


class Watch:
    """Holds the exchange of a rank that is submitted first over a `held` link until `until` is true.

    It gets (begun, ended), which count exchanges by link: "near", inside a node, and "far". `beside` says
    whether it became true, and `begun` how many had begun when the exchange was let go.
    """

    def __init__(self, held: str, until: Callable[[Counter[str], Counter[str]], bool]) -> None:
        self.held, self._until = held, until
        self.beside, self.begun = False, Counter[str]()
        self._begun, self._ended = Counter[str](), Counter[str]()
        self._changed = threading.Condition()
        self._holder: CommStream | None = None  # until it has been held

    def submit(self, link: str, stream: CommStream) -> None:
        """Note who is first: streams are threads, which may begin in any order."""
        if link == self.held and not self._begun[link] and self._holder is None:
            self._holder = stream

    def begin(self, link: str, stream: CommStream) -> None:
        """Count an exchange that begins, and hold the first one."""
        with self._changed:
            first = self._holder is stream and not self.begun
            self._begun[link] += 1
            self._changed.notify_all()
            if first:
                self.beside = self._changed.wait_for(lambda: self._until(self._begun, self._ended), SECONDS)
                self._changed.wait_for(lambda: False, GRACE)
                self.begun = self._begun.copy()

    def end(self, link: str) -> None:
        """Count an exchange that has ended."""
        with self._changed:
            self._ended[link] += 1
            self._changed.notify_all()


class HeldStream(CommStream):
    """A stream whose exchanges are watched."""

    def __init__(self, *args: Any, watch: Watch, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        mesh, self._watch = args[1], watch
        self._link = "near" if mesh.share_a_node(self.ranks) else "far"

    def submit(self, work: Callable[[], object]) -> Pending:
        """See CommStream."""
        self._watch.submit(self._link, self)
        return super().submit(work)

    def all_gather(self, full: Tensor, shard: Tensor) -> None:
        """See CommStream."""
        self._watch.begin(self._link, self)
        super().all_gather(full, shard)
        self._watch.end(self._link)

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        """See CommStream."""
        self._watch.begin(self._link, self)
        super().all_to_all(received, sent)
        self._watch.end(self._link)
