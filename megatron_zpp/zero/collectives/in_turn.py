"""Things that are used in turn, such as streams with their buffers."""

from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class InTurn(Generic[T]):
    """Hands out its things in order, again and again. All ranks that share streams must call it alike."""

    def __init__(self, things: Sequence[T]) -> None:
        self._things, self._turn = tuple(things), 0

    def next(self) -> T:
        """The one after that of the last call."""
        thing = self._things[self._turn]
        self._turn = (self._turn + 1) % len(self._things)
        return thing
