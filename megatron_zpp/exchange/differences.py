"""Codes of weight differences, against a reference that the ranks of each node hold together.

SDP4Bit (2410.15526, section 3.1) sends codes of differences under ZeRO-2, where every rank has all weights.
Here the ranks of a node, or of an hpZ group in it, hold equal parts of the reference of each unit, as hpZ's
secondary shards: a rank holds what the ranks that are gathered once per step own together. Forward and
backward gather the reference inside the group.

    encode   the owner, after the optimizer: codes of its weights less its part of the reference
    gather   the messages, among the ranks that hold the same part
    apply    every one of them, the owner too, moves its reference by every message once

So references have equal bits on all nodes, and what the codes lost is in the next difference. Where they lose
too much, `DifferenceFormats` has the unit travel in 8 bits, as linear codes.
"""

import torch
from torch import Tensor

from megatron_zpp.exchange.route import CodeFormat
from megatron_zpp.ops.formats import LloydMaxFormat, QuantFormat
from megatron_zpp.ops.operations import Operations


def encode(
    operations: Operations,
    weights: Tensor,
    reference: Tensor,
    message: Tensor,
    skip: Tensor,
    *,
    coded: LloydMaxFormat,
    sent: CodeFormat,
    squares: Tensor,
) -> Tensor:
    """Encode `weights` (n,) less `reference` (n,) in the format `sent`; return that part of `message`.

    Where `skip` () is not 0 it changes nothing. `squares` (2, blocks) fp32 gets, per block, the sums of the
    squares of the difference and of what codes in the format `coded` miss of it.
    """
    codes = message[: coded.message_bytes(len(weights))]
    operations.quantize_difference(weights, reference, codes, coded, skip=skip, squares=squares)
    if isinstance(sent, QuantFormat):
        difference = torch.where(skip != 0, 0.0, weights - reference)
        codes = message[: sent.message_bytes(len(weights))]
        operations.quantize(difference[None], codes[None], sent)
    return codes


def apply(operations: Operations, messages: Tensor, reference: Tensor, format: CodeFormat) -> None:
    """Move part p of `reference` (P · n,) by message p of `messages` (P, bytes)."""
    if isinstance(format, LloydMaxFormat):
        operations.add_difference(messages, reference, format)
        return
    for message, part in zip(messages, reference.view(len(messages), -1), strict=True):
        operations.sum_into(message[None], part, format, add=True)
