"""Gathers and reductions that send block-quantised codes (ZeRO++, 2306.10209, sections 3.1 and 3.3)."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from megatron_zpp.distributed.comm_stream import CommStream, Pending
from megatron_zpp.ops.formats import QuantFormat
from megatron_zpp.ops.operations import Operations
from megatron_zpp.zero.collectives.two_hops import TwoHops
from megatron_zpp.zero.flat_layout import FlatLayout
from megatron_zpp.zero.grad_segments import GradSegment, join
from megatron_zpp.zero.theory import chunk_numel


class QuantizedGather:
    """qwZ: every rank sends one message of codes and scales, and decodes all of them, its own too.

    So every rank computes with the same bits. They are decoded into the buffer that the parameters view.
    """

    def __init__(
        self,
        comm_stream: CommStream,
        operations: Operations,
        format: QuantFormat,
        layouts: Sequence[FlatLayout],
        group_rank: int,
    ) -> None:
        """The communication stream's ranks hold the messages of all shards of a unit: one each, or several.

        `group_rank` says which part is this rank's to keep.
        """
        self._comm_stream, self._operations, self._format, self._group_rank = (
            comm_stream,
            operations,
            format,
            group_rank,
        )
        self._shards = layouts[0].ranks
        largest = max(format.message_bytes(layout.shard_numel) for layout in layouts)
        self._received = comm_stream.zeros(self._shards * largest, torch.uint8)

    def gather_source(self, shard_numel: int) -> Tensor:
        """See Gather."""
        return self._comm_stream.zeros(self._format.message_bytes(shard_numel), torch.uint8)

    def write_gather_source(self, master: Tensor, gather_source: Tensor) -> None:
        """See Gather."""
        self._operations.quantize(master.to(gather_source.device)[None], gather_source[None], self._format)

    def gather(self, full: Tensor, gather_source: Tensor, keep: Tensor | None = None) -> Pending:
        """See Gather. A `keep` of bytes keeps the codes, which are then never quantised again."""

        def work() -> None:
            received = self._received[: len(self._comm_stream.ranks) * len(gather_source)]
            self._comm_stream.all_gather(received, gather_source)
            messages = received.view(self._shards, -1)
            self._operations.dequantize(messages, full.view(self._shards, -1), self._format)
            if keep is not None:
                whole = received if keep.dtype == torch.uint8 else full
                keep.copy_(whole.view(-1, len(keep))[self._group_rank])

        return self._comm_stream.submit(work)


class QuantizedReduction:
    """qgZ: gradients cross each link once, as codes; every sum is in fp32.

    Hop 1, inside the node: the rank of place l gets what its node has for the ranks of place l on all nodes,
    in the order of the nodes; the quantisation puts each slice there. It sums, and hop 2, between nodes,
    takes each slice to its owner. A hop of one rank is left out: one node has one, and so have nodes of one.
    """

    returns_squared_norms = False  # a pass beside the compute would cost more than one before the step

    def __init__(
        self,
        inside: CommStream,
        between: CommStream,
        operations: Operations,
        format: QuantFormat,
        layouts: Sequence[FlatLayout],
        dtype: torch.dtype,
    ) -> None:
        """`inside` has the ranks of the node, `between` those of this rank's place on every node.

        `dtype` is that of gradients in several parts.
        """
        self._operations, self._format = operations, format
        self._local, self._nodes = len(inside.ranks), len(between.ranks)
        chunk = max(self._chunk_numel(layout.shard_numel) for layout in layouts)
        self._first = first = between if self._local == 1 else inside
        self._whole = first.zeros(max(layout.numel for layout in layouts), dtype)
        room = len(first.ranks) * format.message_bytes(self._slices * chunk)
        self._sent, self._received = first.zeros(room, torch.uint8), first.zeros(room, torch.uint8)
        if self._two_hops:
            self._hops = TwoHops(inside, between, self._nodes * format.message_bytes(chunk), torch.uint8)

    @property
    def block(self) -> int:
        """Elements that share a scale."""
        return self._format.block

    def error_numel(self, layout: FlatLayout) -> int:
        """Elements of what hop 2 can lose of a unit on this rank; 0 where there is no such hop."""
        return self._nodes * layout.shard_numel if self._two_hops else 0

    def reduce_scatter(
        self,
        sent: Sequence[GradSegment],
        shard: Tensor,
        *,
        add: bool,
        squares: Tensor | None = None,
        error: Tensor | None = None,
    ) -> Pending:
        """See Reduction. `error` (error_numel,) is laid out by chunks."""
        assert squares is None
        full, pending = sent[0].flat, []
        if len(sent) > 1:
            full = self._whole.view(full.dtype)[: len(shard) * self._local * self._nodes]
            pending.append(self._first.submit(partial(join, sent, full)))
        for chunk in self._chunks(len(shard)):
            slices = full.view(-1, len(shard))[:, chunk.start : chunk.stop]  # row r is for rank r
            owned = shard[chunk.start : chunk.stop]
            if self._two_hops:
                lost = None if error is None else error[self._nodes * chunk.start : self._nodes * chunk.stop]
                pending.append(self._in_two_hops(slices, owned, add, lost))
            else:
                pending.append(self._in_one_hop(slices, owned, add))
        return Pending(lambda: [chunk.wait() for chunk in pending])  # each, since each can fail

    @property
    def _two_hops(self) -> bool:
        return self._local > 1 and self._nodes > 1

    @property
    def _slices(self) -> int:
        """Slices of one message of the first hop."""
        return self._nodes if self._two_hops else 1

    def _in_one_hop(self, slices: Tensor, shard: Tensor, add: bool) -> Pending:
        def work() -> None:
            received = self._exchange(slices, slices.shape[1])
            self._operations.sum_into(received, shard, self._format, add=add)

        return self._first.submit(work)

    def _in_two_hops(self, slices: Tensor, shard: Tensor, add: bool, error: Tensor | None) -> Pending:
        def fill(sums: Tensor) -> None:
            received = self._exchange(slices, self._nodes * len(shard))
            messages = sums.view(self._nodes, -1)
            self._operations.sum_quantize(received, messages, self._format, self._format, error=error)

        def take(received: Tensor) -> None:
            messages = received.view(self._nodes, -1)
            self._operations.sum_into(messages, shard, self._format, add=add)

        return self._hops.submit(self._nodes * self._format.message_bytes(len(shard)), fill, take)

    def _exchange(self, slices: Tensor, numel: int) -> Tensor:
        """The first hop: (ranks of its stream, message_bytes(numel)), a message from each of them."""
        ranks, nbytes = len(self._first.ranks), self._format.message_bytes(numel)
        sent, received = (room[: ranks * nbytes] for room in (self._sent, self._received))
        self._operations.quantize(slices, sent.view(ranks, nbytes), self._format)
        self._first.all_to_all(received, sent)
        return received.view(ranks, nbytes)

    def _chunk_numel(self, shard_numel: int) -> int:
        """Elements of each shard that go together."""
        return chunk_numel(shard_numel, self._two_hops, self._format.block)

    def _chunks(self, shard_numel: int) -> Iterator[range]:
        size = self._chunk_numel(shard_numel)
        for start in range(0, shard_numel, size):
            yield range(start, min(start + size, shard_numel))
