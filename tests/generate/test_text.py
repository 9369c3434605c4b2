"""One growing text: what ends it, and characters of several tokens."""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.generate.continuation import Continuation, Stop, text_after
from megatron_zpp.tokenizer.null import NullTokenizer

WORDS = ["a", "b", "ab", "ba", "", "aab", "c"]  # what each id adds; one adds nothing


def text_of(stops: Sequence[str], new_tokens: int) -> Continuation:
    tokenizer: Any = SimpleNamespace(eod=99, decode=lambda ids: "".join(WORDS[i] for i in ids))
    return Continuation((0,), tokenizer, torch.Generator(), new_tokens, Stop(frozenset([98]), tuple(stops)))


@given(st.integers(0, 10**6))
def test_a_text_ends_before_the_first_stop_string(seed: int) -> None:
    drawn = random.Random(seed)
    count = drawn.randint(1, 12)
    ids = [drawn.randrange(len(WORDS)) for _ in range(count)]
    stops = ["".join(drawn.choices("abc", k=drawn.randint(1, 4))) for _ in range(drawn.randint(0, 3))]
    text = text_of(stops, count)
    for token in ids:
        assert not text.ended
        text.take(token)
        if text.ended:
            break
    assert text.ended
    assert text.ids == ids[: len(text.ids)]
    written = ["".join(WORDS[i] for i in ids[:length]) for length in range(count + 1)]
    # The first token after which there is a stop string ends the text before the earliest one.
    ends = next((n for n, part in enumerate(written) if any(stop in part for stop in stops)), None)
    if ends is None:
        assert (len(text.ids), text.text) == (count, written[count])
    else:
        place = min(written[ends].find(stop) for stop in stops if stop in written[ends])
        assert (len(text.ids), text.text) == (ends, written[ends][:place])


def test_an_empty_stop_string_stops_nothing() -> None:
    text = text_of(["", "c"], 3)
    for token in (0, 1, 2):
        text.take(token)
    assert text.text == "abab"


def test_an_id_that_stops_is_no_part_of_the_text() -> None:
    text = text_of([], 5)
    text.take(1)
    text.take(98)
    assert (text.ids, text.text, text.ended) == ([1], "b", True)
    assert text_of([], 0).ended


def test_a_character_of_several_ids_is_whole_with_its_last_one() -> None:
    parts = [bytes([value]) for value in "é!".encode()]
    tokenizer: Any = SimpleNamespace(
        eod=99, decode=lambda ids: b"".join(parts[i] for i in ids).decode(errors="replace")
    )
    text, found = Continuation((2,), tokenizer, torch.Generator(), 2, Stop(strings=("é",))), []
    for token in range(2):
        text.take(token)
        found.append((text.text, text.ended))
    assert found == [("\ufffd", False), ("", True)]


def test_text_goes_on_where_the_prompt_ends() -> None:
    null = NullTokenizer(50)
    assert text_after(null, [1, 2], [3, 4]) == " 3 4"
    assert text_after(null, [50], [3, 4]) == "3 4"
    assert text_after(null, list(range(40)), []) == ""
