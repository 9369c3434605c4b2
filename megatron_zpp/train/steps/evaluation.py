"""Loss and perplexity on held-out tokens."""

from collections.abc import Callable

import numpy as np
import torch

from megatron_zpp.data.documents import as_tensors, counted_share
from megatron_zpp.data.samples import Samples
from megatron_zpp.mesh import Mesh
from megatron_zpp.zero.engine import Batch, ZeroEngine


def own_share(batch: Batch, mesh: Mesh) -> float:
    """Return the share of this rank's targets in a batch, which is on the CPU, that have a loss."""
    if mesh.context_ranks == 1 or isinstance(batch, torch.Tensor):
        return counted_share(batch)
    from megatron_zpp.model.context.parts import places

    assert batch[0] is not None  # the tokens
    own = places(batch[0].shape[1], mesh.context_ranks, mesh.index(mesh.context))
    return counted_share(batch, own)


def evaluate(
    engine: ZeroEngine,
    samples: Samples,
    *,
    count: int,
    micro_batch_size: int,
    before_round: Callable[[int, int], None],
) -> float:
    """The mean loss over all tokens that count of the first `count` samples; NaN if none counts.

    It is the same for every call, number of ranks and size of micro-batches.

    All ranks run the same number of forwards, because each forward gathers sharded parameters; forwards
    beyond the last sample have no weight. `before_round(number, rounds)` is called before each round and may
    raise, on all ranks, to abandon the evaluation.
    """
    ranks, rank = engine.mesh.data_ranks, engine.mesh.data_rank
    chunks = -(-count // micro_batch_size)
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    weights = 0.0  # of this rank
    rounds = range(0, chunks, ranks)
    for number, first_chunk in enumerate(rounds):
        before_round(number, len(rounds))
        chunk = first_chunk + rank
        first = min(chunk, chunks - 1) * micro_batch_size
        size = min(micro_batch_size, count - first)
        batch = as_tensors(samples.batch(np.arange(first, first + size)))
        loss = engine.evaluate(batch)
        if chunk < chunks:
            weight = size * own_share(batch, engine.mesh)
            total += loss * weight
            weights += weight
    sums = engine.sum_over_ranks(torch.stack((total, torch.full_like(total, weights))))
    return (sums[0] / sums[1]).item()
