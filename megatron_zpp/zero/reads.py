"""The order in which the passes of a model read the parameters of its units: arithmetic on values.

A module of `model.units()` is a place in the forward. Most units have one place. Modules with the same
parameters are places of one unit, as two layers that are tied.
Most places have one unit. A module of which some parameters are frozen has two, which are gathered together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TypeAlias

from torch import nn


@dataclass(frozen=True)
class Reads:
    """The order in which the passes of a model read its units."""

    units: tuple[tuple[int, ...], ...]  # at each place, as the forward reads them; numbered by first place
    recomputed: tuple[range, ...] = ()  # places whose forward is repeated before the backward of the last one
    around: frozenset[int] = frozenset()  # units that are read while others are, and take no turns with them

    @cached_property
    def backward(self) -> tuple[int, ...]:
        """The places in the order in which a backward reads their parameters: from the last to the first.

        The last place of a recomputed range is read once for the forward and the backward of the place.
        """
        order: list[int] = []
        first_of = {chunk[-1]: chunk[0] for chunk in self.recomputed}
        for place in reversed(range(len(self.units))):
            order += range(first_of.get(place, place), place + 1)
        return tuple(order)

    @property
    def orders(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The units of each place as the forward reads them, and as the backward does."""
        return self.units, tuple(self.units[place] for place in self.backward)

    @cached_property
    def places(self) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in {unit for units in self.units for unit in units}]
        for place, units in enumerate(self.units):
            for unit in units:
                found[unit].append(place)
        return tuple(map(tuple, found))


class Part:
    """Some of a module's parameters, as a unit of their own."""

    def __init__(self, module: nn.Module, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """`named`: each parameter by its path in the module, once for each place that has it."""
        self.module, self._named = module, list(named)

    def named_parameters(
        self, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As those of modules."""
        found: set[int] = set()
        for path, parameter in self._named:
            if id(parameter) not in found or not remove_duplicate:
                yield inside(prefix, path), parameter
            found.add(id(parameter))

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())


Parameters: TypeAlias = nn.Module | Part  # of a unit
NamedUnits: TypeAlias = Sequence[tuple[str, Parameters]]  # in forward order

_ORDER_FACTOR, _ORDERS = 1009, 1048573  # a prime


def order_after(order: int, number: int) -> int:
    """What follows from the order of some numbers, itself a number, and the next one; 0 before the first.

    A polynomial modulo a prime, whose squares sum over ranks exactly in fp64.
    """
    return (order * _ORDER_FACTOR + number + 1) % _ORDERS


def inside(unit: str, path: str) -> str:
    """The name in the model of what is at `path` in a unit; the unit "" is the model itself."""
    return f"{unit}.{path}" if unit else path


def module_of(parameters: Parameters) -> nn.Module:
    """The module whose passes read them."""
    return parameters.module if isinstance(parameters, Part) else parameters


def without_inner(modules: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, Parameters]]:
    """The same, where a module with other ones inside has the parameters that none of these has."""
    listed = {id(module) for _, module in modules}
    found: list[tuple[str, Parameters]] = []
    for name, module in modules:
        units = (each for each in module.modules() if each is not module and id(each) in listed)
        inner = {id(part) for each in units for part in each.modules()}
        own = [
            (inside(path, key), parameter)
            for path, owner in module.named_modules()
            if id(owner) not in inner
            for key, parameter in owner.named_parameters(recurse=False, remove_duplicate=False)
        ]
        found.append((name, Part(module, own) if inner else module))
    return found


def reads_of(units: NamedUnits, recomputed: Sequence[range] = ()) -> Reads:
    """How passes read modules in this forward order. One with other units inside is read while they are."""
    numbers: dict[tuple[int, ...], int] = {}
    by_place = tuple(
        tuple(numbers.setdefault(key_of(part), len(numbers)) for part in parts_of(unit)) for _, unit in units
    )
    around = (numbers for (_, unit), numbers in zip(units, by_place, strict=True) if isinstance(unit, Part))
    return Reads(by_place, tuple(recomputed), frozenset(chain.from_iterable(around)))


def parts_of(unit: Parameters) -> list[Parameters]:
    """What is gathered for a unit: the whole of it; frozen and trained parameters apart; nothing.

    Parameters without elements are not gathered where no other one is.
    """
    kinds = {parameter.requires_grad for parameter in unit.parameters() if parameter.numel()}
    if {parameter.requires_grad for parameter in unit.parameters()} == kinds and len(kinds) == 1:
        return [unit]
    named = list(unit.named_parameters(remove_duplicate=False))
    return [
        Part(module_of(unit), [each for each in named if each[1].requires_grad == trained])
        for trained in sorted(kinds)
    ]


def distinct(units: NamedUnits) -> list[tuple[str, Parameters]]:
    """The names and parameters at the first place of each unit, by the units' numbers."""
    firsts: dict[tuple[int, ...], tuple[str, Parameters]] = {}
    for name, unit in units:
        for part in parts_of(unit):
            firsts.setdefault(key_of(part), (name, part))
    return list(firsts.values())


def key_of(parameters: Parameters) -> tuple[int, ...]:
    """What units with the same parameters have in common."""
    return tuple(map(id, parameters.parameters()))
