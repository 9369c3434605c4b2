"""Exchanges weight differences between nodes, against a reference that the ranks of each node hold together.

SDP4Bit (2410.15526, section 3.1) sends codes of differences under ZeRO-2, where every rank has all weights.
Here the ranks of a node, or of an hpZ group in it, hold equal parts of the reference of each unit, as hpZ's
secondary shards: a rank holds what the ranks of its group rank own together. Forward and backward gather the
reference inside the group.

    encode   the owner, after the optimizer: codes of its weights less its part of the reference
    gather   the messages, among the cross-node ranks; if a node has several groups, then also among its
             ranks of the same group rank
    apply    every one of them, the owner too, moves its reference by every message once

So references have equal bits on all nodes, and what the codes lost is in the next difference. Where they lose
too much, `DifferenceFormats` has the unit travel in 8 bits, as linear codes.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_zpp.distributed.comm_stream import CommStream, Pending
from megatron_zpp.ops.formats import LloydMaxFormat, QuantFormat
from megatron_zpp.ops.operations import Operations
from megatron_zpp.zero.collectives.rotation import clear
from megatron_zpp.zero.communication_plan import CommunicationPlan
from megatron_zpp.zero.hop import CodeFormat


@dataclass
class _Lane:
    """A stream between nodes, where its messages arrive, and the work of another stream that reads them."""

    stream: CommStream
    buffer: Tensor
    reading: Pending = field(default_factory=Pending)


class WeightDifferences:
    """The exchange of one run."""

    def __init__(
        self,
        plan: CommunicationPlan,
        between: Sequence[CommStream],
        among_groups: CommStream | None,
        operations: Operations,
    ) -> None:
        """Each of `between` has the cross-node ranks; exchanges take turns on them.

        `among_groups` has the ranks of this node with this one's group rank; None: there is one group.
        """
        hop = plan.gather.hop
        assert isinstance(hop.format, LloydMaxFormat)
        self._operations = operations
        self._nodes, self._node = len(hop.ranks), hop.group_rank
        received = plan.gather.received  # sent on among the groups, so in memory of that stream
        self._lanes = deque(_Lane(stream, (among_groups or stream).zeros(*received)) for stream in between)
        self._among, self._groups = among_groups, plan.reference_groups
        self._group = 0 if among_groups is None else among_groups.group_rank
        self._messages = None  # of all owners, where a node has several groups
        if among_groups is not None:
            assert plan.among_groups is not None
            self._messages = among_groups.zeros(*plan.among_groups.received)
        blocks = max(layout.shard_numel for layout in plan.layouts) // hop.format.block
        self._squares = between[0].zeros(2 * blocks, torch.float32)

    def _next_lane(self) -> _Lane:
        self._lanes.rotate(-1)
        return self._lanes[-1]

    def own_part(self, reference: Tensor) -> Tensor:
        """This rank's shard (n,) of its part of the reference (groups · nodes · n,)."""
        return self._nodes_part(reference).view(self._nodes, -1)[self._node]

    def _nodes_part(self, reference: Tensor) -> Tensor:
        """What this rank and its cross-node ranks own of it (nodes · n,)."""
        return reference.view(self._groups, -1)[self._group]

    def write_key_frame(self, weights: Tensor, reference: Tensor) -> None:
        """Begin a reference with `weights` (n,) in bf16; `publish` sends it."""
        self.own_part(reference).copy_(weights.bfloat16())

    def publish(self, reference: Tensor) -> Pending:
        """Send this rank's part of the reference itself, at the start of a run."""
        between, among = self._next_lane().stream, self._among
        own, part = self.own_part(reference), self._nodes_part(reference)
        arrived = between.submit(lambda: between.all_gather(part, own))
        if among is None:
            return arrived

        def gather_among_groups() -> None:
            arrived.wait()
            among.all_gather(reference, part)

        return among.submit(gather_among_groups)

    def exchange(
        self,
        weights: Tensor,
        reference: Tensor,
        message: Tensor,
        gaps: tuple[slice, ...],
        skip: Tensor,
        *,
        coded: LloydMaxFormat,
        sent: CodeFormat,
        measured: Tensor,
        then: Callable[[], None] | None = None,
    ) -> Pending:
        """Move the reference towards the `weights` (n,) fp32 of all owners, unless `skip` () is not 0.

        The messages are in the format `sent`, the same on all ranks. `measured` (2,) fp64 gets the sums of
        the squares of this rank's difference and of what codes in the format `coded` miss of it. `message`
        has room for any format, and keeps what this rank sends. `gaps` are the elements of the reference that
        belong to no parameter: codes have no zero, so blocks that end in a gap would write noise there.
        `then` reads the new reference, as a part of the same work.
        """
        squares = self._squares[: 2 * (len(weights) // coded.block)].view(2, -1)
        codes = encode(
            self._operations,
            weights,
            self.own_part(reference),
            message,
            skip,
            coded=coded,
            sent=sent,
            squares=squares,
        )
        torch.sum(squares, dim=1, dtype=torch.float64, out=measured)

        lane, among = self._next_lane(), self._among
        received, read = lane.buffer[: self._nodes * len(codes)], lane.reading

        def take(messages: Tensor) -> None:
            apply(self._operations, messages.view(self._groups * self._nodes, -1), reference, sent)
            clear(reference, gaps)
            if then is not None:
                then()

        def gather_between_nodes() -> None:
            read.wait()
            lane.stream.all_gather(received, codes)
            if among is None:
                take(received)

        arrived = lane.stream.submit(gather_between_nodes)
        if among is None:
            return arrived
        assert self._messages is not None
        messages = self._messages[: self._groups * len(received)]

        def gather_among_groups() -> None:
            arrived.wait()
            among.all_gather(messages, received)
            take(messages)

        lane.reading = among.submit(gather_among_groups)
        return lane.reading


def encode(
    operations: Operations,
    weights: Tensor,
    reference: Tensor,
    message: Tensor,
    skip: Tensor,
    *,
    coded: LloydMaxFormat,
    sent: CodeFormat,
    squares: Tensor,
) -> Tensor:
    """Encode `weights` (n,) less `reference` (n,) in the format `sent`; return that part of `message`.

    Where `skip` () is not 0 it changes nothing. `squares` (2, blocks) fp32 gets, per block, the sums of the
    squares of the difference and of what codes in the format `coded` miss of it.
    """
    codes = message[: coded.message_bytes(len(weights))]
    operations.quantize_difference(weights, reference, codes, coded, skip=skip, squares=squares)
    if isinstance(sent, QuantFormat):
        difference = torch.where(skip != 0, 0.0, weights - reference)
        codes = message[: sent.message_bytes(len(weights))]
        operations.quantize(difference[None], codes[None], sent)
    return codes


def apply(operations: Operations, messages: Tensor, reference: Tensor, format: CodeFormat) -> None:
    """Move part p of `reference` (P · n,) by message p of `messages` (P, bytes)."""
    if isinstance(format, LloydMaxFormat):
        operations.add_difference(messages, reference, format)
        return
    for message, part in zip(messages, reference.view(len(messages), -1), strict=True):
        operations.sum_into(message[None], part, format, add=True)
