"""Reads states that a checkpoint has in fewer bytes than fp32."""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_zpp.ops.state_codes import FORMS, STATE_BLOCK, is_scaled
from megatron_zpp.zero.model_states import WEIGHTS, Held

_MOST = 1 << 22  # elements at once: decoding needs several times the memory of their numbers

# read(beside, first, room) fills `room` with the numbers from `first` on, or with the bytes beside them.
Read = Callable[[bool, int, Tensor], None]


def read_compact(kind: str, dtype: torch.dtype, start: int, target: Tensor, read: Read) -> None:
    """Fill the fp32 `target` (n,) with the elements from `start` on of a shard that is saved in `dtype`."""
    scaled = kind != WEIGHTS and is_scaled(FORMS.get(dtype, ""))
    block = STATE_BLOCK if scaled else 1
    stop = start + len(target)
    for first in range(start // block * block, stop, _MOST):
        last = min(first + _MOST, -(-stop // block) * block)
        values, beside = torch.empty(last - first, dtype=dtype), None
        read(False, first, values)
        if scaled or kind == WEIGHTS:
            beside = torch.empty((last - first) // block, dtype=torch.uint8)
            read(True, first // block, beside)
        wanted = range(max(first, start), min(last, stop))
        decoded = Held(values, beside).decoded(kind)
        target[wanted.start - start : wanted.stop - start] = decoded[
            wanted.start - first : wanted.stop - first
        ]
