"""The compiled CPU operations of Lloyd-Max codes equal the reference bit for bit."""

import pytest
import torch

from megatron_zpp.ops.library import load_operations
from megatron_zpp.ops.operations import Operations
from tests.ops import lloyd_max_cases as cases


@pytest.fixture(scope="module")
def ops(kernels: None) -> Operations:
    return load_operations("cpu", require_kernels=True, say=print)


@pytest.mark.parametrize("block", cases.BLOCKS)
@pytest.mark.parametrize("bits", cases.BITS)
def test_differences(ops: Operations, bits: int, block: int) -> None:
    cases.differences(ops, bits, block, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", cases.BLOCKS)
@pytest.mark.parametrize("bits", cases.BITS)
def test_rotations(ops: Operations, bits: int, block: int, dtype: torch.dtype) -> None:
    cases.rotations(ops, bits, block, dtype, "cpu")
