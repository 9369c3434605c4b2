"""Sizes of messages, and invalid formats."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.ops.formats import QuantFormat
from tests.ops.cases import BLOCKS, CODE_TYPES

formats = st.builds(QuantFormat, st.sampled_from(CODE_TYPES), st.sampled_from(BLOCKS))


@pytest.mark.parametrize(
    ("format", "numel", "size"),
    [
        (QuantFormat(), 4096, 4096 + 16 * 2),
        (QuantFormat(), 256, 272),  # 258 and padding
        (QuantFormat("int4", 128), 1024, 512 + 16),
        (QuantFormat("int4", 2048), 0, 0),
        (QuantFormat(), 2**40, 2**40 + 2**33),
    ],
)
def test_message_bytes(format: QuantFormat, numel: int, size: int) -> None:
    assert format.message_bytes(numel) == size


@given(formats, st.integers(0, 10**6))
def test_a_size_says_how_many_elements(format: QuantFormat, blocks: int) -> None:
    numel = blocks * format.block
    size = format.message_bytes(numel)
    assert size % 16 == 0
    assert 0 <= size - blocks * format.block_bytes < 16
    assert format.numel_of(torch.empty(2, size, device="meta")) == numel


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"code_type": "int5"}, "code_type must be int8 or int4, got int5"),
        *(
            ({"block": n}, f"block must be a power of two from 32 to 2048, got {n}")
            for n in (48, 16, 4096, -64)
        ),
    ],
)
def test_what_is_no_format(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match="^" + message.replace(".", r"\.") + "$"):
        QuantFormat(**settings)


@pytest.mark.parametrize("numel", [-256, 255, 257])
def test_only_whole_blocks_make_a_message(numel: int) -> None:
    with pytest.raises(ValueError, match=f"whole blocks of 256 elements, got {numel} elements"):
        QuantFormat().message_bytes(numel)
