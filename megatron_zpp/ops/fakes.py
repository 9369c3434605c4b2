"""The operators for tensors without storage, so that torch.compile and FakeTensorMode see through them."""

import inspect
from collections.abc import Callable

import torch

from megatron_zpp.ops import checks, reference

_CHECKED = (
    (reference.quantize, checks.quantize),
    (reference.dequantize, checks.dequantize),
    (reference.sum_quantize, checks.sum_quantize),
    (reference.sum_into, checks.sum_into),
    (reference.sum_parts, checks.sum_parts),
    (reference.sum_squares, checks.sum_squares),
    (reference.adamw, checks.adamw),
    (reference.adamw_quantize, checks.adamw_quantize),
)


def register() -> None:
    """Gives every operator of the loaded library its fake; once a process."""
    for operation, check in _CHECKED:
        torch.library.register_fake(f"megatron_zpp::{operation.__name__}", _fake(operation, check))


def _fake(operation: Callable[..., None], check: Callable[..., None]) -> Callable[..., None]:
    """An operator that writes into its arguments has nothing to make up but its checks."""
    signature = inspect.signature(operation)
    checked = tuple(inspect.signature(check).parameters)

    def fake(*args: object, **kwargs: object) -> None:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        check(*(given.arguments[name] for name in checked))

    return fake
