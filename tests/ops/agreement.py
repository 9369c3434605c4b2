"""Run an operation with the kernels and with the reference, and compare every bit of their arguments."""

from typing import Any

import torch
from torch import Tensor

from megatron_zpp.ops import reference

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_agree(name: str, *args: Any, device: str = "cpu", oracle_device: str = "cpu") -> list[Any]:
    """Run `name` on copies of `args`; afterwards all tensors, inputs included, must have the same bits.

    NaNs of different bits are equal, except inside messages. Returns the arguments of the reference.
    """
    expected = [_copy(arg, oracle_device) for arg in args]
    actual = [_copy(arg, device) for arg in args]
    getattr(reference, name)(*expected)
    getattr(torch.ops.megatron_zpp, name)(*actual)
    for position, pair in enumerate(zip(actual, expected, strict=True)):
        for mine, theirs in zip(*pair, strict=True) if isinstance(pair[0], list) else (pair,):
            if isinstance(mine, Tensor):
                assert_same_bits(mine, theirs.to(mine.device), f"{name}: argument {position}")
    return expected


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "tensor") -> None:
    """Raise AssertionError with the first elements that differ."""
    assert actual.dtype == expected.dtype, what
    assert actual.shape == expected.shape, what
    integer = _INTEGERS[actual.itemsize]
    different = actual.contiguous().view(integer) != expected.contiguous().view(integer)
    if actual.is_floating_point():
        different &= ~(actual.isnan() & expected.isnan())
    if different.any():
        indices = different.nonzero()[:5]
        shown = [(tuple(p.tolist()), actual[tuple(p)].item(), expected[tuple(p)].item()) for p in indices]
        raise AssertionError(
            f"{what} {tuple(actual.shape)} {actual.dtype}: {int(different.sum())} elements differ; "
            f"(index, kernel, reference): {shown}"
        )


def _copy(arg: Any, device: str) -> Any:
    """A copy of a tensor with the same strides, or of a list with its tensors; any other value unchanged."""
    if isinstance(arg, list):
        return [_copy(element, device) for element in arg]
    if not isinstance(arg, Tensor):
        return arg
    return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=device).copy_(arg)
