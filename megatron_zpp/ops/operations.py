"""The operations as callers use them: formats and scalars are values, run by the kernels or the reference."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron_zpp.ops.adamw import AdamWScalars
from megatron_zpp.ops.formats import LloydMaxFormat, QuantFormat
from megatron_zpp.ops.signs import Signs

if TYPE_CHECKING:
    from megatron_zpp.ops.state_codes import Rounding


class Operations:
    """The operations of quantised collectives and of the optimizer, each one pass over memory.

    Results are written to the caller's buffers; nothing is returned and no call waits for the device. Shapes:
    R rows, n columns, G and P messages, m elements; `message_bytes` is the format's. Rows and parts are whole
    blocks. The kernels raise ValueError that names the argument and what was passed; the reference trusts its
    caller.
    """

    def __init__(self, kernels: Any, *, compiled: bool) -> None:
        """`kernels` has the operators by name: torch.ops.megatron_zpp (`compiled`), or `reference`."""
        self._kernels, self.compiled = kernels, compiled

    def quantize(self, input: Tensor, messages: Tensor, format: QuantFormat) -> None:
        """Encode `input` (R, n) fp32, bf16 or fp16 into `messages` (G, message_bytes(R/G · n)) uint8.

        Message g holds the R/G rows from g · R/G on. Rows may be any stride apart.
        """
        self._kernels.quantize(input, messages, *_flat(format))

    def dequantize(self, messages: Tensor, output: Tensor, format: QuantFormat) -> None:
        """The inverse of `quantize`: `messages` (G, message_bytes(R/G · n)) into `output` (R, n)."""
        self._kernels.dequantize(messages, output, *_flat(format))

    def sum_quantize(self, messages: Tensor, output: Tensor, format: QuantFormat) -> None:
        """Sum `messages` (P, message_bytes(m)) and encode the sum as `output` (G, message_bytes(m/G)).

        Part g of the sum becomes message g.
        """
        self._kernels.sum_quantize(messages, output, *_flat(format))

    def sum_into(self, messages: Tensor, shard: Tensor, format: QuantFormat, *, add: bool = False) -> None:
        """Write the sum of `messages` (P, message_bytes(m)) to `shard` (m,) fp32; with `add`, add it."""
        self._kernels.sum_into(messages, shard, *_flat(format), add)

    def sum_parts(
        self,
        parts: Tensor,
        shard: Tensor,
        *,
        add: bool = False,
        own: Tensor | None = None,
        group_rank: int = 0,
        squares: Tensor | None = None,
    ) -> None:
        """Write the sum of `parts` (P, m) fp32, bf16 or fp16 to `shard` (m,) fp32.

        With `add`, it is added to the shard, which may be a row of fp32 `parts`. Row r is the part of
        rank r of a group. `own` (m,) is the part of `group_rank` if it is stored elsewhere; its row of
        `parts` is then not read. `squares` (m / 256,) is set to what `sum_squares` computes of the new shard.
        """
        self._kernels.sum_parts(parts, shard, add, own, group_rank, squares)

    def sum_squares(self, input: Tensor, sums: Tensor) -> None:
        """Write the sum of the squares of each 256 elements of `input` (m,) to `sums` (m / 256,) fp32.

        The order of the additions is fixed, so equal elements give equal bits wherever they are stored.
        """
        self._kernels.sum_squares(input, sums)

    def adamw(
        self,
        master: Tensor,
        gradient: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        gather_source: Tensor | None,
        scalars: AdamWScalars,
        *,
        decayed: int,
    ) -> None:
        """Take one step of AdamW on fp32 tensors (m,). `gradient`, which may have 16 bits, is only read.

        `gather_source` (m,) bf16 or fp16 is set to the new weights. The first `decayed` elements have weight
        decay.
        """
        states = master, gradient, exp_avg, exp_avg_sq
        self._kernels.adamw(*states, gather_source, *scalars.packed(), decayed)

    def adamw_quantize(
        self,
        master: Tensor,
        gradient: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        message: Tensor,
        format: QuantFormat,
        scalars: AdamWScalars,
        *,
        decayed: int,
    ) -> None:
        """Take a step of AdamW and encode the new weights as `message` (message_bytes(m),) uint8.

        The gradient must be fp32.
        """
        states = master, gradient, exp_avg, exp_avg_sq
        self._kernels.adamw_quantize(*states, message, *scalars.packed(), decayed, *_flat(format))

    def adamw_compact(
        self,
        master: Tensor,
        gradient: Tensor,
        exp_avg: Tensor,
        exp_avg_scales: Tensor | None,
        exp_avg_sq: Tensor,
        exp_avg_sq_scales: Tensor | None,
        gather_source: Tensor | None,
        scalars: AdamWScalars,
        rounding: "Rounding",
        *,
        decayed: int,
    ) -> None:
        """`adamw` on moments in fewer bytes, of m elements in whole blocks of 128, as `state_codes` says.

        fp32 and bf16 moments have no scales; fp16 ones and bytes have scales (m / 128,) uint8. A `master` of
        bytes has the corrections of the weights, whose bf16 part is the `gather_source`.
        """
        moments = exp_avg, exp_avg_scales, exp_avg_sq, exp_avg_sq_scales
        run = self._of("reference_compact").adamw_compact
        run(master, gradient, *moments, gather_source, *scalars.packed(), decayed, *rounding.packed())

    def quantize_difference(
        self,
        weights: Tensor,
        reference: Tensor,
        message: Tensor,
        format: LloydMaxFormat,
        *,
        skip: Tensor | None = None,
        squares: Tensor | None = None,
    ) -> None:
        """Encode `weights` (m,) fp32 less `reference` (m,) fp32 as `message` (message_bytes(m),).

        The reference is only read: all ranks, this one too, apply the message by `add_difference`. Where
        `skip` () is not 0 the message changes nothing. `squares` (2, m / block) fp32 gets per block the sums
        of the squares of the differences, and of what the codes lose of them.
        """
        run = self._of("reference_difference").quantize_difference
        run(weights, reference, message, format.bits, format.block, skip, squares)

    def add_difference(self, messages: Tensor, reference: Tensor, format: LloydMaxFormat) -> None:
        """Move part p of `reference` (P · m,) fp32 by message p of `messages` (P, message_bytes(m))."""
        run = self._of("reference_difference").add_difference
        run(messages, reference, format.bits, format.block)

    def quantize_rotated(
        self,
        input: Tensor,
        messages: Tensor,
        format: LloydMaxFormat,
        signs: Signs,
        *,
        lost: Tensor | None = None,
        divisor: Tensor | None = None,
    ) -> None:
        """Rotate `input` (n,) fp32, bf16 or fp16 and encode it as `messages` (G, message_bytes(n / G)).

        `lost` (G, n / G) bf16, whose rows may be apart, times `divisor` () fp32 is added to the input before,
        and becomes what the codes lose of the sum, over `divisor`.
        """
        run = self._of("reference_rotation").quantize_rotated
        run(input, messages, format.bits, format.block, *signs, lost, divisor)

    def sum_rotated(
        self,
        messages: Tensor,
        shard: Tensor,
        format: LloydMaxFormat,
        signs: Signs,
        *,
        add: bool = False,
    ) -> None:
        """Write the sum of `messages` (P, message_bytes(m)) to `shard` (m,) fp32, or add it.

        Messages are summed in their order and rotated back once. So all of them must have the same signs.
        """
        run = self._of("reference_rotation").sum_rotated
        run(messages, shard, format.bits, format.block, *signs, add)

    def _of(self, module: str) -> Any:
        """The kernels, or else a part of the reference, which few runs need and import."""
        return self._kernels if self.compiled else import_module(f"megatron_zpp.ops.{module}")


def _flat(format: QuantFormat) -> tuple[Any, ...]:
    """Return a format as operators take it."""
    return format.code_type, format.block
