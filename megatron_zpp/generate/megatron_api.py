"""Megatron-LM's `PUT /api`."""

import time

from aiohttp import web

from megatron_zpp.generate.answer import answer, encode_prompts, order_of
from megatron_zpp.generate.request import GenerateRequest, parse_request
from megatron_zpp.generate.server_log import say_request
from megatron_zpp.generate.service import Service
from megatron_zpp.generate.text import Continuation


class MegatronApi:
    """Texts, segments and log-probabilities, in one answer."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def generate(self, http: web.Request) -> web.Response:
        """PUT /api. A request is queued once all of it has arrived."""
        body = await self._service.bodies.receive(http)
        with self._service.room():
            return await self._service.in_time(self._answer(body, http.remote))

    async def _answer(self, body: bytes, client: str | None) -> web.Response:
        started = time.perf_counter()
        request, texts = await self._service.parsed(self._parse, body)
        await self._service.write(texts)
        if not request.no_log:
            say_request(client, len(texts), request.tokens_to_generate, time.perf_counter() - started)
        return web.json_response(answer(request, self._service.tokenizer, texts))

    def _parse(self, body: bytes) -> tuple[GenerateRequest, list[Continuation]]:
        """Return the request and its texts. Raises ValueError."""
        service = self._service
        request = parse_request(body)
        service.check_count("prompts", len(request.prompts))
        prompts = encode_prompts(request, service.model, service.tokenizer)
        orders = order_of(request, service.tokenizer, prompts)
        return request, [Continuation(order, service.tokenizer) for order in orders]
