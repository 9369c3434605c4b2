"""The operations, formats and buffers that benchmarks/quantization.py measures."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import plain_quantization as plain
from megatron_zpp.ops.adamw import AdamWScalars
from megatron_zpp.ops.formats import LloydMaxFormat, QuantFormat
from megatron_zpp.ops.operations import Operations
from megatron_zpp.ops.signs import Signs
from megatron_zpp.ops.state_codes import Rounding, encode

INT8, INT4 = QuantFormat("int8", 256), QuantFormat("int4", 128)
FOUR, SIGNS = LloydMaxFormat(4, 256), Signs(seed=0, unit=1, iteration=2)


class Buffers(NamedTuple):
    """One set of buffers: the bytes that a call moves, our call, and the arguments of the plain functions."""

    bytes: int
    ours: Callable[[], None]
    plain: tuple[Any, ...]


class Case(NamedTuple):
    """`build(ops, elements, device)` makes a set of buffers; `written` is compiled, `eager` is not."""

    operation: str
    variant: str
    build: Callable[[Operations, int, torch.device], Buffers]
    written: Callable[..., Any]
    eager: Callable[..., Any]
    element_bytes: int = 2  # of the numbers that a size in megabytes refers to


def all_cases() -> list[Case]:
    """All cases, in the order in which a step uses the operations."""
    return [*_one_message(), *_several_messages(), *_steps(), *_lloyd_max()]


def _one_message() -> list[Case]:
    named = (("int8/256", INT8), ("int4/128", INT4))
    cases = []
    for name, format in named:
        written = partial(plain.quantize, format=format)
        cases.append(Case("quantize", name, partial(_quantize, format=format), written, written))
    for name, format in named:
        into = partial(plain.dequantize_into, format=format)
        cases.append(Case("dequantize", name, partial(_dequantize, format=format), into, into))
    return cases


def _several_messages() -> list[Case]:
    cases = []
    encode, add = partial(plain.sum_quantize, format=INT4), partial(plain.sum_into, format=INT4)
    for count in (2, 4, 8):
        name = f"int4/128, {count} messages"
        cases.append(Case("sum_quantize", name, partial(_sum_quantize, count=count), encode, encode))
        cases.append(Case("sum_into", name, partial(_sum_into, count=count), add, add))
        build = partial(_sum_parts, count=count)
        cases.append(Case("sum_parts", f"bf16, {count} parts", build, plain.sum_parts, plain.sum_parts))
    both = plain.sum_parts_and_squares
    cases.append(Case("sum_parts", "bf16, 2 parts, with squares", _sum_parts_and_squares, both, both))
    return cases


def _steps() -> list[Case]:
    written = partial(plain.adamw_quantize, format=INT8)
    fused = partial(plain.fused_adamw_quantize, format=INT8)
    return [
        Case("sum_squares", "bf16", _sum_squares, plain.sum_squares, plain.sum_squares),
        Case("adamw", "writes bf16", _adamw, plain.adamw, plain.fused_adamw, 4),
        Case("adamw_quantize", "int8/256", _adamw_quantize, written, fused, 4),
        Case("adamw_compact", "fp8, bf16+8", _adamw_compact, plain.adamw, plain.fused_adamw, 4),
    ]


def _lloyd_max() -> list[Case]:
    encode, move = plain.quantize_difference, plain.add_difference
    cases = [
        Case("quantize_difference", "delta4", _quantize_difference, encode, encode, 4),
        Case("add_difference", "delta4, 2 messages", _add_difference, move, move, 4),
    ]
    for dtype in (torch.float32, torch.bfloat16):
        name = f"rotated4, {str(dtype).removeprefix('torch.')}"
        build = partial(_quantize_rotated, dtype=dtype)
        rotate = plain.quantize_rotated
        cases.append(Case("quantize_rotated", name, build, rotate, rotate, dtype.itemsize))
    for count in (2, 4):
        build = partial(_sum_rotated, count=count)
        add = plain.sum_rotated
        cases.append(Case("sum_rotated", f"rotated4, {count} messages", build, add, add))
    return cases


def _quantize_difference(ops: Operations, elements: int, device: torch.device) -> Buffers:
    weights, reference = (torch.randn(elements, device=device) for _ in range(2))
    message = torch.empty(FOUR.message_bytes(elements), dtype=torch.uint8, device=device)
    ours = partial(ops.quantize_difference, weights, reference, message, FOUR)
    moved = weights.nbytes + reference.nbytes + message.nbytes
    return Buffers(moved, ours, (weights, reference, plain.lloyd_max(device)[0]))


def _add_difference(ops: Operations, elements: int, device: torch.device) -> Buffers:
    weights, reference = (torch.randn(elements, device=device) for _ in range(2))
    boundaries, levels = plain.lloyd_max(device)
    messages = torch.empty(2, FOUR.message_bytes(elements // 2), dtype=torch.uint8, device=device)
    halves = zip(weights.view(2, -1), reference.view(2, -1), messages, strict=True)
    for weights_of, reference_of, message in halves:
        ops.quantize_difference(weights_of, reference_of, message, FOUR)
    theirs = (*plain.quantize_difference(weights, reference, boundaries), reference.clone(), levels)
    ours = partial(ops.add_difference, messages, reference, FOUR)
    return Buffers(messages.nbytes + 2 * reference.nbytes, ours, theirs)


def _signs(elements: int, device: torch.device) -> Tensor:
    return torch.randint(0, 2, (elements,), device=device).bfloat16() * 2 - 1


def _quantize_rotated(ops: Operations, elements: int, device: torch.device, *, dtype: torch.dtype) -> Buffers:
    x = torch.randn(elements, device=device).to(dtype)
    messages = torch.empty(2, FOUR.message_bytes(elements // 2), dtype=torch.uint8, device=device)
    theirs = (x, _signs(elements, device), plain.hadamard(device, 256), *plain.lloyd_max(device))
    return Buffers(
        x.nbytes + messages.nbytes, partial(ops.quantize_rotated, x, messages, FOUR, SIGNS), theirs
    )


def _sum_rotated(ops: Operations, elements: int, device: torch.device, *, count: int) -> Buffers:
    m = elements // count
    tables, signs, matrix = plain.lloyd_max(device), _signs(m, device), plain.hadamard(device, 256)
    messages = torch.empty(count, FOUR.message_bytes(m), dtype=torch.uint8, device=device)
    quantized = []
    for message in messages:
        x = torch.randn(m, device=device)
        ops.quantize_rotated(x, message[None], FOUR, SIGNS)
        quantized.append(plain.quantize_rotated(x, signs, matrix, *tables))
    shard = torch.empty(m, device=device)
    theirs = (quantized, torch.empty_like(shard), signs, matrix, tables[1])
    return Buffers(
        messages.nbytes + shard.nbytes, partial(ops.sum_rotated, messages, shard, FOUR, SIGNS), theirs
    )


def _numbers(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def _messages(ops: Operations, x: Tensor, format: QuantFormat) -> tuple[Tensor, list[plain.Quantized]]:
    """x (P, m) encoded as our messages, and by the plain functions."""
    messages = torch.empty(len(x), format.message_bytes(x.shape[1]), dtype=torch.uint8, device=x.device)
    ops.quantize(x, messages, format)
    return messages, [plain.quantize(row, format=format) for row in x]


def _quantize(ops: Operations, elements: int, device: torch.device, *, format: QuantFormat) -> Buffers:
    x = _numbers(1, elements, device=device)
    message = torch.empty(1, format.message_bytes(elements), dtype=torch.uint8, device=device)
    ours = partial(ops.quantize, x, message, format)
    return Buffers(x.nbytes + message.nbytes, ours, (x,))


def _dequantize(ops: Operations, elements: int, device: torch.device, *, format: QuantFormat) -> Buffers:
    output = _numbers(1, elements, device=device)
    message, (quantized,) = _messages(ops, output, format)
    theirs = (*quantized, torch.empty_like(output))
    return Buffers(output.nbytes + message.nbytes, partial(ops.dequantize, message, output, format), theirs)


def _sum_quantize(
    ops: Operations,
    elements: int,
    device: torch.device,
    *,
    count: int,
) -> Buffers:
    m = elements // count
    messages, quantized = _messages(ops, _numbers(count, m, device=device), INT4)
    output = torch.empty(1, INT4.message_bytes(m), dtype=torch.uint8, device=device)
    ours = partial(ops.sum_quantize, messages, output, INT4)
    return Buffers(messages.nbytes + output.nbytes, ours, (quantized,))


def _sum_into(ops: Operations, elements: int, device: torch.device, *, count: int) -> Buffers:
    m = elements // count
    messages, quantized = _messages(ops, _numbers(count, m, device=device), INT4)
    shard = torch.empty(m, device=device)
    ours = partial(ops.sum_into, messages, shard, INT4)
    return Buffers(messages.nbytes + shard.nbytes, ours, (quantized, torch.empty_like(shard)))


def _sum_parts(ops: Operations, elements: int, device: torch.device, *, count: int) -> Buffers:
    parts, shard = (
        _numbers(count, elements // count, device=device),
        torch.empty(elements // count, device=device),
    )
    ours = partial(ops.sum_parts, parts, shard)
    return Buffers(parts.nbytes + shard.nbytes, ours, (parts, torch.empty_like(shard)))


def _sum_parts_and_squares(ops: Operations, elements: int, device: torch.device) -> Buffers:
    m = elements // 2
    parts, shard = _numbers(2, m, device=device), torch.empty(m, device=device)
    squares = torch.empty(m // 256, device=device)
    ours = partial(ops.sum_parts, parts, shard, squares=squares)
    plain_buffers = (parts, torch.empty_like(shard), torch.empty_like(squares))
    return Buffers(parts.nbytes + shard.nbytes + squares.nbytes, ours, plain_buffers)


def _sum_squares(ops: Operations, elements: int, device: torch.device) -> Buffers:
    x, sums = _numbers(1, elements, device=device)[0], torch.empty(elements // 256, device=device)
    return Buffers(x.nbytes + sums.nbytes, partial(ops.sum_squares, x, sums), (x, torch.empty_like(sums)))


def _states(elements: int, device: torch.device) -> tuple[list[Tensor], AdamWScalars]:
    """Weights, gradients and both moments; and the scalars of the first step."""
    states = [torch.randn(elements, device=device) for _ in range(4)]
    states[3].square_()
    return states, AdamWScalars(
        divisor=torch.ones((), device=device),
        found_inf=torch.zeros((), device=device),
        bias_corrections=torch.tensor([0.1, 0.05], device=device),
        learning_rate=3e-4,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        weight_decay=0.1,
    )


def _adamw(ops: Operations, elements: int, device: torch.device) -> Buffers:
    states, scalars = _states(elements, device)
    states.append(torch.empty(elements, device=device, dtype=torch.bfloat16))
    tensors: tuple[Any, ...] = (*states, scalars)
    ours = partial(ops.adamw, *tensors, decayed=elements)
    return Buffers(7 * states[0].nbytes + states[4].nbytes, ours, tuple(states))


def _adamw_compact(ops: Operations, elements: int, device: torch.device) -> Buffers:
    """The plain functions step fp32 states."""
    states, scalars = _states(elements, device)
    states.append(torch.empty(elements, device=device, dtype=torch.bfloat16))
    upper, corrections = states[0].bfloat16(), torch.zeros(elements, dtype=torch.uint8, device=device)
    moments = (*encode(states[2], "fp8", second=False), *encode(states[3], "fp8", second=True))
    held = (corrections, *moments, upper)
    gradient, step = states[1].bfloat16(), torch.ones((), device=device)
    ours = partial(
        ops.adamw_compact,
        corrections,
        gradient,
        *moments,
        upper,
        scalars,
        Rounding(step, 0),
        decayed=elements,
    )
    return Buffers(
        gradient.nbytes + 2 * sum(each.nbytes for each in held if each is not None), ours, tuple(states)
    )


def _adamw_quantize(ops: Operations, elements: int, device: torch.device) -> Buffers:
    states, scalars = _states(elements, device)
    message = torch.empty(INT8.message_bytes(elements), dtype=torch.uint8, device=device)
    tensors: tuple[Any, ...] = (*states, message, INT8, scalars)
    ours = partial(ops.adamw_quantize, *tensors, decayed=elements)
    return Buffers(7 * states[0].nbytes + message.nbytes, ours, tuple(states))
