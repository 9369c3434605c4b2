"""Answers in the form of OpenAI's completions: choices, log-probabilities, counts of tokens, events."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_zpp.generate.completion_request import CompletionRequest
from megatron_zpp.generate.text import Continuation, Piece, TokenScore
from megatron_zpp.generate.texts import segments, text_after
from megatron_zpp.tokenizer.base import Tokenizer

DONE = b"data: [DONE]\n\n"


@dataclass
class Choice:
    """One text of an answer, which is sent whole or in pieces."""

    request: CompletionRequest
    tokenizer: Tokenizer
    number: int
    prompt: Sequence[int]  # as the client gave it; empty for a new document
    length: int = field(default=0, init=False)  # characters that were sent
    context: list[int] = field(default_factory=list, init=False)  # ids before those that are sent next

    def whole(self, text: Continuation) -> dict[str, Any]:
        """The choice when its text has ended."""
        piece = Piece(text.ids, text.segments, text.scores, text.finish)
        return self.chunk(text, piece)

    def chunk(self, text: Continuation, piece: Piece) -> dict[str, Any]:
        """The choice with the next tokens of its text; the first has the echo of the prompt."""
        ids, parts, scores = list(piece.ids), list(piece.segments), list[TokenScore | None](piece.scores)
        sent = "".join(parts)
        if not self.context:
            self.context = [] if self.request.echo else text.prompt
            if self.request.echo and self.prompt:
                ids, parts = [*self.prompt, *ids], [*segments(self.tokenizer, self.prompt), *parts]
                scores = [None, *text.prompt_scores, *scores]
                given = self.request.prompts[self.number // self.request.n]
                sent = (given if isinstance(given, str) else self.tokenizer.decode(self.prompt)) + sent
            elif self.request.echo:
                self.context = text.prompt
        logprobs = None
        if self.request.logprobs is not None:
            logprobs = self._log_probabilities(ids, parts, scores)
        self.context = [*self.context, *ids]
        self.length += len(sent)
        return {"text": sent, "index": self.number, "logprobs": logprobs, "finish_reason": piece.finish}

    def _log_probabilities(
        self, ids: Sequence[int], parts: Sequence[str], scores: Sequence[TokenScore | None]
    ) -> dict[str, Any]:
        """Per token its text, log-probability, the likeliest in its place, and its offset in the text."""
        likeliest, offsets, offset = [], [], self.length
        before = list(self.context)
        for token, part, score in zip(ids, parts, scores, strict=True):
            offsets.append(offset)
            offset += len(part)
            likeliest.append(None if score is None else self._likeliest(before, token, part, score))
            before.append(token)
        return {
            "tokens": list(parts),
            "token_logprobs": [None if score is None else score.log_probability for score in scores],
            "top_logprobs": likeliest,
            "text_offset": offsets,
        }

    def _likeliest(self, before: list[int], token: int, part: str, score: TokenScore) -> dict[str, float]:
        """Return the likeliest tokens and the one that was taken; of two with the same text the likelier."""
        found: dict[str, float] = {}
        for other, value in (*score.likeliest, (token, score.log_probability)):
            name = part if other == token else text_after(self.tokenizer, before, [other])
            found.setdefault(name, value)
        return found


@dataclass(frozen=True)
class Completion:
    """What all parts of one answer share."""

    id: str
    created: int  # seconds since 1970
    model: str

    def body(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> dict[str, Any]:
        """The object that carries `choices`."""
        shared = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}
        return shared | {"choices": choices} | ({} if usage is None else {"usage": usage})


def usage_of(prompts: Sequence[Sequence[int]], texts: Sequence[Continuation]) -> dict[str, int]:
    """Counts of tokens; a prompt counts once, however many texts follow it."""
    asked, written = sum(map(len, prompts)), sum(len(text.ids) for text in texts)
    return {"prompt_tokens": asked, "completion_tokens": written, "total_tokens": asked + written}


def event(content: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return f"data: {json.dumps(content)}\n\n".encode()
