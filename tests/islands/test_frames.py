"""What a rank finds in the frames of an island with another mesh: every element of its shards, once."""

from itertools import product

import pytest
import torch
from torch import Tensor

from megatron_zpp.islands import frames
from megatron_zpp.islands.frames import Chunk, Wanted, chunks_of, from_text, sends, to_text
from megatron_zpp.islands.outer_state import Codec, _Source
from megatron_zpp.mesh import Mesh
from megatron_zpp.placement import Layout, Placement, Split

SHAPES = {"table": (50, 12), "qkv": (24, 16), "out": (16, 8), "norm": (16,), "scalar": ()}
MESHES = [
    Mesh(),
    Mesh(local_ranks=3),
    Mesh(nodes=2, local_ranks=2),
    Mesh(nodes=2, local_ranks=1, tensor_ranks=2),
    Mesh(local_ranks=1, tensor_ranks=4),
]
CPU = torch.device("cpu")


def layouts(mesh: Mesh) -> list[Layout]:
    """Two units with split and whole parameters, as tensor ranks have them."""

    def place(name: str) -> Placement:
        split = None
        if mesh.tensor_ranks > 1 and name in ("qkv", "out"):
            split = Split(0, (8, 8, 8), mesh.tensor) if name == "qkv" else Split(1, (8,), mesh.tensor)
        return Placement(name=name, shape=SHAPES[name], split=split)

    units = [("table",), ("qkv", "out", "norm", "scalar")]
    return [Layout(placements=tuple(map(place, unit)), axes=mesh.shards) for unit in units]


def values_of(chunk: Chunk, whole: dict[str, Tensor]) -> Tensor:
    """The elements (n,) of a chunk, zero in gaps."""
    flat = torch.zeros(chunk.frame.numel)
    for part in chunk.frame.parts:
        array = flat[part.at :][: torch.Size(part.shape).numel()].view(part.shape)
        array[tuple(slice(s.start, s.stop) for s in part.here)] = whole[part.name][
            tuple(slice(s.start, s.stop) for s in part.whole)
        ]
    return flat


@pytest.mark.parametrize(("theirs", "ours"), [*product(MESHES, MESHES)])
def test_every_rank_finds_its_shards_in_the_frames_of_any_mesh(
    theirs: Mesh, ours: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "LEAST", 256)
    whole = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    sent: list[tuple[str, list[Tensor]]] = []
    for rank in range(theirs.world_size):
        mesh = theirs.at(rank)
        chunks = [
            chunk
            for unit, layout in enumerate(layouts(mesh))
            if sends(layout, mesh)
            for chunk in chunks_of(unit, layout, mesh)
        ]
        sent.append((to_text([c.frame for c in chunks]), [values_of(c, whole) for c in chunks]))
    for rank in range(ours.world_size):
        mesh = ours.at(rank)
        chunks = [c for unit, layout in enumerate(layouts(mesh)) for c in chunks_of(unit, layout, mesh)]
        wanted = Wanted(chunks)
        chosen = wanted.choose([text for text, _ in sent])
        received = [
            (text, number, values[number].view(torch.uint8))
            for (text, values), numbers in zip(sent, chosen, strict=True)
            for number in numbers
        ]
        source = _Source(received, Codec("fp32", None, torch.device("cpu")), wanted, 0)
        for number, chunk in enumerate(chunks):
            assert torch.equal(source.values(number, chunk.frame, CPU), values_of(chunk, whole))
        if theirs == ours:  # and no more than it needs
            assert sum(len(numbers) for numbers in chosen) == len(chunks)


def test_a_description_of_elements_that_are_not_there_is_refused() -> None:
    for text in (
        "[[10,[]",
        '[[4,[["w",2,[3],[[0,3]],[[0,3]]]]]]',
        '[[4,[["w",0,[4],[[0,4]],[[0,3]]]]]]',
        "[7]",
    ):
        with pytest.raises(ValueError, match="frame"):
            from_text(text)
