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


def segments(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return what each id adds to the text; a character of several ids comes with its last one."""
    found: list[str] = []
    first = 0  # of the ids that have given no text yet
    for index in range(len(ids)):
        text = text_after(tokenizer, ids[:first], ids[first : index + 1])
        waits = text.endswith(_HALF) and index + 1 < len(ids) and index - first < 3
        found.append("" if waits else text)
        first = first if waits else index + 1
    return found
