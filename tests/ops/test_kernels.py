"""The compiled CPU operations equal the reference bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.ops.formats import QuantFormat
from tests.ops import cases
from tests.ops.agreement import assert_agree

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.mark.parametrize("block", cases.BLOCKS)
@pytest.mark.parametrize("code_type", cases.CODE_TYPES)
def test_quantize_and_dequantize(code_type: str, block: int) -> None:
    cases.quantize_and_back(code_type, block, "cpu")


@pytest.mark.parametrize("code_type", cases.CODE_TYPES)
def test_any_bytes_decode_the_same(code_type: str) -> None:
    cases.any_bytes(code_type, "cpu")


def test_no_code_decodes_to_an_infinite_fp16_number() -> None:
    cases.largest_fp16_number("cpu")


def test_rows_go_to_their_messages() -> None:
    cases.row_orders("cpu")


def test_a_strided_output_keeps_its_gaps() -> None:
    cases.strided_output_keeps_its_gaps("cpu")


@pytest.mark.parametrize("code_type", cases.CODE_TYPES)
def test_sums(code_type: str) -> None:
    cases.sums(code_type, "cpu")


def test_sums_of_plain_parts() -> None:
    cases.plain_parts("cpu")


def test_sums_of_plain_parts_and_their_squares() -> None:
    cases.plain_parts_and_squares("cpu")


def test_sums_of_squares() -> None:
    cases.squares("cpu")


def test_adamw() -> None:
    cases.adamw_steps("cpu")


def test_zero_elements() -> None:
    cases.nothing_at_all("cpu")


floats = st.floats(width=32, allow_nan=True, allow_infinity=True)


@settings(max_examples=150)
@given(
    code_type=st.sampled_from(cases.CODE_TYPES),
    dtype=st.sampled_from(cases.FLOATS),
    per_message=st.integers(1, 4),
    groups=st.integers(1, 4),
    blocks=st.integers(1, 5),
    values=st.lists(floats, min_size=1, max_size=200),
)
def test_any_numbers_encode_the_same(
    code_type: str,
    dtype: torch.dtype,
    per_message: int,
    groups: int,
    blocks: int,
    values: list[float],
) -> None:
    format, rows, n = QuantFormat(code_type, 32), per_message * groups, 32 * blocks
    x = torch.tensor(values).repeat(-(-rows * n // len(values)))[: rows * n].view(rows, n).to(dtype)
    messages = cases.garbage(groups, format.message_bytes(per_message * n))
    _, messages, *_ = assert_agree("quantize", x, messages, *cases.plain(format))
    assert_agree("dequantize", messages, torch.ones(rows, n, dtype=dtype), *cases.plain(format))


@settings(max_examples=50)
@given(
    code_type=st.sampled_from(cases.CODE_TYPES),
    block=st.sampled_from((32, 64, 256)),
    count=st.integers(1, 17),
    groups=st.integers(1, 9),
    blocks=st.integers(1, 4),
)
def test_any_parts_of_a_sum_encode_the_same(
    code_type: str, block: int, count: int, groups: int, blocks: int
) -> None:
    format, part = QuantFormat(code_type, block), blocks * block
    messages = cases.random_messages(count, format, groups * part, seed=blocks)
    output = cases.garbage(groups, format.message_bytes(part))
    assert_agree("sum_quantize", messages, output, *cases.plain(format))
