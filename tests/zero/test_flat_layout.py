"""The flat layout: arithmetic that one process can test for any number of ranks."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.zero.flat_layout import ALIGNMENT, SHARD_MULTIPLE, FlatLayout
from megatron_zpp.zero.grad_segments import join, segments_of

numels = st.lists(st.integers(0, 5000), min_size=1, max_size=30)
coded = st.lists(st.integers(1, 60).map(lambda number: 256 * number), min_size=1, max_size=6)


@given(numels, st.integers(1, 17))
def test_parameters_never_overlap_and_start_aligned(numels: list[int], ranks: int) -> None:
    layout = FlatLayout(tuple(numels), 0, ranks)
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets)
    for (start, following), numel in zip(pairwise(layout.offsets), numels, strict=True):
        assert start + numel <= following
    assert layout.offsets[-1] <= layout.numel
    assert layout.shard_numel % SHARD_MULTIPLE == 0
    assert layout.numel < sum(numels) + ALIGNMENT * len(numels) + SHARD_MULTIPLE * ranks


@given(numels, st.integers(1, 17), st.data())
def test_the_shards_pieces_are_every_element_once(numels: list[int], ranks: int, data: st.DataObject) -> None:
    layout = FlatLayout(tuple(numels), data.draw(st.integers(0, len(numels))), ranks)
    seen = [0] * len(numels)
    decayed = 0
    for rank in range(ranks):
        owned = layout.shard(rank)
        inside = layout.decayed_in(owned)
        decayed += inside
        for piece in layout.parameter_slices(owned):
            assert piece.start == seen[piece.parameter]  # in order, without a gap
            seen[piece.parameter] += piece.length
            assert piece.destination >= 0
            assert piece.destination + piece.length <= len(owned)
            assert layout.offsets[piece.parameter] + piece.start == owned.start + piece.destination
            assert (piece.destination < inside) == (piece.parameter < layout.decayed)
    assert seen == numels
    assert decayed == layout.offsets[layout.decayed]


@given(numels, st.integers(1, 17))
def test_a_block_has_elements_of_one_parameter_on_any_number_of_ranks(numels: list[int], ranks: int) -> None:
    block = 256
    layout = FlatLayout(tuple(numels), 0, ranks, alignment=block)
    assert layout.shard_numel % block == 0
    assert layout.offsets == FlatLayout(tuple(numels), 0, 1, alignment=block).offsets
    parameters = zip(numels, layout.offsets, strict=False)
    blocks = [index for n, start in parameters for index in range(start // block, -(-(start + n) // block))]
    assert len(blocks) == len(set(blocks))
    assert layout.numel < sum(numels) + block * (len(numels) + ranks)


@given(numels, st.integers(1, 17))
def test_gaps_are_what_no_parameter_covers(numels: list[int], ranks: int) -> None:
    layout = FlatLayout(tuple(numels), 0, ranks)
    runs = [range(start, start + numel) for start, numel in zip(layout.offsets, numels, strict=False)]
    covered = sorted([run for run in (*runs, *layout.gaps()) if run], key=lambda run: run.start)
    end = 0
    for run in covered:
        assert run.start == end
        end = run.stop
    assert end == layout.numel


@given(coded, st.lists(st.integers(0, 5000), max_size=6), st.integers(1, 17), st.sampled_from((256, 512)))
def test_a_coded_unit_is_gathered_as_bytes(codes: list[int], wide: list[int], ranks: int, block: int) -> None:
    """What every rank writes of its shard, one after the other, is each parameter in its own format."""
    numels = (*codes, *wide)
    layout = FlatLayout(numels, len(codes), ranks, alignment=block, coded=len(codes))
    assert layout.offsets == tuple(sorted(layout.offsets))
    assert all(start % block == 0 for start in layout.offsets)
    first = layout.wide.start
    assert layout.offsets[len(codes) :] == (first, *layout.offsets[len(codes) + 1 :])
    gathered = torch.full((layout.numel, 2), -1)  # by byte: parameter and byte of it
    for rank in range(ranks):
        owned = layout.shard(rank)
        inside = layout.wide_in(owned)
        for piece in layout.parameter_slices(owned):
            numbers = torch.arange(piece.start, piece.start + piece.length)
            at = owned.start + piece.destination
            if piece.parameter >= len(codes):
                assert piece.destination in inside
                assert piece.destination + piece.length <= inside.stop
                numbers = torch.stack((2 * numbers, 2 * numbers + 1), 1).flatten()
                at = first + 2 * (at - first)
            assert at in owned  # so that this rank sends them
            assert at + len(numbers) <= owned.stop
            gathered[at : at + len(numbers), 0] = piece.parameter
            gathered[at : at + len(numbers), 1] = numbers
    for parameter, numel in enumerate(numels):
        size = 1 if parameter < len(codes) else 2
        start = layout.offsets[parameter]
        start = start if size == 1 else first + 2 * (start - first)
        found = gathered[start : start + size * numel]
        assert (found[:, 0] == parameter).all()
        assert torch.equal(found[:, 1], torch.arange(size * numel))


@given(coded, st.lists(st.integers(1, 5000), max_size=6), st.integers(1, 17))
def test_gaps_of_a_coded_unit_are_what_no_parameter_covers(
    codes: list[int], wide: list[int], ranks: int
) -> None:
    layout = FlatLayout((*codes, *wide), len(codes), ranks, alignment=256, coded=len(codes))
    inside = torch.zeros(layout.numel, dtype=torch.bool)
    for start, numel in zip(layout.offsets, layout.numels, strict=False):
        inside[start : start + numel] = True
    for gap in layout.gaps():
        assert not inside[gap.start : gap.stop].any()
        inside[gap.start : gap.stop] = True
    assert inside.all()
    padded = sum(-(-numel // 256) * 256 for numel in wide)
    assert layout.numel < max(sum(codes) + 2 * padded, 2 * padded * ranks) + 256 * ranks


@given(coded, st.lists(st.integers(1, 5000), max_size=4), st.integers(1, 17), st.sampled_from((1, 1024)))
def test_segments_of_a_coded_unit_are_the_whole_gradient(
    codes: list[int], wide: list[int], ranks: int, large: int
) -> None:
    """Those that stay where they were made, and the gaps between them."""
    layout = FlatLayout((*codes, *wide), len(codes), ranks, alignment=256, coded=len(codes))
    produced = [torch.full((numel,), 1.0 + index) for index, numel in enumerate(layout.numels)]
    expected = torch.zeros(layout.numel)
    for start, gradient in zip(layout.offsets, produced, strict=False):
        expected[start : start + len(gradient)] = gradient
    segments = segments_of(layout, produced, large)
    assert torch.equal(join(segments, torch.full((layout.numel,), torch.nan)), expected)
    assert [segment.start for segment in segments[1:]] == [
        segment.start + len(segment.flat) for segment in segments[:-1]
    ]
