"""What is planned: a model, its settings and the ranks it would run on."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from megatron_zpp.config.model import ModelConfig, RecomputeConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.zero import GRADIENT_BLOCK, WEIGHT_BLOCK, ZeroConfig
from megatron_zpp.model.flops import flops_per_token
from megatron_zpp.model.gpt import GPT
from megatron_zpp.ops.formats import QuantFormat
from megatron_zpp.zero.build import layouts_of
from megatron_zpp.zero.engine import reduce_dtype, sum_dtype
from megatron_zpp.zero.flat_layout import FlatLayout
from megatron_zpp.zero.theory import AllReduceAlgorithm, all_reduce_algorithm, reduces_in_two_hops
from megatron_zpp.zero.unit import Residency


@dataclass(frozen=True, kw_only=True)
class Job:
    """One optimizer step of `micro_batches` on `nodes` × `local` GPUs. `units` are the model's, on meta.

    `compiled` says that parts of it are kernels made for it, as by default.
    """

    model: ModelConfig
    vocab_size: int
    recompute: RecomputeConfig
    zero: ZeroConfig
    precision: PrecisionConfig
    nodes: int
    local: int
    micro_batch_size: int
    micro_batches: int
    units: Sequence[tuple[str, nn.Module]]
    compiled: bool = False

    @property
    def ranks(self) -> int:
        """Of all nodes."""
        return self.nodes * self.local

    @property
    def tokens(self) -> int:
        """Of one micro-batch on one rank."""
        return self.micro_batch_size * self.model.seq_length

    @property
    def tokens_a_step(self) -> int:
        """Of all ranks."""
        return self.tokens * self.micro_batches * self.ranks

    @property
    def flops_a_token(self) -> float:
        """Forward and backward, as PaLM counts them."""
        return flops_per_token(self.model, self.vocab_size)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the token embedding."""
        return self.model.padded_vocab_size(self.vocab_size)

    @property
    def dtype(self) -> torch.dtype:
        """Of the compute, on a GPU."""
        return getattr(torch, self.precision.compute_dtype("cuda"))

    @property
    def reduce_bytes(self) -> int:
        """Of a gradient as it is sent, where it is not quantised."""
        return reduce_dtype(Residency(self.zero.zero_stage), self.precision, self.dtype).itemsize

    @property
    def sent_bytes(self) -> int:
        """Of the same on the wire: those of a step's only micro-batch are sent as they are made."""
        as_made = self.micro_batches == 1 and self.all_reduce_algorithm is not AllReduceAlgorithm.LIBRARY
        return min(self.reduce_bytes, self.dtype.itemsize) if as_made else self.reduce_bytes

    @property
    def all_reduce_algorithm(self) -> AllReduceAlgorithm | None:
        """How stage 0 sums over ranks."""
        return all_reduce_algorithm(self.nodes, self.local) if self.zero.zero_stage == 0 else None

    @property
    def writes_peers(self) -> bool:
        """Whether ranks send gradients from where they are made, into each other's memory."""
        copies = self.zero.zero_copy_engines != "off"
        return copies and self.nodes == 1 < self.local and self.gradient_format is None

    @property
    def sum_bytes(self) -> int:
        """Of a node's sum of such gradients."""
        return sum_dtype(self.precision).itemsize

    @property
    def prefetch(self) -> int:
        """Units gathered ahead."""
        return self.zero.zero_prefetch_units or 0

    @cached_property
    def layouts(self) -> list[FlatLayout]:
        """Of the units, in forward order."""
        return layouts_of(self.units, self.ranks, self.zero.shard_multiple, self.zero.largest_block)

    @property
    def weight_format(self) -> QuantFormat | None:
        """What qwZ sends."""
        if not self.zero.zero_quantized_weights:
            return None
        block = self.zero.zero_quantization_block or WEIGHT_BLOCK
        return QuantFormat(self.zero.zero_quantized_weights_format, block)

    @property
    def gradient_format(self) -> QuantFormat | None:
        """What qgZ sends."""
        if not self.zero.zero_quantized_gradients:
            return None
        block = self.zero.zero_quantization_block or GRADIENT_BLOCK
        return QuantFormat(self.zero.zero_quantized_gradients_format, block)

    @property
    def secondary_ranks(self) -> int | None:
        """Ranks of an hpZ group; None without hpZ."""
        return self.zero.hpz_ranks(self.local, self.nodes) if self.zero.hpz else None

    @property
    def secondary_codes(self) -> bool:
        """Whether an hpZ group keeps codes."""
        return self.zero.zero_hpz_secondary == "quantized"

    @property
    def sums_gradients(self) -> bool:
        """Whether the optimizer takes fp32 sums: one rank's only micro-batch leaves gradients as they are."""
        one = self.ranks == self.micro_batches == 1
        return not one or self.zero.quantizes or self.zero.zero_offload_optimizer

    @property
    def reduces_as_made(self) -> bool:
        """Whether gradients are reduced as the backward makes them, not summed over micro-batches first."""
        return self.sums_gradients and (self.zero.zero_stage >= 2 or self.micro_batches == 1)

    @property
    def returns_squared_norms(self) -> bool:
        """Whether the squares for the norm come with the sums over ranks, without a pass of their own."""
        sums_itself = self.gradient_format is None and self.all_reduce_algorithm in (
            None,
            AllReduceAlgorithm.LOCAL_SUM,
        )
        return self.sums_gradients and sums_itself

    @property
    def two_hops(self) -> bool:
        """Whether gradients are summed inside nodes and then between them."""
        if self.gradient_format is not None:
            return min(self.nodes, self.local) > 1
        sizes = {"reduce_bytes": self.reduce_bytes, "sum_bytes": self.sum_bytes}
        return self.zero.zero_stage >= 1 and reduces_in_two_hops(self.nodes, self.local, **sizes)


def units_of(model: ModelConfig, vocab_size: int) -> list[tuple[str, nn.Module]]:
    """The units of a model that takes no memory."""
    with torch.device("meta"):
        return GPT(model, vocab_size).units()
