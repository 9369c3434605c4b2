"""Ids back to text, in context: a tokenizer may decode an id differently at the beginning of a text."""

from collections.abc import Sequence

from megatron_zpp.tokenizer.base import Tokenizer

_CONTEXT = 8  # ids; a character takes at most four
_HALF = "\ufffd"  # what the bytes of an unfinished character become


def text_after(tokenizer: Tokenizer, before: Sequence[int], ids: Sequence[int]) -> str:
    """The text that `ids` add to that of the ids before them; ends of documents count as a beginning."""
    context = list(before[-_CONTEXT:])
    while tokenizer.eod in context:
        del context[: context.index(tokenizer.eod) + 1]
    known = tokenizer.decode(context)
    text = tokenizer.decode([*context, *ids])
    return text[len(known) :] if text.startswith(known) else tokenizer.decode(ids)


class GrowingText:
    """The text of ids that come one by one after those of `before`."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self._tokenizer, self._before = tokenizer, list(before[-_CONTEXT:])
        self.open: list[int] = []  # ids that have given no text yet

    def add(self, token: int) -> str:
        """What an id adds to the text; a character of several ids comes with its last one."""
        self.open.append(token)
        text = text_after(self._tokenizer, self._before, self.open)
        return "" if text.endswith(_HALF) and len(self.open) < 4 else self._close(text)

    def finish(self) -> str:
        """What the ids of an unfinished character add where no other follows."""
        return self._close(text_after(self._tokenizer, self._before, self.open)) if self.open else ""

    def _close(self, text: str) -> str:
        self._before = [*self._before, *self.open][-_CONTEXT:]
        self.open = []
        return text


def segments(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return what each id adds to the text; a character of several ids comes with its last one."""
    growing = GrowingText(tokenizer, [])
    found = [growing.add(token) for token in ids]
    if found:
        found[-1] += growing.finish()
    return found
