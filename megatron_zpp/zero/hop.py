"""One exchange between the ranks of a group: what travels, in which format, over which links."""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from megatron_zpp.ops.formats import LloydMaxFormat, QuantFormat

CodeFormat: TypeAlias = QuantFormat | LloydMaxFormat
WireFormat: TypeAlias = torch.dtype | CodeFormat


def eight_bits(format: LloydMaxFormat) -> QuantFormat:
    """The format of weight differences that need more bits than Lloyd-Max codes have."""
    return QuantFormat("int8", format.block)


@dataclass(frozen=True)
class SentBytes:
    """Bytes sent to ranks of the same node, and to ranks of other nodes."""

    intra: int = 0
    inter: int = 0

    def __add__(self, other: "SentBytes") -> "SentBytes":
        return SentBytes(self.intra + other.intra, self.inter + other.inter)

    def __mul__(self, times: int) -> "SentBytes":
        return SentBytes(self.intra * times, self.inter * times)


class Buffer(NamedTuple):
    """Memory for `numel` elements: the arguments of `CommStream.zeros`."""

    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Hop:
    """The group of one exchange, as this rank sees it, and the format in which elements travel.

    `streams` are the indices of the group's communication streams in `CommunicationPlan.streams`. Where there
    are two, exchanges take turns on them: over TCP one communicator does not fill a link between nodes, and
    one exchange is on the wire while the messages of another are encoded or decoded.
    """

    streams: tuple[int, ...]
    ranks: tuple[int, ...]
    group_rank: int
    format: WireFormat
    neighbours: int  # other ranks of the group on this node
    next_is_near: bool  # whether the next rank of the ring is on this node

    @property
    def stream(self) -> int:
        """The first of its streams, which is the only one of a hop whose exchanges do not take turns."""
        return self.streams[0]

    @property
    def quant_format(self) -> QuantFormat | None:
        """The format of block codes; None where elements travel in a dtype or as Lloyd-Max codes."""
        return self.format if isinstance(self.format, QuantFormat) else None

    @property
    def quantized(self) -> bool:
        """Whether elements travel as codes."""
        return not isinstance(self.format, torch.dtype)

    @property
    def code_format(self) -> CodeFormat:
        """The format of the codes, where elements travel as such."""
        assert not isinstance(self.format, torch.dtype)
        return self.format

    def nbytes(self, numel: int) -> int:
        """Bytes of `numel` elements as they travel."""
        return self.buffer(numel).nbytes

    def buffer(self, numel: int, messages: int = 1) -> Buffer:
        """A buffer for `messages` of `numel` elements each, as they travel."""
        if isinstance(self.format, torch.dtype):
            return Buffer(messages * numel, self.format)
        return Buffer(messages * self.format.message_bytes(numel), torch.uint8)

    def ring(self, nbytes: int) -> SentBytes:
        """`nbytes` to the next rank."""
        if len(self.ranks) == 1:
            return SentBytes()
        return SentBytes(intra=nbytes) if self.next_is_near else SentBytes(inter=nbytes)

    def exchange(self, nbytes: int) -> SentBytes:
        """`nbytes` to every other rank."""
        far = len(self.ranks) - 1 - self.neighbours
        return SentBytes(self.neighbours * nbytes, far * nbytes)
