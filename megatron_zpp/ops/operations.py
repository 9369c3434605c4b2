"""The operations as callers use them: formats as values, and either the kernels or the reference behind."""

from typing import Any

from torch import Tensor

from megatron_zpp.ops.formats import QuantFormat


class Operations:
    """What quantised collectives and the optimizer need, each one pass over memory.

    Outputs are the caller's buffers, and nothing is returned or waited for. Shapes: R rows, n columns, G and
    P messages, m elements; `message_bytes` is the format's. Rows and parts are whole blocks. All raise
    ValueError that names the argument and what it got.
    """

    def __init__(self, kernels: Any, *, compiled: bool) -> None:
        """`kernels` has the operators by name: those of torch.ops.megatron_zpp are `compiled`."""
        self._kernels, self.compiled = kernels, compiled

    def quantize(
        self, input: Tensor, messages: Tensor, format: QuantFormat, *, seed: int | None = None
    ) -> None:
        """Encodes `input` (R, n) fp32, bf16 or fp16 into `messages` (G, message_bytes(R/G · n)) uint8.

        Row r goes to message r % G, to place r // G in it. Rows may lie any stride apart. With a `seed`,
        which must be another one in every call, rounding is stochastic, else to nearest.
        """
        self._kernels.quantize(input, messages, *_plain(format), format.rotate, seed)

    def dequantize(self, messages: Tensor, output: Tensor, format: QuantFormat) -> None:
        """The inverse of `quantize`: `messages` (G, message_bytes(R/G · n)) into `output` (R, n)."""
        self._kernels.dequantize(messages, output, *_plain(format), format.rotate)

    def sum_quantize(
        self,
        messages: Tensor,
        output: Tensor,
        format: QuantFormat,
        output_format: QuantFormat,
        *,
        error: Tensor | None = None,
        seed: int | None = None,
    ) -> None:
        """Sums `messages` (P, message_bytes(m)) and encodes the parts as `output` (G, message_bytes(m/G)).

        `error` (m,) fp32, bf16 or fp16 is added first and gets what this encoding loses. Sums of rotated
        messages stay rotated, so both formats say the same of it.
        """
        if format.rotate != output_format.rotate:
            raise ValueError(
                f"sum_quantize: a sum of messages with rotate={format.rotate} cannot become one with "
                f"rotate={output_format.rotate}"
            )
        self._kernels.sum_quantize(messages, output, *_plain(format), *_plain(output_format), error, seed)

    def sum_into(
        self, messages: Tensor, shard: Tensor, format: QuantFormat, *, factor: float = 1.0, add: bool = False
    ) -> None:
        """Sums `messages` (P, message_bytes(m)) times `factor` into `shard` (m,) fp32: over it, or added."""
        self._kernels.sum_into(messages, shard, *_plain(format), format.rotate, factor, add)

    def sum_parts(
        self,
        parts: Tensor,
        shard: Tensor,
        *,
        factor: float = 1.0,
        add: bool = False,
        own: Tensor | None = None,
        place: int = 0,
        squares: Tensor | None = None,
    ) -> None:
        """Sums `parts` (P, m) fp32, bf16 or fp16 likewise; `shard` (m,) may be a row of fp32 `parts`.

        `own` (m,) is part `place` where it lies elsewhere; what the row there holds does not count. `squares`
        get what `sum_squares` would find in the shard afterwards.
        """
        self._kernels.sum_parts(parts, shard, factor, add, own, place, squares)

    def sum_squares(self, input: Tensor, sums: Tensor) -> None:
        """Sums the squares of each 256 elements of `input` (m,), of any format, into `sums` (m / 256,) fp32.

        In an order of its own, so that the same elements give the same bits wherever they lie.
        """
        self._kernels.sum_squares(input, sums)

    def adamw(
        self,
        master: Tensor,
        gradient: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        gather_source: Tensor | None,
        *,
        divisor: Tensor,
        found_inf: Tensor,
        bias_corrections: Tensor,
        learning_rate: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        decayed: int,
    ) -> None:
        """One step of AdamW on fp32 (m,) tensors; `gather_source` (m,) bf16 or fp16 gets the new weights.

        `gradient` may be bf16 or fp16 as well.

        Gradients are divided by `divisor` () and only read; nothing is written where `found_inf` () is not 0;
        `bias_corrections` (2,) is 1 - beta1^t and 1 - beta2^t; all three fp32 on the tensors' device. The
        first `decayed` elements have weight decay.
        """
        states = master, gradient, exp_avg, exp_avg_sq, gather_source
        scalars = divisor, found_inf, bias_corrections
        self._kernels.adamw(*states, *scalars, learning_rate, beta1, beta2, eps, weight_decay, decayed)

    def adamw_quantize(
        self,
        master: Tensor,
        gradient: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        message: Tensor,
        format: QuantFormat,
        *,
        divisor: Tensor,
        found_inf: Tensor,
        bias_corrections: Tensor,
        learning_rate: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        decayed: int,
    ) -> None:
        """`adamw` whose new weights go out as `message` (message_bytes(m),) uint8, rounded to nearest."""
        states = master, gradient, exp_avg, exp_avg_sq, message
        scalars = divisor, found_inf, bias_corrections
        numbers = learning_rate, beta1, beta2, eps, weight_decay
        self._kernels.adamw_quantize(*states, *scalars, *numbers, decayed, *_plain(format), format.rotate)


def _plain(format: QuantFormat) -> tuple[Any, ...]:
    return format.codes, format.block, format.scales
