"""Checkpoints of runs with --fp8-param-gather: resumed, with other flags, and without scales."""

from pathlib import Path

import pytest

from megatron_zpp.checkpoint.load import load_checkpoint
from megatron_zpp.distributed.topology import Topology
from tests.checkpoint.saving import TOKENIZER, save
from tests.support import nightly
from tests.train.coded_weights import HELD, check_codes, equal, masters_of, resumed, scales_of, take_step
from tests.train.test_fp8_scaling import batch, engine_of, state_of
from tests.zero.ranks import on_ranks

HPZ = ("--zero-stage", "3", "--zero-hpz-partition-size", "auto")


@pytest.mark.parametrize("case", [nightly(("--zero-stage", "1")), HPZ])
def test_a_resumed_run_has_the_bits_of_the_undisturbed_one(case: tuple[str, ...], tmp_path: Path) -> None:
    for expected, found, _ in on_ranks(2, resumed, str(tmp_path), case):
        assert found == expected


def test_checkpoints_load_with_the_flag_and_without(tmp_path: Path) -> None:
    """From each kind into the other, and into a grid of other ranks: fp32 weights and scales are equal."""
    for name, flags in (("held", (HELD,)), ("plain", ())):
        on_ranks(2, saved, str(tmp_path / name), "--zero-stage", "3", *flags)
        engines = []
        for more in ((), (HELD,)):
            engine = engine_of(Topology(), *more)
            path = tmp_path / name / "iter_0000005"
            load_checkpoint(path, engine, TOKENIZER, with_optimizer=True)
            engines.append(
                (engine, masters_of(engine), state_of(engine), engine.evaluate(batch(4, 0)).item())
            )
        (plain, weights, state, loss), (held, same, too, near) = engines
        assert state == too
        assert equal(weights, same)
        assert near == pytest.approx(loss, rel=0.01)
        check_codes(held, scales_of(held))
        plain.close()
        held.close()


def saved(topology: Topology, directory: str, *more: str) -> None:
    engine = engine_of(topology, *more)
    for step in range(2):
        take_step(engine, step)
    save(Path(directory), engine)
    engine.close()


def test_weights_without_scales_are_scaled_by_themselves(tmp_path: Path) -> None:
    """As --finetune and --no-load-optim load them."""
    saved(Topology(), str(tmp_path))
    engine = engine_of(Topology(), HELD)
    load_checkpoint(tmp_path / "iter_0000005", engine, TOKENIZER, with_optimizer=False)
    engine.evaluate(batch(4, 0))
    check_codes(engine)
    engine.close()
