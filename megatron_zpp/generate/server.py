"""Megatron-LM's text generation server: `PUT /api`, one request at a time, the others in a short queue."""

import asyncio
import logging
import re
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from typing import Any

from aiohttp import web

from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.options import option_error
from megatron_zpp.generate.answer import answer, encode_prompts
from megatron_zpp.generate.request import GenerateRequest, parse_request
from megatron_zpp.generate.server_options import ServerOptions
from megatron_zpp.model.gpt import GPT
from megatron_zpp.tokenizer.base import Tokenizer

_GRACE = 5.0  # seconds that a running request has left at SIGTERM
_MOST_BODIES = 256  # that are received at a time: each is held in memory, up to --max-request-bytes
_EVERY_ADDRESS = ("0.0.0.0", "::")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"(?P<name>\[[^\[\]]+\]|[^:\[\]]+)(:\d+)?")  # RFC 9110, 7.2
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class TooLate(Exception):
    """A request exceeded its time limit."""


def run(model: GPT, tokenizer: Tokenizer, options: ServerOptions) -> None:
    """Answer until SIGTERM or Ctrl-C; a running request gets some seconds. Raises OSError for a port."""
    service = Service(model, tokenizer, options)
    web.run_app(
        application(service, options),
        host=options.host,
        port=options.port,
        print=lambda *_: _say(f"listening on http://{options.host}:{options.port}/api"),
        access_log=None,
        handler_cancellation=True,  # when the client leaves
        shutdown_timeout=_GRACE,
    )
    service.close()


def application(service: "Service", options: ServerOptions) -> web.Application:
    """Return the application: it answers PUT /api, and only requests addressed to this server."""
    logger = logging.Logger("megatron_zpp.serve")  # not among those that a library configures
    logger.addHandler(_OneLine())
    middlewares: list[Any] = [_errors_as_json, _AllowedHosts(options.host, options.allowed_hosts).check]
    app = web.Application(
        client_max_size=options.max_request_bytes,
        middlewares=middlewares,
        # Compressed bodies are refused, so none is ever expanded: a megabyte can become a gigabyte.
        handler_args={"auto_decompress": False, "logger": logger},
    )
    app.router.add_put("/api", service.generate)
    return app


class Service:
    """The model, and the requests that are received or wait for it."""

    def __init__(self, model: GPT, tokenizer: Tokenizer, options: ServerOptions) -> None:
        self._model, self._tokenizer, self._options = model, tokenizer, options
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="generate")
        self._arriving = 0  # requests whose body is being received
        self._present = 0  # requests that are worked on or wait

    async def generate(self, http: web.Request) -> web.Response:
        """PUT /api. A request is queued once all of it has arrived, so that slow senders delay no others."""
        body = await self._receive(http)
        deadline = time.monotonic() + self._options.request_timeout
        if self._present > self._options.max_waiting:
            raise _unavailable(f"{self._present} requests are here already")
        self._present += 1
        given_up = threading.Event()
        try:
            work = asyncio.get_running_loop().run_in_executor(
                self._thread, self._work, body, deadline, given_up, http.remote
            )
            return web.json_response(await asyncio.wait_for(work, self._options.request_timeout))
        except (asyncio.TimeoutError, TooLate):
            seconds = self._options.request_timeout
            raise web.HTTPGatewayTimeout(
                text=f"not done within --request-timeout {seconds:g} s; ask for fewer tokens or prompts"
            ) from None
        finally:
            given_up.set()  # nobody waits for the answer when the client has left
            self._present -= 1

    async def _receive(self, http: web.Request) -> bytes:
        encoding = http.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            raise web.HTTPUnsupportedMediaType(
                text=f"Content-Encoding {encoding[:40]}: send the request as it is, not compressed"
            )
        if self._arriving >= _MOST_BODIES:
            raise _unavailable(f"{self._arriving} requests are arriving already")
        self._arriving += 1
        seconds = self._options.body_timeout
        try:
            return await asyncio.wait_for(http.read(), seconds)
        except asyncio.TimeoutError:
            raise web.HTTPRequestTimeout(
                text=f"the request has not arrived within --body-timeout {seconds:g} s"
            ) from None
        finally:
            self._arriving -= 1

    def close(self) -> None:
        """Wait for the thread, which notices at its next token that the request was given up."""
        self._thread.shutdown(cancel_futures=True)

    def _work(
        self, body: bytes, deadline: float, given_up: threading.Event, client: str | None
    ) -> dict[str, Any]:
        """Answer a request, in the thread of the model."""

        def check() -> None:
            if given_up.is_set() or time.monotonic() > deadline:
                raise TooLate

        check()
        started = time.perf_counter()
        try:
            request = parse_request(body)
            if len(request.prompts) > self._options.max_prompts:
                raise option_error(
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


class _AllowedHosts:
    """Refuses requests that are addressed to another server.

    A page in a user's browser can make its own host name resolve to 127.0.0.1 (DNS rebinding), and so talk to
    this server as if it were the page's own. The Host line says which name the client used.
    """

    def __init__(self, host: str, more: tuple[str, ...]) -> None:
        self._names = {_bare(name) for name in (*_LOOPBACK, host, *more)}
        self._addresses = host in _EVERY_ADDRESS  # numeric ones, which nobody can redirect

    @web.middleware
    async def check(self, http: web.Request, handler: Handler) -> web.StreamResponse:
        """Raise HTTPForbidden unless the Host line has an allowed name."""
        given = http.headers.get("Host", "")
        match = _HOST.fullmatch(given)
        name = _bare(match["name"]) if match else ""
        if name in self._names or (self._addresses and _is_address(name)):
            return await handler(http)
        raise web.HTTPForbidden(
            text=f"Host {given[:100] or '(not given)'}: is not this server; --allowed-hosts adds names"
        )


def _bare(name: str) -> str:
    return name.strip("[]").rstrip(".").lower()


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _unavailable(why: str) -> web.HTTPServiceUnavailable:
    return web.HTTPServiceUnavailable(text=f"{why}; try again later", headers={"Retry-After": "1"})


class _OneLine(logging.Handler):
    """Prints aiohttp's messages about clients that do not speak HTTP, without tracebacks."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        why = f": {one_line(error)}" if error is not None else ""
        _say(f"{record.getMessage()}{why}")


@web.middleware
async def _errors_as_json(http: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every refused request with {"message": one line}, which Megatron-LM's client prints."""
    try:
        return await handler(http)
    except (ConnectionError, web.RequestPayloadError):
        # The client left in the middle of its request, or it is not HTTP: perhaps nobody reads this answer.
        return web.json_response({"message": "the request is not whole"}, status=400)
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
