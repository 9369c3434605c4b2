"""ZeRO++ over NCCL, on GPUs and emulated nodes: the CPU's tests of bits, sums, differences and skips."""

from pathlib import Path

import pytest
import torch

from tests.exchange import test_gathers as gathers
from tests.exchange import test_reductions as reductions
from tests.gpu.ranks import GPUS, largest_in_core, on_gpus
from tests.zero import test_difference_formats as difference_formats
from tests.zero import test_differences as differences
from tests.zero import test_quantized as cases
from tests.zero.ranks import on_ranks
from tests.zero.zeropp_engines import FOUR_BITS

GRIDS = largest_in_core((1, 1), (1, 2), (2, 1), (2, 2))
OF_TWO_NODES = largest_in_core((2, 1), (2, 2))
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


@pytest.mark.parametrize(("nodes", "local"), OF_TWO_NODES)
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


@pytest.mark.parametrize(("nodes", "local"), OF_TWO_NODES)
def test_every_node_holds_the_reference_that_its_forward_reads(nodes: int, local: int) -> None:
    settings = [FOUR_BITS, FOUR_BITS | {"zero_stage": 2, "zero_hpz_partition_size": "1"}]
    differences.check_references(local, on_gpus(nodes, local, differences.references, settings))


@pytest.mark.parametrize(("nodes", "local"), OF_TWO_NODES)
def test_losses_are_those_of_cpus(nodes: int, local: int) -> None:
    """Codes flip where sums differ by a rounding, so losses agree within bf16: twice its epsilon.

    Eight steps of CPUs in bf16 and in fp32 differ by 0.9%, and the loss falls by a quarter or more.
    """
    settings = [(FOUR_BITS, cases.BF16)]
    ((expected,), *_) = on_ranks(nodes * local, cases.losses, settings, ranks_per_node=local)
    first, *others = on_gpus(nodes, local, cases.losses, settings)
    assert first[0] == pytest.approx(expected, rel=2 * torch.finfo(torch.bfloat16).eps)
    assert all(other == first for other in others)


@pytest.mark.skipif(GPUS < 4, reason="needs four GPUs")
def test_groups_of_a_node_hold_references_of_equal_bits(tmp_path: Path) -> None:
    differences.check_groups(on_gpus(2, 4, differences.in_groups, str(tmp_path)))


def test_a_skipped_step_moves_no_reference() -> None:
    assert on_gpus(2, 1, difference_formats.after_a_skipped_step) == [(1.0, 1, True, [1, 1, 1, 0])] * 2


@needs_two
def test_a_reference_that_changed_on_one_node_is_detected() -> None:
    differences.check_found(on_gpus(2, 2, differences.found_to_differ))
