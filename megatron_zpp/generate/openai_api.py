"""OpenAI's `POST /v1/completions`, whole or as a stream of server-sent events, and `GET /v1/models`."""

import asyncio
import contextlib
import secrets
import time
from dataclasses import dataclass

from aiohttp import web

from megatron_zpp.config.options import option_error
from megatron_zpp.generate.completion_answer import DONE, Choice, Completion, event, usage_of
from megatron_zpp.generate.completion_request import (
    CompletionRequest,
    orders_of,
    parse_completion,
    prompts_of,
)
from megatron_zpp.generate.http_errors import openai_error
from megatron_zpp.generate.http_limits import require_json
from megatron_zpp.generate.scheduler import GenerationFailed
from megatron_zpp.generate.server_log import say_request
from megatron_zpp.generate.service import Service
from megatron_zpp.generate.text import Continuation

_LAST_WORDS = 1.0  # seconds in which a client must take the error that ends its stream


@dataclass
class _Work:
    """A request and its texts."""

    request: CompletionRequest
    prompts: list[list[int]]
    texts: list[Continuation]
    choices: list[Choice]
    completion: Completion


class OpenaiApi:
    """Completions by the one model that is served."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._since = int(time.time())

    async def models(self, http: web.Request) -> web.Response:
        """GET /v1/models."""
        return web.json_response({"object": "list", "data": [self._model()]})

    async def model(self, http: web.Request) -> web.Response:
        """GET /v1/models/NAME."""
        self._check_model(http.match_info["name"])
        return web.json_response(self._model())

    async def complete(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/completions. A request is queued once all of it has arrived."""
        require_json(http)
        body = await self._service.bodies.receive(http)
        with self._service.room():
            started = time.perf_counter()
            work = await self._service.in_time(self._service.parsed(self._parse, body))
            self._check_model(work.request.model)
            left = max(0.0, self._service.options.request_timeout - (time.perf_counter() - started))
            if work.request.stream:
                response: web.StreamResponse = await self._stream(http, work, left)
            else:
                response = await self._service.in_time(self._whole(work), left)
            count, tokens = len(work.texts), work.request.max_tokens
            say_request(http.remote, count, tokens, time.perf_counter() - started)
            return response

    async def _whole(self, work: _Work) -> web.Response:
        await self._service.write(work.texts)
        choices = [choice.whole(text) for choice, text in zip(work.choices, work.texts, strict=True)]
        return web.json_response(work.completion.body(choices, usage_of(work.prompts, work.texts)))

    async def _stream(self, http: web.Request, work: _Work, seconds: float) -> web.StreamResponse:
        """Send tokens as they become certain. What goes wrong after the first byte becomes an event."""
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        try:
            await response.prepare(http)
            await asyncio.wait_for(self._send(response, work), seconds)
        except ConnectionError:
            pass  # the client has left
        except asyncio.TimeoutError:
            await self._fail(http, response, 504, self._service.too_late)
        except GenerationFailed as failure:
            await self._fail(http, response, 500, str(failure))
        return response

    async def _send(self, response: web.StreamResponse, work: _Work) -> None:
        async with contextlib.aclosing(self._service.pieces(work.texts, stream=True)) as pieces:
            async for number, piece in pieces:
                chunk = work.choices[number].chunk(work.texts[number], piece)
                await response.write(event(work.completion.body([chunk])))
        if work.request.stream_options:
            await response.write(event(work.completion.body([], usage_of(work.prompts, work.texts))))
        await response.write(DONE)

    async def _fail(self, http: web.Request, response: web.StreamResponse, status: int, message: str) -> None:
        """End a stream with an error, or the connection if the client does not read."""
        try:
            await asyncio.wait_for(response.write(event(openai_error(status, message))), _LAST_WORDS)
        except (ConnectionError, asyncio.TimeoutError):
            if http.transport is not None:
                http.transport.abort()

    def _parse(self, body: bytes) -> _Work:
        """Return the request and its texts. Raises ValueError."""
        service = self._service
        request = parse_completion(body)
        service.check_count("n" if request.n > 1 else "prompt", len(request.prompts) * request.n)
        prompts = prompts_of(request, service.model, service.tokenizer)
        texts = [
            Continuation(order, service.tokenizer) for order in orders_of(request, service.tokenizer, prompts)
        ]
        choices = [
            Choice(request, service.tokenizer, number, prompts[number // request.n])
            for number in range(len(texts))
        ]
        completion = Completion(f"cmpl-{secrets.token_hex(12)}", int(time.time()), service.name)
        return _Work(request, prompts, texts, choices, completion)

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._service.name):
            error = option_error("model", name, f"is not served; {self._service.name} is")
            raise web.HTTPNotFound(text=str(error))

    def _model(self) -> dict[str, object]:
        fixed = {"object": "model", "created": self._since, "owned_by": "megatron_zpp"}
        return {"id": self._service.name} | fixed
