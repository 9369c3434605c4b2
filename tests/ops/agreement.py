"""Runs an operation twice, with the kernels and the reference, and compares every bit that it may touch."""

from typing import Any

import torch
from torch import Tensor

from megatron_zpp.ops import reference

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_agree(name: str, *args: Any, device: str = "cpu", oracle_device: str = "cpu") -> list[Any]:
    """Runs `name` on copies of `args`; afterwards all tensors, inputs too, must have the same bits.

    NaNs are equal whatever their bits, but for those inside messages. Returns the reference's arguments.
    """
    expected = [_copy(arg, oracle_device) for arg in args]
    actual = [_copy(arg, device) for arg in args]
    getattr(reference, name)(*expected)
    getattr(torch.ops.megatron_zpp, name)(*actual)
    for position, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        if isinstance(mine, Tensor):
            assert_same_bits(mine, theirs.to(mine.device), f"{name}: argument {position}")
    return expected


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "tensor") -> None:
    """Raises AssertionError with the first places that differ."""
    assert actual.dtype == expected.dtype, what
    assert actual.shape == expected.shape, what
    integer = _INTEGERS[actual.itemsize]
    different = actual.contiguous().view(integer) != expected.contiguous().view(integer)
    if actual.is_floating_point():
        different &= ~(actual.isnan() & expected.isnan())
    if different.any():
        places = different.nonzero()[:5]
        shown = [(tuple(p.tolist()), actual[tuple(p)].item(), expected[tuple(p)].item()) for p in places]
        raise AssertionError(
            f"{what} {tuple(actual.shape)} {actual.dtype}: {int(different.sum())} elements differ; "
            f"(place, kernel, reference): {shown}"
        )


def _copy(arg: Any, device: str) -> Any:
    """A tensor's copy with its strides; anything else as it is."""
    if not isinstance(arg, Tensor):
        return arg
    return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=device).copy_(arg)
