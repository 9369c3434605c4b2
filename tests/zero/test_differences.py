"""Weight differences between nodes (delta4 and others), and rotated gradients, in whole engines."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_zpp.checkpoint.load import load_checkpoint
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.model_states import REFERENCE, WEIGHTS
from tests.checkpoint.saving import TOKENIZER, save
from tests.support import nightly
from tests.zero.engines import all_states, states_of
from tests.zero.ranks import on_ranks
from tests.zero.zeropp_engines import ALL, AUTO, DELTA4, FOUR_BITS, batch, build

GRIDS = [(2, 2), nightly(2, 1), nightly(3, 2), nightly(2, 3)]


def train(engine: ZeroEngine, steps: range, *, evaluate: bool = False) -> list[float]:
    """The gradient norms of steps of two micro-batches, with evaluations between or not."""
    norms = []
    for step in steps:
        for index in range(2):
            engine.accumulate(batch(engine.topology, 2 * step + index), index=index, micro_batches=2)
            if evaluate:
                engine.evaluate(batch(engine.topology, 0))
        norms.append(engine.step(1e-2).grad_norm.item())
        if evaluate:
            engine.evaluate(batch(engine.topology, 0))
    return norms


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def references(topology: Topology, settings: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """(each unit's reference, whether it is what the next forward reads, its gaps are zero) per setting."""
    found = []
    for zero in settings:
        engine = build(topology, zero)
        train(engine, range(2))
        engine.evaluate(batch(topology, 0))
        whole = states_of(engine, REFERENCE)
        last = engine.units[-1]  # its slot is not shared
        seen = dict(zip(last.names, last.views(last.full), strict=True))
        reads = all(torch.equal(seen[name], whole[name].bfloat16()) for name in last.names)
        zeros = not any(
            unit.reference[gap.start : gap.stop].any() for unit in engine.units for gap in unit.gaps
        )
        own = [raw(unit.reference) for unit in engine.units]
        found.append((own, reads, zeros, [raw(tensor) for tensor in whole.values()]))
    return found


@pytest.mark.parametrize(("nodes", "local"), GRIDS)
def test_every_node_holds_the_reference_that_its_forward_reads(nodes: int, local: int) -> None:
    settings = [FOUR_BITS, FOUR_BITS | {"zero_stage": 2, "zero_hpz_partition_size": "1"}]
    check_references(local, on_ranks(nodes * local, references, settings, ranks_per_node=local))


def check_references(local: int, ranks: list[list[tuple[Any, ...]]]) -> None:
    for rank, found in enumerate(ranks):
        for (own, reads, zeros, whole), counterpart, first in zip(
            found, ranks[rank % local], ranks[0], strict=True
        ):
            assert own == counterpart[0]
            assert whole == first[3]
            assert reads
            assert zeros


def changed_while_read(topology: Topology, zero: dict[str, Any]) -> tuple[list[int], int]:
    """Units that a step or a load changes while they are gathered; how many were being gathered before."""
    engine = build(topology, zero)
    train(engine, range(1))
    prefetcher, early, begun = engine.weights.prefetcher, [], 0

    def gather_all() -> None:
        nonlocal begun
        for index in range(len(engine.units)):
            prefetcher.changed(index)
            prefetcher._start(index)
        begun += sum(slot.pending is not None for slot in set(prefetcher._slots))

    def check(index: int) -> None:
        slot = prefetcher._slots[index]
        if slot.holder == index and slot.pending is not None:
            early.append(index)

    if engine.weights.formats is not None:
        exchange = engine.weights._exchange

        def checked(index: int, *arguments: Any) -> None:
            check(index)
            exchange(index, *arguments)

        engine.weights._exchange = checked
        engine.accumulate(batch(topology, 0), index=0, micro_batches=1)
        gather_all()
        engine.step(1e-2)
    gather_all()
    shards = [shard.clone() for shard in engine.states.shards(WEIGHTS)]

    def fill(index: int, elements: range, target: torch.Tensor) -> None:
        check(index)
        target.copy_(shards[index][: len(elements)])

    engine.states.fill(WEIGHTS, fill)
    return early, begun


@pytest.mark.parametrize("zero", [{}, DELTA4], ids=["weights", "differences"])
def test_nothing_changes_what_a_gather_still_reads(zero: dict[str, Any]) -> None:
    """Units whose gather began and was not needed: a gather holds on until somebody waits for it."""
    for early, begun in on_ranks(4, changed_while_read, zero, ranks_per_node=2):
        assert early == []
        assert begun > 0


def raw_states(engine: ZeroEngine) -> dict[str, bytes]:
    return {name: raw(state) for name, state in all_states(engine).items()}


def after_other_reads(topology: Topology, directory: str) -> list[bytes]:
    """All states after two steps: alone, with evaluations between, and with a save and a load between."""
    plain, evaluated, saved = (build(topology, FOUR_BITS | AUTO) for _ in range(3))
    train(plain, range(2))
    train(evaluated, range(2), evaluate=True)
    train(saved, range(1))
    path = save(Path(directory), saved, Progress(iteration=1))
    again = build(topology, FOUR_BITS | AUTO)
    load_checkpoint(path, again, TOKENIZER, with_optimizer=True)
    train(again, range(1, 2))
    train(saved, range(1, 2))
    engines = (plain, evaluated, saved, again)
    return [b"".join(raw_states(engine).values()) for engine in engines]


def test_reading_never_applies_a_message_again(tmp_path: Path) -> None:
    for plain, *others in on_ranks(4, after_other_reads, str(tmp_path), ranks_per_node=2):
        assert all(other == plain for other in others)


def found_to_differ(topology: Topology) -> list[str | None]:
    """What the check says before and after steps, of a flipped bit on rank 3, and of two swapped elements."""
    engine = build(topology, FOUR_BITS)
    for unit in engine.units:  # nothing has been gathered yet: memory may contain anything
        own = unit.own_kept.clone()
        unit.reference.fill_(topology.rank)
        unit.own_kept.copy_(own)
    found = [engine.weights.differing_references()]
    train(engine, range(2))
    found.append(engine.weights.differing_references())
    reference = engine.units[2].reference
    if topology.rank == 3:
        reference.view(torch.int32)[5] ^= 1 << 12
    found.append(engine.weights.differing_references())
    if topology.rank == 3:
        reference.view(torch.int32)[5] ^= 1 << 12
        reference[[7, 8]] = reference[[8, 7]]
    found.append(engine.weights.differing_references())
    return found


def test_a_reference_that_changed_on_one_node_is_detected() -> None:
    check_found(on_ranks(4, found_to_differ, ranks_per_node=2))


def check_found(ranks: list[list[str | None]]) -> None:
    for first, sound, flipped, swapped in ranks:
        assert first is None
        assert sound is None
        assert flipped == swapped
        assert flipped is not None
        assert flipped.startswith("unit 2 (with layers.1")
        assert flipped.endswith("on ranks 3")


def in_groups(topology: Topology, directory: str) -> list[Any]:
    """Of whole nodes and of groups of two: the weights, the references, and what the check says.

    The second run is saved, loaded by the other kind of groups and continued, before that.
    """
    found: list[Any] = []
    kinds = [FOUR_BITS | {"zero_hpz_partition_size": size} for size in ("auto", "2")]
    for zero in kinds:
        engine = build(topology, zero)
        train(engine, range(2), evaluate=True)
        if zero is kinds[1]:
            path = save(Path(directory), engine, Progress(iteration=2))
            for again in kinds:
                engine = build(topology, again)
                load_checkpoint(path, engine, TOKENIZER, with_optimizer=True)
                train(engine, range(2, 3), evaluate=True)
                found.append(_states(engine))
        else:
            train(engine, range(2, 3), evaluate=True)
            found.append(_states(engine))
    found.append(engine.weights.differing_references())
    if topology.rank in (1, 5):  # of each node one, with the part of ranks 0 and 4
        engine.units[2].reference.view(torch.int32)[3] ^= 1
    return [*found, engine.weights.differing_references()]


def _states(engine: ZeroEngine) -> tuple[list[bytes], list[bytes], list[int]]:
    kinds = [[raw(tensor) for tensor in states_of(engine, kind).values()] for kind in (WEIGHTS, REFERENCE)]
    return kinds[0], kinds[1], [len(unit.reference) // unit.layout.shard_numel for unit in engine.units]


def test_groups_of_a_node_hold_references_of_equal_bits(tmp_path: Path) -> None:
    """Two nodes of two groups of two ranks: each rank has half of the reference, not a quarter."""
    check_groups(on_ranks(8, in_groups, str(tmp_path), ranks_per_node=4))


def check_groups(ranks: list[list[Any]]) -> None:
    for found in ranks:
        whole, loaded, groups, sound, changed = found
        assert whole[:2] == loaded[:2] == groups[:2]
        assert set(whole[2]) == set(loaded[2]) == {2}
        assert set(groups[2]) == {4}
        assert sound is None
        assert changed.startswith("unit 2 (with layers.1")
        assert changed.endswith("on ranks 1, 5")


def on_this_grid(topology: Topology, directory: str, zero: dict[str, Any], load: bool) -> dict[str, bytes]:
    """The states of a run that is saved or loaded."""
    engine = build(topology, zero)
    if load:
        load_checkpoint(next(Path(directory).glob("iter_*")), engine, TOKENIZER, with_optimizer=True)
        engine.evaluate(batch(topology, 0))
    else:
        train(engine, range(2))
        save(Path(directory), engine, Progress(iteration=2))
    return raw_states(engine)


@pytest.mark.parametrize(
    ("zero", "others"),
    [
        (FOUR_BITS | AUTO, [(2, 1, FOUR_BITS | AUTO), (6, 3, FOUR_BITS | AUTO)]),
        nightly(
            ALL | AUTO, [(4, 2, {"zero_stage": 1}), (4, 4, {"zero_stage": 0}), (6, 2, {"zero_stage": 2})]
        ),
    ],
    ids=["references", "int8"],
)
def test_any_grid_loads_what_another_one_owned(zero: dict, others: list, tmp_path: Path) -> None:
    """Who owns which shard depends on nodes and ranks; the checkpoint records it."""
    (saved, *_) = on_ranks(4, on_this_grid, str(tmp_path), zero, False, ranks_per_node=2)
    for ranks, local, other in others:
        for loaded in on_ranks(ranks, on_this_grid, str(tmp_path), other, True, ranks_per_node=local):
            assert loaded == saved
