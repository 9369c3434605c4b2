"""Weight differences and rotated gradients in whole engines over NCCL, with events and pinned copies."""

from pathlib import Path

import pytest
import torch

from tests.gpu.ranks import GPUS, largest_in_core, on_gpus
from tests.zero import test_difference_formats as formats
from tests.zero import test_differences as cases
from tests.zero.ranks import on_ranks
from tests.zero.test_quantized import losses
from tests.zero.zeropp_engines import BF16, FOUR_BITS

GRIDS = largest_in_core((2, 1), (2, 2))


@pytest.mark.parametrize(("nodes", "local"), GRIDS)
def test_every_node_holds_the_reference_that_its_forward_reads(nodes: int, local: int) -> None:
    settings = [FOUR_BITS, FOUR_BITS | {"zero_stage": 2, "zero_hpz_partition_size": "1"}]
    cases.check_references(local, on_gpus(nodes, local, cases.references, settings))


@pytest.mark.parametrize(("nodes", "local"), GRIDS)
def test_losses_are_those_of_cpus(nodes: int, local: int) -> None:
    """Codes flip where sums differ by a rounding, so losses agree within bf16: twice its epsilon.

    Eight steps of CPUs in bf16 and in fp32 differ by 0.9%, and the loss falls by a quarter or more.
    """
    settings = [(FOUR_BITS, BF16)]
    ((expected,), *_) = on_ranks(nodes * local, losses, settings, ranks_per_node=local)
    first, *others = on_gpus(nodes, local, losses, settings)
    assert first[0] == pytest.approx(expected, rel=2 * torch.finfo(torch.bfloat16).eps)
    assert all(other == first for other in others)


@pytest.mark.skipif(GPUS < 4, reason="needs four GPUs")
def test_groups_of_a_node_hold_references_of_equal_bits(tmp_path: Path) -> None:
    cases.check_groups(on_gpus(2, 4, cases.in_groups, str(tmp_path)))


def test_a_skipped_step_moves_no_reference() -> None:
    assert on_gpus(2, 1, formats.after_a_skipped_step) == [(1.0, 1, True, [1, 1, 1, 0])] * 2


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_a_reference_that_changed_on_one_node_is_detected() -> None:
    cases.check_found(on_gpus(2, 2, cases.found_to_differ))
