"""The operations, formats and buffers that benchmarks/quantization.py measures."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_zpp.ops.adamw import AdamWScalars
from megatron_zpp.ops.formats import LloydMaxFormat, QuantFormat
from megatron_zpp.ops.operations import Operations
from megatron_zpp.ops.signs import Signs
from megatron_zpp.ops.state_codes import Rounding, encode

INT8, INT4 = QuantFormat("int8", 256), QuantFormat("int4", 128)
FOUR, SIGNS = LloydMaxFormat(4, 256), Signs(seed=0, unit=1, iteration=2)


class Buffers(NamedTuple):
    """One set of buffers: the bytes that a call moves, and the call."""

    bytes: int
    call: Callable[[], None]


class Case(NamedTuple):
    """`build(ops, elements, device)` makes a set of buffers."""

    operation: str
    variant: str
    build: Callable[[Operations, int, torch.device], Buffers]
    element_bytes: int = 2  # of the numbers that a size in megabytes refers to


def all_cases() -> list[Case]:
    """All cases, in the order in which a step uses the operations."""
    named = (("int8/256", INT8), ("int4/128", INT4))
    cases = [Case("quantize", name, partial(_quantize, format=format)) for name, format in named]
    cases += [Case("dequantize", name, partial(_dequantize, format=format)) for name, format in named]
    for count in (2, 4, 8):
        cases += [
            Case("sum_quantize", f"int4/128, {count} messages", partial(_sum_quantize, count=count)),
            Case("sum_into", f"int4/128, {count} messages", partial(_sum_into, count=count)),
            Case("sum_parts", f"bf16, {count} parts", partial(_sum_parts, count=count)),
        ]
    cases += [
        Case("sum_parts", "bf16, 2 parts, with squares", partial(_sum_parts, count=2, squared=True)),
        Case("sum_squares", "bf16", _sum_squares),
        Case("adamw", "writes bf16", _adamw, 4),
        Case("adamw_quantize", "int8/256", _adamw_quantize, 4),
        Case("adamw_compact", "fp8, bf16+8", _adamw_compact, 4),
        Case("quantize_difference", "delta4", _quantize_difference, 4),
        Case("add_difference", "delta4, 2 messages", _add_difference, 4),
    ]
    if find_spec("torchao"):
        cases.append(Case("adamw_torchao", "8 bits, bf16 weights", _adamw_torchao, 4))
    for dtype in (torch.float32, torch.bfloat16):
        name = f"rotated4, {str(dtype).removeprefix('torch.')}"
        for suffix, owed in (("", False), (", with error feedback", True)):
            make = partial(_quantize_rotated, dtype=dtype, owed=owed)
            cases.append(Case("quantize_rotated", name + suffix, make, dtype.itemsize))
    for count in (2, 4):
        cases.append(Case("sum_rotated", f"rotated4, {count} messages", partial(_sum_rotated, count=count)))
    return cases


def _quantize_difference(ops: Operations, elements: int, device: torch.device) -> Buffers:
    weights, reference = (torch.randn(elements, device=device) for _ in range(2))
    message = torch.empty(FOUR.message_bytes(elements), dtype=torch.uint8, device=device)
    call = partial(ops.quantize_difference, weights, reference, message, FOUR)
    return Buffers(weights.nbytes + reference.nbytes + message.nbytes, call)


def _add_difference(ops: Operations, elements: int, device: torch.device) -> Buffers:
    weights, reference = (torch.randn(elements, device=device) for _ in range(2))
    messages = torch.empty(2, FOUR.message_bytes(elements // 2), dtype=torch.uint8, device=device)
    halves = zip(weights.view(2, -1), reference.view(2, -1), messages, strict=True)
    for weights_of, reference_of, message in halves:
        ops.quantize_difference(weights_of, reference_of, message, FOUR)
    return Buffers(
        messages.nbytes + 2 * reference.nbytes, partial(ops.add_difference, messages, reference, FOUR)
    )


def _quantize_rotated(
    ops: Operations, elements: int, device: torch.device, *, dtype: torch.dtype, owed: bool
) -> Buffers:
    x = torch.randn(elements, device=device).to(dtype)
    messages = torch.empty(2, FOUR.message_bytes(elements // 2), dtype=torch.uint8, device=device)
    call, nbytes = partial(ops.quantize_rotated, x, messages, FOUR, SIGNS), x.nbytes + messages.nbytes
    if owed:
        lost = torch.zeros(2, elements // 2, dtype=torch.bfloat16, device=device)
        call = partial(call, lost=lost, divisor=torch.ones((), device=device))
        nbytes += 2 * lost.nbytes
    return Buffers(nbytes, call)


def _sum_rotated(ops: Operations, elements: int, device: torch.device, *, count: int) -> Buffers:
    m = elements // count
    messages = torch.empty(count, FOUR.message_bytes(m), dtype=torch.uint8, device=device)
    for message in messages:
        ops.quantize_rotated(torch.randn(m, device=device), message[None], FOUR, SIGNS)
    shard = torch.empty(m, device=device)
    return Buffers(messages.nbytes + shard.nbytes, partial(ops.sum_rotated, messages, shard, FOUR, SIGNS))


def _numbers(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def _messages(ops: Operations, x: Tensor, format: QuantFormat) -> Tensor:
    """x (P, m) encoded."""
    messages = torch.empty(len(x), format.message_bytes(x.shape[1]), dtype=torch.uint8, device=x.device)
    ops.quantize(x, messages, format)
    return messages


def _quantize(ops: Operations, elements: int, device: torch.device, *, format: QuantFormat) -> Buffers:
    x = _numbers(1, elements, device=device)
    message = torch.empty(1, format.message_bytes(elements), dtype=torch.uint8, device=device)
    return Buffers(x.nbytes + message.nbytes, partial(ops.quantize, x, message, format))


def _dequantize(ops: Operations, elements: int, device: torch.device, *, format: QuantFormat) -> Buffers:
    output = _numbers(1, elements, device=device)
    message = _messages(ops, output, format)
    return Buffers(output.nbytes + message.nbytes, partial(ops.dequantize, message, output, format))


def _sum_quantize(ops: Operations, elements: int, device: torch.device, *, count: int) -> Buffers:
    m = elements // count
    messages = _messages(ops, _numbers(count, m, device=device), INT4)
    output = torch.empty(1, INT4.message_bytes(m), dtype=torch.uint8, device=device)
    return Buffers(messages.nbytes + output.nbytes, partial(ops.sum_quantize, messages, output, INT4))


def _sum_into(ops: Operations, elements: int, device: torch.device, *, count: int) -> Buffers:
    m = elements // count
    messages = _messages(ops, _numbers(count, m, device=device), INT4)
    shard = torch.empty(m, device=device)
    return Buffers(messages.nbytes + shard.nbytes, partial(ops.sum_into, messages, shard, INT4))


def _sum_parts(
    ops: Operations, elements: int, device: torch.device, *, count: int, squared: bool = False
) -> Buffers:
    m = elements // count
    parts, shard = _numbers(count, m, device=device), torch.empty(m, device=device)
    squares = torch.empty(m // 256, device=device) if squared else None
    moved = parts.nbytes + shard.nbytes + (0 if squares is None else squares.nbytes)
    return Buffers(moved, partial(ops.sum_parts, parts, shard, squares=squares))


def _sum_squares(ops: Operations, elements: int, device: torch.device) -> Buffers:
    x, sums = _numbers(1, elements, device=device)[0], torch.empty(elements // 256, device=device)
    return Buffers(x.nbytes + sums.nbytes, partial(ops.sum_squares, x, sums))


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
    call = partial(ops.adamw, *tensors, decayed=elements)
    return Buffers(7 * states[0].nbytes + states[4].nbytes, call)


def _adamw_compact(ops: Operations, elements: int, device: torch.device) -> Buffers:
    states, scalars = _states(elements, device)
    upper, corrections = states[0].bfloat16(), torch.zeros(elements, dtype=torch.uint8, device=device)
    moments = (*encode(states[2], "fp8", second=False), *encode(states[3], "fp8", second=True))
    held = (corrections, *moments, upper)
    gradient, step = states[1].bfloat16(), torch.ones((), device=device)
    tensors: tuple[Any, ...] = (corrections, gradient, *moments, upper, scalars, Rounding(step, 0))
    call = partial(ops.adamw_compact, *tensors, decayed=elements)
    return Buffers(gradient.nbytes + 2 * sum(each.nbytes for each in held if each is not None), call)


def _adamw_torchao(ops: Operations, elements: int, device: torch.device) -> Buffers:
    from torchao.optim import AdamW8bit

    weights = torch.nn.Parameter(torch.randn(elements, device=device, dtype=torch.bfloat16))
    weights.grad = torch.randn_like(weights)
    optimizer = AdamW8bit([weights], lr=1e-4, bf16_stochastic_round=True)
    blocks = elements // optimizer.block_size
    return Buffers(3 * weights.nbytes + 2 * (2 * elements + 2 * 4 * blocks), optimizer.step)


def _adamw_quantize(ops: Operations, elements: int, device: torch.device) -> Buffers:
    states, scalars = _states(elements, device)
    message = torch.empty(INT8.message_bytes(elements), dtype=torch.uint8, device=device)
    tensors: tuple[Any, ...] = (*states, message, INT8, scalars)
    call = partial(ops.adamw_quantize, *tensors, decayed=elements)
    return Buffers(7 * states[0].nbytes + message.nbytes, call)
