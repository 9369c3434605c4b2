"""The checks of the operations' arguments; those of csrc/checks.cpp raise the same messages.

Every function raises ValueError that names the operation, the argument, what is valid and what was passed.
The checks read shapes, dtypes and devices only, so they also work for tensors without storage.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_zpp.ops.adamw import AdamWScalars
from megatron_zpp.ops.formats import CodeType, QuantFormat

SQUARES_BLOCK = 256  # elements per sum of squares
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_HALVES = (torch.bfloat16, torch.float16)


def quantize(input: Tensor, messages: Tensor, code_type: CodeType, block: int) -> None:
    """See reference.quantize."""
    format = _format("quantize", code_type, block)
    _rows("quantize", "input", input, format)
    _messages_of_rows("quantize", messages, input, format)
    _same_device("quantize", input=input, messages=messages)


def dequantize(messages: Tensor, output: Tensor, code_type: CodeType, block: int) -> None:
    """See reference.dequantize."""
    format = _format("dequantize", code_type, block)
    _rows("dequantize", "output", output, format)
    _messages_of_rows("dequantize", messages, output, format)
    _same_device("dequantize", messages=messages, output=output)


def sum_quantize(messages: Tensor, output: Tensor, code_type: CodeType, block: int) -> None:
    """See reference.sum_quantize."""
    op = "sum_quantize"
    format = _format(op, code_type, block)
    m = _numel_of_messages(op, messages, format)
    groups = len(output) if output.dim() == 2 else 0
    if groups < 1 or m % (groups * block):
        raise ValueError(
            f"{op}: output must have G >= 1 rows, where G divides the {m} summed elements into whole blocks "
            f"of {block}, got {_shown(output)}"
        )
    _exactly(op, "output", output, torch.uint8, (groups, format.message_bytes(m // groups)))
    _same_device(op, messages=messages, output=output)


def sum_into(messages: Tensor, shard: Tensor, code_type: CodeType, block: int) -> None:
    """See reference.sum_into."""
    format = _format("sum_into", code_type, block)
    _exactly("sum_into", "shard", shard, torch.float32, (_numel_of_messages("sum_into", messages, format),))
    _same_device("sum_into", messages=messages, shard=shard)


def sum_parts(
    parts: Tensor, shard: Tensor, own: Tensor | None, group_rank: int, squares: Tensor | None
) -> None:
    """See reference.sum_parts."""
    if parts.dim() != 2 or len(parts) < 1 or parts.dtype not in _FLOATS:
        raise ValueError(
            f"sum_parts: parts must be float32, bfloat16 or float16 of shape (P >= 1, m), got {_shown(parts)}"
        )
    _contiguous_rows("sum_parts", "parts", parts)
    if not 0 <= group_rank < len(parts):
        raise ValueError(f"sum_parts: group_rank must be from 0 to {len(parts) - 1}, got {group_rank}")
    if own is not None:
        _exactly("sum_parts", "own", own, parts.dtype, (parts.shape[1],))
    _exactly("sum_parts", "shard", shard, torch.float32, (parts.shape[1],))
    if squares is not None:
        _sums_of_squares("sum_parts", "squares", squares, "shard", shard)
    _same_device("sum_parts", parts=parts, shard=shard, own=own, squares=squares)


def sum_squares(input: Tensor, sums: Tensor) -> None:
    """See reference.sum_squares."""
    _sums_of_squares("sum_squares", "sums", sums, "input", input)
    _same_device("sum_squares", input=input, sums=sums)


def adamw(
    master: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gather_source: Tensor | None,
    device_scalars: Sequence[Tensor],
    host_scalars: Sequence[float],
    decayed: int,
) -> None:
    """See reference.adamw."""
    op, states = "adamw", {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    _adamw_step(op, states, gradient, _FLOATS, device_scalars, host_scalars, decayed)
    if gather_source is not None:
        _one_of(op, "gather_source", gather_source, _HALVES, tuple(master.shape))
    _same_device(op, master=master, gather_source=gather_source)


def adamw_quantize(
    master: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    message: Tensor,
    device_scalars: Sequence[Tensor],
    host_scalars: Sequence[float],
    decayed: int,
    code_type: CodeType,
    block: int,
) -> None:
    """See reference.adamw_quantize."""
    op, states = "adamw_quantize", {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    format = _format(op, code_type, block)
    _adamw_step(op, states, gradient, (torch.float32,), device_scalars, host_scalars, decayed)
    if len(master) % block:
        raise ValueError(f"{op}: master must hold whole blocks of {block} elements, got {_shown(master)}")
    _exactly(op, "message", message, torch.uint8, (format.message_bytes(len(master)),))
    _same_device(op, master=master, message=message)


def _adamw_step(
    op: str,
    states: dict[str, Tensor],
    gradient: Tensor,
    gradient_dtypes: tuple[torch.dtype, ...],
    device_scalars: Sequence[Tensor],
    host_scalars: Sequence[float],
    decayed: int,
) -> None:
    """The checks that both operations share; `states` has the master first."""
    master = states["master"]
    if master.dim() != 1:
        raise ValueError(f"{op}: master must be float32 of shape (m,), got {_shown(master)}")
    for name, tensor in states.items():
        _exactly(op, name, tensor, torch.float32, (len(master),))
    if not 0 <= decayed <= len(master):
        raise ValueError(f"{op}: decayed must be from 0 to {len(master)}, got {decayed}")
    _one_of(op, "gradient", gradient, gradient_dtypes, (len(master),))
    _same_device(op, **{"master": master, "gradient": gradient, **states})
    if len(device_scalars) != 3:
        raise ValueError(
            f"{op}: device_scalars must be [divisor, found_inf, bias_corrections], "
            f"got {len(device_scalars)} tensors"
        )
    if len(host_scalars) != 5:
        raise ValueError(
            f"{op}: host_scalars must be [learning_rate, beta1, beta2, eps, weight_decay], "
            f"got {len(host_scalars)} numbers"
        )
    scalars = AdamWScalars.unpacked(device_scalars, host_scalars)
    divisor, found_inf = scalars.divisor, scalars.found_inf
    _exactly(op, "divisor", divisor, torch.float32, ())
    _exactly(op, "found_inf", found_inf, torch.float32, ())
    _exactly(op, "bias_corrections", scalars.bias_corrections, torch.float32, (2,))
    _same_device(
        op, master=master, divisor=divisor, found_inf=found_inf, bias_corrections=scalars.bias_corrections
    )


def numel_of_messages(messages: Tensor, format: QuantFormat) -> int:
    """Return m of messages (P, message_bytes(m)): unique, because a block has more bytes than the padding."""
    return messages.shape[1] // format.block_bytes * format.block


def _format(op: str, code_type: CodeType, block: int) -> QuantFormat:
    try:
        return QuantFormat(code_type, block)
    except ValueError as error:
        raise ValueError(f"{op}: {error}") from None


def _rows(op: str, name: str, tensor: Tensor, format: QuantFormat) -> None:
    """A matrix (R, n) of floats: n is whole blocks, rows are contiguous and do not overlap."""
    if tensor.dim() != 2 or tensor.dtype not in _FLOATS:
        raise ValueError(
            f"{op}: {name} must be float32, bfloat16 or float16 of shape (R, n), got {_shown(tensor)}"
        )
    n = tensor.shape[1]
    if n % format.block:
        raise ValueError(f"{op}: block must divide the {n} columns of {name}, got {format.block}")
    _contiguous_rows(op, name, tensor)


def _contiguous_rows(op: str, name: str, tensor: Tensor) -> None:
    rows, n = tensor.shape
    if tensor.numel() and ((n > 1 and tensor.stride(1) != 1) or (rows > 1 and tensor.stride(0) < n)):
        raise ValueError(
            f"{op}: {name} must have contiguous rows at least {n} elements apart, "
            f"got strides {tuple(tensor.stride())}"
        )


def _sums_of_squares(op: str, name: str, sums: Tensor, input_name: str, input: Tensor) -> None:
    whole = input.dim() == 1 and len(input) % SQUARES_BLOCK == 0
    if not whole or input.dtype not in _FLOATS or not input.is_contiguous():
        raise ValueError(
            f"{op}: {input_name} must be contiguous float32, bfloat16 or float16 of shape (m,), m a multiple "
            f"of {SQUARES_BLOCK}, got {_shown(input)}"
        )
    _exactly(op, name, sums, torch.float32, (len(input) // SQUARES_BLOCK,))


def _messages_of_rows(op: str, messages: Tensor, rows: Tensor, format: QuantFormat) -> None:
    count, n = rows.shape
    groups = len(messages) if messages.dim() == 2 else 0
    if groups < 1 or count % groups:
        raise ValueError(
            f"{op}: messages must have G >= 1 rows, where G divides the {count} rows of values, "
            f"got {_shown(messages)}"
        )
    _exactly(op, "messages", messages, torch.uint8, (groups, format.message_bytes(count // groups * n)))


def _numel_of_messages(op: str, messages: Tensor, format: QuantFormat) -> int:
    """Return m of messages (P, message_bytes(m))."""
    if messages.dim() == 2 and len(messages) >= 1:
        numel = numel_of_messages(messages, format)
        _exactly(op, "messages", messages, torch.uint8, (len(messages), format.message_bytes(numel)))
        return numel
    raise ValueError(f"{op}: messages must be uint8 of shape (P >= 1, bytes), got {_shown(messages)}")


def _exactly(op: str, name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    _one_of(op, name, tensor, (dtype,), shape)


def _one_of(
    op: str, name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]
) -> None:
    """A contiguous tensor of one of the dtypes and exactly this shape."""
    if tensor.dtype not in dtypes or tuple(tensor.shape) != shape:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{op}: {name} must be {wanted} of shape {shape}, got {_shown(tensor)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{op}: {name} must be contiguous, got strides {tuple(tensor.stride())}")


def _same_device(op: str, **tensors: Tensor | None) -> None:
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    (first, device), *others = devices.items()
    for name, other in others:
        if other != device:
            raise ValueError(f"{op}: {name} must be on the device of {first}, {device}, got {other}")


def _shown(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"
