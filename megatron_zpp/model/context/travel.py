"""Keys, values and their gradients on their way between the context ranks of a ring.

Shapes: B batch, T tokens of this rank, G heads of keys and values, H head width.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.distributed.tensor_group import TensorGroup
from megatron_zpp.model.context.blocks import Sums, of_chunks
from megatron_zpp.model.context.rounds import Round, rounds


class _Transfer:
    """Rows of two tensors, on their way to the rank `distance` places behind, and those that come here.

    All ranks of the group must make it. It owns its buffers until `wait` has returned.
    """

    def __init__(self, sent: Tensor, received: Tensor, distance: int, group: TensorGroup) -> None:
        """Contiguous (2, B, rows, G, H); ranks may send each other different numbers of rows, or none."""
        self._sent, self._received = sent, received
        taken, given = [0] * group.size, [0] * group.size
        taken[(group.rank - distance) % group.size] = received.numel()
        given[(group.rank + distance) % group.size] = sent.numel()
        self._work = dist.all_to_all_single(
            received.view(-1), sent.view(-1), taken, given, group=group.process_group, async_op=True
        )

    def wait(self) -> Tensor:
        """Let the current stream (on a CPU: the caller) wait for what this rank receives."""
        self._work.wait()
        return self._received


def travelling_keys(
    k: Tensor, v: Tensor, group: TensorGroup, window: int | None
) -> Iterator[tuple[Any, ...]]:
    """Each round with its keys and values, while those of the next one are on their way."""
    size = k.shape[1] // 2
    each, *others = rounds(group.size, group.rank, k.shape[1] * group.size, window)
    keys: tuple[Tensor, ...] = k, v
    for following in others:
        coming = _Transfer(
            torch.stack([of_chunks(part, following.sent, size) for part in (k, v)]),
            _rows(k, following.received),
            following.distance,
            group,
        )
        yield each, *keys
        each, keys = following, coming.wait().unbind()
        del coming  # with what was sent
    yield each, *keys


def send_home(
    each: Round, sums: Sequence[Sums], k: Tensor, group: TensorGroup
) -> Callable[[Sequence[Sums]], None]:
    """Send the gradients of a round's keys and values home, and receive those of the keys that were sent.

    What is returned adds these to sums of gradients of keys and of values, when they have arrived.
    """
    sent, received = _rows(k, each.received), _rows(k, each.sent)
    for total, part in zip(sums, sent, strict=True):
        total.into(part, each.received)
    transfer = _Transfer(sent, received, -each.distance, group)

    def add_to(own: Sequence[Sums]) -> None:
        for total, part in zip(own, transfer.wait().unbind(), strict=True):
            total.add(each.sent, part)

    return add_to


def _rows(k: Tensor, chunks: range) -> Tensor:
    """Memory for keys and values of `chunks`, (2, B, rows, G, H)."""
    return k.new_empty(2, len(k), len(chunks) * (k.shape[1] // 2), *k.shape[2:])
