"""The operators in torch, the substitute without a compiler, and the messages of invalid arguments."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_zpp.native.cache import BuildError
from megatron_zpp.ops import library, reference
from megatron_zpp.ops.adamw import AdamWScalars
from megatron_zpp.ops.formats import QuantFormat
from megatron_zpp.ops.library import load_operations
from megatron_zpp.ops.operations import Operations
from megatron_zpp.ops.toolchain import ARCHITECTURES, capability_problem
from tests.ops.agreement import assert_same_bits
from tests.ops.cases import adamw_scalars, adamw_states, garbage, plain

FORMAT = QuantFormat("int4", 32)
EIGHT = QuantFormat("int8", 64)
SCALARS = adamw_scalars()


def calls(scalars: AdamWScalars | None = None) -> dict[str, tuple[Any, ...]]:
    """Valid arguments for every operator."""
    packed = (scalars or adamw_scalars()).packed()
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


@pytest.mark.parametrize("name", calls())
def test_torch_may_trace_and_compile_the_operator(kernels: None, name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.megatron_zpp, name).default, calls()[name])


def test_tensors_without_storage_pass_the_same_checks(kernels: None) -> None:
    with FakeTensorMode():
        for name, args in calls().items():
            getattr(torch.ops.megatron_zpp, name)(*args)
        with pytest.raises(ValueError, match="sum_parts: shard must be float32"):
            torch.ops.megatron_zpp.sum_parts(torch.zeros(2, 8), torch.zeros(9), False)


def test_a_compiled_function_may_call_them(kernels: None) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        messages, output = x.new_zeros(2, EIGHT.message_bytes(256), dtype=torch.uint8), torch.empty_like(x)
        Operations(torch.ops.megatron_zpp, compiled=True).quantize(x * 2, messages, EIGHT)
        Operations(torch.ops.megatron_zpp, compiled=True).dequantize(messages, output, EIGHT)
        return output + 1

    x = torch.randn(4, 128)
    assert torch.equal(torch.compile(function, backend="aot_eager", fullgraph=True)(x), function(x))


def replaced(args: tuple[Any, ...], position: int, value: Any) -> tuple[Any, ...]:
    return (*args[:position], value, *args[position + 1 :])


REFUSALS = [
    ("quantize", 0, torch.randn(4, 128).double(), "quantize: input must be"),
    ("quantize", 0, torch.randn(128), "quantize: input must be"),
    ("quantize", 0, torch.randn(4, 100), "quantize: block must divide"),
    ("quantize", 0, torch.randn(128, 4).T, "quantize: input must"),
    ("quantize", 0, torch.randn(1, 128).expand(4, 128), "quantize: input must"),
    ("quantize", 0, torch.randn(5, 128), "quantize: messages must"),
    (
        "quantize",
        1,
        torch.zeros(2, 272, dtype=torch.int8),
        "quantize: messages must be uint8 of shape (2, 272)",
    ),
    (
        "quantize",
        1,
        torch.zeros(2, 256, dtype=torch.uint8),
        "quantize: messages must be uint8 of shape (2, 272)",
    ),
    ("quantize", 1, torch.zeros(2, 544, dtype=torch.uint8)[:, ::2], "quantize: messages must be contiguous"),
    ("quantize", 1, torch.zeros(0, 272, dtype=torch.uint8), "quantize: messages must"),
    ("quantize", 1, torch.zeros(544, dtype=torch.uint8), "quantize: messages must"),
    ("quantize", 2, "int5", "quantize: code_type must be int8 or int4, got int5"),
    ("quantize", 3, 48, "quantize: block must be a power of two from 32 to 2048, got 48"),
    ("quantize", 3, 0, "quantize: block must be a power of two from 32 to 2048, got 0"),
    ("quantize", 3, -32, "quantize: block must be a power of two from 32 to 2048, got -32"),
    ("quantize", 3, 4096, "quantize: block must be a power of two from 32 to 2048, got 4096"),
    ("dequantize", 1, torch.zeros(4, 128, dtype=torch.int32), "dequantize: output must be"),
    ("dequantize", 0, torch.zeros(3, 272, dtype=torch.uint8), "dequantize: messages must"),
    ("dequantize", 2, "fp4", "dequantize: code_type must be int8 or int4, got fp4"),
    ("sum_quantize", 0, torch.zeros(3, 150, dtype=torch.uint8), "sum_quantize: messages must"),
    ("sum_quantize", 0, torch.zeros(0, 144, dtype=torch.uint8), "sum_quantize: messages must"),
    ("sum_quantize", 1, torch.zeros(3, 100, dtype=torch.uint8), "sum_quantize: output must"),
    (
        "sum_quantize",
        1,
        torch.zeros(2, 100, dtype=torch.uint8),
        "sum_quantize: output must be uint8 of shape",
    ),
    ("sum_quantize", 1, torch.zeros(16, 48, dtype=torch.uint8), "sum_quantize: output must"),
    ("sum_quantize", 2, "fp8", "sum_quantize: code_type must be int8 or int4, got fp8"),
    ("sum_quantize", 3, 33, "sum_quantize: block must be a power of two from 32 to 2048, got 33"),
    ("sum_into", 0, torch.zeros(3, 143, dtype=torch.uint8), "sum_into: messages must"),
    ("sum_into", 1, torch.zeros(255), "sum_into: "),
    (
        "sum_into",
        1,
        torch.zeros(256, dtype=torch.bfloat16),
        "sum_into: shard must be float32 of shape (256,)",
    ),
    ("sum_into", 1, torch.zeros(512)[::2], "sum_into: shard must be contiguous"),
    ("sum_parts", 0, torch.zeros(0, 256), "sum_parts: parts must"),
    ("sum_parts", 0, torch.zeros(256), "sum_parts: parts must"),
    ("sum_parts", 0, torch.zeros(3, 256).long(), "sum_parts: parts must"),
    (
        "sum_parts",
        0,
        torch.zeros(256, 3).T,
        "sum_parts: parts must have contiguous rows at least 256 elements",
    ),
    (
        "sum_parts",
        0,
        torch.zeros(1, 256).expand(3, 256),
        "sum_parts: parts must have contiguous rows at least",
    ),
    ("sum_parts", 3, torch.zeros(255), "sum_parts: own must be float32 of shape (256,)"),
    ("sum_parts", 3, torch.zeros(256).half(), "sum_parts: own must be float32 of shape (256,)"),
    ("sum_parts", 3, torch.zeros(512)[::2], "sum_parts: own must be contiguous"),
    ("sum_parts", 4, 3, "sum_parts: group_rank must be from 0 to 2, got 3"),
    ("sum_parts", 4, -1, "sum_parts: group_rank must be from 0 to 2, got -1"),
    ("sum_parts", 5, torch.zeros(2), "sum_parts: squares must be float32 of shape (1,)"),
    ("sum_parts", 1, torch.zeros(255), "sum_parts: shard must be float32 of shape (256,)"),
    (
        "sum_squares",
        0,
        torch.zeros(511),
        "sum_squares: input must be contiguous float32, bfloat16 or float16 of",
    ),
    ("sum_squares", 0, torch.zeros(2, 256), "sum_squares: input must"),
    ("sum_squares", 0, torch.zeros(1024)[::2], "sum_squares: input must be contiguous"),
    ("sum_squares", 0, torch.zeros(512).long(), "sum_squares: input must"),
    ("sum_squares", 1, torch.zeros(3), "sum_squares: sums must be float32 of shape (2,)"),
    ("adamw", 0, torch.zeros(2, 128), "adamw: master must be float32 of shape (m,)"),
    ("adamw", 0, torch.zeros(256).half(), "adamw: master must be float32 of shape"),
    (
        "adamw",
        1,
        torch.zeros(256).double(),
        "adamw: gradient must be float32 or bfloat16 or float16 of shape",
    ),
    (
        "adamw_quantize",
        1,
        torch.zeros(256).half(),
        "adamw_quantize: gradient must be float32 of shape (256,)",
    ),
    ("adamw", 2, torch.zeros(255), "adamw: exp_avg must be float32 of shape (256,)"),
    ("adamw", 3, torch.zeros(512)[::2], "adamw: exp_avg_sq must be contiguous"),
    ("adamw", 4, torch.zeros(256), "adamw: gather_source must be"),
    ("adamw", 4, torch.zeros(255).half(), "adamw: gather_source must be"),
    (
        "adamw",
        5,
        replace(SCALARS, divisor=torch.zeros(1)).packed()[0],
        "adamw: divisor must be float32 of shape ()",
    ),
    (
        "adamw",
        5,
        replace(SCALARS, found_inf=torch.zeros(()).double()).packed()[0],
        "adamw: found_inf must be float32 of shape ()",
    ),
    (
        "adamw",
        5,
        replace(SCALARS, bias_corrections=torch.zeros(3)).packed()[0],
        "adamw: bias_corrections must be float32 of shape (2,)",
    ),
    (
        "adamw",
        5,
        [torch.zeros(()), torch.zeros(())],
        "adamw: device_scalars must be [divisor, found_inf, bias_corrections], got 2 tensors",
    ),
    (
        "adamw_quantize",
        6,
        [1e-3, 0.9, 0.95, 1e-8],
        "adamw_quantize: host_scalars must be [learning_rate, beta1, beta2, eps, weight_decay], got 4",
    ),
    ("adamw", 7, 257, "adamw: decayed must be from 0 to 256, got 257"),
    ("adamw", 7, -1, "adamw: decayed must be from 0 to 256, got -1"),
    (
        "adamw_quantize",
        4,
        torch.zeros(256, dtype=torch.uint8),
        "adamw_quantize: message must be uint8 of shape (272,)",
    ),
    ("adamw_quantize", 9, 512, "adamw_quantize: master must hold whole blocks of 512 elements"),
    ("adamw_quantize", 9, 100, "adamw_quantize: block must be a power of two from 32 to 2048, got 100"),
]


@pytest.mark.parametrize(("name", "position", "value", "words"), REFUSALS)
def test_kernels_and_reference_refuse_in_the_same_words(
    kernels: None, name: str, position: int, value: Any, words: str
) -> None:
    args = replaced(calls()[name], position, value)
    before = [arg.clone() for arg in args if isinstance(arg, torch.Tensor)]
    said = []
    for implementation in (reference, torch.ops.megatron_zpp):
        with pytest.raises(ValueError, match="^" + re.escape(words)) as raised:
            getattr(implementation, name)(*args)
        said.append(str(raised.value).splitlines()[0])
    assert said[0] == said[1]
    after = [arg for arg in args if isinstance(arg, torch.Tensor)]
    for old, new in zip(before, after, strict=True):
        assert_same_bits(new, old, "an argument of a refused call")


def test_every_operation_of_the_object_runs_the_operator() -> None:
    """Formats and scalars are passed as the operators' arguments, in their order."""
    seen = {}

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            return lambda *args: seen.setdefault(name, args)

    given, operations = calls(SCALARS), Operations(Recorder(), compiled=True)
    operations.quantize(*given["quantize"][:2], EIGHT)
    operations.dequantize(*given["dequantize"][:2], EIGHT)
    operations.sum_quantize(*given["sum_quantize"][:2], FORMAT)
    operations.sum_into(*given["sum_into"][:2], FORMAT, add=True)
    operations.sum_parts(
        *given["sum_parts"][:2],
        own=given["sum_parts"][3],
        group_rank=1,
        squares=given["sum_parts"][5],
    )
    operations.sum_squares(*given["sum_squares"])
    operations.adamw(*given["adamw"][:5], SCALARS, decayed=100)
    operations.adamw_quantize(*given["adamw_quantize"][:5], EIGHT, SCALARS, decayed=100)
    assert seen.keys() == given.keys()
    for name, args in given.items():
        for mine, wanted in zip(seen[name], args, strict=True):
            assert type(mine) is type(wanted), name
            if not isinstance(wanted, torch.Tensor):
                assert mine == wanted, name


def broken_build(**_: object) -> Path:
    raise BuildError("the C++ compiler g++ is not installed\nand more")


def test_without_a_compiler_the_reference_serves_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    monkeypatch.setattr(library, "build", broken_build)
    monkeypatch.setattr(library, "loaded", lambda: False)
    operations = load_operations("cpu", require_kernels=False, say=said.append)
    operations.sum_parts(torch.ones(2, 3), torch.ones(3))
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


def test_device_code_is_compiled_for_the_oldest_gpu_that_it_runs_on() -> None:
    compiled = [int(number) for line in ARCHITECTURES for number in re.findall(r"compute_(\d+),", line)]
    assert min(compiled) == 80
    assert capability_problem((7, 5)) is not None
    for newer in ((8, 0), (8, 6), (9, 0), (12, 0)):
        assert capability_problem(newer) is None


def test_with_kernels_nothing_is_said(kernels: None) -> None:
    said: list[str] = []
    operations = load_operations("cpu", require_kernels=True, say=said.append)
    shard = torch.ones(3)
    operations.sum_parts(torch.ones(2, 3), shard, add=True)
    assert shard.tolist() == [3.0] * 3
    assert said == []


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA here")
def test_kernels_without_cuda_do_not_serve_a_gpu(kernels: None) -> None:
    with pytest.raises(BuildError, match="built without CUDA"):
        load_operations("cuda", require_kernels=True, say=print)


def test_adamw_follows_torchs() -> None:
    """Ten steps against torch.optim.AdamW in fp64.

    A step rounds fewer than 16 times, each by 2^-24 of a number no larger than the weight or the update, and
    the update is the learning rate times at most 10 (the moments' ratio at the start).
    """
    generator, m, decayed, rate = torch.Generator().manual_seed(8), 3000, 1000, 1e-2
    start = torch.randn(m, generator=generator)
    parts = [torch.nn.Parameter(part.double()) for part in (start[:decayed], start[decayed:])]
    groups = [{"params": parts[:1], "weight_decay": 0.1}, {"params": parts[1:], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-8)
    master, exp_avg, exp_avg_sq = start.clone(), torch.zeros(m), torch.zeros(m)
    gather_source = torch.empty(m, dtype=torch.bfloat16)
    for step in range(1, 11):
        gradient = torch.randn(m, generator=generator)
        for part, own in zip(parts, (gradient[:decayed], gradient[decayed:]), strict=True):
            part.grad = own.double()
        adamw.step()
        reference.adamw(
            *(master, gradient * 4, exp_avg, exp_avg_sq, gather_source),
            *adamw_scalars(divisor=4.0, step=step, learning_rate=rate).packed(),
            decayed,
        )
    exact = torch.cat([part.detach() for part in parts])
    assert ((master - exact).abs() <= 10 * 16 * 2.0**-24 * (exact.abs() + 10 * rate)).all()
    assert torch.equal(gather_source, master.bfloat16())
