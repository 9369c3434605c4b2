"""The order in which the passes of a model read the parameters of its units: arithmetic on values.

A module of `model.units()` is a place in the forward. Most units have one place. Modules with the same
parameters are places of one unit: a block of a tied table is read by the lookup of tokens and by the loss.
Most places have one unit. A module of which some parameters are frozen has two, which are gathered together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from torch import nn


@dataclass(frozen=True)
class Reads:
    """`units`: the units at each place, in the order of the forward; units are numbered by first place.

    `recomputed`: ranges of places whose forward is repeated before the backward of their last place.
    `forward_only`: places whose backward does not read the parameters.
    """

    units: tuple[tuple[int, ...], ...]
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
    def orders(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The units of each place as the forward reads them, and as the backward does."""
        return self.units, tuple(self.units[place] for place in self.backward)

    @cached_property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """The places of each unit."""
        found: list[list[int]] = [[] for _ in {unit for units in self.units for unit in units}]
        for place, units in enumerate(self.units):
            for unit in units:
                found[unit].append(place)
        return tuple(map(tuple, found))


def reads_of(modules: Sequence[tuple[str, nn.Module]], recomputed: Sequence[range] = ()) -> Reads:
    """How passes read the units of a model whose modules in forward order are these.

    A module with `read_by_backward` False needs no parameters in its backward.
    """
    numbers: dict[tuple[int, ...], int] = {}
    units = tuple(
        tuple(numbers.setdefault(key_of(part), len(numbers)) for part in parts_of(module))
        for _, module in modules
    )
    forward_only = frozenset(
        place for place, (_, module) in enumerate(modules) if not getattr(module, "read_by_backward", True)
    )
    return Reads(units, tuple(recomputed), forward_only)


class Part:
    """The frozen parameters of a module, or those that are trained, as a unit of their own."""

    def __init__(self, module: nn.Module, *, frozen: bool) -> None:
        self.module, self.frozen = module, frozen

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, nn.Parameter]]:
        """Those of the part, with their paths in the module."""
        for name, parameter in self.module.named_parameters(prefix):
            if parameter.requires_grad != self.frozen:
                yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of the part."""
        return (parameter for _, parameter in self.named_parameters())

    def get_submodule(self, path: str) -> nn.Module:
        """That of the module."""
        return self.module.get_submodule(path)


Parameters: TypeAlias = nn.Module | Part  # of a unit


def parts_of(module: nn.Module) -> list[Parameters]:
    """What is gathered for a module: the whole of it; frozen and trained parameters apart; nothing.

    Parameters without elements are not gathered where no other one is.
    """
    kinds = {parameter.requires_grad for parameter in module.parameters() if parameter.numel()}
    if {parameter.requires_grad for parameter in module.parameters()} == kinds and len(kinds) == 1:
        return [module]
    return [Part(module, frozen=not trained) for trained in sorted(kinds)]


def distinct(modules: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, Parameters]]:
    """The names and parameters at the first place of each unit, by the units' numbers."""
    firsts: dict[tuple[int, ...], tuple[str, Parameters]] = {}
    for name, module in modules:
        for part in parts_of(module):
            firsts.setdefault(key_of(part), (name, part))
    return list(firsts.values())


def key_of(parameters: Parameters) -> tuple[int, ...]:
    """What units with the same parameters have in common."""
    return tuple(map(id, parameters.parameters()))
