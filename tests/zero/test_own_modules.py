"""Modules of users under the engine: right, or refused in a line that names the parameter, at every stage."""

import gc
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from megatron_zpp.distributed.topology import Topology
from megatron_zpp.zero.read_guard import Unreadable
from tests.support import refusal
from tests.zero.own_modules import (
    LAYERS,
    READS,
    TRAINED,
    Deep,
    Layer,
    LowRank,
    Stack,
    batch_of,
    check_trained,
    compiled,
    engine_of,
    losses_of_torch,
    read_wrongly,
    reads_between,
    stack_of,
    stack_that,
    steps_of,
)
from tests.zero.ranks import on_ranks
from tests.zero.zeropp_engines import FOUR_BITS, QGZ, QWZ

STAGES = [{"zero_stage": stage} for stage in (0, 1, 2, 3)]
NO_PREFETCH = {"zero_prefetch_units": 0}
GROUPED = {"zero_stage": 2, "zero_gradient_partition_size": "auto"}
HPZ = {"zero_hpz_partition_size": "2", "zero_gradient_partition_size": "2"}


@pytest.mark.parametrize("kind", TRAINED)
def test_one_rank_trains_modules_of_users_as_torch_does(kind: str) -> None:
    check_trained(Topology(), [(kind, zero) for zero in (STAGES[0], STAGES[3], NO_PREFETCH)])


def test_no_forward_moves_the_weights_of_an_lstm(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU torch would pack them for cuDNN, and steps would change others."""
    engine = engine_of(TRAINED["LSTM"])
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", lambda self: pytest.fail("the weights are moved"))
    steps_of(engine, steps=1)


def test_two_nodes_train_modules_of_users_as_torch_does() -> None:
    """Some at stage 3; LoRA, units inside units and tied units with the other settings too."""
    cases = [(kind, STAGES[3]) for kind in list(TRAINED)[::2]]
    cases += [
        (kind, zero) for zero in (NO_PREFETCH, STAGES[1], GROUPED, HPZ) for kind in ("LoRA", "the rest")
    ]
    cases += [("nested", NO_PREFETCH), ("nested", HPZ)]
    cases += [("tied units", zero) for zero in (*STAGES[1:], GROUPED, HPZ)]
    on_ranks(4, check_trained, cases, ranks_per_node=2)


def test_frozen_parameters_are_not_trained_and_have_no_states() -> None:
    """With quantised weights and differences of weights too, where they are sent once."""
    for result in on_ranks(4, train_frozen, ranks_per_node=2):
        assert result


def train_frozen(topology: Topology) -> bool:
    for zero in (STAGES[1], QWZ | QGZ, FOUR_BITS):
        engine = engine_of(stack_of(LowRank), topology, **zero)
        frozen = [index for index, unit in enumerate(engine.units) if unit.frozen]
        assert len(frozen) == LAYERS
        before = [shard.clone() for shard in engine.states.shards("weights")]
        engine.take_traffic()
        losses = steps_of(engine, steps=4)
        assert losses[-1] < losses[0]
        for index, (old, new) in enumerate(zip(before, engine.states.shards("weights"), strict=True)):
            assert torch.equal(old, new) or index not in frozen
        moments = engine.states.shards("exp_avg")
        assert [len(shard) for shard in moments if not len(shard)] == [0] * LAYERS
        assert all(unit.grad.segments == () for unit in engine.units if unit.frozen)
        engine.close()
    return True


def test_a_read_of_weights_that_are_not_gathered_names_the_parameter() -> None:
    ahead = {"zero_prefetch_units": LAYERS}  # every unit has a slot of its own
    of_one = read_wrongly(Topology(), [STAGES[0], NO_PREFETCH])
    for said in (of_one, *on_ranks(2, read_wrongly, [STAGES[0], STAGES[3], NO_PREFETCH, ahead])):
        refused = set()
        for kind, case, text in said:
            name, *_ = text.split(":")
            if name != "right":
                refused.add(kind)
                assert re.fullmatch(r"layers\.\d\.linear\.(weight|bias)", name), (kind, case, name)
                assert "'zero_stage': 0" not in case, (kind, name)  # all weights are there
                assert ("is returned by the forward of" in text) == kind.startswith("returned"), (kind, text)
        # What is kept has its backward behind that of its layer, whose weights are there then.
        assert refused | {"kept"} == READS.keys()


def test_what_describes_a_parameter_may_be_read_at_any_time() -> None:
    engine = engine_of(Stack)
    weight = engine.model.layers[0].linear.weight
    assert isinstance(weight, Unreadable)
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.dtype, weight.device.type) == ((12, 12), torch.float32, "cpu")
    assert weight.requires_grad
    assert weight.grad is None
    assert sum(parameter.numel() for parameter in engine.model.parameters()) == LAYERS * 156 + 13
    assert not weight.new_zeros(3).any()
    assert "layers.0.linear.weight (12, 12), not gathered" in repr(weight)
    for read in (
        lambda: weight + 1,
        lambda: weight.t(),
        lambda: weight[0],
        lambda: weight.data,
        weight.tolist,
    ):
        with pytest.raises(
            RuntimeError, match=r"^layers.0.linear.weight: is read while its unit layers.0 is"
        ):
            read()


def test_errors_of_a_backward_that_are_no_stale_reads_stay_as_they_are() -> None:
    class Changes(Stack):
        def hidden(self, x: Tensor) -> Tensor:
            x = torch.exp(super().hidden(x))
            x.add_(1)
            return x

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        steps_of(engine_of(Changes))


class Box:
    def __init__(self, kept: Tensor) -> None:
        self.kept = kept


class Boxes(Layer):
    def forward(self, x: Tensor) -> Box:
        return Box(self.encode(x))


READS_IN_CHECKPOINT = {
    "layers.0.linear.weight: is read while its unit": stack_that(hidden=reads_between),
    "layers.0: returns a Box inside": stack_of(Boxes, stack_that(run=lambda _, layer, x: layer(x).kept)),
}


@pytest.mark.parametrize("said", READS_IN_CHECKPOINT)
def test_reads_in_a_checkpoint_of_several_units_are_refused(said: str) -> None:
    """Autograd compares no versions of what hooks on saved tensors return."""
    engine = engine_of(READS_IN_CHECKPOINT[said], **NO_PREFETCH)
    hidden = engine.model.hidden
    engine.model.hidden = lambda x: checkpoint(hidden, x, use_reentrant=False)
    assert refusal(steps_of, engine, error=RuntimeError).startswith(said)
    gc.collect()  # torch 2.8 sets no other hooks before the checkpoint that has raised is freed


def test_a_selective_checkpoint_of_several_units_trains_as_it_is() -> None:
    """It counts the operations of forward and recomputation, which have other gathers."""
    kept = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    make = stack_that(
        hidden=lambda it, x: checkpoint(partial(Stack.hidden, it), x, use_reentrant=False, context_fn=kept)
    )
    expected = torch.tensor(losses_of_torch(make, 1))
    assert torch.allclose(torch.tensor(steps_of(engine_of(make))), expected, rtol=2e-5)


class Repeats(Stack):
    """Its first layers run twice, in torch.utils.checkpoint."""

    reentrant = False

    def hidden(self, x: Tensor) -> Tensor:
        x = self.layers[4](x)  # a gradient must come out of the others
        for layer in self.layers[:3]:
            for _ in range(2):
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class RepeatsReentrantly(Repeats):
    """Each of the two runs is then a backward of its own, with a gradient of its own."""

    reentrant = True


@pytest.mark.parametrize("zero", [STAGES[0], NO_PREFETCH])
def test_gradients_that_arrive_more_than_once_are_refused(zero: dict[str, int]) -> None:
    expected = torch.tensor(losses_of_torch(Repeats, 1))
    assert torch.allclose(torch.tensor(steps_of(engine_of(Repeats, **zero))), expected, rtol=2e-5)
    with pytest.raises(RuntimeError, match=r"^layers.2.linear.\w+: its gradient arrives once more .*=False$"):
        steps_of(engine_of(RepeatsReentrantly, **zero))


def test_a_backward_beside_accumulate_is_refused() -> None:
    """No step would have its gradient, or that of the next micro-batch would."""
    engine, other = engine_of(Stack), engine_of(Stack)
    for index in range(2):
        with pytest.raises(RuntimeError, match=r"^head.\w+: its gradient arrives outside of accumulate"):
            engine.model(*batch_of(7, index)).backward()
        assert steps_of(engine, steps=1, first=index) == steps_of(other, steps=1, first=index)


class Interrupted(torch.autograd.Function):
    """Raises in its backward, while told to."""

    raises = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Interrupted.raises:
            raise MemoryError
        return gradient


class Interrupts(Deep):
    """Of its two modules the second one's gradients have arrived then."""

    def encode(self, x: Tensor) -> Tensor:
        return self.other(Interrupted.apply(torch.tanh(self.linear(x))))


@pytest.mark.parametrize("zero", STAGES)
def test_a_backward_that_raised_may_be_repeated(
    zero: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the first micro-batch; none of its gradients is counted twice."""
    engine, other = (engine_of(stack_of(Interrupts), **zero) for _ in range(2))
    engine.accumulate(batch_of(7, 0), index=0, micro_batches=2)
    monkeypatch.setattr(Interrupted, "raises", True)
    with pytest.raises(MemoryError):
        engine.accumulate(batch_of(7, 1), index=1, micro_batches=2)
    monkeypatch.setattr(Interrupted, "raises", False)
    assert steps_of(engine) == steps_of(other)


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_units_train_as_they_are(in_place: bool) -> None:
    make = stack_of(lambda: compiled(Layer, in_place=in_place))
    expected = torch.tensor(losses_of_torch(make, 1, steps=2))
    assert torch.allclose(
        torch.tensor(steps_of(engine_of(make, **NO_PREFETCH), steps=2)), expected, rtol=2e-5
    )


class Quiet(Layer):
    """Has a dropout that never drops, because it is in evaluation mode when all else trains."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5).eval()

    def encode(self, x: Tensor) -> Tensor:
        return self.dropout(super().encode(x))


def test_an_evaluation_leaves_each_module_the_mode_that_it_had() -> None:
    engine, losses = engine_of(stack_of(Quiet)), []
    for step in range(2):
        engine.evaluate(batch_of(9, 9))
        losses += steps_of(engine, steps=1, first=step)
    assert torch.allclose(torch.tensor(losses), torch.tensor(losses_of_torch(stack_of(Quiet), 1, steps=2)))


class Merges(Layer):
    """Computes with other weights in evaluation, which its train() undoes; adapters do so."""

    factor = 1

    def train(self, mode: bool = True) -> "Merges":
        self.factor = 1 if mode else 2
        return super().train(mode)

    def encode(self, x: Tensor) -> Tensor:
        return super().encode(x * self.factor)


def test_an_evaluation_is_undone_by_a_models_own_train() -> None:
    engine = engine_of(stack_of(Merges))
    engine.evaluate(batch_of(9, 9))
    expected = torch.tensor(losses_of_torch(stack_of(Merges), 1))
    assert torch.allclose(torch.tensor(steps_of(engine)), expected, rtol=2e-5)


class Drops(Quiet):
    def __init__(self) -> None:
        super().__init__()
        self.dropout.train()


def test_modules_train_in_the_mode_that_they_have() -> None:
    """Models of other programs may come in evaluation mode, in which torch trains them without dropout."""
    make = lambda: stack_of(Drops)().eval()  # noqa: E731
    expected = torch.tensor(losses_of_torch(make, 1))
    assert torch.allclose(torch.tensor(steps_of(engine_of(make))), expected)


@pytest.mark.parametrize("zero", [STAGES[0], STAGES[3]])
def test_other_tensors_in_the_place_of_parameters_compute_or_are_refused(zero: dict[str, int]) -> None:
    """A gather would put the parameters back, and the forward would compute with them."""

    def generated(stack: Stack, layer: nn.Module, x: Tensor) -> Tensor:
        made = {name: torch.ones_like(each) for name, each in layer.named_parameters()}
        return functional_call(layer, made, (x,))

    make = stack_that(run=generated)
    if zero is STAGES[0]:
        expected = torch.tensor(losses_of_torch(make, 1))
        assert torch.allclose(torch.tensor(steps_of(engine_of(make, **zero))), expected)
    else:
        with pytest.raises(
            RuntimeError, match=r"^layers.0.linear.weight: the model has another tensor in its"
        ):
            steps_of(engine_of(make, **zero))
