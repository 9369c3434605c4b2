"""Layouts of units for tests that need no model."""

from megatron_zpp.mesh import Mesh
from megatron_zpp.placement import ALIGNMENT, Layout, Placement


def layout_of(mesh: Mesh, *numels: int, coded: int = 0, alignment: int = ALIGNMENT) -> Layout:
    """Parameters of `numels` elements, of which the first ones are held as codes."""
    placements = (
        Placement(name=str(index), shape=(numel,), coded=index < coded) for index, numel in enumerate(numels)
    )
    return Layout(placements=tuple(placements), axes=mesh.shards, alignment=alignment)
