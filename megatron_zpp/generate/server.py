"""Megatron-LM's text generation server: `PUT /api`, one request at a time, the others in a short queue."""

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp import web

from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.options import refusal
from megatron_zpp.generate.answer import answer, encode_prompts
from megatron_zpp.generate.request import GenerateRequest, parse_request
from megatron_zpp.generate.server_options import ServerOptions
from megatron_zpp.model.gpt import GPT
from megatron_zpp.tokenizer.base import Tokenizer

_FAREWELL = 5.0  # seconds that a request under way has left at SIGTERM
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class TooLate(Exception):
    """A request took longer than it may."""


def run(model: GPT, tokenizer: Tokenizer, options: ServerOptions) -> None:
    """Answers until SIGTERM or Ctrl-C; a request under way gets some seconds. Raises OSError for a port."""
    service = _Service(model, tokenizer, options)
    app = web.Application(client_max_size=options.max_request_bytes, middlewares=[_errors_as_json])
    app.router.add_put("/api", service.generate)
    web.run_app(
        app,
        host=options.host,
        port=options.port,
        print=lambda *_: _say(f"listening on http://{options.host}:{options.port}/api"),
        access_log=None,
        handler_cancellation=True,  # when the client leaves
        shutdown_timeout=_FAREWELL,
    )
    service.close()


class _Service:
    """The model and those who wait for it."""

    def __init__(self, model: GPT, tokenizer: Tokenizer, options: ServerOptions) -> None:
        self._model, self._tokenizer, self._options = model, tokenizer, options
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="generate")
        self._present = 0  # requests that are worked on or wait

    async def generate(self, http: web.Request) -> web.Response:
        """PUT /api."""
        deadline = time.monotonic() + self._options.request_timeout
        if self._present > self._options.max_waiting:
            raise web.HTTPServiceUnavailable(
                text=f"{self._present} requests are here already; try again later",
                headers={"Retry-After": "1"},
            )
        self._present += 1
        given_up = threading.Event()
        try:
            body = await asyncio.wait_for(http.read(), self._options.request_timeout)
            work = asyncio.get_running_loop().run_in_executor(
                self._thread, self._work, body, deadline, given_up, http.remote
            )
            left = deadline - time.monotonic()
            return web.json_response(await asyncio.wait_for(work, left))
        except (asyncio.TimeoutError, TooLate):
            seconds = self._options.request_timeout
            raise web.HTTPGatewayTimeout(
                text=f"not done within --request-timeout {seconds:g} s; ask for fewer tokens or prompts"
            ) from None
        finally:
            given_up.set()  # of no use any more when the client has left
            self._present -= 1

    def close(self) -> None:
        """Waits for the thread, which notices at its next token that nobody waits for it."""
        self._thread.shutdown(cancel_futures=True)

    def _work(
        self, body: bytes, deadline: float, given_up: threading.Event, client: str | None
    ) -> dict[str, Any]:
        """In the thread of the model."""

        def check() -> None:
            if given_up.is_set() or time.monotonic() > deadline:
                raise TooLate

        check()
        started = time.perf_counter()
        try:
            request = parse_request(body)
            if len(request.prompts) > self._options.max_prompts:
                raise refusal(
                    "prompts", f"(list of {len(request.prompts)})", f"at most {self._options.max_prompts}"
                )
            prompts = encode_prompts(request, self._model, self._tokenizer)
        except ValueError as error:
            raise web.HTTPBadRequest(text=str(error)) from None
        found = answer(
            request,
            self._model,
            self._tokenizer,
            prompts,
            batch_size=self._options.batch_size,
            before_token=check,
        )
        if not request.no_log:
            _say(_log_line(client, request, time.perf_counter() - started))
        return found


@web.middleware
async def _errors_as_json(http: web.Request, handler: Handler) -> web.StreamResponse:
    """{"message": one line} for whatever is refused; Megatron-LM's client prints that."""
    try:
        return await handler(http)
    except web.HTTPException as error:
        message = " ".join((error.text or error.reason).split())
        if error.status == 404:
            message = f"{http.path}: not here; PUT /api is"
        elif error.status == 405:
            message = f"{http.method} {http.path}: use PUT"
        kept = {name: value for name, value in error.headers.items() if name in ("Retry-After", "Allow")}
        return web.json_response({"message": message}, status=error.status, headers=kept)
    except Exception as error:
        traceback.print_exc()  # a bug of ours, or a model that cannot serve
        return web.json_response({"message": one_line(error)}, status=500)


def _log_line(client: str | None, request: GenerateRequest, seconds: float) -> str:
    clock = time.strftime("%Y-%m-%d %H:%M:%S")
    texts = f"{len(request.prompts)} prompts, up to {request.tokens_to_generate} tokens each"
    return f"[{clock}] {client}: {texts}, {seconds:.2f} s"


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
