"""Training continues from state_dict and from checkpoints: bit for bit, or on any other ranks."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from megatron_zpp import Mesh, PrecisionConfig, Topology, ZeroEngine
from megatron_zpp.distributed.exchange import NoProgress
from tests.api.models import Vision, engine_of, steps_of
from tests.api.test_lion import Lion
from tests.plan import jobs
from tests.support import refusal
from tests.zero.own_modules import LowRank, Normalised, Stack, WithoutElements, stack_of
from tests.zero.ranks import on_ranks

FP32, FP16 = {"precision": PrecisionConfig(fp32=True)}, {"precision": PrecisionConfig(fp16=True)}
FOUR_BITS: dict[str, Any] = jobs.FOUR_BITS | FP16


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def continued(topology: Topology, directory: str, cases: list[dict[str, Any]]) -> bool:
    """An engine continues with the bits of one into which its states, or its checkpoint, were loaded."""
    for number, settings in enumerate(cases):
        engine = engine_of(Vision(), topology.mesh(), **settings)
        steps_of(engine)
        state, saved = engine.state_dict(), Path(directory, str(number))
        assert bool(state) == (topology.rank == 0)
        engine.save(saved, extra={"samples": [3]}, keep_last=1)
        expected = steps_of(engine, first=3)
        for loads_state in (True, False):
            torch.manual_seed(5)
            other = engine_of(Vision(), topology.mesh(), **settings)
            if loads_state:
                steps_of(other)  # other weights, of which some have been gathered for the next step
                other.load_state_dict(state)
            else:
                assert other.load(saved) == {"samples": [3]}
            assert other.iteration == 3
            assert same(other.state_dict(), state)
            assert steps_of(other, first=3) == expected, (settings, loads_state)
            other.close()
        engine.close()
    return True


def test_an_engine_continues_bit_for_bit(tmp_path: Path) -> None:
    assert continued(Topology(), str(tmp_path / "one"), [FP32, {"zero_stage": 0, **FP16}])


def test_two_nodes_continue_bit_for_bit(tmp_path: Path) -> None:
    """With loss scale, signs of rotated gradients, references of differences, and what codes have lost."""
    cases = [{"zero_stage": 1, **FP32}, FOUR_BITS, {"muon": True, **FOUR_BITS}]
    assert all(on_ranks(4, continued, str(tmp_path), cases, ranks_per_node=2))


def flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All tensors of a state."""
    kinds = {"model": state["model"], **state["optimizer"]}
    return {f"{kind}/{name}": value for kind, each in kinds.items() for name, value in each.items()}


def test_a_state_of_muon_has_momentum_of_matrices_and_moments_of_the_rest() -> None:
    engine = engine_of(Vision(), muon=True)
    steps_of(engine)
    names = {each.name: bool(each.matrices) for unit in engine.units for each in unit.layout.placements}
    states = engine.state_dict()["optimizer"]
    for kind, of_matrices in (("momentum_buffer", True), ("exp_avg", False), ("exp_avg_sq", False)):
        assert states[kind].keys() == {name for name, is_one in names.items() if is_one == of_matrices}


def test_muon_goes_on_with_its_matrices_or_more(tmp_path: Path) -> None:
    """AdamW would divide by a second moment of zero, many steps behind the correction of its bias."""

    first, second = "blocks.0.up.weight", "blocks.1.up.weight"

    def engine(*names: str, frozen: str | None = None) -> ZeroEngine:
        model = Vision()
        if frozen:
            model.get_parameter(frozen).requires_grad_(False)
        return engine_of(model, muon=True, matrices=dict.fromkeys(names, (20,)))

    saved = engine(first)
    steps_of(saved)
    saved.save(str(tmp_path))
    state = saved.state_dict()
    for load, given in ((ZeroEngine.load, str(tmp_path)), (ZeroEngine.load_state_dict, state)):
        load(engine(first, second), given)
        load(engine(second, frozen=first), given)
        with pytest.raises(ValueError, match=f"{first}: the state is Muon's, and has no moments of it; .*"):
            load(engine(second), given)


def moved(topology: Topology, directory: str, stage: int) -> list[float]:
    """Losses of an engine that takes over what other ranks saved; the first one trains and saves itself."""
    torch.manual_seed(3)
    engine = engine_of(Vision(), topology.mesh(), zero_stage=stage)
    if engine.load(directory) is None and engine.iteration == 0:
        steps_of(engine)
        engine.save(directory)
        state = engine.state_dict()
        if topology.rank == 0:
            save_file(flat(state), Path(directory, "whole.safetensors"))
    state = engine.state_dict()
    if topology.rank == 0:
        assert same(flat(state), load_file(Path(directory, "whole.safetensors")))
    engine.load_state_dict(state)
    losses = steps_of(engine, first=3)
    engine.close()
    return losses


def test_any_ranks_load_what_others_saved(tmp_path: Path) -> None:
    """By name and slice: the same weights, moments and buffers."""
    on_ranks(2, moved, str(tmp_path), 3, ranks_per_node=1)
    moved(Topology(), str(tmp_path), 1)
    (losses, *_) = on_ranks(3, moved, str(tmp_path), 2)
    assert losses == pytest.approx(on_ranks(3, moved, str(tmp_path), 3, ranks_per_node=1)[0], rel=1e-5)


def test_weights_are_those_of_the_model_itself(tmp_path: Path) -> None:
    """`load_state_dict` of torch takes them, and safetensors does, a weight with two names included."""
    engine = engine_of(Vision())
    steps_of(engine)
    weights = engine.state_dict()["model"]
    plain = Vision()
    plain.load_state_dict(weights)
    assert torch.equal(plain.last.weight, weights["first.weight"])
    assert plain(*batch()).item() == pytest.approx(engine.evaluate(batch()).item())
    save_file(weights, tmp_path / "model.safetensors")
    other = engine_of(Vision())
    other.load_state_dict({"model": load_file(tmp_path / "model.safetensors")}, optimizer=False)
    assert same(other.state_dict()["model"], weights)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(4, 12), torch.ones(4)


def with_a_layer_twice() -> nn.Module:
    model = stack_of(Normalised)()
    model.layers[2] = model.layers[0]
    return model


@pytest.mark.parametrize(
    "make", [stack_of(Normalised), with_a_layer_twice, stack_of(LowRank), WithoutElements]
)
def test_buffers_frozen_and_empty_parameters_come_back(tmp_path: Path, make: Any) -> None:
    """Averages of a BatchNorm, which one rank changes, among them."""
    engine = engine_of(make())
    steps_of(engine)
    engine.save(tmp_path)
    state, others = engine.state_dict(), [engine_of(make()) for _ in range(2)]
    others[0].load_state_dict(state)
    others[1].load(tmp_path)
    make().load_state_dict(state["model"])
    expected = steps_of(engine, first=3)
    for other in others:
        assert same(other.state_dict(), state)
        assert steps_of(other, first=3) == expected


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    said: list[str] = []
    engine = ZeroEngine(Vision(), Mesh(), device=torch.device("cpu"), say=said.append)
    steps_of(engine, steps=1)
    engine.save(tmp_path, extra=1)
    steps_of(engine, first=1, steps=1)
    newest = engine.save(tmp_path, extra=2)
    assert engine.load(tmp_path) == 2
    file = newest / "rank_00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"X")
    assert engine.load(tmp_path) == 1
    assert engine.iteration == 1
    assert said[0].startswith(f" WARNING: {newest} is skipped: ")
    assert engine.load(tmp_path / "none") is None
    with pytest.raises(ValueError, match=r"^keep_last 0: must be at least 1$"):
        engine.save(tmp_path, keep_last=0)
    with pytest.raises(ValueError, match=r"not in .*; iterations there: 1, 2"):
        engine.load(tmp_path, iteration=7)
    steps_of(engine, first=1, steps=2)
    engine.save(tmp_path, keep_last=1)
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000003"]


def test_another_optimizers_states_are_refused_by_name(tmp_path: Path) -> None:
    lion, adamw = engine_of(Vision(), optimizer=Lion()), engine_of(Vision())
    steps_of(lion)
    lion.save(tmp_path)
    with pytest.raises(ValueError, match="has no exp_avg_sq, which this optimizer needs; it was saved with"):
        adamw.load(tmp_path)
    adamw.load(tmp_path, optimizer=False)
    assert same(adamw.state_dict()["model"], lion.state_dict()["model"])
    with pytest.raises(ValueError, match=r"^exp_avg_sq: missing from the state, whose optimizer has exp"):
        adamw.load_state_dict(lion.state_dict())


def refused(topology: Topology) -> list[str]:
    """What is said of states that do not fit, on each rank."""
    engine = engine_of(Stack(), topology.mesh())
    state, said = engine.state_dict(), []
    model = state.get("model", {})
    without = {name: weight for name, weight in model.items() if name != "head.bias"}
    for wrong in (
        {**state, "model": without},
        {**state, "model": {**model, "head.extra": torch.ones(1)}},
        {**state, "model": {**model, "head.bias": torch.ones(2)}},
        {"model": model},
        {},
    ):
        said.append(refusal(engine.load_state_dict, wrong))
    return said


def test_states_that_do_not_fit_are_refused_on_all_ranks() -> None:
    for said in on_ranks(2, refused):
        assert said == [
            "head.bias: missing from the state",
            "head.extra: not part of this model",
            "head.bias: has shape (2,) in the state, (1,) in this model",
            "state: has no 'optimizer'; optimizer=False loads weights and buffers alone",
            "state: has no 'model'",
        ]


def test_a_call_that_other_ranks_do_not_make_ends_and_says_that_all_must() -> None:
    engine = engine_of(Stack())
    engine._timeout = timedelta(seconds=0.2)
    said = refusal(engine._exchange("save").get, "open", error=NoProgress)
    assert said.endswith(" for 0:00:00.200000; every rank must call save and load")


class OddlyStored(nn.Linear):
    """Has buffers whose elements lie otherwise in memory, or share some of it."""

    def __init__(self) -> None:
        super().__init__(12, 1)
        self.register_buffer("transposed", torch.randn(2, 3).t())
        self.register_buffer("expanded", torch.randn(3).expand(2, 3))
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (super().forward(x)[:, 0] - y).square().mean()


def buffers_come_back(topology: Topology, directory: str) -> bool:
    torch.manual_seed(topology.rank)
    engine, others = engine_of(OddlyStored(), topology.mesh()), []
    state = engine.state_dict()
    engine.save(directory)
    for _ in range(2):
        others.append(engine_of(OddlyStored(), topology.mesh()))
    others[0].load_state_dict(state)
    others[1].load(directory)
    torch.manual_seed(0)
    expected = dict(OddlyStored().named_buffers())
    assert all(same(dict(each.model.named_buffers()), expected) for each in (engine, *others))
    return True


@pytest.mark.parametrize("ranks", [1, 2])
def test_buffers_that_lie_otherwise_in_memory_come_back(tmp_path: Path, ranks: int) -> None:
    assert all(on_ranks(ranks, buffers_come_back, str(tmp_path)))


class Other(nn.Linear):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mean()


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    engine_of(Stack()).save(tmp_path)
    with pytest.raises(ValueError, match="bias is missing from it"):
        engine_of(Other(12, 12)).load(tmp_path)


def trains_by_lion(topology: Topology) -> bool:
    """Where weights travel as codes, which the engine then writes, and not the rule."""
    torch.manual_seed(0)
    expected = torch.tensor(steps_of(engine_of(Vision(), topology.mesh(), optimizer=Lion(), zero_stage=0)))
    for precision in (PrecisionConfig(fp32=True), PrecisionConfig(bf16=True)):
        torch.manual_seed(0)
        codes = {"precision": precision, "zero_quantized_weights": True}
        found = torch.tensor(steps_of(engine_of(Vision(), topology.mesh(), optimizer=Lion(), **codes)))
        assert torch.allclose(found, expected, rtol=0.1)
    return True


def test_the_engine_writes_codes_for_a_rule_that_does_not() -> None:
    assert all(on_ranks(2, trains_by_lion))
