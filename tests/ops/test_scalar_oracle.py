"""The reference equals the format's description in exact fractions, one number at a time."""

import itertools

import numpy as np
import pytest
import torch

from megatron_zpp.ops import reference
from megatron_zpp.ops.formats import QuantFormat
from megatron_zpp.ops.signs import philox
from tests.ops import scalar_oracle
from tests.ops.awkward import KINDS, awkward
from tests.ops.cases import CODE_TYPES, adamw_scalars, garbage, plain

ALL_ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ],
)
def test_philox_gives_random123s_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    given = tuple(torch.tensor([word]) for word in counter)
    assert tuple(word.item() for word in philox(given, key)) == words


@pytest.mark.parametrize("code_type", CODE_TYPES)
def test_messages(code_type: str) -> None:
    """Every kind of block except negative zeros, which fractions lack."""
    block = 32
    x = awkward(2, block * KINDS, block, torch.float32)
    x = torch.where(x == 0, 0.0, x)
    messages = garbage(1, QuantFormat(code_type, block).message_bytes(x.numel()))
    reference.quantize(x, messages, code_type, block)
    expected = scalar_oracle.message_of(x.flatten().numpy(), code_type, block)
    assert bytes(messages[0].tolist()) == expected


def test_a_message_of_two_rows() -> None:
    """Message g holds the rows from g · R/G on."""
    format, groups = QuantFormat("int4", 32), 3
    x = torch.randn(6, 96, generator=torch.Generator().manual_seed(2))
    messages = garbage(groups, format.message_bytes(192))
    reference.quantize(x, messages, *plain(format))
    for group in range(groups):
        rows = [2 * group, 2 * group + 1]
        expected = scalar_oracle.message_of(x[rows].flatten().numpy(), "int4", 32)
        assert bytes(messages[group].tolist()) == expected


@pytest.mark.parametrize("code_type", CODE_TYPES)
def test_every_code_decodes(code_type: str) -> None:
    """All codes, with a scale that is no power of two."""
    format, stored = QuantFormat(code_type, 256), torch.tensor([-0.3]).bfloat16()
    message = torch.zeros(1, format.message_bytes(256), dtype=torch.uint8)
    numbers = torch.arange(256) if code_type == "int8" else torch.arange(128) * 2  # 16 times every code
    used = 256 * format.bits // 8
    message[0, :used] = numbers.to(torch.uint8)
    message[0, used : used + 2] = stored.view(torch.uint8)
    output = torch.empty(1, 256)
    reference.dequantize(message, output, *plain(format))
    if code_type == "int4":
        coded = [code for byte in message[0, :used].tolist() for code in (byte & 15, byte >> 4)]
        coded = [code - 16 if code > 7 else code for code in coded]
    else:
        coded = [code - 256 if code > 127 else code for code in range(256)]
    scale = scalar_oracle.Fraction(stored.item())
    for code, value in zip(coded, output[0].tolist(), strict=True):
        assert value == scalar_oracle.decode_one(code, scale), code


def test_sums_are_in_order() -> None:
    """sum_into, sum_parts and sum_quantize equal numpy's fp32 sums, one message after the other."""
    format = QuantFormat("int8", 64)
    parts = (
        torch.randn(5, 192, generator=torch.Generator().manual_seed(4)) * torch.logspace(-3, 3, 5)[:, None]
    )
    messages = garbage(5, format.message_bytes(192))
    reference.quantize(parts, messages, *plain(format))
    decoded = torch.empty(5, 192)
    reference.dequantize(messages, decoded, *plain(format))
    total = decoded[0].numpy()
    for row in decoded[1:].numpy():
        total = total + row
    before = torch.randn(192, generator=torch.Generator().manual_seed(5))

    shard = before.clone()
    reference.sum_into(messages, shard, *plain(format), True)
    assert np.array_equal(shard.numpy(), before.numpy() + total)
    reference.sum_parts(decoded, shard, False)
    assert np.array_equal(shard.numpy(), total)

    output = garbage(1, format.message_bytes(192))
    reference.sum_quantize(messages, output, *plain(format))
    assert bytes(output[0].tolist()) == scalar_oracle.message_of(total, "int8", 64)


@pytest.mark.parametrize(("divisor", "weight_decay"), list(itertools.product((1.0, 3.7), (0.0, 0.1))))
def test_adamw_one_element_at_a_time(divisor: float, weight_decay: float) -> None:
    generator = torch.Generator().manual_seed(6)
    states = [*torch.randn(3, 40, generator=generator), torch.rand(40, generator=generator) ** 8]
    before = [state.clone() for state in states]
    scalars = adamw_scalars(divisor=divisor, weight_decay=weight_decay)
    reference.adamw(*states, None, *scalars.packed(), 25)
    for index in range(40):
        w, g, m, v = (state[index].item() for state in before)
        new = scalar_oracle.adamw_element(
            w,
            g,
            m,
            v,
            divisor=divisor,
            corrections=tuple(scalars.bias_corrections.tolist()),
            learning_rate=3e-4,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=weight_decay if index < 25 else 0.0,
        )
        assert new == tuple(states[place][index].item() for place in (0, 2, 3))
