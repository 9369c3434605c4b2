"""Kinds of gradients, and sums of whole units that ranks must find: in one process, without routes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import gcd
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.exchange.codecs import clear
from megatron_zpp.mesh import Mesh
from megatron_zpp.ops import reference
from megatron_zpp.ops.formats import LloydMaxFormat, QuantFormat
from megatron_zpp.ops.operations import Operations
from megatron_zpp.ops.signs import Signs
from megatron_zpp.placement import Layout, Placement
from megatron_zpp.zero.communication_plan import CommunicationPlan, plan_communication
from tests.exchange.streams import Sizes, mesh_of

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ORACLE = Operations(reference, compiled=False)
CHUNK = 256  # elements of a chunk at least: the second unit has three chunks per shard, of two sizes
INSIDE = 2  # the unit that each node holds by itself
OF_LOCAL, OF_NODES = 3, 4  # units of which each rank of a node, and each node, has other elements
POISONED = 0  # the unit of which the last rank has a NaN in the last micro-batch
SIGNS_SEED, ITERATION = 11, 5


@dataclass(frozen=True)
class Case:
    """Gradients that are `made` in a format, and how they are summed."""

    zero: dict[str, Any]
    made: torch.dtype = BF16
    micro_batches: int = 3
    in_bf16: bool = False
    kernels: bool = True
    peer_writes: bool = False  # on one node ranks write each other's memory; GPUs do wherever they can
    config: ZeroConfig = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", ZeroConfig(**{"zero_stage": 2} | self.zero))

    def plan(self, mesh: Mesh, *, copy_engines: bool) -> CommunicationPlan:
        return plan_communication(
            self.config,
            mesh,
            layouts(mesh),
            compute_dtype=self.made,
            reduce_in_bf16=self.in_bf16,
            copy_engines=copy_engines,
            inside_nodes=(INSIDE,),
        )


def codes(format: str, group: str = "off", **more: Any) -> Case:
    flags = {"zero_quantized_gradients": True, "zero_quantized_gradients_format": format}
    return Case(flags | {"zero_gradient_partition_size": group}, **more)


def groups(size: str, stage: int = 2, **more: Any) -> Case:
    return Case({"zero_stage": stage, "zero_gradient_partition_size": size}, **more)


CASES = [
    Case({"zero_stage": 0}),
    Case({"zero_stage": 0}, micro_batches=1, in_bf16=True, kernels=False),
    Case({"zero_stage": 0}, FP32, peer_writes=True),
    Case({"zero_stage": 1}, FP16, kernels=False),
    Case({"zero_stage": 1}, micro_batches=1, peer_writes=True),
    Case({"zero_stage": 1}, in_bf16=True),
    Case({}),
    Case({"zero_stage": 3}, FP16, in_bf16=True, kernels=False),
    Case({}, FP32, kernels=False, peer_writes=True),
    groups("1"),
    groups("2"),
    groups("2", micro_batches=1, in_bf16=True),
    groups("auto", 1, in_bf16=True, kernels=False),
    groups("auto", 3, micro_batches=1),
    codes("int4"),
    codes("int8", made=FP16, micro_batches=1),
    codes("int4", "1"),
    codes("int4", made=FP32, in_bf16=True),
    codes("int4", "2", made=FP32),
    codes("int8", "2", micro_batches=1),
    codes("int8", "auto"),
    codes("rotated4"),
    codes("rotated4", "2"),
    codes("rotated4", "auto", made=FP32, micro_batches=1),
]


def possible(sizes: Sizes, every: int = 1) -> list[Case]:
    """The cases whose groups divide a node; of `every` so many one, where each takes seconds, as on GPUs."""
    groups = [case.config.zero_gradient_partition_size for case in CASES]
    return [
        case
        for case, group in list(zip(CASES, groups, strict=True))[::every]
        if not group.isdecimal() or sizes[1] % int(group) == 0
    ]


def layouts(mesh: Mesh) -> list[Layout]:
    """Units with gaps: of a block per shard, of several chunks, and one that is hardly more than padding."""
    shards = mesh.nodes * mesh.local_ranks
    sizes = [(shards * 256 - 515, 300), (shards * 5 * 256 - 1027, 10, 700), (1,)]
    sizes += [(mesh.nodes * 5 * 256 - 3,), (mesh.local_ranks * 5 * 256 - 3,)]
    axes = {OF_LOCAL: mesh.shards_beside(mesh.replicas), OF_NODES: mesh.shards_beside(mesh.node)}
    return [
        Layout(
            placements=tuple(
                Placement(name=str(i), shape=(max(size, 1),)) for i, size in enumerate(parameters)
            ),
            axes=axes.get(unit, mesh.shards),
            alignment=256,
        )
        for unit, parameters in enumerate(sizes)
    ]


def sizes_of(unit: int, sizes: Sizes) -> Sizes:
    """The nodes and ranks of a node that sum a unit."""
    nodes, local, tensor = sizes
    return 1 if unit == OF_NODES else nodes, 1 if unit == OF_LOCAL else local, tensor


def gradient(case: Case, rank: int, unit: int, layout: Layout, micro_batch: int) -> Tensor:
    """What rank `rank` of the job makes of a unit."""
    seed = 10_000 * micro_batch + 100 * rank + unit
    made = torch.randn(layout.numel, generator=torch.Generator().manual_seed(seed)).to(case.made)
    made[::97] *= 30
    if unit == POISONED and micro_batch == case.micro_batches - 1 and rank == layout.shards - 1:
        made[3] = torch.nan
    return made


class Expected:
    """The sum of one unit over data ranks and micro-batches, all of it in one process, without a plan."""

    def __init__(self, case: Case, sizes: Sizes, unit: int) -> None:
        size, stage = case.config.zero_gradient_partition_size, case.config.zero_stage
        self._case, self._unit, self._layout = case, unit, layouts(mesh_of(sizes))[unit]
        self._nodes, self._local, _ = nodes, local, _ = sizes_of(unit, sizes)
        group = {"off": None, "auto": local}[size] if size in ("off", "auto") else gcd(int(size), local)
        self._whole = group == 1 or (group is None and stage < 2)  # sums over micro-batches first
        self._group = local if group in (None, 1) else group
        inside: Any = None  # as they are
        between = inside if local == 1 else BF16 if case.in_bf16 else FP32
        if case.config.zero_quantized_gradients:
            name = case.config.zero_quantized_gradients_format
            inside = between = QuantFormat("int8" if name == "rotated4" else name, 128)
            between = LloydMaxFormat(4, 256) if name == "rotated4" else between
        levels = [(2, inside), (1, FP32), (0, between)]  # dimensions of (nodes, groups, places, n)
        counts = nodes, local // self._group, self._group
        self._levels = [level for level in levels if counts[level[0]] > 1]
        in_groups = group not in (None, 1, nodes * local)
        self._early = 1 if in_groups else len(self._levels)  # how many run after every micro-batch

    def sum(self, made: Tensor) -> Tensor:
        """Of gradients (micro-batches, ranks, n); gaps are zero where a rotation mixes elements."""
        if self._whole and len(made) > 1:
            made = in_order(made.float().unbind())[None]
        if self._case.in_bf16 and self._levels and made.dtype == FP32:
            made = made.bfloat16()
        total: Tensor | None = None
        for of_ranks in made:
            grid = of_ranks.view(self._nodes, -1, self._group, made.shape[-1])
            total = self._reduced(grid, self._levels[: self._early], total)
        assert total is not None
        if self._early < len(self._levels):
            total = self._reduced(total, self._levels[self._early :], None)
        total = total.view(-1)
        if self._levels and isinstance(self._levels[-1][1], LloydMaxFormat):
            clear(total, self._layout.gaps_in(range(len(total))))
        return total

    def _reduced(self, grid: Tensor, levels: Sequence[tuple[int, Any]], total: Tensor | None) -> Tensor:
        for at, (dim, format) in enumerate(levels):
            parts = self._arrived(grid, dim, format)
            last = at == len(levels) - 1
            grid = self._added(total if last else None, parts)
        return grid if levels else self._added(total, [grid.float()])

    def _added(self, total: Tensor | None, parts: Sequence[Tensor]) -> Tensor:
        if total is None:
            return in_order(parts)
        parts = [part.view(total.shape) for part in parts]
        return total + in_order(parts) if self._case.kernels else in_order([total, *parts])

    def _arrived(self, grid: Tensor, dim: int, format: Any) -> Sequence[Tensor]:
        """The parts along `dim` as they arrive; of rotated codes their sum."""
        if isinstance(format, LloydMaxFormat):
            return [self._rotated_sum(grid.reshape(self._nodes, -1), format)]
        if isinstance(format, QuantFormat):
            rows = grid.reshape(-1, grid.shape[-1]).contiguous()
            messages = torch.empty(len(rows), format.message_bytes(rows.shape[1]), dtype=torch.uint8)
            ORACLE.quantize(rows, messages, format)
            decoded = torch.empty(rows.shape)
            ORACLE.dequantize(messages, decoded, format)
            return decoded.view(grid.shape).unbind(dim)
        return (grid if format is None else grid.to(format)).float().unbind(dim)

    def _rotated_sum(self, nodes: Tensor, format: LloydMaxFormat) -> Tensor:
        total = torch.empty(nodes.shape[1])
        for elements, number in self.runs():
            signs = Signs(SIGNS_SEED, self._unit, ITERATION, number)
            here = slice(elements.start, elements.stop)
            messages = torch.empty(self._nodes, format.message_bytes(len(elements)), dtype=torch.uint8)
            for message, part in zip(messages, nodes, strict=True):
                ORACLE.quantize_rotated(part[here].float(), message[None], format, signs)
            ORACLE.sum_rotated(messages, total[here], format, signs)
        return total

    def runs(self) -> Iterator[tuple[range, int]]:
        """Elements that a node sends to another one together, and the number of the first: its place in
        the unit if what ranks of equal place in their groups send lies chunk by chunk, node by node.
        """
        shard, ends = self._layout.shard_numel, [0, 512, 1024, 1280]
        if shard == 256 or self._local == 1:
            ends = [0, shard]
        assert ends[-1] == shard
        for place in range(self._local):
            for start, stop in pairwise(ends):
                for node in range(self._nodes):
                    first = (place * self._nodes + node) * shard
                    number = self._nodes * (place % self._group * shard + start) + node * (stop - start)
                    yield range(first + start, first + stop), number


def in_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum of parts, one after the other."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
