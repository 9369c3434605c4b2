"""Whole matrices from the shards of a node: layouts, FLOPs and bytes alone, at the sizes of real models."""

from functools import cache

import pytest
import torch

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.shapes.presets import PRESETS
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.exchange.route import SentBytes, code_format, gradient_route, sent, sum_route, weight_route
from megatron_zpp.mesh import Mesh
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.shape import layer_shape
from megatron_zpp.placement import Layout, Placement
from megatron_zpp.zero.build import layouts_of
from megatron_zpp.zero.matrices import IMBALANCE, PADDING, Matrix, exchanges, matrices_of

GRIDS = [(2, 1), (3, 2), (8, 1), (8, 8), (16, 8)]
FOUR_BITS = ZeroConfig(
    zero_stage=3,
    zero_hpz_partition_size="auto",
    zero_quantized_weights=True,
    zero_quantized_weights_format="delta4",
    zero_quantized_gradients=True,
    zero_quantized_gradients_format="rotated4",
)


@cache
def layouts(preset: str, mesh: Mesh) -> list[Layout]:
    config = ModelConfig(**PRESETS[preset])
    with torch.device("meta"):
        return layouts_of(GPT(config, 50304).units(), mesh, 256)


def matrices(preset: str, mesh: Mesh) -> list[list[Matrix]]:
    """Those of all units; queries, keys and values apart."""
    qkv = layer_shape(ModelConfig(**PRESETS[preset])).qkv.runs

    def runs_of(placement: Placement) -> tuple[int, ...]:
        if not placement.name.startswith("layers.") or len(placement.local_shape) < 2:
            return ()
        return qkv if placement.name.endswith(".qkv.weight") else (placement.local_shape[0],)

    return matrices_of(layouts(preset, mesh), runs_of)


@pytest.mark.parametrize(("nodes", "local"), GRIDS)
@pytest.mark.parametrize(("preset", "most"), [("1.3b", 4), ("13b", 4), ("llama3.2-1b", 8)])
def test_the_ranks_of_a_node_share_matrices_evenly(preset: str, most: int, nodes: int, local: int) -> None:
    """At `most` so many layers at a time, and each matrix once; each node has them all."""
    units = matrices(preset, Mesh(nodes=nodes, local_ranks=local))
    made = exchanges(units, local)
    assert all(each.imbalance <= IMBALANCE and each.padding <= PADDING for each in made)
    assert max(len({matrix.unit for matrix in each.matrices}) for each in made) <= (1 if local == 1 else most)
    found = [
        matrix
        for each in made
        for place in range(local)
        for batch in each.owned(place).values()
        for matrix in batch
    ]
    assert len(found) == len(set(found)) == sum(map(len, units))
    layers = ModelConfig(**PRESETS[preset]).num_layers
    order = [min(matrix.unit for matrix in each.matrices) for each in made]
    assert order == sorted(order)
    assert {matrix.unit for matrix in found} == set(range(1, layers + 1))


def test_newton_schulz_of_1_3b_is_that_of_the_papers_arithmetic() -> None:
    """Five iterations; 4 · 6 · h³ for square matrices and 2 · 18 · h³ for those of the MLP, per layer."""
    flops = 5 * sum(matrix.flops for unit in matrices("1.3b", Mesh()) for matrix in unit)
    assert flops == 5 * 24 * 60 * 2048**3
    assert flops == pytest.approx(6e13, rel=0.05)


def test_a_model_too_small_to_be_shared_evenly_is_exchanged_at_once() -> None:
    units = [[], matrices("1.3b", Mesh())[1], []]
    (only,) = exchanges(units, 8)
    assert only.imbalance > IMBALANCE
    assert len(only.owned(7)) <= 1
    assert exchanges([[], []], 8) == ()


@pytest.mark.parametrize(("nodes", "local", "context"), [(2, 1, 1), (3, 2, 1), (1, 8, 1), (2, 2, 2)])
def test_whole_matrices_come_from_shards_and_go_back(nodes: int, local: int, context: int) -> None:
    """Every element once, by what each rank sends to each place, on shapes that nothing divides."""
    mesh = Mesh(nodes=nodes, local_ranks=local, context_ranks=context)
    config = ModelConfig(num_layers=3, hidden_size=36, num_attention_heads=3, seq_length=10)
    with torch.device("meta"):
        cut = layouts_of(GPT(config, 101).units(), mesh, 256)
    units = matrices_of(
        cut,
        lambda each: (each.local_shape[0],)
        if each.name.startswith("layers.") and len(each.shape) > 1
        else (),
    )
    axes = mesh.local, mesh.context
    whole = [torch.arange(layout.numel) + 10**6 * unit for unit, layout in enumerate(cut)]
    group = [mesh.at(rank) for rank in mesh.ranks(*axes)]
    shards = [[layout.ranges(each, axes)[0] for layout in cut] for each in group]
    for exchange in exchanges(units, len(group)):
        for place in range(len(group)):
            wanted = [matrix for batch in exchange.owned(place).values() for matrix in batch]
            arrived: list[list[torch.Tensor]] = [[] for _ in wanted]
            for owned in shards:
                for matrix, part, parts in zip(wanted, exchange.parts(place, owned), arrived, strict=True):
                    shard = owned[matrix.unit]
                    parts.append(whole[matrix.unit][shard.start : shard.stop][part])
            for matrix, parts in zip(wanted, arrived, strict=True):
                here = slice(matrix.elements.start, matrix.elements.stop)
                assert torch.equal(torch.cat(parts), whole[matrix.unit][here])


@pytest.mark.parametrize(("nodes", "local"), GRIDS)
@pytest.mark.parametrize("preset", ["1.3b", "13b"])
def test_muon_sends_between_nodes_what_adamw_sends(preset: str, nodes: int, local: int) -> None:
    """States inside nodes: sums of gradients cross as codes of 4 bits, in place of differences of weights."""
    mesh = Mesh(nodes=nodes, local_ranks=local)
    adamw = muon = SentBytes()
    sums = sum_route(mesh, (mesh.local, mesh.context), code_format("rotated4", 256))
    reduce = gradient_route(FOUR_BITS, mesh, torch.bfloat16, in_bf16=False)
    bring = weight_route(FOUR_BITS, mesh, torch.bfloat16, mesh.shards)[:1]
    assert [stage.verb for stage in (*bring, *sums)] == ["difference", "gather"]
    assert not any(
        mesh.node in stage.axes for stage in weight_route(FOUR_BITS, mesh, torch.bfloat16, (mesh.local,))
    )
    for layout in layouts(preset, mesh):
        gradients = sent(reduce, layout, mesh, count=range(len(reduce)))
        adamw += gradients + sent(bring, layout, mesh, count=[0])
        muon += gradients + sent(sums, layout, mesh, count=[0])
    assert muon.inter == adamw.inter
    numel = sum(layout.numel for layout in layouts(preset, mesh))
    assert muon.inter * nodes * local / (nodes - 1) / numel == pytest.approx(1.0156, abs=0.001)
