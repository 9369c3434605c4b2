"""How model states are sharded, and how weights and gradients travel between ranks (ZeRO, ZeRO++)."""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from megatron_zpp.config.options import Options, option, option_error, optional, switch
from megatron_zpp.config.words import counted, divisors, either

# Elements per scale: gradients need the finer blocks, unless a rotation spreads their outliers.
WEIGHT_BLOCK, GRADIENT_BLOCK, ROTATED_BLOCK = 256, 128, 256
_SHARDED = "--zero-stage 1, 2 or 3"


@dataclass(frozen=True, kw_only=True)
class ZeroConfig(Options):
    """ZeRO and ZeRO++: sharding of model states, and communication of weights and gradients"""

    zero_stage: int = option(
        0,
        "What is sharded over all ranks. 0: nothing; 1: master weights and moments; 2: gradients as well; "
        "3: parameters as well. auto: the stage, and where they are not given the groups of hpZ and of "
        "gradients, that the plan finds fastest for these ranks and their memory; never quantises.",
        auto=True,
        at_least=0,
        at_most=3,
    )
    zero_offload_optimizer: bool = switch(
        "Keep master weights and moments in CPU memory and run the optimizer on the CPU. Saves 12 bytes of "
        "GPU memory per parameter of the shard; costs a slower step."
    )
    zero_unit: Literal["layer", "sublayer"] = option(
        "layer",
        "Parameters that are gathered, and whose gradients are reduced, together. layer: those of a layer; "
        "sublayer: those of its attention, or of its MLP. Sublayers take less memory for buffers and send "
        "smaller messages.",
    )
    zero_prefetch_units: int | None = optional(
        "Stage 3: units gathered ahead of the unit that computes; default 1. Each costs memory for one unit.",
        needs="--zero-stage 3",
        at_least=0,
    )
    zero_quantized_weights: bool = switch("qwZ: gather weights as block-quantised codes.", needs=_SHARDED)
    zero_quantized_weights_format: Literal["int8", "delta4"] = option(
        "int8",
        "qwZ: format of the codes. delta4: codes of 4 bits of what weights changed by, for several nodes. "
        "The ranks of a node, at stage 3 of each hpZ group, keep the fp32 weights that the other nodes "
        "know: 4 bytes per parameter / these ranks. Stage 3 needs --zero-hpz-partition-size auto, or a "
        "divisor of a node above 1.",
        needs="--zero-quantized-weights",
    )
    zero_hpz_partition_size: str = option(
        "1",
        "hpZ: gather weights between nodes once per step, and at each use within groups of this many ranks, "
        "which hold a secondary shard each. auto: the ranks of a node (nodes of one rank then hold all "
        "weights); 1: off. Costs memory: all 16-bit weights / group size.",
        needs="--zero-stage 3",
    )
    zero_gradient_partition_size: str = option(
        "off",
        "Accumulate the gradients of a step's micro-batches among groups of so many ranks inside a node, and "
        "send them between groups and nodes once per step, not after every micro-batch. Keeps 4 / N bytes "
        "per parameter on every rank. auto: the ranks of a node; 1: whole on every rank; off: in the shards "
        "at stages 2 and 3, whole at stage 1.",
        needs=_SHARDED,
    )
    zero_quantized_gradients: bool = switch(
        "qgZ: reduce gradients as block-quantised codes, in one hop inside nodes and one between nodes.",
        needs=_SHARDED,
    )
    zero_quantized_gradients_format: Literal["int4", "int8", "rotated4"] = option(
        "int4",
        "qgZ: format of the codes. rotated4: codes of 4 bits of randomly rotated gradients between nodes, "
        "and int8 inside them.",
        needs="--zero-quantized-gradients",
    )

    def check(self) -> None:
        """Refuse text that is neither a number nor one of the words."""
        for name, words in (
            ("zero_hpz_partition_size", ("auto",)),
            ("zero_gradient_partition_size", ("auto", "off")),
        ):
            size = str(getattr(self, name))
            object.__setattr__(self, name, size)  # a number, in Python
            if size not in words and not (size.isdecimal() and int(size) >= 1):
                raise self.error(name, f"must be {either(('a whole number of ranks', *words))}")

    @property
    def prefetched_units(self) -> int:
        """Units that are gathered ahead of the unit that computes: none below stage 3, and 1 by default."""
        if self.zero_stage < 3:
            return 0
        return 1 if self.zero_prefetch_units is None else self.zero_prefetch_units

    @property
    def cuts_layers(self) -> bool:
        """Whether the halves of a layer are units of their own."""
        return self.zero_unit == "sublayer"

    @property
    def hpz(self) -> bool:
        """Whether hpZ is on: groups of more than one rank, or a node's ranks, hold secondary shards."""
        return self.zero_hpz_partition_size == "auto" or int(self.zero_hpz_partition_size) > 1

    @property
    def quantizes(self) -> bool:
        """Whether weights or gradients travel as codes."""
        return self.zero_quantized_weights or self.zero_quantized_gradients

    def among(self, data_ranks: int) -> "ZeroConfig":
        """What is in force among so many ranks: one alone sends nothing, so it quantises nothing."""
        if data_ranks > 1:
            return self
        of_codes = (field for field in fields(self) if field.name.startswith("zero_quantized_"))
        off: dict[str, Any] = {field.name: field.default for field in of_codes}
        return replace(self, **off)

    @property
    def largest_block(self) -> int:
        """Elements of the largest quantisation block in use; 1 without quantisation."""
        weights = WEIGHT_BLOCK if self.zero_quantized_weights else 1
        gradients = ROTATED_BLOCK if self.rotates_gradients else GRADIENT_BLOCK
        return max(weights, gradients if self.zero_quantized_gradients else 1)

    @property
    def sends_differences(self) -> bool:
        """Whether weight differences cross nodes, not weights."""
        return self.zero_quantized_weights and self.zero_quantized_weights_format.startswith("delta")

    @property
    def rotates_gradients(self) -> bool:
        """Whether gradients are rotated before they cross nodes."""
        return self.zero_quantized_gradients and self.zero_quantized_gradients_format.startswith("rotated")

    def describe(self, ranks: int | None = None) -> str:
        """Return what is switched on, for the first lines of the log; `ranks` are the run's data ranks."""
        parts = [f"ZeRO stage {self.zero_stage}"]
        if self.zero_quantized_weights:
            parts.append(f"qwZ {self.zero_quantized_weights_format}")
        if self.hpz:
            parts.append(f"hpZ {self.zero_hpz_partition_size}")
        if self.zero_quantized_gradients:
            parts.append(f"qgZ {self.zero_quantized_gradients_format}")
        if self.zero_gradient_partition_size != "off":
            size = self.zero_gradient_partition_size
            over = "a node" if size == "auto" else counted(int(size), "rank")
            parts.append(f"gradients accumulated over {over}")
        if ranks == 1 and len(parts) > 1:
            parts[-1] += " (one rank: nothing to communicate)"
        if self.cuts_layers:
            parts.append("units of sublayers")
        return " + ".join(parts)

    def hpz_ranks(self, ranks_of_a_node: int) -> int:
        """Return the ranks of an hpZ group. Raises ValueError unless the groups divide nodes evenly."""
        size = self.zero_hpz_partition_size
        return _ranks_of_groups("--zero-hpz-partition-size", size, ranks_of_a_node)

    def holds_references(self, ranks_of_a_node: int) -> bool:
        """Whether ranks of a node can hold the reference of weight differences.

        At stage 3 they are an hpZ group, of the node or of a part of it. Raises ValueError as `hpz_ranks`.
        """
        return self.zero_stage < 3 or self.hpz_ranks(ranks_of_a_node) > 1 or ranks_of_a_node == 1

    def gradient_ranks(self, ranks_of_a_node: int) -> int | None:
        """Ranks of a group in which gradients accumulate; None: the stage says where.

        Raises ValueError unless the groups divide nodes evenly.
        """
        size = self.zero_gradient_partition_size
        if size == "off":
            return None
        return _ranks_of_groups("--zero-gradient-partition-size", size, ranks_of_a_node)


def _ranks_of_groups(flag: str, size: str, ranks_of_a_node: int) -> int:
    """Return the ranks of a group inside a node. Raises ValueError unless the groups divide it evenly."""
    if size == "auto":
        return ranks_of_a_node
    if ranks_of_a_node % int(size):
        sizes = either([*divisors(ranks_of_a_node), "auto"])
        nodes = counted(ranks_of_a_node, "data rank")
        raise option_error(flag, size, f"not possible on nodes of {nodes}; give {sizes}")
    return int(size)
