"""ZeRO++ over NCCL: the CPU's tests of bits, sums and skipped steps, on GPUs and emulated nodes of them."""

import pytest

from tests.exchange import test_gathers as gathers
from tests.exchange import test_reductions as reductions
from tests.gpu.ranks import GPUS, largest_in_core, on_gpus
from tests.zero import test_difference_formats as difference_formats
from tests.zero import test_quantized as cases

GRIDS = largest_in_core((1, 1), (1, 2), (2, 1), (2, 2))
EVERY = 4  # of the CPU's cases one of so many: NCCL takes seconds for the communicators of each
needs_two = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")


@pytest.mark.parametrize(("nodes", "local"), GRIDS)
def test_every_pass_sees_the_same_bits_on_every_rank(nodes: int, local: int) -> None:
    settings = [cases.QWZ, cases.HPZ, cases.QWZ | cases.HPZ]
    ranks = on_gpus(nodes, local, cases.weights_seen, settings)
    assert all(rank == ranks[0] for rank in ranks[1:])


@pytest.mark.parametrize(("nodes", "local"), GRIDS)
def test_reductions_are_sums_over_all_ranks(nodes: int, local: int) -> None:
    grids = [(nodes, local, 1)]
    reductions.check(grids, on_gpus(nodes, local, reductions.sums, grids, EVERY), EVERY)


@pytest.mark.parametrize(("nodes", "local"), GRIDS)
def test_gathers_bring_the_weights_of_all_owners(nodes: int, local: int) -> None:
    grids = [(nodes, local, 1)]
    gathers.check(grids, on_gpus(nodes, local, gathers.filled, grids, EVERY), EVERY)


@pytest.mark.parametrize(("nodes", "local"), largest_in_core((2, 1), (2, 2)))
def test_a_unit_that_falls_behind_sends_eight_bits(nodes: int, local: int) -> None:
    ranks = on_gpus(nodes, local, difference_formats.raised_and_lowered)
    difference_formats.check_raised(nodes, local, ranks)


@pytest.mark.parametrize(("nodes", "local"), largest_in_core((1, 2), (2, 2)))
def test_a_nan_on_one_rank_skips_the_step_on_all(nodes: int, local: int) -> None:
    settings = [(cases.ALL, cases.BF16), ({"zero_stage": 1} | cases.QWZ | cases.QGZ, cases.BF16)]
    for rank in on_gpus(nodes, local, cases.skipped_on_nan, settings):
        assert rank == [([0.0, 1.0, 0.0], [True, False, True], True)] * 2


@needs_two
def test_zeropp_learns_what_the_plain_run_learns() -> None:
    settings = [({}, cases.BF16), (cases.ALL, cases.BF16)]
    for plain, curve in on_gpus(2, 2, cases.losses, settings):
        assert curve == pytest.approx(plain, rel=0.02)
