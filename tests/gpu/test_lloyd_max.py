"""The CUDA kernels of Lloyd-Max codes equal the reference on a CPU bit for bit."""

import pytest
import torch
from torch import Tensor

from megatron_zpp.ops import reference_difference, reference_rotation
from megatron_zpp.ops.formats import LloydMaxFormat
from megatron_zpp.ops.library import load_operations
from megatron_zpp.ops.operations import Operations
from megatron_zpp.ops.signs import Signs
from tests.ops.awkward import KINDS, awkward

BITS, BLOCKS = (2, 3, 4), (32, 64, 128, 256, 512, 1024, 2048)
SIGNS = Signs(seed=2**40 + 7, unit=3, iteration=11, first=256)


@pytest.fixture(scope="module")
def ops() -> Operations:
    return load_operations("cuda", require_kernels=True, say=print)


def same(ours: Tensor, reference: Tensor) -> bool:
    """Equal bits, but for which NaN a NaN is."""
    ours = ours.cpu()
    if ours.dtype == torch.uint8:
        return torch.equal(ours, reference)
    nan = reference.isnan()
    return torch.equal(ours.isnan(), nan) and torch.equal(
        ours[~nan].view(torch.int32), reference[~nan].view(torch.int32)
    )


def messages_of(format: LloydMaxFormat, count: int, numel: int) -> Tensor:
    return torch.full((count, format.message_bytes(numel)), 165, dtype=torch.uint8)


def numbers(blocks: int, block: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Blocks of every awkward kind, and then normal ones; 31 of them end in the middle of a tile."""
    kinds = awkward(1, block * 2 * KINDS, block, dtype, seed=seed)[0]
    generator = torch.Generator().manual_seed(seed)
    return torch.cat((kinds, torch.randn(blocks * block, generator=generator).to(dtype)))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("bits", BITS)
def test_differences(ops: Operations, bits: int, block: int) -> None:
    format = LloydMaxFormat(bits, block)
    weights = numbers(31, block, 1)
    reference = weights + 1e-3 * torch.randn(weights.shape, generator=torch.Generator().manual_seed(2))
    reference[~reference.isfinite()] = 0.5
    n = len(weights)
    for skip in (None, torch.zeros(()), torch.ones(())):
        message, squares = messages_of(format, 1, n)[0], torch.zeros(2, n // block)
        ours, our_squares = message.cuda(), squares.cuda()
        reference_difference.quantize_difference(weights, reference, message, bits, block, skip, squares)
        on_gpu = None if skip is None else skip.cuda()
        ops.quantize_difference(
            weights.cuda(), reference.cuda(), ours, format, skip=on_gpu, squares=our_squares
        )
        assert same(ours, message)
        assert same(our_squares, squares)
    for count in (1, 3):
        messages = messages_of(format, count, 5 * block)
        whole = torch.randn(count * 5 * block)
        for sent, part in zip(messages, whole.view(count, -1), strict=True):
            near = part + 1e-2 * torch.randn(part.shape)
            reference_difference.quantize_difference(near, part, sent, bits, block)
        ours = whole.cuda()
        ops.add_difference(messages.cuda(), ours, format)
        reference_difference.add_difference(messages, whole, bits, block)
        assert same(ours, whole)
    reference_difference.quantize_difference(weights, reference, message, bits, block)
    ours = reference.cuda()
    ops.add_difference(message[None].cuda(), ours, format)
    reference_difference.add_difference(message[None], reference, bits, block)
    assert same(ours, reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("bits", BITS)
def test_rotations(ops: Operations, bits: int, block: int, dtype: torch.dtype) -> None:
    format, groups = LloydMaxFormat(bits, block), 3
    x = numbers(31, block, 5, dtype)
    whole = groups * max(block, 128)  # signs are drawn for 128 elements at a time
    x = x[: len(x) // whole * whole]
    messages = messages_of(format, groups, len(x) // groups)
    ours = messages.cuda()
    reference_rotation.quantize_rotated(x, messages, bits, block, *SIGNS.packed())
    ops.quantize_rotated(x.cuda(), ours, format, SIGNS)
    assert same(ours, messages)
    shard = torch.randn(len(x) // groups)
    for factor, add in ((1.0, False), (0.3, True)):
        total = shard.cuda()
        ops.sum_rotated(ours, total, format, SIGNS, factor=factor, add=add)
        reference_rotation.sum_rotated(messages, shard, bits, block, *SIGNS.packed(), factor, add)
        assert same(total, shard)


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
