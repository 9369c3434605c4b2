"""Which units send weight differences with more bits, and when: those that fall behind."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_zpp.checkpoint.load import load_checkpoint
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.exchange.route import eight_bits
from megatron_zpp.ops.formats import LloydMaxFormat
from megatron_zpp.zero.difference_formats import LOST_SHARE, DifferenceFormats
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.model_states import REFERENCE, WEIGHTS
from tests.checkpoint.saving import TOKENIZER, save
from tests.support import nightly
from tests.zero.engines import states_of
from tests.zero.ranks import on_ranks
from tests.zero.test_differences import raw
from tests.zero.test_quantized import with_a_nan
from tests.zero.zeropp_engines import FOUR_BITS, batch, build

BEHIND = 2  # the unit whose codes fall behind


def fall_behind(engine: ZeroEngine) -> None:
    """Moves one element per block of a unit's reference, on all nodes alike, by a hundred updates.

    Codes of 4 bits reach 2.7 rms of a block of 256, and such an element is at 16.
    """
    engine.evaluate(batch(engine.topology, 0))  # which waits for the exchanges behind the last step
    engine.units[BEHIND].reference[7::256] += 1.0


def step(engine: ZeroEngine, number: int, learning_rate: float = 1e-2) -> tuple[int | None, int]:
    """Takes a step; returns how many units were raised, and the bytes sent between nodes."""
    engine.take_traffic()
    engine.accumulate(batch(engine.topology, number), index=0, micro_batches=1)
    result = engine.step(learning_rate)
    engine.evaluate(batch(engine.topology, 0))
    return result.raised_units, engine.take_traffic()[1]


def behind(engine: ZeroEngine) -> float:
    """The largest |w - r| of the unit."""
    weights, known = states_of(engine, WEIGHTS), states_of(engine, REFERENCE)
    return max((weights[name] - known[name]).abs().max().item() for name in engine.units[BEHIND].names)


def raised_and_lowered(topology: Topology) -> dict[str, Any]:
    engine = build(topology, FOUR_BITS)
    before = [step(engine, number) for number in range(2)]
    fall_behind(engine)
    after = [(*step(engine, 2 + number), behind(engine)) for number in range(6)]
    unit = engine.units[BEHIND]
    return {
        "before": before,
        "after": after,
        "references": [raw(each.reference) for each in engine.units],
        "shard": unit.layout.shard_numel,
        "gaps": [bool(unit.reference[gap.start : gap.stop].any()) for gap in unit.gaps],
    }


@pytest.mark.parametrize(("nodes", "local"), [(2, 2), nightly(2, 1), nightly(3, 2)])
def test_a_unit_that_falls_behind_sends_eight_bits_two_steps_later(nodes: int, local: int) -> None:
    check_raised(nodes, local, on_ranks(nodes * local, raised_and_lowered, ranks_per_node=local))


def check_raised(nodes: int, local: int, ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        assert [raised for raised, _ in found["before"]] == [0, 0]
        assert [raised for raised, *_ in found["after"]] == [0, 0, 1, 1, 1, 0]
        usual = found["before"][1][1]
        formats = eight_bits(LloydMaxFormat(4)), LloydMaxFormat(4)
        eight, four = (format.message_bytes(found["shard"]) for format in formats)
        more = (nodes - 1) * (eight - four)
        assert [sent - usual for _, sent, _ in found["after"]] == [0, 0, more, more, more, 0]
        lags = [lag for *_, lag in found["after"]]
        assert lags[1] > 0.5
        assert max(lags[2:]) < 0.05
        assert found["references"] == ranks[rank % local]["references"]
        assert not any(found["gaps"])


def resumed(topology: Topology, directory: str) -> list[bool]:
    """Whether a run that is saved and loaded before each step is the run that is not, bit for bit."""
    engine = build(topology, FOUR_BITS)
    for number in range(2):
        step(engine, number)
    fall_behind(engine)
    same, again = [], None
    for number in range(5):
        path = save(Path(directory) / str(number), engine, Progress(iteration=2 + number))
        again = build(topology, FOUR_BITS)
        load_checkpoint(path, again, TOKENIZER, with_optimizer=True)
        here, there = step(engine, 2 + number), step(again, 2 + number)
        references = zip(engine.units, again.units, strict=True)
        raised = here[0] == there[0] == (0, 0, 1, 1, 1)[number]
        same.append(raised and all(torch.equal(a.reference, b.reference) for a, b in references))
        engine = again  # so the next save is that of an engine which has resumed
    return same


def test_a_resumed_run_raises_the_same_units(tmp_path: Path) -> None:
    assert on_ranks(4, resumed, str(tmp_path), ranks_per_node=2) == [[True] * 5] * 4


def after_a_skipped_step(topology: Topology) -> tuple[float, int | None, bool, list[int | None]]:
    """A step that is not finite, in which a unit would send 8 bits; and how many are raised after it."""
    engine = build(topology, FOUR_BITS)
    step(engine, 0)
    fall_behind(engine)
    for number in range(2):
        step(engine, 1 + number)
    before = [raw(unit.reference) for unit in engine.units]
    handle = engine.units[BEHIND].parameters[0].register_hook(with_a_nan)
    engine.accumulate(batch(topology, 9), index=0, micro_batches=1)
    handle.remove()
    result = engine.step(1e-2)
    engine.evaluate(batch(topology, 0))
    same = before == [raw(unit.reference) for unit in engine.units]
    return result.skipped.item(), result.raised_units, same, [step(engine, 3 + n)[0] for n in range(4)]


def test_a_skipped_step_moves_no_reference_by_eight_bits_and_lowers_no_unit() -> None:
    """Without it the unit would send 8 bits in three steps. As it sends none here, there is one more."""
    assert on_ranks(4, after_a_skipped_step, ranks_per_node=2) == [(1.0, 1, True, [1, 1, 1, 0])] * 4


def test_a_unit_is_raised_that_settles_two_updates_behind() -> None:
    """The worst that codes can leave behind if they lose this share: updates that all point one way."""
    behind_by = 0.0
    for _ in range(100):
        behind_by = LOST_SHARE**0.5 * (1.0 + behind_by)
    assert behind_by == pytest.approx(2.0)
    formats = DifferenceFormats(LloydMaxFormat(4), 4, torch.device("cpu"))
    measured = torch.tensor([[1.0, 0.45], [1.0, 0.44], [0.0, 0.0], [torch.nan, torch.nan]])
    for raised in (0, 1, 1):
        formats.decide(measured.double())
        assert formats.raised == raised
    skipped, state = torch.zeros(4, 2, dtype=torch.float64), formats.state(measured)
    for _ in range(3):
        formats.decide(skipped)
        assert formats.raised == 1
    again = DifferenceFormats(LloydMaxFormat(4), 4, torch.device("cpu"))
    for loaded, raised in ((state, [1, 1, 1]), (None, [0, 0, 0])):
        again.load_state(loaded, first_rank=False)
        assert [(again.decide(skipped), again.raised)[1] for _ in range(3)] == raised
        again.load_state(loaded, first_rank=True)
        restored = measured.double() if loaded else torch.zeros(4, 2).double()
        assert torch.equal(again.measured.nan_to_num(), restored.nan_to_num())
    assert formats.sent(0) == eight_bits(LloydMaxFormat(4))
    assert formats.sent(1) == LloydMaxFormat(4)
