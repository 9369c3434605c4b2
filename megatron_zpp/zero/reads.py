"""The order in which the passes of a model read the parameters of its units: arithmetic on values.

A module of `model.units()` is a place in the forward. Most units have one place. Modules with the same
parameters are places of one unit: a block of a tied table is read by the lookup of tokens and by the loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn


@dataclass(frozen=True)
class Reads:
    """`units`: the unit at each place, in the order of the forward; units are numbered by first place.

    `recomputed`: ranges of places whose forward is repeated before the backward of their last place.
    `forward_only`: places whose backward does not read the parameters.
    """

    units: tuple[int, ...]
    recomputed: tuple[range, ...] = ()
    forward_only: frozenset[int] = frozenset()

    @cached_property
    def backward(self) -> tuple[int, ...]:
        """The places in the order in which a backward reads their parameters: from the last to the first.

        The last place of a recomputed range is read once for the forward and the backward of the place.
        """
        order: list[int] = []
        first_of = {chunk[-1]: chunk[0] for chunk in self.recomputed}
        for place in reversed(range(len(self.units))):
            if place not in self.forward_only:
                order += range(first_of.get(place, place), place + 1)
        return tuple(order)

    @property
    def orders(self) -> tuple[tuple[int, ...], ...]:
        """The units as the forward reads them, and as the backward does."""
        return self.units, tuple(self.units[place] for place in self.backward)

    @cached_property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """The places of each unit."""
        found: list[list[int]] = [[] for _ in set(self.units)]
        for place, unit in enumerate(self.units):
            found[unit].append(place)
        return tuple(map(tuple, found))


def reads_of(modules: Sequence[tuple[str, nn.Module]], recomputed: Sequence[range] = ()) -> Reads:
    """How passes read the units of a model whose modules in forward order are these.

    A module with `read_by_backward` False needs no parameters in its backward.
    """
    numbers: dict[tuple[int, ...], int] = {}
    units = tuple(numbers.setdefault(key_of(module), len(numbers)) for _, module in modules)
    forward_only = frozenset(
        place for place, (_, module) in enumerate(modules) if not getattr(module, "read_by_backward", True)
    )
    return Reads(units, tuple(recomputed), forward_only)


def distinct(modules: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """The names and modules at the first place of each unit, by the units' numbers."""
    firsts: dict[tuple[int, ...], tuple[str, nn.Module]] = {}
    for name, module in modules:
        firsts.setdefault(key_of(module), (name, module))
    return list(firsts.values())


def key_of(module: nn.Module) -> tuple[int, ...]:
    """What modules with the same parameters have in common."""
    return tuple(map(id, module.parameters()))
