"""One growing text: what ends it, and which of its tokens are certain before it has ended."""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_zpp.generate.draw import Sampling
from megatron_zpp.generate.text import Continuation, Order, Stop, TokenScore

WORDS = ["a", "b", "ab", "ba", "", "aab", "c"]  # what each id adds; one adds nothing


def text_of(stops: Sequence[str], new_tokens: int, words: Sequence[str] = WORDS) -> Continuation:
    tokenizer: Any = SimpleNamespace(eod=99, decode=lambda ids: "".join(words[i] for i in ids))
    order = Order((0,), new_tokens, Sampling(), 1, stop=Stop(frozenset([98]), tuple(stops)))
    return Continuation(order, tokenizer)


@pytest.mark.parametrize("seed", range(300))
def test_pieces_join_to_the_text_up_to_the_first_stop(seed: int) -> None:
    drawn = random.Random(seed)
    count = drawn.randint(1, 12)
    ids = [drawn.randrange(len(WORDS)) for _ in range(count)]
    stops = ["".join(drawn.choices("abc", k=drawn.randint(1, 4))) for _ in range(drawn.randint(0, 3))]
    text, pieces = text_of(stops, count), []
    for token in ids:
        assert not text.ended
        text.take(token, TokenScore(float(len(text.ids))))
        if (piece := text.piece()) is not None:
            pieces.append(piece)
        if text.ended:
            break
    whole = "".join(WORDS[i] for i in ids)
    places = [whole.find(stop) for stop in stops if stop in whole]
    # A text ends with the token that completes a stop string, so another one may come first only later.
    reached = "".join(WORDS[i] for i in ids[: len(text.ids)])
    assert whole.startswith(text.text)
    assert reached.startswith(text.text)
    if places:
        assert text.finish == "stop"
        assert len(text.text) >= min(places)
        assert not any(stop in text.text for stop in stops)
    else:
        assert (text.finish, text.text) == ("length", whole)
    assert "".join("".join(piece.segments) for piece in pieces) == text.text
    assert [token for piece in pieces for token in piece.ids] == text.ids == ids[: len(text.ids)]
    assert [score.log_probability for piece in pieces for score in piece.scores] == text.log_probabilities
    assert text.log_probabilities == [float(place) for place in range(len(text.ids))]
    assert [piece.finish for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish == text.finish


def test_tokens_are_certain_as_soon_as_no_stop_string_can_begin_in_them() -> None:
    text = text_of(["aba"], 9)
    found = []
    for token in (2, 6, 0, 6):  # ab c a c
        text.take(token, TokenScore(0.0))
        piece = text.piece()
        found.append(list(piece.segments) if piece else None)
    assert found == [None, ["ab", "c"], None, ["a", "c"]]


def test_an_unfinished_character_waits_for_its_end() -> None:
    parts = [bytes([value]) for value in "é!".encode()]
    tokenizer: Any = SimpleNamespace(
        eod=99, decode=lambda ids: b"".join(parts[i] for i in ids).decode(errors="replace")
    )
    text = Continuation(Order((2,), 2, Sampling(), 1), tokenizer)
    text.take(0, TokenScore(0.0))
    assert text.piece() is None
    text.take(1, TokenScore(0.0))
    assert text.piece().segments == ["", "é"]
    cut = Continuation(Order((2,), 1, Sampling(), 1), tokenizer)
    cut.take(0, TokenScore(0.0))
    assert (cut.piece().segments, cut.text) == (["\ufffd"], "\ufffd")


def test_an_id_that_stops_is_no_part_of_the_text() -> None:
    text = text_of([], 5)
    text.take(1, TokenScore(0.0))
    text.take(98, TokenScore(0.0))
    assert (text.ids, text.text, text.finish) == ([1], "b", "stop")
    assert (text.piece().finish, text.piece().ids) == ("stop", [])
