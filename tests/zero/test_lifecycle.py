"""Where the weights of units are in a step: every transition on values, without ranks."""

import pytest
import torch

from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.comm_stream import Pending
from megatron_zpp.mesh import Mesh
from megatron_zpp.placement import Layout
from megatron_zpp.zero.communication_plan import CommunicationPlan, plan_communication
from megatron_zpp.zero.prefetch import Phase, Prefetcher, WeightState
from tests.zero.engines import layout_of

SHARDED, GATHERING, GATHERED = WeightState.SHARDED, WeightState.GATHERING, WeightState.GATHERED
MESH = Mesh(nodes=2, local_ranks=2)
LAYER = layout_of(MESH, 5000)


def plan_of(units: int, *, last: Layout = LAYER, **zero: object) -> CommunicationPlan:
    return plan_communication(
        ZeroConfig(**zero),
        MESH.at(1),
        [LAYER] * (units - 1) + [last],
        compute_dtype=torch.bfloat16,
        reduce_in_bf16=False,
        copy_engines=False,
    )


class Walk:
    """A prefetcher that records the units that it gathers."""

    def __init__(self, plan: CommunicationPlan) -> None:
        self.gathers: list[int] = []
        self.waited: list[int] = []  # the units whose gathers the compute has waited for
        self.units = range(len(plan.units))
        self.readable = {*self.units}  # those whose weights modules may read
        self.prefetcher = Prefetcher(plan, self._gather, set_readable=self._set_readable)

    def step(self) -> None:
        self.prefetcher.begin_step()
        for index in self.units:
            self.prefetcher.updated(index)

    def forward(self) -> None:
        self.prefetcher.begin(Phase.FORWARD)
        for index in self.units:
            self.prefetcher.before_forward(index)

    def backward(self) -> None:
        self.prefetcher.begin(Phase.BACKWARD)
        for index in reversed(self.units):
            self.prefetcher.before_backward(index)

    def _gather(self, index: int) -> Pending:
        self.gathers.append(index)
        return Pending(lambda: self.waited.append(index))

    def _set_readable(self, index: int, readable: bool) -> None:
        self.readable ^= {index}
        assert (index in self.readable) == readable

    def weights(self) -> list[WeightState]:
        return [self.prefetcher.weights_of(index) for index in self.units]

    def taken(self) -> list[int]:
        taken, self.gathers = self.gathers, []
        return taken


def test_weights_go_through_their_slots() -> None:
    """Four units in two slots: each gather takes the slot of the unit before the last."""
    walk = Walk(plan_of(4, zero_stage=3))
    assert walk.weights() == [SHARDED] * 4
    walk.prefetcher.begin(Phase.FORWARD)
    walk.prefetcher.before_forward(0)
    assert walk.weights() == [GATHERED, GATHERING, SHARDED, SHARDED]
    walk.prefetcher.before_forward(1)
    assert walk.weights() == [SHARDED, GATHERED, GATHERING, SHARDED]
    for index in (2, 3):
        walk.prefetcher.before_forward(index)
    assert walk.weights() == [SHARDED, SHARDED, GATHERED, GATHERED]
    assert walk.taken() == [0, 1, 2, 3]
    walk.backward()
    assert walk.taken() == [1, 0]  # the last two were there
    walk.step()
    assert walk.weights() == [GATHERING, GATHERING, SHARDED, SHARDED]


@pytest.mark.parametrize("keeps", ["nothing", "shards", "references"])
def test_a_gather_overtakes_none_that_the_forward_needs_sooner(keeps: str) -> None:
    """The last unit has a slot of its own, which is free after a step.

    Gathers run in order, and one from what is kept ends when that has arrived. Before it had to wait for its
    turn, the second layer waited for what crosses nodes of all units.
    """
    formats = {"zero_quantized_weights": True, "zero_quantized_weights_format": "delta4"}
    walk = Walk(
        plan_of(
            5,
            last=layout_of(MESH, 64),
            zero_stage=3,
            zero_hpz_partition_size="1" if keeps == "nothing" else "auto",
            **formats if keeps == "references" else {},
        )
    )
    walk.step()
    last = GATHERING if keeps == "nothing" else SHARDED
    assert walk.weights() == [GATHERING, GATHERING, SHARDED, SHARDED, last]
    walk.forward()
    assert sorted(walk.taken()) == [0, 1, 2, 3, 4]
    assert walk.readable == {2, 3, 4}
    walk.step()
    assert walk.readable == set()  # with the weights of before the step


def test_new_weights_wait_for_their_own_gather_alone() -> None:
    """The third unit shares the slot of the first, whose gather does not read what the third changes."""
    walk = Walk(plan_of(4, zero_stage=3))
    walk.step()
    walk.prefetcher.wait_for_gather_of(2)
    assert walk.waited == []
    walk.prefetcher.wait_for_gather_of(0)
    walk.prefetcher.wait_for_gather_of(0)  # it is not under way any more
    assert walk.waited == [0]
    assert walk.weights() == [GATHERED, GATHERING, SHARDED, SHARDED]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_below_stage_3_each_unit_has_its_slot(stage: int) -> None:
    walk = Walk(plan_of(3, zero_stage=stage))
    walk.step()
    assert walk.taken() == ([] if stage == 0 else [0, 1, 2])
    walk.forward()
    walk.backward()
    assert walk.weights() == [GATHERED] * 3
    assert walk.taken() == []
