"""The operators in torch, the substitute without a compiler, and the messages of invalid arguments."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_zpp.native.cache import BuildError
from megatron_zpp.ops import library
from megatron_zpp.ops.formats import QuantFormat
from megatron_zpp.ops.library import load_operations
from tests.ops.agreement import assert_same_bits
from tests.ops.cases import adamw_scalars, adamw_states, garbage, plain

FORMAT = QuantFormat("int4", 32)
EIGHT = QuantFormat("int8", 64)
SCALARS = adamw_scalars()


def calls() -> dict[str, tuple[Any, ...]]:
    """Valid arguments for every operator."""
    packed = adamw_scalars().packed()
    messages, shard = torch.zeros(3, FORMAT.message_bytes(256), dtype=torch.uint8), torch.zeros(256)
    message = garbage(EIGHT.message_bytes(256))
    quantized = torch.zeros(2, EIGHT.message_bytes(256), dtype=torch.uint8)
    return {
        "quantize": (torch.randn(4, 128), quantized, *plain(EIGHT)),
        "dequantize": (quantized, torch.zeros(4, 128), *plain(EIGHT)),
        "sum_quantize": (
            *(messages, torch.zeros(2, FORMAT.message_bytes(128), dtype=torch.uint8)),
            *plain(FORMAT),
        ),
        "sum_into": (messages, shard, *plain(FORMAT), True),
        "sum_parts": (torch.randn(3, 256), shard, False, torch.randn(256), 1, torch.zeros(1)),
        "sum_squares": (torch.randn(512), torch.zeros(2)),
        "adamw": (*adamw_states(256), garbage(256, dtype=torch.bfloat16), *packed, 100),
        "adamw_quantize": (*adamw_states(256), message, *packed, 100, *plain(EIGHT)),
    }


BYTES = torch.uint8
REFUSALS = [  # operator, position and value of the wrong argument, what is said
    ("quantize", 0, torch.randn(4, 128).double(), "input must be"),
    ("quantize", 0, torch.randn(128), "input must be"),
    ("quantize", 0, torch.randn(4, 100), "block must divide"),
    ("quantize", 0, torch.randn(128, 4).T, "input must have contiguous rows"),
    ("quantize", 0, torch.randn(1, 128).expand(4, 128), "input must have contiguous rows"),
    ("quantize", 0, torch.randn(5, 128), "messages must"),
    ("quantize", 1, torch.zeros(2, 272).char(), "messages must be uint8 of shape (2, 272)"),
    ("quantize", 1, torch.zeros(2, 256).byte(), "messages must be uint8 of shape (2, 272)"),
    ("quantize", 1, torch.zeros(0, 272, dtype=BYTES), "messages must"),
    ("quantize", 1, torch.zeros(544, dtype=BYTES), "messages must"),
    ("quantize", 2, "int5", "code_type must be int8 or int4, got int5"),
    *(("quantize", 3, b, f"block must be a power of two from 32 to 2048, got {b}") for b in (48, 0, 4096)),
    ("dequantize", 1, torch.zeros(4, 128).int(), "output must be"),
    ("dequantize", 0, torch.zeros(3, 272, dtype=BYTES), "messages must"),
    ("sum_quantize", 0, torch.zeros(3, 150, dtype=BYTES), "messages must"),
    ("sum_quantize", 0, torch.zeros(0, 144, dtype=BYTES), "messages must"),
    ("sum_quantize", 1, torch.zeros(3, 100, dtype=BYTES), "output must"),
    ("sum_quantize", 1, torch.zeros(2, 100, dtype=BYTES), "output must be uint8 of shape"),
    ("sum_quantize", 1, torch.zeros(16, 48, dtype=BYTES), "output must"),
    ("sum_quantize", 2, "fp8", "code_type must be int8 or int4, got fp8"),
    ("sum_into", 0, torch.zeros(3, 143, dtype=BYTES), "messages must"),
    ("sum_into", 1, torch.zeros(255), "shard must be float32 of shape (256,)"),
    ("sum_into", 1, torch.zeros(256).bfloat16(), "shard must be float32 of shape (256,)"),
    ("sum_into", 1, torch.zeros(512)[::2], "shard must be contiguous"),
    ("sum_parts", 0, torch.zeros(0, 256), "parts must"),
    ("sum_parts", 0, torch.zeros(256), "parts must"),
    ("sum_parts", 0, torch.zeros(3, 256).long(), "parts must"),
    ("sum_parts", 0, torch.zeros(256, 3).T, "parts must have contiguous rows at least 256 elements"),
    ("sum_parts", 0, torch.zeros(1, 256).expand(3, 256), "parts must have contiguous rows at least"),
    ("sum_parts", 3, torch.zeros(255), "own must be float32 of shape (256,)"),
    ("sum_parts", 3, torch.zeros(256).half(), "own must be float32 of shape (256,)"),
    ("sum_parts", 4, 3, "group_rank must be from 0 to 2, got 3"),
    ("sum_parts", 4, -1, "group_rank must be from 0 to 2, got -1"),
    ("sum_parts", 5, torch.zeros(2), "squares must be float32 of shape (1,)"),
    ("sum_parts", 1, torch.zeros(255), "shard must be float32 of shape (256,)"),
    ("sum_squares", 0, torch.zeros(511), "input must be contiguous float32, bfloat16 or float16 of"),
    ("sum_squares", 0, torch.zeros(2, 256), "input must"),
    ("sum_squares", 0, torch.zeros(1024)[::2], "input must be contiguous"),
    ("sum_squares", 0, torch.zeros(512).long(), "input must"),
    ("sum_squares", 1, torch.zeros(3), "sums must be float32 of shape (2,)"),
    ("adamw", 0, torch.zeros(2, 128), "master must be float32 of shape (m,)"),
    ("adamw", 0, torch.zeros(256).half(), "master must be float32 of shape"),
    ("adamw", 1, torch.zeros(256).double(), "gradient must be float32 or bfloat16 or float16 of shape"),
    ("adamw_quantize", 1, torch.zeros(256).half(), "gradient must be float32 of shape (256,)"),
    ("adamw", 2, torch.zeros(255), "exp_avg must be float32 of shape (256,)"),
    ("adamw", 3, torch.zeros(512)[::2], "exp_avg_sq must be contiguous"),
    ("adamw", 4, torch.zeros(256), "gather_source must be"),
    ("adamw", 4, torch.zeros(255).half(), "gather_source must be"),
    ("adamw", 5, replace(SCALARS, divisor=torch.zeros(1)).packed()[0], "divisor must be float32 of shape ()"),
    ("adamw", 5, replace(SCALARS, found_inf=torch.zeros(()).double()).packed()[0], "found_inf must be"),
    ("adamw", 5, replace(SCALARS, bias_corrections=torch.zeros(3)).packed()[0], "bias_corrections must be"),
    (
        "adamw",
        5,
        [torch.zeros(())] * 2,
        "device_scalars must be [divisor, found_inf, bias_corrections], got 2",
    ),
    ("adamw_quantize", 6, [1e-3, 0.9, 0.95, 1e-8], "host_scalars must be [learning_rate, beta1, beta2, eps,"),
    ("adamw", 7, 257, "decayed must be from 0 to 256, got 257"),
    ("adamw", 7, -1, "decayed must be from 0 to 256, got -1"),
    ("adamw_quantize", 4, torch.zeros(256, dtype=BYTES), "message must be uint8 of shape (272,)"),
    ("adamw_quantize", 9, 512, "master must hold whole blocks of 512 elements"),
    ("adamw_quantize", 9, 100, "block must be a power of two from 32 to 2048, got 100"),
]


@pytest.mark.parametrize(("name", "position", "value", "words"), REFUSALS)
def test_kernels_refuse_what_is_not_valid(
    kernels: None, name: str, position: int, value: Any, words: str
) -> None:
    given = calls()[name]
    args = (*given[:position], value, *given[position + 1 :])
    before = [arg.clone() for arg in args if isinstance(arg, torch.Tensor)]
    with pytest.raises(ValueError, match="^" + re.escape(f"{name}: {words}")):
        getattr(torch.ops.megatron_zpp, name)(*args)
    after = [arg for arg in args if isinstance(arg, torch.Tensor)]
    for old, new in zip(before, after, strict=True):
        assert_same_bits(new, old, "an argument of a refused call")


def broken_build(**_: object) -> Path:
    raise BuildError("the C++ compiler g++ is not installed\nand more")


def test_without_a_compiler_the_reference_serves_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    monkeypatch.setattr(library, "build", broken_build)
    monkeypatch.setattr(library, "loaded", lambda: False)
    operations = load_operations("cpu", require_kernels=False, say=said.append)
    operations.sum_parts(torch.ones(2, 3), torch.ones(3))
    (warning,) = said
    assert "\n" not in warning
    assert "g++ is not installed" in warning
    assert "python -m megatron_zpp.ops.build" in warning
    with pytest.raises(BuildError, match=r"g\+\+ is not installed"):
        load_operations("cpu", require_kernels=True, say=said.append)
    assert len(said) == 1


def test_the_reference_serves_gpus_that_are_older_than_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    said: list[str] = []
    assert not load_operations("cuda", require_kernels=False, say=said.append).compiled
    (warning,) = said
    assert "need a GPU of compute capability 8.0 or later; this one has 7.5" in warning
    with pytest.raises(BuildError, match=r"this one has 7\.5"):
        load_operations("cuda", require_kernels=True, say=said.append)


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA here")
def test_kernels_without_cuda_serve_cpus_alone(kernels: None) -> None:
    assert load_operations("cpu", require_kernels=True, say=pytest.fail).compiled
    with pytest.raises(BuildError, match="built without CUDA"):
        load_operations("cuda", require_kernels=True, say=print)
