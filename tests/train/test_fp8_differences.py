"""--fp8-param-gather with weight differences between nodes: codes of the reference, the same on all nodes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_zpp.checkpoint.load import load_checkpoint
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.model_states import REFERENCE
from tests.checkpoint.saving import TOKENIZER, save
from tests.model.test_fp8_delayed import nearest
from tests.train.coded_weights import (
    E4M3,
    HELD,
    Measured,
    check_codes,
    masters_of,
    products,
    resumed,
    scales_of,
    steps,
    take_step,
)
from tests.train.test_fp8_param_gather import check_plan
from tests.train.test_fp8_scaling import batch, engine_of, state_of
from tests.zero.engines import states_of
from tests.zero.ranks import on_ranks

DELTA = "--zero-quantized-weights --zero-quantized-weights-format"
NODE = "--zero-stage 3 --zero-hpz-partition-size auto"
# Two layers: with --zero-prefetch-units 0 they take turns in one slot.
IN_TURN = "--zero-prefetch-units 0 --recompute-granularity full --recompute-method uniform"
CASES = [
    f"{NODE} {IN_TURN} {DELTA} delta4",
    f"{NODE} {DELTA} delta4",
    f"--zero-stage 2 {DELTA} delta4",
    f"--zero-stage 1 {DELTA} delta4",
    f"{NODE} {DELTA} delta4 --zero-quantized-gradients --zero-quantized-gradients-format rotated4",
]
FIRST = CASES[0].split()
TWO_RANKS = CASES[1].split()
GROUPS = CASES[0].replace("auto", "2").split()  # of a node of four ranks, with a reference each


def multiplied(engine: ZeroEngine) -> dict[str, Tensor]:
    """The codes that an evaluation multiplies, by weight; bytes."""
    found, handles = {}, []
    for name, product in products(engine).items():

        def keep(module: Any, inputs: Any, name: str = name) -> None:
            found[name] = module.codes.view(torch.uint8).clone()

        handles.append(product.register_forward_pre_hook(keep))
    engine.evaluate(batch(7, 0))
    for handle in handles:
        handle.remove()
    return found


def check(engine: ZeroEngine, found: dict[str, Tensor], scales: dict[str, float]) -> None:
    """Require codes that a plain encoding of the whole reference has, and its other parameters in bf16."""
    known = states_of(engine, REFERENCE)
    assert set(found) == {name for name in known if known[name].dim() == 2 and "layers" in name}
    for name, codes in found.items():
        assert torch.equal(codes, nearest(known[name] * torch.tensor(scales[name]), E4M3)), name
    if len({unit.full.data_ptr() for unit in engine.units}) < len(engine.units):
        return  # slots hold other units now
    for unit in engine.units:
        for name, parameter in zip(unit.names, unit.parameters, strict=True):
            if name not in found:
                assert torch.equal(parameter, known[name].bfloat16()), name


def largest(engine: ZeroEngine) -> dict[str, float]:
    """448 over the largest magnitude of each reference."""
    known = states_of(engine, REFERENCE)
    return {name: (torch.tensor(448.0) / known[name].abs().max()).item() for name in products(engine)}


def measure(topology: Topology, cases: list[list[str]]) -> list[Measured]:
    return [_measure(engine_of(topology, HELD, *case)) for case in cases]


def _measure(engine: ZeroEngine) -> Measured:
    """Steps of one micro-batch, of two, and of one; bytes of a later step of one."""
    numbers, seen, rank = [], [], engine.mesh.data_rank
    codes = multiplied(engine)
    first = largest(engine)
    check(engine, codes, first)
    for step, found in enumerate(steps(engine)):
        numbers += found
        codes = multiplied(engine)
        check(engine, codes, scales_of(engine))
        if step == 0:
            assert scales_of(engine) == first
        seen.append(b"".join(each.numpy().tobytes() for each in codes.values()))
    assert engine.weights.differing_references() is None
    for step in range(2):  # without an evaluation between, which leaves other units in the slots
        engine.take_traffic()
        engine.accumulate(batch(step, rank), index=0, micro_batches=1)
        assert engine.step(1e-2).raised_units == 0  # those would send more than is planned
    sent = engine.take_traffic()
    slots = {unit.full.data_ptr(): unit.full.nbytes for unit in engine.units}
    weights = sum(slots.values())
    for unit in engine.units:
        weights += unit.message.nbytes
        if unit.encoded is not None and not _inside(unit.encoded.codes, unit.full):
            weights += unit.encoded.codes.nbytes
    engine.close()
    return Measured(numbers, sent, weights, sum(unit.reference.nbytes for unit in engine.units), seen)


def _inside(part: Tensor, whole: Tensor) -> bool:
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def without_codes(topology: Topology, case: list[str]) -> list[float]:
    """Numbers of the same steps where nodes gather the reference in bf16, and multiply casts of that."""
    engine = engine_of(topology, *case)
    numbers = [number for found in steps(engine) for number in found]
    engine.close()
    return numbers


@pytest.fixture(scope="module")
def ranks() -> list[list[Measured]]:
    """2 nodes of 2 ranks."""
    return on_ranks(4, measure, [case.split() for case in CASES], ranks_per_node=2)


def test_all_ranks_multiply_the_codes_of_the_reference(ranks: list[list[Measured]]) -> None:
    """`check` has required that these are what a plain encoding of the reference gives."""
    for found in ranks:
        assert [case.multiplied for case in found] == [case.multiplied for case in ranks[0]]
        assert [case.numbers for case in found] == [case.numbers for case in ranks[0]]


def test_stages_have_the_same_bits_and_losses_near_those_of_bf16(ranks: list[list[Measured]]) -> None:
    turns, own, second, first, rotated = ranks[0]
    for same in (own, second, first):
        assert (same.numbers, same.multiplied) == (turns.numbers, turns.multiplied)
    assert rotated.numbers != turns.numbers
    (plain, *_) = on_ranks(4, without_codes, FIRST, ranks_per_node=2)
    assert turns.numbers != plain
    assert turns.numbers == pytest.approx(plain, rel=0.02)  # as of codes of master weights


@pytest.mark.parametrize("index", range(len(CASES)))
def test_the_plan_is_what_ranks_send_and_hold(index: int, ranks: list[list[Measured]]) -> None:
    check_plan(CASES[index].split(), [rank[index] for rank in ranks])


def with_codes(topology: Topology, directory: str) -> tuple[list[Any], list[Any], dict[str, bytes]]:
    """`resumed`, and the codes at the save."""
    return resumed(topology, directory, FIRST, lambda engine: raw(multiplied(engine)))


def raw(codes: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: each.numpy().tobytes() for name, each in codes.items()}


def loaded(topology: Topology, directory: str, *more: str) -> tuple[dict[str, bytes], Any]:
    """Codes and scales of what another grid loads."""
    engine = engine_of(topology, HELD, *more)
    load_checkpoint(Path(directory) / "iter_0000005", engine, TOKENIZER, with_optimizer=True)
    found = raw(multiplied(engine)), state_of(engine)
    take_step(engine, 2)
    engine.close()
    return found


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A directory with a checkpoint of two nodes of two ranks, and what `with_codes` found on each."""
    directory = tmp_path_factory.mktemp("differences")
    return directory, on_ranks(4, with_codes, str(directory), ranks_per_node=2)


def test_resumed_runs_have_the_same_bits_on_the_same_grid_and_the_same_codes_on_others(
    saves: tuple[Path, list[Any]],
) -> None:
    directory, saved = saves
    for expected, found, codes in saved:
        assert found == expected
        assert codes == saved[0][2]
    scales = loaded(Topology(), str(directory))[1]
    for world, local, flags in ((2, 1, CASES[2].split()), (8, 4, GROUPS)):
        for codes, state in on_ranks(world, loaded, str(directory), *flags, ranks_per_node=local):
            assert codes == saved[0][2]
            assert state == scales


def test_checkpoints_load_without_differences_and_without_a_reference(
    saves: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    """The codes are then those of master weights, and of these in bf16, by the scales that were saved."""
    engine = engine_of(Topology(), HELD)
    load_checkpoint(saves[0] / "iter_0000005", engine, TOKENIZER, with_optimizer=True)
    engine.evaluate(batch(7, 0))
    masters, scales = masters_of(engine), scales_of(engine)
    check_codes(engine, scales)
    save(tmp_path / "plain", engine)
    engine.close()
    for codes, _ in on_ranks(2, loaded, str(tmp_path / "plain"), *TWO_RANKS, ranks_per_node=1):
        for name, found in codes.items():
            frame = masters[name].bfloat16().float()
            assert found == nearest(frame * torch.tensor(scales[name]), E4M3).numpy().tobytes()


def of_tensor_ranks(topology: Topology) -> tuple[list[Any], Any, list[bytes]]:
    """Steps, scales and codes where two tensor ranks share each layer, on two nodes."""
    engine = engine_of(topology, HELD, "--tensor-model-parallel-size", "2", *FIRST)
    numbers = [take_step(engine, step)[1] for step in range(2)]
    found, known, scales = multiplied(engine), states_of(engine, REFERENCE), scales_of(engine)
    placements = {each.name: each for unit in engine.units for each in unit.layout.placements}
    for name, codes in found.items():
        part = torch.empty_like(codes, dtype=torch.float32)
        for here, there in placements[name].parts(engine.topology.rank):
            part[here] = known[name][there]
        assert torch.equal(codes, nearest(part * torch.tensor(scales[name]), E4M3)), name
    result = numbers, state_of(engine), list(raw(found).values())
    engine.close()
    return result


def test_tensor_ranks_have_codes_of_their_parts_by_one_scale() -> None:
    first, second, *others = on_ranks(4, of_tensor_ranks, ranks_per_node=2)
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert others == [first, second]
