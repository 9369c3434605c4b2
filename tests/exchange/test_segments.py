"""Parts of a whole gradient, each wherever it lies."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.exchange.segments import join, segments_inside, segments_of
from megatron_zpp.mesh import Mesh
from tests.test_placement import coded, meshes, wides
from tests.zero.layouts import layout_of


@given(coded, wides, meshes, st.sampled_from((1, 1024)))
def test_segments_of_a_coded_unit_are_the_whole_gradient(
    codes: list[int], wide: list[int], mesh: Mesh, large: int
) -> None:
    """Those that stay where they were made, and the gaps between them."""
    layout = layout_of(mesh, *codes, *wide, coded=len(codes), alignment=256)
    produced = [torch.full(each.shape, 1.0 + index) for index, each in enumerate(layout.placements)]
    expected = torch.zeros(layout.numel)
    for start, gradient in zip(layout.offsets, produced, strict=True):
        expected[start : start + len(gradient)] = gradient
    segments = segments_of(layout, produced, large)
    assert torch.equal(join(segments, torch.full((layout.numel,), torch.nan)), expected)
    assert [segment.start for segment in segments[1:]] == [
        segment.start + len(segment.flat) for segment in segments[:-1]
    ]
    for rank in range(mesh.world_size):
        owned = layout.shard(mesh.at(rank))
        shard = torch.full((len(owned),), torch.nan)
        for segment in segments_inside(segments, owned):
            segment.of(shard).copy_(segment.flat)
        assert torch.equal(shard, expected[owned.start : owned.stop])
