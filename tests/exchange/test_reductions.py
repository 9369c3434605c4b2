"""Sums of gradients over ranks: the bits of every route beside sums of whole units in the order of the ranks.

Also what ranks send and allocate beside the plan, and what runs beside what.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import Mock, patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_zpp.distributed.topology import Topology
from megatron_zpp.exchange import route
from megatron_zpp.exchange.codecs import Rotation, clear
from megatron_zpp.exchange.reductions import Target
from megatron_zpp.exchange.route import SentBytes
from megatron_zpp.exchange.segments import GradSegment, join, segments_inside, segments_of
from megatron_zpp.exchange.sums import TORCH_SUMS
from megatron_zpp.mesh import Mesh
from megatron_zpp.ops.signs import Signs
from megatron_zpp.placement import Layout, within
from megatron_zpp.zero.communication import Communication
from megatron_zpp.zero.unit_plan import UnitPlan
from tests.exchange.streams import GRIDS, Opened, Sizes, Watch, mesh_of
from tests.exchange.sums_of_units import (
    CHUNK,
    FP16,
    FP32,
    INSIDE,
    ITERATION,
    SIGNS_SEED,
    Case,
    Expected,
    codes,
    gradient,
    layouts,
    possible,
    sizes_of,
)
from tests.test_placement import coded, meshes, wides
from tests.zero.engines import copy_engines, layout_of, operations, this_device
from tests.zero.ranks import on_ranks


def in_parts(flat: Tensor, unit: int) -> list[GradSegment]:
    """A gradient as one segment, or in pieces of 1 to 3 blocks that lie elsewhere."""
    if unit == 0:
        return [GradSegment(0, flat)]
    starts = sorted(start for first in (0, 256, 768) for start in range(first, len(flat), 6 * 256))
    stops = [*starts[1:], len(flat)]
    return [GradSegment(start, flat[start:stop].clone()) for start, stop in zip(starts, stops, strict=True)]


def sums(started: Topology, grids: list[Sizes], every: int = 1) -> list[list[list[bytes]]]:
    """What `reduced` returns of every case that is possible, by grid."""
    return [
        [reduced(case, mesh_of(sizes, started.rank)) for case in possible(sizes, every)] for sizes in grids
    ]


@patch.object(route, "SMALLEST_CHUNK", CHUNK)
def reduced(case: Case, mesh: Mesh, watch: Watch | None = None) -> list[bytes]:
    """The sums of this rank after a step, as the engine runs it.

    All units of a micro-batch are submitted before the first is waited for, as by a fast backward.
    """
    device = this_device()
    engines = case.peer_writes if device.type == "cpu" else copy_engines(mesh)
    plan = case.plan(mesh, copy_engines=engines)
    kernels = operations() if case.kernels else TORCH_SUMS
    opened = Opened(plan, kernels, watch)
    legs = opened.communication.legs
    whole = [torch.zeros(each.layout.numel, device=device) for each in plan.units]
    accumulated = [torch.full((each.accumulator_numel,), 7.0, device=device) for each in plan.units]
    totals = [torch.full((len(each.owned),), 7.0, device=device) for each in plan.units]
    squares = [torch.full((each.layout.shard_numel // 256,), 7.0, device=device) for each in plan.units]
    shards = [within(each.shard, each.owned) for each in plan.units]
    expected = SentBytes()
    for micro_batch in range(case.micro_batches):
        last, only = micro_batch == case.micro_batches - 1, case.micro_batches == 1
        under_way, sent = [], []
        for unit, weights in enumerate(plan.units):
            layout = weights.layout
            reduction = opened.communication.reductions[weights.gradients]
            if weights.sums and weights.sums[0].codes:  # tests/zero/test_inside_nodes.py has these
                weights = replace(weights, sums=())
            expected += weights.reduced(case.micro_batches, last=last)
            flat = gradient(case, mesh.rank, unit, layout, micro_batch).to(device)
            summed = not (only or weights.every_micro_batch)
            if summed:
                whole[unit] += flat
                if not last:
                    continue
                flat = whole[unit].to(weights.gradient_dtype)
                if len(totals[unit]) == len(flat):
                    totals[unit] = flat if flat.dtype == FP32 else whole[unit]  # the sum lies where it was
            elif flat.itemsize > weights.gradient_dtype.itemsize:
                flat = flat.to(weights.gradient_dtype)
            parts = [GradSegment(0, flat)] if summed else in_parts(flat, unit)
            sent.append(parts)  # there until they are waited for
            total, add = totals[unit], micro_batch > 0 and weights.every_micro_batch
            shard = total[shards[unit]]
            found = None if weights.quantizes_gradients else squares[unit]
            target = Target(shard, add, found, rotation_of(weights, unit))
            if weights.in_groups and not (only and reduction.at_once):
                under_way.append(reduction.accumulate(parts, accumulated[unit], add=micro_batch > 0))
                if not last:
                    continue
                pending = reduction.reduce_accumulated(accumulated[unit], target._replace(add=False))
            else:
                pending = reduction.reduce(parts, target)
            if last and (leg := legs[unit].sums).stages:
                if weights.sums:
                    pending = leg.run(shard, total, after=pending)
                else:
                    totals[unit] = shard
            under_way.append(pending)
        for one in under_way:
            one.wait()
    sent_bytes = opened.close()
    assert sent_bytes == expected, (case, sent_bytes, expected)
    for weights, total, owned, found in zip(plan.units, totals, shards, squares, strict=True):
        if weights.quantizes_gradients:
            continue
        its_squares = torch.empty_like(found)
        kernels.sum_squares(total[owned], its_squares)
        any_order = 0 if case.kernels else 2 * 256 * 2**-24  # torch's depends on how many sums there are
        torch.testing.assert_close(found, its_squares, rtol=any_order, atol=0, equal_nan=True)
    return [total.cpu().numpy().tobytes() for total in totals]


def rotation_of(weights: UnitPlan, unit: int) -> Rotation | None:
    if not weights.rotates_gradients:
        return None
    return Rotation(Signs(SIGNS_SEED, unit, ITERATION), weights.layout.gaps_in(weights.shard))


# The error of a sum in its norm: of 24 and 8 bits, and of block codes with outliers of 30 times the others.
ERRORS = {"plain": 2e-6, "bf16": 2**-8, "int8": 0.04, "int4": 0.6, "rotated4": 0.16}


def check(grids: list[Sizes], ranks: list[list[list[list[bytes]]]], every: int = 1) -> None:
    """Every unit of every case on every rank: the expected bits, which are near the sum in fp64."""
    for sizes, *by_rank in zip(grids, *ranks, strict=True):
        mesh, units = mesh_of(sizes), [*enumerate(layouts(mesh_of(sizes)))]
        ranks_of = {  # what ranks sum together
            unit: {mesh.at(rank).ranks(*layout.axes) for rank in range(mesh.world_size)}
            for unit, layout in units
        }
        for case, *results in zip(possible(sizes, every), *by_rank, strict=True):
            for unit, layout, owners in (
                (*each, sorted(ranks)) for each in units for ranks in ranks_of[each[0]]
            ):
                (nodes, local, _), batches = sizes_of(unit, sizes), range(case.micro_batches)
                made = [gradient(case, rank, unit, layout, each) for each in batches for rank in owners]
                of_batches = torch.stack(made).view(len(batches), len(owners), -1)
                total = Expected(case, sizes, unit).sum(of_batches)
                check_error(case, layout, total, of_batches)
                shards = total.view(nodes * local, -1)
                for place, rank in enumerate(owners):
                    node, local_rank = divmod(place, local)
                    first = local_rank * nodes
                    gathered = unit == INSIDE and not case.config.zero_quantized_gradients
                    own = shards[first : first + nodes] if gathered else shards[first + node]
                    own = shards if case.config.zero_stage == 0 else own
                    found = torch.frombuffer(bytearray(results[rank][unit]), dtype=FP32)
                    same = torch.equal(found.nan_to_num(nan=1e9), own.flatten().nan_to_num(nan=1e9))
                    assert same, (sizes, case, unit, rank)


def check_error(case: Case, layout: Layout, total: Tensor, made: Tensor) -> None:
    name = "bf16" if case.in_bf16 else "plain"
    if case.config.zero_quantized_gradients and layout.shards > 1:
        name = case.config.zero_quantized_gradients_format
    exact = made.double().sum((0, 1))
    off = total - exact
    clear(off, layout.gaps_in(range(layout.numel)))
    lost = int(off.isnan().sum())
    assert lost in (0, 1, 128, 256), (case, lost)  # a NaN reaches its element, or its block
    error = off.nan_to_num().norm() / exact.nan_to_num().norm()
    assert error <= ERRORS[name], (case, error)


@pytest.mark.parametrize("grids", GRIDS)
def test_a_reduction_is_the_sum_over_all_ranks(grids: list[Sizes]) -> None:
    nodes, local, tensor = grids[0]
    check(grids, on_ranks(nodes * local * tensor, sums, grids))


def held_up(topology: Topology, sizes: Sizes, case: Case) -> tuple[bool, int, bool]:
    """Whether the next exchange between nodes began while the first was held, how many sums of a node had
    been made then, and whether the bits are those of a step that nothing held.
    """
    mesh = mesh_of(sizes, topology.rank)
    inside = 2 if mesh.local_ranks > 1 else 0
    watch = Watch("far", lambda begun, ended: begun["far"] > 1 and ended["near"] >= inside)
    held = reduced(case, mesh, watch)
    return watch.beside, watch.begun["near"] - inside, held == reduced(case, mesh)


@pytest.mark.parametrize(
    ("sizes", "case"),
    [
        ((2, 1, 1), codes("int8", made=FP16, micro_batches=1)),
        ((2, 2, 1), codes("int8", made=FP16, micro_batches=1)),
        ((2, 2, 1), codes("rotated4", "auto", micro_batches=1)),
        ((2, 2, 1), Case({}, micro_batches=1)),
    ],
)
def test_a_sum_is_made_beside_two_exchanges_between_nodes(sizes: Sizes, case: Case) -> None:
    """The third one only when what the first one sends from is free."""
    nodes, local, _ = sizes
    for rank in on_ranks(nodes * local, held_up, sizes, case):
        assert rank == (True, 0, True)


@pytest.mark.parametrize("order", [1, -1])
def test_streams_and_rooms_do_not_depend_on_which_unit_is_first(order: int) -> None:
    """There are as many lanes as the plan has room for, also if the first unit to use a link needs fewer."""
    made, allocated = Counter[tuple[int, ...]](), list[int]()

    def stream(ranks: Sequence[int]) -> Mock:
        made[tuple(ranks)] += 1
        return Mock(zeros=lambda numel, dtype: allocated.append(numel * dtype.itemsize), writes_peers=False)

    plan = Case({}).plan(mesh_of((2, 2, 1)), copy_engines=False)
    plan = replace(plan, units=plan.units[::order])
    Communication(plan, stream, TORCH_SUMS)
    assert sum(allocated) == plan.arena_bytes
    assert made == {(0, 1): 2, (0, 2): 4}  # of weights, gradients in two lanes between nodes, and sums


@given(coded, wides, meshes, st.sampled_from((1, 1024)))
def test_segments_of_a_coded_unit_are_the_whole_gradient(
    narrow: list[int], wide: list[int], mesh: Mesh, large: int
) -> None:
    """Those that stay where they were made, where kernels can load them there, and the gaps between them."""
    layout = layout_of(mesh, *narrow, *wide, coded=len(narrow), alignment=256)
    numels = [placement.numel for placement in layout.placements]
    produced = [torch.full((3 + each,), 1.0 + at)[3 * (at % 2) :][:each] for at, each in enumerate(numels)]
    expected = torch.zeros(layout.numel)
    for start, made in zip(layout.offsets, produced, strict=True):
        expected[start : start + len(made)] = made
    segments = segments_of(layout, produced, large)
    assert not any(segment.flat.data_ptr() % 16 for segment in segments)
    assert torch.equal(join(segments, torch.full((layout.numel,), torch.nan)), expected)
    assert [segment.start for segment in segments[1:]] == [
        segment.start + len(segment.flat) for segment in segments[:-1]
    ]
    for rank in range(mesh.world_size):
        owned = layout.shard(mesh.at(rank))
        shard = torch.full((len(owned),), torch.nan)
        for segment in segments_inside(segments, owned):
            segment.of(shard).copy_(segment.flat)
        assert torch.equal(shard, expected[owned.start : owned.stop])
