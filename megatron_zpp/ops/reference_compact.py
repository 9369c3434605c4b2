"""The step of AdamW on states in fewer bytes, in plain torch: the oracle of its kernel."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_zpp.ops.adamw import AdamWScalars, adamw_step
from megatron_zpp.ops.reference import tiles
from megatron_zpp.ops.state_codes import (
    FORMS,
    STATE_BLOCK,
    Rounding,
    decode,
    draws_of,
    encode,
    joined_weights,
    split_weights,
)


def adamw_compact(
    master: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_scales: Tensor | None,
    exp_avg_sq: Tensor,
    exp_avg_sq_scales: Tensor | None,
    gather_source: Tensor | None,
    device_scalars: Sequence[Tensor],
    host_scalars: Sequence[float],
    decayed: int,
    step: Tensor,
    seed: int,
    unit: int,
    first: int,
) -> None:
    """See Operations."""
    scalars = AdamWScalars.unpacked(device_scalars, host_scalars)
    skip, rounding = scalars.found_inf != 0, Rounding(step, unit, first, seed)
    moments = ((exp_avg, exp_avg_scales), (exp_avg_sq, exp_avg_sq_scales))
    for tile in tiles(len(master)):
        scaled = slice(tile.start // STATE_BLOCK, tile.stop // STATE_BLOCK)
        draws, left = draws_of(rounding, tile), decayed - tile.start
        old = [
            (values[tile], None if scales is None else scales[scaled], bool(second))
            for second, (values, scales) in enumerate(moments)
        ]
        weights = master[tile]
        if master.dtype == torch.uint8:
            assert gather_source is not None
            weights = joined_weights(gather_source[tile], weights)
        average, square = (decode(values, scales, second=second) for values, scales, second in old)
        states = weights, gradient[tile], average, square
        new, *changed = adamw_step(scalars, *states, decayed=left, compact=True)
        for (values, scales, second), moment, drawn in zip(old, changed, draws[:2], strict=True):
            codes, new_scales = encode(moment, FORMS[values.dtype], second=second, draws=drawn)
            _put(values, codes, skip)
            if scales is not None:
                assert new_scales is not None
                _put(scales, new_scales, skip)
        sent = kept = new
        if master.dtype == torch.uint8:
            sent, kept = split_weights(new, draws.weight)
        _put(master[tile], kept, skip)
        if gather_source is not None:
            _put(gather_source[tile], sent.to(gather_source.dtype), skip)


def _put(room: Tensor, new: Tensor, skip: Tensor) -> None:
    room.copy_(torch.where(skip, room, new))
