"""One text that is written token by token: what has been written, and what ends it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megatron_zpp.tokenizer.base import Tokenizer

_CONTEXT = 8  # ids; a character takes at most four
_HALF = "\ufffd"  # what the bytes of an unfinished character become


@dataclass(frozen=True)
class Stop:
    """What ends a text without being part of it: an id, or a string in the generated text."""

    ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()


@dataclass(eq=False)
class Continuation:
    """Up to `new_tokens` ids after `prompt`, which has one id or more, and their text.

    `text` ends before a stop string; `ids` includes the tokens that completed it. An unfinished character is
    part of `text` only at its end.
    """

    prompt: Sequence[int]
    tokenizer: Tokenizer
    generator: torch.Generator
    new_tokens: int
    stop: Stop = Stop()
    ids: list[int] = field(default_factory=list)
    text: str = ""

    def __post_init__(self) -> None:
        self.ended = not self.new_tokens
        self._growing = GrowingText(self.tokenizer, self.prompt)
        self._longest_stop = max(map(len, self.stop.strings), default=0)

    def take(self, token: int) -> None:
        """Add an id, unless it ends the text."""
        if token in self.stop.ids:
            self._end()
            return
        self.ids.append(token)
        self._append(self._growing.add(token))
        if not self.ended and len(self.ids) == self.new_tokens:
            self._end()

    def _end(self) -> None:
        self._append(self._growing.finish())
        self.ended = True

    def _append(self, piece: str) -> None:
        """Add to the text, and end it before a stop string that `piece` completes."""
        start = max(0, len(self.text) - self._longest_stop + 1)
        self.text += piece
        strings = filter(None, self.stop.strings)
        places = [place for string in strings if (place := self.text.find(string, start)) >= 0]
        if places:
            self.text = self.text[: min(places)]
            self.ended = True


class GrowingText:
    """The text of ids that come one by one after those of `before`."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self._tokenizer, self._before = tokenizer, list(before[-_CONTEXT:])
        self._open: list[int] = []  # ids that have given no text yet

    def add(self, token: int) -> str:
        """What an id adds to the text; a character of several ids comes with its last one."""
        self._open.append(token)
        text = text_after(self._tokenizer, self._before, self._open)
        return "" if text.endswith(_HALF) and len(self._open) < 4 else self._close(text)

    def finish(self) -> str:
        """What the ids of an unfinished character add where no other follows."""
        return self._close(text_after(self._tokenizer, self._before, self._open)) if self._open else ""

    def _close(self, text: str) -> str:
        self._before = [*self._before, *self._open][-_CONTEXT:]
        self._open = []
        return text


def text_after(tokenizer: Tokenizer, before: Sequence[int], ids: Sequence[int]) -> str:
    """The text that `ids` add to that of the ids before them; ends of documents count as a beginning.

    A tokenizer may decode an id differently at the beginning of a text.
    """
    context = list(before[-_CONTEXT:])
    while tokenizer.eod in context:
        del context[: context.index(tokenizer.eod) + 1]
    known = tokenizer.decode(context)
    text = tokenizer.decode([*context, *ids])
    return text[len(known) :] if text.startswith(known) else tokenizer.decode(ids)
