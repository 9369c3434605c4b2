"""Gathers of weights and of differences: what is kept and what is in the slot, beside whole units.

Also what ranks send and allocate beside the plan, and what runs beside what.
"""

from dataclasses import replace
from functools import partial
from math import gcd, prod
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.comm_stream import Pending
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.exchange.differences import apply, encode
from megatron_zpp.exchange.route import SentBytes, eight_bits
from megatron_zpp.mesh import Mesh
from megatron_zpp.ops import reference
from megatron_zpp.ops.formats import LloydMaxFormat, QuantFormat
from megatron_zpp.ops.operations import Operations
from megatron_zpp.placement import Layout
from megatron_zpp.zero.communication_plan import CommunicationPlan, plan_communication
from megatron_zpp.zero.unit_plan import UnitPlan
from tests.exchange.streams import GRIDS, Opened, Sizes, Watch, mesh_of
from tests.zero.engines import copy_engines, layout_of, operations, this_device
from tests.zero.ranks import on_ranks
from tests.zero.zeropp_engines import HPZ, QWZ

PAIRS = {"zero_hpz_partition_size": "2"}
DELTA4 = QWZ | {"zero_quantized_weights_format": "delta4"}
# By name: the flags, stage 3 unless they name another one, and whether weights are held as codes.
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "stage 1": ({"zero_stage": 1}, False),
    "stage 2, qwZ": ({"zero_stage": 2} | QWZ, False),
    "plain": ({}, False),
    "coded": ({}, True),
    "qwZ": (QWZ, False),
    "qwZ, coded": (QWZ, True),
    "hpZ": (HPZ, False),
    "hpZ, coded": (HPZ, True),
    "hpZ of pairs": (PAIRS, False),
    "qwZ, hpZ": (QWZ | HPZ, False),
    "qwZ, hpZ of pairs": (QWZ | PAIRS, False),
    "stage 1, delta4": ({"zero_stage": 1} | DELTA4, False),
    "delta4": (DELTA4 | HPZ, False),
    "delta4 of pairs": (DELTA4 | PAIRS, False),
}
UNITS, STEPS = 6, 3
OF_LOCAL, OF_NODES = 4, 5  # units of which each rank of a node, and each node, has other elements
WITHOUT_NODES = {"stage 1, delta4": "stage 1", "delta4": "hpZ", "delta4 of pairs": "hpZ of pairs"}
RAISED, SKIPPED = 2, 2  # the unit that travels in 8 bits in step 1, and a step that changes no weights
ORACLE = Operations(reference, compiled=False)


def plan_of(name: str, mesh: Mesh) -> CommunicationPlan:
    """Of units that take turns in two slots, one with a slot of its own, and two over other ranks."""
    flags, coded = CASES[name]
    axes = [mesh.shards] * OF_LOCAL + [mesh.shards_beside(axis) for axis in (mesh.replicas, mesh.node)]
    shards = [prod(axis.size for axis in each) for each in axes]
    numels = [each * 1024 for each in shards]
    numels[OF_LOCAL - 1] = shards[0] * 512 - 90
    return plan_communication(
        ZeroConfig(**{"zero_stage": 3} | flags),
        mesh,
        [
            replace(layout_of(mesh, numel, alignment=256, coded=int(coded)), axes=over)
            for numel, over in zip(numels, axes, strict=True)
        ],
        compute_dtype=torch.bfloat16,
        reduce_in_bf16=False,
        copy_engines=copy_engines(mesh),
    )


def possible(sizes: Sizes, every: int = 1) -> list[str]:
    """The cases whose groups divide a node, and of one node those without differences; see sums_of_units."""
    nodes, local, _ = sizes
    return [
        name
        for name in list(CASES)[::every]
        if not ((nodes == 1 and "delta4" in name) or (local % 2 and name.endswith("pairs")))
    ]


def masters(mesh: Mesh, unit: int, layout: Layout, step: int) -> Tensor:
    """The fp32 weights of a whole unit, of which each rank along its axes has its shard."""
    first = min(mesh.ranks(*layout.axes))
    generator = torch.Generator().manual_seed(1000 * min(step, SKIPPED - 1) + 100 * first + unit)
    return torch.randn(layout.numel, generator=generator)


class Held:
    """What a rank holds of one unit, and how a step fills it."""

    def __init__(self, opened: Opened, index: int, kernels: Operations) -> None:
        self.plan, self._index, self._kernels = opened.communication.plan.units[index], index, kernels
        self._legs, plan, device = opened.communication.legs[index], self.plan, this_device()
        self.full = torch.zeros(plan.layout.numel, dtype=plan.dtype, device=device)
        self._own = {
            name: torch.zeros(numel, dtype=dtype, device=device)
            for name, (_, (numel, dtype)) in plan.memory.items()
        }
        self.kept = self.full[:0]
        if plan.bring:
            self.kept = self._own.get("kept", self._legs.fill.own(self.full))

    def format(self, step: int) -> QuantFormat | LloydMaxFormat | None:
        """That of the differences which are sent in a step."""
        format = self.plan.differences
        raised = format is not None and (self._index, step) == (RAISED, 1)
        return eight_bits(format) if raised else format

    def sent_in(self, step: int) -> SentBytes:
        """Bytes that this rank must send in a step."""
        bring = self.plan.bring
        if (format := self.format(step)) is not None:
            bring = tuple(replace(stage, format=format) for stage in bring)
        return replace(self.plan, bring=bring).brought + self.plan.filled

    def fill(self, master: Tensor, step: int) -> Pending:
        """Start to bring and to fill what a step has changed to `master` (n / shards,)."""
        plan, kernels, (_, bring, fill) = self.plan, self._kernels, self._legs
        leg, target = (bring, self.kept) if plan.bring else (fill, self.full)
        if not plan.first:
            self.full.copy_(master)
            return Pending()
        take, parts = None, len(target) // plan.layout.shard_numel
        source = self._own.get("gather_source", leg.own(target))
        if (coded := plan.differences) is not None:
            sent = self.format(step)
            source = encode(
                kernels,
                master,
                leg.own(target),
                self._own["message"],
                torch.tensor(float(step == SKIPPED), device=master.device),
                coded=coded,
                sent=sent,
                squares=torch.empty(2, len(master) // coded.block, device=master.device),
            )
            take = lambda messages: apply(kernels, messages.view(parts, -1), target, sent)  # noqa: E731
        elif (format := plan.codes) is not None:
            kernels.quantize(master[None], source[None], format)
            take = lambda messages: kernels.dequantize(  # noqa: E731
                messages.view(parts, -1), target.view(parts, -1), format
            )
        else:
            source.copy_(coded_as(master, plan))
        brought = leg.run(source, target, take)
        return fill.run(target, self.full, after=brought) if plan.bring else brought


def coded_as(master: Tensor, plan: UnitPlan) -> Tensor:
    """Weights in the format of the slot; those that are held as codes are bytes of any meaning here."""
    return (master * 50).to(torch.int8).view(torch.uint8) if plan.layout.coded else master.to(plan.dtype)


def filled(topology: Topology, grids: list[Sizes], every: int = 1) -> list[list[list[bytes]]]:
    """What `steps` returns of every case that is possible, by grid."""
    return [
        [steps(name, mesh_of(sizes, topology.rank)) for name in possible(sizes, every)] for sizes in grids
    ]


def steps(name: str, mesh: Mesh, watch: Watch | None = None) -> list[bytes]:
    """What is kept, and the slot, of each unit after each step.

    All units are submitted before the first is waited for, each with a slot of its own here.
    """
    kernels, plan = operations(), plan_of(name, mesh)
    opened, found, expected = Opened(plan, kernels, watch), list[bytes](), SentBytes()
    units = [Held(opened, index, kernels) for index in range(UNITS)]
    for step in range(STEPS):
        shards = [
            masters(mesh, index, each.layout, step)[each.layout.shard(mesh)].to(this_device())
            for index, each in enumerate(plan.units)
        ]
        pending = [unit.fill(shard, step) for unit, shard in zip(units, shards, strict=True)]
        for unit, one in zip(units, pending, strict=True):
            one.wait()
            expected += unit.sent_in(step)
            found += [raw(unit.kept), raw(unit.full)]
    sent = opened.close()
    assert sent == expected, (name, sent, expected)
    return found


def raw(tensor: Tensor) -> bytes:
    return tensor.cpu().view(torch.uint8).numpy().tobytes()


def whole_units(given: str, sizes: Sizes, rank: int) -> list[tuple[Tensor, Tensor]]:
    """What all ranks keep together, and the slot, of each unit after each step: without shards or a plan."""
    mesh = mesh_of(sizes, rank)
    layouts = [each.layout for each in plan_of(given, mesh).units]
    references = [torch.zeros(layout.numel) for layout in layouts]
    found = []
    for step in range(STEPS):
        for unit, layout in enumerate(layouts):
            weights, (name, _) = masters(mesh, unit, layout, step), alike(unit, given, sizes)
            flags, coded = CASES[name]
            if "delta4" in name:
                difference_applied(references[unit], weights, step, raised=(unit, step) == (RAISED, 1))
                kept = references[unit].clone()
            elif coded:
                kept = (weights * 50).to(torch.int8).view(torch.uint8)
            elif flags.get("zero_quantized_weights") and layout.shards > 1:
                kept = decoded(weights, QuantFormat("int8", 256)).bfloat16()
            else:
                kept = weights.bfloat16()
            found.append((kept, kept if coded else kept.bfloat16()))
    return found


def decoded(flat: Tensor, format: QuantFormat) -> Tensor:
    message, result = (
        torch.empty(1, format.message_bytes(len(flat)), dtype=torch.uint8),
        torch.empty_like(flat),
    )
    ORACLE.quantize(flat[None], message, format)
    ORACLE.dequantize(message, result[None], format)
    return result


def difference_applied(reference: Tensor, weights: Tensor, step: int, *, raised: bool) -> None:
    if step == SKIPPED:
        return
    if raised:
        reference += decoded(weights - reference, QuantFormat("int8", 256))
        return
    format = LloydMaxFormat(4, 256)
    message = torch.empty(format.message_bytes(len(weights)), dtype=torch.uint8)
    ORACLE.quantize_difference(weights, reference, message, format)
    ORACLE.add_difference(message[None], reference, format)


def alike(unit: int, name: str, sizes: Sizes) -> tuple[str, Sizes]:
    """The case, and sizes of a mesh, in which ordinary units travel as this one does."""
    nodes, local, tensor = sizes
    if unit == OF_NODES:
        return WITHOUT_NODES.get(name, name), (1, local, tensor)
    return name, (nodes, 1 if unit == OF_LOCAL else local, tensor)


def kept_of(name: str, sizes: Sizes, place: int, whole: Tensor) -> Tensor:
    """What a rank, by its place in its node, keeps: groups of ranks that are evenly spaced have all of it.

    That is nothing where its own shard alone would be kept as it is.
    """
    flags, (nodes, local, _) = CASES[name][0], sizes
    group = gcd(2, local) if flags.get("zero_hpz_partition_size") == "2" else local
    as_it_is = group == nodes * local and ("qwZ" not in name or group == 1)
    if as_it_is or not ("hpZ" in name or "delta4" in name):
        return whole[:0]
    return whole.chunk(group)[place // (local // group)]


def check(grids: list[Sizes], ranks: list[list[list[list[bytes]]]], every: int = 1) -> None:
    """Every unit after every step on every rank."""
    for sizes, *by_rank in zip(grids, *ranks, strict=True):
        for name, *results in zip(possible(sizes, every), *by_rank, strict=True):
            for rank, found in enumerate(results):
                for at, (kept, full) in enumerate(whole_units(name, sizes, rank)):
                    case, like = alike(at % UNITS, name, sizes)
                    place = rank // like[2] % like[1]
                    wanted = [raw(kept_of(case, like, place, kept)), raw(full)]
                    assert found[2 * at : 2 * at + 2] == wanted, (sizes, name, rank, at)


@pytest.mark.parametrize("grids", GRIDS)
def test_what_is_kept_and_read_are_the_weights_of_all_owners(grids: list[Sizes]) -> None:
    nodes, local, tensor = grids[0]
    check(grids, on_ranks(nodes * local * tensor, filled, grids))


def held_up(topology: Topology, sizes: Sizes, name: str, held: str) -> tuple[bool, int, bool]:
    """Whether the next gathers began while the first over a `held` link was; how many too many over the
    other link had begun then; whether the bits are those of steps that nothing held.
    """
    mesh, other = mesh_of(sizes, topology.rank), {"near": "far", "far": "near"}[held]
    wanted = 2 if held == "near" else 0
    until = partial(_beside, held, other, wanted)
    watch = Watch(held, until)
    under_way = steps(name, mesh, watch)
    return watch.beside, watch.begun[other] - wanted, under_way == steps(name, mesh)


def _beside(held: str, other: str, wanted: int, begun: Any, ended: Any) -> bool:
    return ended[other] == wanted and (begun[held] > 1 or held == "near")


@pytest.mark.parametrize(("name", "held"), [("qwZ", "near"), ("stage 1, delta4", "far"), ("delta4", "far")])
def test_a_gather_is_under_way_beside_that_of_the_next_unit(name: str, held: str) -> None:
    """Two between nodes, or one between and one inside. No buffer is filled before what it had is read."""
    for rank in on_ranks(4, held_up, (2, 2, 1), name, held):
        assert rank == (True, 0, True)
