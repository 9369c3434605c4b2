"""One text that is written token by token: what is asked for, what has been written, and what ends it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from megatron_zpp.generate.draw import Sampling, generator_of
from megatron_zpp.generate.texts import GrowingText
from megatron_zpp.tokenizer.base import Tokenizer

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Stop:
    """What ends a text without being part of it: an id, or a string in the generated text."""

    ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Order:
    """A text that is asked for. The drawn ids depend only on `prompt`, `sampling`, `seed` and `copy`."""

    prompt: tuple[int, ...]  # one id or more
    new_tokens: int
    sampling: Sampling
    seed: int
    copy: int = 0  # how often the same prompt came before, with this seed
    stop: Stop = Stop()
    alternatives: int = 0  # likeliest ids whose log-probabilities are given beside that of each token
    score_prompt: bool = False


class TokenScore(NamedTuple):
    """The log-probability of an id, and the likeliest ids in its place with theirs."""

    log_probability: float
    likeliest: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """Tokens at the end of a text that will not change any more; `finish` comes with the last piece."""

    ids: Sequence[int]
    segments: Sequence[str]
    scores: Sequence[TokenScore]
    finish: Finish | None


@dataclass(eq=False)
class Continuation:
    """The text after `order.prompt`. `segments` has what each id adds to it."""

    order: Order
    tokenizer: Tokenizer
    ids: list[int] = field(default_factory=list)
    segments: list[str] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    prompt_scores: list[TokenScore] = field(default_factory=list)  # of all ids of the prompt but the first
    finish: Finish | None = None
    failure: str = ""

    def __post_init__(self) -> None:
        self.generator = generator_of(self.order.seed, self.order.prompt, self.order.copy)
        self._growing = GrowingText(self.tokenizer, self.order.prompt)
        self._longest_stop = max(map(len, self.order.stop.strings), default=0)
        self._given = 0  # ids that `piece` has returned
        if not self.order.new_tokens:
            self.finish = "length"

    @property
    def prompt(self) -> list[int]:
        """The ids that the text continues."""
        return list(self.order.prompt)

    @property
    def text(self) -> str:
        """The text of `ids`, without an unfinished character unless the text has ended."""
        return "".join(self.segments)

    @property
    def log_probabilities(self) -> list[float]:
        """The log-probability of each of `ids`."""
        return [score.log_probability for score in self.scores]

    @property
    def ended(self) -> bool:
        """Whether nothing will be added."""
        return bool(self.finish or self.failure)

    def take(self, token: int, score: TokenScore) -> None:
        """Add an id, unless it ends the text."""
        if token in self.order.stop.ids:
            self._end("stop")
            return
        self.ids.append(token)
        self.scores.append(score)
        self.segments.append(self._growing.add(token))
        if not self._cut() and len(self.ids) == self.order.new_tokens:
            self._end("length")

    def piece(self) -> Piece | None:
        """What has become certain since the last call; None if nothing has."""
        first, last = self._given, len(self.ids)
        if not self.finish:
            last -= len(self._growing.open)
            certain = sum(map(len, self.segments)) - self._held()
            end = sum(map(len, self.segments[:last]))  # of token last - 1
            # Where the certain text ends, a token that adds nothing may yet be cut off with what follows.
            while last > first and (end > certain or (end == certain and not self.segments[last - 1])):
                last -= 1
                end -= len(self.segments[last])
        if first == last and not self.finish:
            return None
        self._given = last
        chosen = slice(first, last)
        return Piece(self.ids[chosen], self.segments[chosen], self.scores[chosen], self.finish)

    def _end(self, finish: Finish) -> None:
        if self.ids:
            self.segments[-1] += self._growing.finish()
        self.finish = finish
        if finish == "length":
            self._cut()

    def _cut(self) -> bool:
        """End the text before a stop string that its last token has completed."""
        if not self._longest_stop or not self.segments[-1]:
            return False
        text = self.text
        start = max(0, len(text) - len(self.segments[-1]) - self._longest_stop + 1)
        places = [place for string in self.order.stop.strings if (place := text.find(string, start)) >= 0]
        if not places:
            return False
        place, begin = min(places), len(text)
        while self.ids and (begin := begin - len(self.segments[-1])) >= place:
            del self.ids[-1], self.segments[-1], self.scores[-1]
        if self.ids:
            self.segments[-1] = self.segments[-1][: place - begin]
        self.finish = "stop"
        return True

    def _held(self) -> int:
        """Return how many characters at the end may be the beginning of a stop string."""
        if not self._longest_stop:
            return 0
        tail, held = self.text[1 - self._longest_stop :] if self._longest_stop > 1 else "", 0
        for string in self.order.stop.strings:
            place = tail.find(string[0])
            while place >= 0 and not string.startswith(tail[place:]):
                place = tail.find(string[0], place + 1)
            held = max(held, len(tail) - place if place >= 0 else 0)
        return held
