"""The compiled operations of Lloyd-Max codes equal the reference on a CPU bit for bit, on every device."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from megatron_zpp.ops import reference_difference, reference_rotation
from megatron_zpp.ops.formats import LloydMaxFormat
from megatron_zpp.ops.library import load_operations
from megatron_zpp.ops.operations import Operations
from megatron_zpp.ops.signs import Signs
from tests.ops.agreement import assert_same_bits
from tests.ops.awkward import KINDS, awkward
from tests.ops.cases import BLOCKS, FLOATS

BITS = (2, 4)
SIGNS = Signs(seed=-(2**40 + 7), unit=3, iteration=11, first=128 * (2**32 - 1))


@pytest.fixture
def ops(kernels: None, device: str) -> Operations:
    return load_operations(device, require_kernels=True, say=print)


def copies_on(device: str) -> Callable[[Tensor], Tensor]:
    """Return a function that copies a tensor to `device`, also where it is there already."""
    return lambda tensor: tensor.to(device, copy=True)


def messages_of(format: LloydMaxFormat, count: int, numel: int) -> Tensor:
    return torch.full((count, format.message_bytes(numel)), 165, dtype=torch.uint8)


def numbers(blocks: int, block: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Blocks of every awkward kind, and then normal ones; 31 of them end in the middle of a tile."""
    kinds = awkward(1, block * 2 * KINDS, block, dtype, seed=seed)[0]
    generator = torch.Generator().manual_seed(seed)
    return torch.cat((kinds, torch.randn(blocks * block, generator=generator).to(dtype)))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("bits", BITS)
def test_differences(ops: Operations, bits: int, block: int, device: str) -> None:
    """Encoded with and without `skip`, and applied as one message or three."""
    format, copy = LloydMaxFormat(bits, block), copies_on(device)
    weights = numbers(31, block, 1)
    reference = weights + 1e-3 * torch.randn(weights.shape, generator=torch.Generator().manual_seed(2))
    reference[~reference.isfinite()] = 0.5
    n = len(weights)
    for skip in (None, torch.zeros(()), torch.ones(())):
        message, squares = messages_of(format, 1, n)[0], torch.zeros(2, n // block)
        ours, our_squares = copy(message), copy(squares)
        reference_difference.quantize_difference(weights, reference, message, bits, block, skip, squares)
        on_device = None if skip is None else copy(skip)
        ops.quantize_difference(
            copy(weights), copy(reference), ours, format, skip=on_device, squares=our_squares
        )
        assert_same_bits(ours.cpu(), message)
        assert_same_bits(our_squares.cpu(), squares)
    for count in (1, 3):
        messages = messages_of(format, count, 5 * block)
        whole = torch.randn(count * 5 * block)
        for sent, part in zip(messages, whole.view(count, -1), strict=True):
            near = part + 1e-2 * torch.randn(part.shape)
            reference_difference.quantize_difference(near, part, sent, bits, block)
        ours = copy(whole)
        ops.add_difference(copy(messages), ours, format)
        reference_difference.add_difference(messages, whole, bits, block)
        assert_same_bits(ours.cpu(), whole)
    reference_difference.quantize_difference(weights, reference, message, bits, block)
    ours = copy(reference)
    ops.add_difference(copy(message[None]), ours, format)
    reference_difference.add_difference(message[None], reference, bits, block)
    assert_same_bits(ours.cpu(), reference)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("bits", BITS)
def test_rotations(ops: Operations, bits: int, block: int, dtype: torch.dtype, device: str) -> None:
    """Encoded as three messages, with and without error feedback, and their sum written and added."""
    format, groups, copy = LloydMaxFormat(bits, block), 3, copies_on(device)
    x = numbers(31, block, 5, dtype)
    whole = groups * max(block, 128)  # signs are drawn for 128 elements at a time
    x = x[: len(x) // whole * whole]
    messages = messages_of(format, groups, len(x) // groups)
    ours = copy(messages)
    reference_rotation.quantize_rotated(x, messages, bits, block, *SIGNS)
    ops.quantize_rotated(copy(x), ours, format, SIGNS)
    assert_same_bits(ours.cpu(), messages)
    owed = numbers(31, block, 6, torch.bfloat16)[: len(x)].view(groups, -1).clamp(-1e30, 1e30).nan_to_num()
    lost = torch.zeros(groups, len(x) // groups + 8, dtype=torch.bfloat16)[:, :-8].copy_(
        owed
    )  # rows are apart
    our_lost, divisor = torch.empty_like(lost, device=device).copy_(lost), torch.tensor(3.0)
    reference_rotation.quantize_rotated(x, messages, bits, block, *SIGNS, lost, divisor)
    ops.quantize_rotated(copy(x), ours, format, SIGNS, lost=our_lost, divisor=copy(divisor))
    assert_same_bits(ours.cpu(), messages)
    assert_same_bits(our_lost.cpu(), lost)
    shard = torch.randn(len(x) // groups)
    for add in (False, True):
        total = copy(shard)
        ops.sum_rotated(ours, total, format, SIGNS, add=add)
        reference_rotation.sum_rotated(messages, shard, bits, block, *SIGNS, add)
        assert_same_bits(total.cpu(), shard)


def test_wrong_tensors_are_refused(ops: Operations, device: str) -> None:
    format = LloydMaxFormat(4, 256)
    flat, message = torch.zeros(512, device=device), torch.zeros(1, 272, dtype=torch.uint8, device=device)
    half, lost = message[:, :144].contiguous(), torch.zeros(1, 512, dtype=torch.bfloat16, device=device)
    odd, between = torch.zeros(300, device=device)[1:257], Signs(0, 0, 0, 64)
    for call, given, said in (
        (ops.quantize_rotated, (flat, message, format, between), "first must be a multiple of 128, got 64"),
        (ops.quantize_rotated, (flat, half, format, SIGNS), "messages must be"),
        (
            partial(ops.quantize_rotated, lost=lost[0]),
            (flat, message, format, SIGNS),
            "lost must be bfloat16",
        ),
        (partial(ops.quantize_rotated, lost=lost), (flat, message, format, SIGNS), "divisor must be given"),
        (ops.add_difference, (message, flat[:300], format), "m a multiple of 256"),
        (ops.add_difference, (half, odd, format), "address of reference must be a multiple of 16"),
    ):
        with pytest.raises(ValueError, match=said):
            call(*given)
