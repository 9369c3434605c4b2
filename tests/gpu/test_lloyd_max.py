"""The CUDA kernels of Lloyd-Max codes equal the reference on a CPU bit for bit."""

import pytest
import torch

from megatron_zpp.ops.formats import LloydMaxFormat
from megatron_zpp.ops.library import load_operations
from megatron_zpp.ops.operations import Operations
from megatron_zpp.ops.signs import Signs
from tests.ops import lloyd_max_cases as cases
from tests.ops.lloyd_max_cases import SIGNS


@pytest.fixture(scope="module")
def ops() -> Operations:
    return load_operations("cuda", require_kernels=True, say=print)


@pytest.mark.parametrize("block", cases.BLOCKS)
@pytest.mark.parametrize("bits", cases.BITS)
def test_differences(ops: Operations, bits: int, block: int) -> None:
    cases.differences(ops, bits, block, "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", cases.BLOCKS)
@pytest.mark.parametrize("bits", cases.BITS)
def test_rotations(ops: Operations, bits: int, block: int, dtype: torch.dtype) -> None:
    cases.rotations(ops, bits, block, dtype, "cuda")


def test_many_tiles(ops: Operations) -> None:
    """More blocks than all warps hold at once; what was sent is near what was meant."""
    format, m = LloydMaxFormat(4, 256), 256 * (2**17 + 3)
    x = torch.randn(2, m, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    messages = torch.empty(2, format.message_bytes(m), dtype=torch.uint8, device="cuda")
    for row, message in zip(x, messages, strict=True):
        ops.quantize_rotated(row, message[None], format, SIGNS)
    total = torch.empty(m, device="cuda")
    ops.sum_rotated(messages, total, format, SIGNS)
    assert ((total - x.sum(0)).square().mean() / x.sum(0).square().mean()).sqrt() < 0.12
    reference = x[0] + 1e-3 * x[1]
    before = (x[0] - reference).norm()
    ops.quantize_difference(x[0], reference, messages[0], format)
    ops.add_difference(messages[:1], reference, format)
    assert (x[0] - reference).norm() < 0.11 * before


@pytest.mark.parametrize("case", ["signs", "messages", "blocks", "address"])
def test_wrong_tensors_are_refused(ops: Operations, case: str) -> None:
    format = LloydMaxFormat(4, 256)
    flat, message = torch.zeros(512, device="cuda"), torch.zeros(1, 272, dtype=torch.uint8, device="cuda")
    half = message[:, :144].contiguous()
    call, said = {
        "signs": (
            lambda: ops.quantize_rotated(flat, message, format, Signs(0, 0, 0, 64)),
            "first must be a multiple of 128, got 64",
        ),
        "messages": (lambda: ops.quantize_rotated(flat, half, format, SIGNS), "messages must be"),
        "blocks": (lambda: ops.add_difference(message, flat[:300], format), "m a multiple of 256"),
        "address": (
            lambda: ops.add_difference(half, torch.zeros(300, device="cuda")[1:257], format),
            "address of reference must be a multiple of 16",
        ),
    }[case]
    with pytest.raises(ValueError, match=said):
        call()
