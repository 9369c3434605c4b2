"""The states of one unit on this rank, and what it shares with others: where its whole parameters are.

For a unit of n elements (padding included) on d ranks:

    parameters   (n,) compute dtype, in a ParameterSlot: what the module's parameters view, for good
    master       fp32 weights that this rank's optimizer changes: all n at stage 0, else its shard n / d;
                 in CPU memory if offloaded
    published    like master in the compute dtype: what the next forward reads or the next gather sends; with
                 qwZ the message that the next gather sends
    gradients    parts of the whole, which is like master: the fp32 sum over micro-batches and ranks, from a
                 step's first reduction until the optimizer is done with it; where there is nothing to sum, as
                 the backward made them, large ones where it made them
    squares      sums of the squares of the gradient's blocks, where its last reduction finds them
    accumulated  (n,) fp32 at stages 0 and 1: the sum over micro-batches, from a step's first one to its last
    reducing     the reduction under way, and the gradients that it reads, from where they were made; units of
                 equal layout have two of these in turn, so that no more are kept for it
    secondary    hpZ: this rank's part of what its group keeps of the unit, weights or codes; where the unit's
                 slot is its own alone, it is gathered once a step and needs none
    error        qgZ with error feedback: what this rank's sums have lost and not sent yet, bf16
    error_before what `error` was before the present step, which a skipped step puts back

A unit's slot is fixed, so autograd's references to a parameter stay right when the slot is filled again for
the backward. Which unit a slot holds, and as of which version of its weights, is written on the slot.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_zpp.distributed.comm_stream import Pending
from megatron_zpp.zero.flat_layout import SHARD_MULTIPLE, FlatLayout
from megatron_zpp.zero.grad_segments import GradSegment


@dataclass
class InFlight:
    """At most one asynchronous collective, and what it reads."""

    pending: Pending | None = None
    reads: tuple[GradSegment, ...] = ()

    def wait(self) -> None:
        """Lets the compute wait until the collective is done."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
            self.reads = ()


@dataclass(kw_only=True)
class ParameterSlot(InFlight):
    """Holds the whole parameters of one unit at a time: EMPTY -> GATHERING (`pending`) -> GATHERED."""

    buffer: Tensor
    holder: "Unit | None" = None
    version: int = -1  # of the holder's weights

    def holds(self, unit: "Unit") -> bool:
        """Whether the unit's present weights are here, or on their way."""
        return self.holder is unit and self.version == unit.version

    def assign(self, unit: "Unit", pending: Pending | None) -> None:
        """EMPTY or GATHERED -> GATHERING, or GATHERED without `pending`."""
        self.holder, self.version, self.pending = unit, unit.version, pending


@dataclass(eq=False, kw_only=True)
class Unit:
    """Parameters that are gathered together, as this rank holds them."""

    names: tuple[str, ...]  # of the parameters, as the model calls them
    parameters: tuple[nn.Parameter, ...]
    layout: FlatLayout
    owned: range  # the elements that this rank's optimizer changes
    slot: ParameterSlot
    reducing: InFlight
    master: Tensor
    gather_source: Tensor
    accumulated: Tensor | None = None
    gradients: tuple[GradSegment, ...] = ()
    squares: Tensor | None = None
    secondary: Tensor | None = None
    secondary_version: int = -1  # of the weights that `secondary` holds a part of
    error: Tensor | None = None
    error_before: Tensor | None = None
    version: int = 0  # rises with every change of the weights
    arrived: int = 0  # gradients of the present backward

    @property
    def whole(self) -> bool:
        """Whether this rank changes all of the unit (stage 0), so that nothing has to be gathered."""
        return len(self.owned) == self.layout.numel

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parameters' parts of a buffer (n,), each in its parameter's shape."""
        return [
            flat[offset : offset + parameter.numel()].view(parameter.shape)
            for offset, parameter in zip(self.layout.offsets, self.parameters, strict=False)
        ]

    def grad_segments(self, produced: list[Tensor], large: int) -> tuple[GradSegment, ...]:
        """The whole gradient, gaps included, from those of the parameters.

        Those of `large` elements or more are parts themselves. Others are copied, neighbours into one part,
        since every part costs kernels of its own. Parts begin and end where blocks of SHARD_MULTIPLE do.
        """
        parts: list[GradSegment] = []
        copied: list[int] = []
        offsets, start = self.layout.offsets, 0
        for index, gradient in enumerate(produced):
            if gradient.numel() >= large and _is_a_part(offsets[index], gradient):
                parts += self._copy(range(start, offsets[index]), copied, produced)
                parts.append(GradSegment(offsets[index], gradient.view(-1)))
                start, copied = offsets[index + 1], []
            else:
                copied.append(index)
        return (*parts, *self._copy(range(start, self.layout.numel), copied, produced))

    def _copy(self, elements: range, indices: list[int], produced: list[Tensor]) -> list[GradSegment]:
        """One part with these elements, in which the gradients of these parameters are; none without any."""
        if not elements:
            return []
        flat = torch.zeros(len(elements), dtype=produced[0].dtype, device=produced[0].device)
        begins = [self.layout.offsets[i] - elements.start for i in indices]
        copied = [produced[i] for i in indices]
        views = [flat[b : b + g.numel()].view(g.shape) for b, g in zip(begins, copied, strict=True)]
        if copied:
            torch._foreach_copy_(views, copied)
        return [GradSegment(elements.start, flat)]

    def new_sum(self) -> Tensor:
        """A buffer (n,) for whole gradients: the parameters' parts are not filled, the gaps are zero."""
        whole = torch.empty(self.layout.numel, device=self.slot.buffer.device)
        for gap in self.layout.gaps():
            whole[gap.start : gap.stop].zero_()
        return whole

    def load(self, flat: Tensor, index: int, parameter: Tensor) -> None:
        """Copies this rank's part of a whole parameter into `flat`, a buffer like `master`."""
        for piece in self.layout.pieces(self.owned):
            if piece.parameter == index:
                part = parameter.flatten()[piece.start : piece.start + piece.length]
                flat[piece.destination : piece.destination + piece.length].copy_(part)

    def segments(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """The parts of a buffer like `master` with and without weight decay."""
        decayed = self.layout.decayed_in(self.owned)
        return flat[:decayed], flat[decayed:]

    @property
    def gradient(self) -> Tensor:
        """The whole gradient, where it is in one part."""
        ((_, flat),) = self.gradients
        return flat

    @property
    def gathers_from_master(self) -> bool:
        """Whether the compute reads the master weights themselves (fp32)."""
        return self.gather_source.data_ptr() == self.master.data_ptr()

    def changed(self) -> None:
        """Takes note that the published weights are new ones."""
        self.version += 1
        if self.whole and self.slot.buffer.data_ptr() == self.gather_source.data_ptr():
            self.slot.assign(self, None)


def _is_a_part(offset: int, gradient: Tensor) -> bool:
    """Whether a parameter's gradient is as it would be in a buffer."""
    whole_blocks = offset % SHARD_MULTIPLE == 0 and gradient.numel() % SHARD_MULTIPLE == 0
    return whole_blocks and gradient.is_contiguous()
