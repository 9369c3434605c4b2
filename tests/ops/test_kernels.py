"""The compiled operations equal the reference bit for bit, on CPUs and, where there is one, on a GPU."""

import itertools

import pytest
import torch

from megatron_zpp.ops import reference
from megatron_zpp.ops.formats import QuantFormat
from tests.ops import cases
from tests.ops.agreement import assert_agree, assert_same_bits
from tests.ops.awkward import KINDS, awkward, random_messages, sprinkled
from tests.ops.cases import adamw_scalars, adamw_states, garbage, plain

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.mark.parametrize("block", cases.BLOCKS)
@pytest.mark.parametrize("code_type", cases.CODE_TYPES)
def test_quantize_and_dequantize(code_type: str, block: int, device: str) -> None:
    """Every dtype of numbers, on every kind of block."""
    rows, groups, n = 6, 3, block * -(-KINDS // 6)
    format = QuantFormat(code_type, block)
    for dtype in cases.FLOATS:
        messages = garbage(groups, format.message_bytes(rows // groups * n))
        x = awkward(rows, n, block, dtype)
        _, messages, *_ = assert_agree("quantize", x, messages, *plain(format), device=device)
        output = garbage(rows, n, dtype=dtype)
        assert_agree("dequantize", messages, output, *plain(format), device=device)


@pytest.mark.parametrize("code_type", cases.CODE_TYPES)
def test_any_bytes_decode_the_same(code_type: str, device: str) -> None:
    """Every code, with scales of every kind."""
    format = QuantFormat(code_type, 64)
    for dtype in cases.FLOATS:
        messages = random_messages(2, format, 4096)
        assert_agree("dequantize", messages, garbage(8, 1024, dtype=dtype), *plain(format), device=device)


def test_rows_go_to_their_messages(device: str) -> None:
    """Several numbers of messages, odd numbers of rows, rows with gaps, and sizes beyond one thread's."""
    format = QuantFormat("int4", 32)
    for rows, groups in ((1, 1), (5, 5), (7, 1), (9, 3), (12, 4), (12, 6), (16, 8)):
        for n, gap in ((32, 0), (96, 32), (32 * 37, 8), (32, 1)):
            for dtype in cases.FLOATS:
                x = torch.randn(rows, n + gap, generator=torch.Generator().manual_seed(n))
                x = x.to(dtype)[:, :n]
                messages = garbage(groups, format.message_bytes(rows // groups * n))
                _, messages, *_ = assert_agree("quantize", x, messages, *plain(format), device=device)
                output = garbage(rows, n + gap, dtype=dtype)[:, :n]
                assert_agree("dequantize", messages, output, *plain(format), device=device)
    for code_type in cases.CODE_TYPES:
        format = QuantFormat(code_type, 128)
        x = awkward(3, 128 * 1001, 128, torch.bfloat16)
        messages = garbage(3, format.message_bytes(x.shape[1]))
        assert_agree("quantize", x, messages, *plain(format), device=device)


def test_a_strided_output_keeps_its_gaps(device: str) -> None:
    """Rows of an output may have gaps between them, which must not be written."""
    format = QuantFormat()
    messages = random_messages(2, format, 512).to(device)
    buffer = garbage(4, 300, dtype=torch.float32).to(device)
    torch.ops.megatron_zpp.dequantize(messages, buffer[:, :256], *plain(format))
    assert (buffer[:, 256:] == 165).all()
    assert not (buffer[:, :256] == 165).all()


@pytest.mark.parametrize("code_type", cases.CODE_TYPES)
def test_sums(code_type: str, device: str) -> None:
    """Sum 1 to 9 messages into a shard, and encode sums. The last warp may be half empty."""
    for count, block in [*((count, 64) for count in range(1, 10)), *((3, block) for block in cases.BLOCKS)]:
        format, m = QuantFormat(code_type, block), 2048 * 3 if block > 256 else 256 * 42
        messages = random_messages(count, format, m, seed=count)
        for add in (False, True):
            shard = awkward(1, m, 32, torch.float32)[0]
            assert_agree("sum_into", messages, shard, *plain(format), add, device=device)
        for groups in (1, 3) if block > 256 else (1, 2, 6):
            output = garbage(groups, format.message_bytes(m // groups))
            assert_agree("sum_quantize", messages, output, *plain(format), device=device)
    format = QuantFormat(code_type, 32)
    messages = garbage(1, format.message_bytes(64))
    reference.quantize(torch.full((1, 64), torch.finfo(torch.float32).max), messages, *plain(format))
    assert_agree("sum_quantize", messages, garbage(*messages.shape), *plain(format), device=device)


def test_sums_of_plain_parts(device: str) -> None:
    """Any m, divisible by a vector's length or not; 1 to 9 parts of every dtype."""
    for m, count in itertools.product((0, 1, 3, 17, 1000, 4097), range(1, 10)):
        for dtype, add in itertools.product(cases.FLOATS, (False, True)):
            parts = torch.stack([sprinkled(m, dtype, seed) for seed in range(count)])
            assert_agree("sum_parts", parts, torch.ones(m), add, device=device)
            own = sprinkled(m, dtype, 77)
            assert_agree("sum_parts", parts, torch.ones(m), add, own, count // 2, device=device)
            columns = parts[:, : m // 2]  # rows with gaps
            assert_agree("sum_parts", columns, torch.ones(m // 2), add, device=device)
    for m, own, add in itertools.product((4099, 4100), range(5), (False, True)):  # 16-byte rows
        parts = torch.randn(5, m, generator=torch.Generator().manual_seed(1))
        expected = parts[own].clone()
        in_place, shard = parts.to(device, copy=True), parts[own].to(device, copy=True)
        reference.sum_parts(parts, expected, add)
        torch.ops.megatron_zpp.sum_parts(in_place, shard, add, shard, own)
        assert_same_bits(shard.cpu(), expected, f"in place of part {own}, which is stored elsewhere")
        torch.ops.megatron_zpp.sum_parts(in_place, in_place[own], add)
        assert_same_bits(in_place[own].cpu(), expected, f"in place of part {own}")


def test_sums_of_plain_parts_and_their_squares(device: str) -> None:
    """Whole blocks, with distances between rows that are divisible by all, some or no vector lengths."""
    for blocks, count in ((0, 1), (1, 9), (2, 2), (67, 1), (67, 4), (67, 5)):
        m = 256 * blocks
        for dtype, gap in itertools.product(cases.FLOATS, (0, 8, 4, 1)):
            columns = torch.stack([sprinkled(m + gap, dtype, seed) for seed in range(count)])[:, :m]
            for add, own in ((False, None), (True, None), (True, sprinkled(m, dtype, 77))):
                sums = garbage(blocks, dtype=torch.float32)
                shard = awkward(1, m, 32, torch.float32)[0]
                assert_agree("sum_parts", columns, shard, add, own, count // 2, sums, device=device)
    parts = torch.randn(3, 1024, generator=torch.Generator().manual_seed(1))
    for own, add in itertools.product(range(3), (False, True)):
        expected, in_place = parts.clone(), parts.to(device, copy=True)
        sums, expected_sums = torch.zeros(4, device=device), torch.zeros(4)
        reference.sum_parts(parts, expected[own], add, None, 0, expected_sums)
        torch.ops.megatron_zpp.sum_parts(in_place, in_place[own], add, None, 0, sums)
        assert_same_bits(in_place.cpu(), expected, f"in place of part {own}")
        assert_same_bits(sums.cpu(), expected_sums, f"squares in place of part {own}")


def test_sums_of_squares(device: str) -> None:
    """Sums of whole blocks, of numbers that are not all finite, aligned to 16 bytes or not."""
    for blocks, dtype in itertools.product((0, 1, 2, 7, 1001), cases.FLOATS):
        assert_agree("sum_squares", sprinkled(256 * blocks, dtype, blocks), torch.ones(blocks), device=device)
        behind = sprinkled(256 * blocks + 1, dtype, blocks)[1:]
        assert_agree("sum_squares", behind, torch.ones(blocks), device=device)


def test_adamw(device: str) -> None:
    """Every dtype of weights and gradients, numbers of decayed elements, divisors, and skipped steps."""
    for m in (0, 1, 7, 1000, 1002, 4099, 40_001):
        for dtype, part in zip((None, torch.bfloat16, torch.float16), (0.0, 0.37, 1.0), strict=True):
            gather_source = None if dtype is None else garbage(m, dtype=dtype)
            gradients = dtype if dtype is not None and m % 2 == 0 else torch.float32
            for found_inf, divisor in ((0.0, 1.0), (0.0, 3.7), (1.0, 1.0), (float("nan"), 2.0)):
                assert_agree(
                    "adamw",
                    *adamw_states(m, gradients),
                    gather_source,
                    *adamw_scalars(found_inf, divisor).packed(),
                    int(part * m),
                    device=device,
                )
    for code_type, blocks in itertools.product(cases.CODE_TYPES, (1, 13)):
        for block, found_inf in ((32, 0.0), (256, 0.0), (2048, 0.0), (64, 1.0)):
            format = QuantFormat(code_type, block)
            m = blocks * block
            assert_agree(
                "adamw_quantize",
                *adamw_states(m),
                garbage(format.message_bytes(m)),
                *adamw_scalars(found_inf).packed(),
                m // 3,
                *plain(format),
                device=device,
            )


def test_zero_elements(device: str) -> None:
    """Tensors without elements are valid."""
    format = QuantFormat()
    for rows, n in ((0, 256), (4, 0)):
        assert_agree("quantize", torch.empty(rows, n), garbage(2, 0), *plain(format), device=device)
        assert_agree("dequantize", garbage(2, 0), torch.empty(rows, n), *plain(format), device=device)
    assert_agree("sum_into", garbage(3, 0), torch.empty(0), *plain(format), True, device=device)
    states, messages = [torch.empty(0) for _ in range(4)], garbage(0)
    assert_agree(
        "adamw_quantize", *states, messages, *adamw_scalars().packed(), 0, *plain(format), device=device
    )
    assert_agree("sum_quantize", garbage(3, 0), garbage(2, 0), *plain(format), device=device)
