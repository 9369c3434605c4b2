"""Units that are held as codes, and what padding costs; tests/test_placement.py has the rest of layouts."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.mesh import Mesh
from megatron_zpp.placement import ALIGNMENT, SHARD_MULTIPLE
from megatron_zpp.zero.grad_segments import join, segments_of
from tests.zero.layouts import layout_of

coded = st.lists(st.integers(1, 60).map(lambda number: 256 * number), min_size=1, max_size=6)
wides = st.lists(st.integers(0, 5000), max_size=6)
meshes = st.integers(1, 17).map(lambda ranks: Mesh(nodes=ranks))


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=30), meshes)
def test_padding_is_small(numels: list[int], mesh: Mesh) -> None:
    layout = layout_of(mesh, *numels)
    assert layout.shard_numel % SHARD_MULTIPLE == 0
    assert layout.numel < sum(numels) + ALIGNMENT * len(numels) + SHARD_MULTIPLE * mesh.world_size


@given(coded, wides, meshes, st.sampled_from((256, 512)))
def test_a_coded_unit_is_gathered_as_bytes(codes: list[int], wide: list[int], mesh: Mesh, block: int) -> None:
    """What every rank writes of its shard, one after the other, is each parameter in its own format."""
    layout = layout_of(mesh, *codes, *wide, coded=len(codes), alignment=block)
    assert all(start % block == 0 for start in layout.offsets)
    first = layout.wide.start
    gathered = torch.full((layout.numel, 2), -1)  # by byte: parameter and byte of it
    for rank in range(mesh.world_size):
        owned = layout.shard(mesh.at(rank))
        for piece in layout.pieces_in(owned):
            numbers, at = torch.tensor(piece.elements), piece.at.start
            if not piece.placement.coded:
                assert layout.wide.start in owned
                assert piece.at.stop <= layout.wide.stop
                numbers = torch.stack((2 * numbers, 2 * numbers + 1), 1).flatten()
                at = first + 2 * (at - first)
            assert at in owned  # so that this rank sends them
            assert at + len(numbers) <= owned.stop
            gathered[at : at + len(numbers), 0] = int(piece.placement.name)
            gathered[at : at + len(numbers), 1] = numbers
    for parameter, (placement, start) in enumerate(zip(layout.placements, layout.offsets, strict=True)):
        size = 1 if placement.coded else 2
        start = start if placement.coded else first + 2 * (start - first)
        found = gathered[start : start + size * placement.numel]
        assert (found[:, 0] == parameter).all()
        assert torch.equal(found[:, 1], torch.arange(size * placement.numel))
    codes_numel, wide_numel = (sum(-(-n // block) * block for n in numels) for numels in (codes, wide))
    least = max(codes_numel + 2 * wide_numel, 2 * wide_numel * mesh.world_size)
    assert layout.numel < least + block * mesh.world_size


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
