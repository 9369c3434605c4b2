"""Bytes and residency of routes beside closed forms of sizes alone, for each rank of several meshes."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch

from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.exchange.route import SentBytes, check_routes
from megatron_zpp.mesh import Mesh
from megatron_zpp.placement import Layout, Placement
from megatron_zpp.zero.communication_plan import CommunicationPlan, plan_communication
from megatron_zpp.zero.weight_plan import WeightPlan
from tests.support import nightly

GRIDS = [(1, 2), (1, 4), (2, 1), (2, 2), (3, 2), nightly((2, 4))]
BITS = {"int8": (8, 128), "int4": (4, 128), "rotated4": (4, 256), "delta4": (4, 256), "qwZ": (8, 256)}
LARGE = 9 * 2**18 // 2  # elements of a shard that has four chunks, or three and a part


def message(format: str | int, numel: int) -> int:
    """Bytes of a message: a number's bytes times numel, or codes and a scale per block, a multiple of 16."""
    if isinstance(format, int):
        return format * numel
    bits, block = BITS[format]
    return -(-numel // block * (block * bits // 8 + 2) // 16) * 16


class Closed:
    """What each rank of N nodes of L data ranks must send for a unit of shards of n elements."""

    def __init__(
        self, zero: ZeroConfig, grid: tuple[int, int], numel: int, made: int, *, in_bf16: bool
    ) -> None:
        self.nodes, self.local = grid
        self.zero, self.numel, self.made, self.in_bf16 = zero, numel, made, in_bf16
        size, local = zero.zero_gradient_partition_size, self.local
        group = {"off": None, "auto": local, "1": 1, "2": 2}[size]
        self.whole = group == 1 or (group is None and zero.zero_stage < 2)
        self.in_groups = group not in (None, 1, self.nodes * local)
        self.group = local if group in (None, 1) else group

    def gradients(self, micro_batches: int, *, last: bool) -> SentBytes:
        """Of one micro-batch: inside groups, between those of a node, between nodes, and of the sums."""
        if self.whole and not last:
            return SentBytes()
        nodes, local, groups = self.nodes, self.local, self.local // self.group
        plain = 2 if self.in_bf16 else 4 if self.whole else self.made
        if micro_batches == 1:
            plain = min(plain, self.made)
        inside: str | int = plain
        between: str | int = 2 if self.in_bf16 else 4
        if local == 1:
            between = plain
        sizes = [self.numel]
        if self.zero.zero_quantized_gradients:
            between = self.zero.zero_quantized_gradients_format
            inside = "int8" if between == "rotated4" else between
            if nodes > 1 < self.group:
                chunk = max(-(-self.numel // 4), 2**18)
                chunk = -(-chunk // 256) * 256
                sizes = [min(chunk, self.numel - start) for start in range(0, self.numel, chunk)]
        near = sum((self.group - 1) * groups * message(inside, nodes * size) for size in sizes)
        far = 0
        if last or not self.in_groups:
            near += (groups - 1) * nodes * self.numel * 4
            far = sum((nodes - 1) * message(between, size) for size in sizes)
        sent = SentBytes(near, far)
        if self.zero.zero_stage == 0:
            sent += SentBytes((local - 1) * nodes * self.numel * 4, (nodes - 1) * self.numel * 4)
        return sent

    def weights(self, *, coded: bool) -> tuple[SentBytes, SentBytes, int]:
        """Once per step, at a use, and the elements that a rank keeps."""
        zero, nodes, local = self.zero, self.nodes, self.local
        if zero.zero_stage == 0:
            return SentBytes(), SentBytes(), 0
        element = 1 if coded else self.made
        sent = message(element, self.numel)
        if zero.sends_differences:
            sent = message("delta4", self.numel)
        elif zero.zero_quantized_weights and not coded:
            sent = message("qwZ", self.numel)
        between = SentBytes(inter=(nodes - 1) * sent)
        hpz = zero.zero_stage == 3 and zero.hpz
        if not (hpz or zero.sends_differences):
            return SentBytes(), between + SentBytes((local - 1) * nodes * sent), 0
        group = (
            local if zero.zero_hpz_partition_size == "auto" or not hpz else int(zero.zero_hpz_partition_size)
        )
        spread = local // group  # ranks between two of a group
        kept = nodes * spread * self.numel
        brought = between + SentBytes((spread - 1) * nodes * sent)
        if kept == self.numel and sent == message(element, self.numel):
            kept = 0  # the shard itself
        return brought, SentBytes((group - 1) * nodes * spread * self.numel * element), kept


def settings() -> Iterator[ZeroConfig]:
    """Every stage with every format, and every size of groups."""
    for stage, weights, hpz, gradients, group in product(
        range(4),
        (None, "int8", "delta4"),
        ("1", "2", "auto"),
        (None, *list(BITS)[:3]),
        ("off", "auto", "1", "2"),
    ):
        given: dict[str, object] = {"zero_stage": stage, "zero_hpz_partition_size": hpz}
        if weights:
            given |= {"zero_quantized_weights": True, "zero_quantized_weights_format": weights}
        if gradients:
            given |= {"zero_quantized_gradients": True, "zero_quantized_gradients_format": gradients}
        if (stage == 3 or hpz == "1") and (stage > 0 or (weights, gradients, group) == (None, None, "off")):
            yield ZeroConfig(**given, zero_gradient_partition_size=group)  # type: ignore[arg-type]


def plans(
    zero: ZeroConfig, grid: tuple[int, int], dtype: torch.dtype, *, in_bf16: bool, coded: bool
) -> Iterator[CommunicationPlan]:
    """Those of all ranks, of units of one chunk and of several."""
    nodes, local = grid
    for rank in range(nodes * local):
        mesh = Mesh(nodes=nodes, local_ranks=local, rank=rank)
        layouts = [
            Layout(
                placements=(Placement(name="w", shape=(nodes * local * numel,), coded=coded),),
                axes=mesh.shards,
                alignment=256,
            )
            for numel in (768, LARGE)
        ]
        yield plan_communication(
            zero, mesh, layouts, compute_dtype=dtype, reduce_in_bf16=in_bf16, copy_engines=False
        )


def is_possible(zero: ZeroConfig, grid: tuple[int, int]) -> bool:
    try:
        check_routes(zero, Mesh(nodes=grid[0], local_ranks=grid[1]))
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("grid", GRIDS)
def test_routes_send_the_bytes_of_closed_forms(grid: tuple[int, int]) -> None:
    """Weights of each step and of each use, what is kept, gradients of a last micro-batch and of others."""
    for zero, (dtype, in_bf16, coded) in product(
        (zero for zero in settings() if is_possible(zero, grid)),
        ((torch.bfloat16, False, False), (torch.float32, True, False), (torch.bfloat16, False, True)),
    ):
        of_ranks = list(plans(zero, grid, dtype, in_bf16=in_bf16, coded=coded))
        ends = of_ranks[0], of_ranks[-1]  # --dry-run asks one rank
        assert len({(plan.arena_bytes, plan.weight_bytes, plan.kept_bytes) for plan in ends}) == 1
        for plan in of_ranks:
            for weights in plan.weights:
                closed = Closed(zero, grid, weights.layout.shard_numel, dtype.itemsize, in_bf16=in_bf16)
                found = weights.brought, weights.filled, len(weights.kept_elements)
                assert found == closed.weights(coded=coded), (zero, coded)
                check_kept(weights)
                for count, last in ((1, True), (3, True), (3, False)):
                    wanted = closed.gradients(count, last=last)
                    assert plan.reduced(weights, count, last=last) == wanted, (zero, dtype, count, last)


def check_kept(weights: WeightPlan) -> None:
    """What is kept has the rank's own shard in it, and begins where a shard does."""
    kept, own = weights.kept_elements, weights.layout.shard(weights.mesh)
    assert not kept or kept.start <= own.start < own.stop <= kept.stop
    assert kept.start % len(own) == 0
