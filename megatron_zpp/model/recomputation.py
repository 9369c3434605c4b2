"""Which layers the backward recomputes, as arithmetic on layer numbers: the planner asks without a model."""

from collections.abc import Iterator

from megatron_zpp.config.model import RecomputeConfig


def segments(layers: int, plan: RecomputeConfig) -> Iterator[tuple[int, int, bool]]:
    """Runs of layers as (first, last + 1, whether they are recomputed in backward)."""
    recomputed = plan.recompute_num_layers or 0  # None unless the granularity is full
    if plan.recompute_method == "uniform":
        for first in range(0, layers, recomputed):
            yield first, min(first + recomputed, layers), True
        return
    for first in range(recomputed):
        yield first, first + 1, True
    yield recomputed, layers, False


def mlps_again(layers: int, plan: RecomputeConfig) -> list[int]:
    """Layers whose MLP the backward computes again in chunks (model/chunks.py), beside recomputed layers.

    The recomputation of layers leaves out the last one's MLP: its chunks follow at once.
    """
    if plan.mlp_chunks_for_training == 1:
        return []
    runs = segments(layers, plan)
    return [layer for first, stop, again in runs for layer in range(first, stop - 1 if again else stop)]


def recomputed_units(layers: int, plan: RecomputeConfig, *, cut_layers: bool = False) -> list[range]:
    """See GPT.recomputed_units; layers, which may be cut into halves, are behind the embedding's unit."""
    of_a_layer = 2 if cut_layers else 1
    return [
        range(1 + first * of_a_layer, 1 + stop * of_a_layer)
        for first, stop, again in segments(layers, plan)
        if again
    ]
