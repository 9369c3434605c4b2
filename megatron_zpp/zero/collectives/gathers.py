"""Gathers of weights, in the compute format or as block-quantised messages (ZeRO++, section 3.1)."""

from torch import Tensor

from megatron_zpp.distributed.comm_stream import CommStream, Pending, copy
from megatron_zpp.ops.operations import Operations
from megatron_zpp.zero.communication_plan import GatherPlan


class PlainGather:
    """Sends shards in the compute format; they land in the buffer that the parameters view."""

    def __init__(self, plan: GatherPlan, comm_stream: CommStream) -> None:
        self._comm_stream, self._kept = comm_stream, plan.kept

    def write_gather_source(self, master: Tensor, gather_source: Tensor) -> None:
        """See Gather. Where both are the same memory there is nothing to write."""
        copy(gather_source, master)

    def gather(self, full: Tensor, gather_source: Tensor, keep: Tensor | None = None) -> Pending:
        """See Gather. `gather_source` may be this rank's own part of `full`."""

        def work() -> None:
            self._comm_stream.all_gather(full, gather_source)
            if keep is not None:
                keep.copy_(full.view(-1, len(keep))[self._kept])

        return self._comm_stream.submit(work)


class QuantizedGather:
    """qwZ: every rank sends messages of codes and scales, and decodes all of them, its own too.

    So every rank computes with the same bits. They are decoded into the buffer that the parameters view.
    """

    def __init__(self, plan: GatherPlan, comm_stream: CommStream, operations: Operations) -> None:
        assert plan.hop.quant_format is not None
        self._comm_stream, self._operations, self._format = comm_stream, operations, plan.hop.quant_format
        self._kept, self._messages = plan.kept, len(plan.hop.ranks) * plan.shards
        self._received = comm_stream.zeros(*plan.received)

    def write_gather_source(self, master: Tensor, gather_source: Tensor) -> None:
        """See Gather."""
        self._operations.quantize(master.to(gather_source.device)[None], gather_source[None], self._format)

    def gather(self, full: Tensor, gather_source: Tensor, keep: Tensor | None = None) -> Pending:
        """See Gather. A `keep` of bytes gets messages, so that weights are never quantised a second time."""

        def work() -> None:
            received = self._received[: len(self._comm_stream.ranks) * len(gather_source)]
            self._comm_stream.all_gather(received, gather_source)
            messages = received.view(self._messages, -1)
            self._operations.dequantize(messages, full.view(self._messages, -1), self._format)
            if keep is not None:
                whole = received if keep.dtype == gather_source.dtype else full
                keep.copy_(whole.view(-1, len(keep))[self._kept])

        return self._comm_stream.submit(work)
