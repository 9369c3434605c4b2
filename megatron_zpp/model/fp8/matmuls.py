"""What 8-bit products change in a model and its engine: linear maps, the loss, scales and kernels."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.model.fp8.cast import Cast, plain_cast
from megatron_zpp.model.fp8.delayed import DelayedLinear, DelayedProduct, Transpose, plain_transpose
from megatron_zpp.model.fp8.output import OutputProduct
from megatron_zpp.model.fp8.scaling import DelayedScaling
from megatron_zpp.model.fp8.tensorwise import Float8Linear, float8_linear
from megatron_zpp.model.fp8.weights import WeightCodes
from megatron_zpp.model.matmuls import Matmuls, Product


class TensorwiseMatmuls(Matmuls):
    """Products whose factors are scaled as each is made."""

    linear = Float8Linear

    def product(self) -> Product:
        return float8_linear


class DelayedMatmuls(Matmuls):
    """Products whose scales follow from earlier steps."""

    def __init__(self, precision: PrecisionConfig, device: torch.device) -> None:
        self._precision, self._device = precision, device
        self._cast: Cast = plain_cast
        self._transpose: Transpose = plain_transpose
        if device.type == "cuda":  # these import Triton, which only torch for GPUs brings
            from megatron_zpp.model.fp8.kernels.cast import cast
            from megatron_zpp.model.fp8.kernels.weight_codes import transpose

            self._cast, self._transpose = cast, transpose
        self.linear = partial(DelayedLinear, cast=self._cast, transpose=self._transpose)
        self.output = partial(OutputProduct, self._cast) if precision.fp8_output_layer else None

    def product(self) -> Product:
        return DelayedProduct(self._cast, self._transpose)

    def scaling(self, model: nn.Module) -> DelayedScaling:
        return DelayedScaling(
            model,
            self._device,
            history=self._precision.fp8_amax_history_len or 1,
            algorithm=self._precision.fp8_amax_compute_algo or "most_recent",
        )

    def weight_codes(self, scaling: DelayedScaling) -> WeightCodes | None:
        if not self._precision.fp8_param_gather:
            return None
        if self._device.type != "cuda":
            return WeightCodes(scaling)
        from megatron_zpp.model.fp8.kernels.weight_codes import encode_weights

        return WeightCodes(scaling, encode_weights)

    def fuse(self, model: Any) -> Any:
        from megatron_zpp.model.fp8.kernels import blocks, coded_loss
        from megatron_zpp.model.fused import loss

        blocks.fuse(model)
        return replace(loss.PASSES, to_codes=coded_loss.logits_to_codes)
