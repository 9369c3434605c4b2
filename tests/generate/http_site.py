"""A server in this process, with a small model that can be held, and clients that speak bare HTTP."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.generate.server import application
from megatron_zpp.generate.server_options import ServerOptions
from megatron_zpp.generate.service import Service
from megatron_zpp.model.gpt import GPT
from megatron_zpp.tokenizer.null import NullTokenizer

POSITIONS, IDS = 96, 50
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Gate:
    """A GPT whose forward passes can be held, from any of them on, and are counted."""

    def __init__(self) -> None:
        self.go_on, self.busy = threading.Event(), threading.Event()
        self.go_on.set()
        self.pause, self.passes = 0.0, 0
        self.last: int | None = None  # the pass after which all are held
        shape = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": POSITIONS}
        self.model = GPT(ModelConfig(**shape, init_method_std=0.3), IDS + 1).initialize(1).eval()
        self.model.requires_grad_(False)
        self.model.layers[0].register_forward_pre_hook(self._hold)
        self.tokenizer = NullTokenizer(IDS)

    def _hold(self, *_: object) -> None:
        if self.passes == self.last:
            self.go_on.clear()
        self.passes += 1
        self.busy.set()
        assert self.go_on.wait(60)
        time.sleep(self.pause)


@dataclass
class Site:
    """Where a server is, and what a test may look at."""

    port: int
    service: Service


@asynccontextmanager
async def serving(gate: Gate, **options: Any) -> AsyncIterator[Site]:
    """A server with these options."""
    given = ServerOptions(**options)
    service = Service(gate.model, gate.tokenizer, given, "tiny")
    runner = web.AppRunner(
        application(service, given), access_log=None, handler_cancellation=True, shutdown_timeout=0.1
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield Site(runner.addresses[0][1], service)
    finally:
        gate.go_on.set()
        await runner.cleanup()
        service.close()


async def connect(
    port: int,
    body: bytes,
    *,
    start: str = "PUT /api",
    host: str = "localhost",
    length: int | None = None,
    more: str = "",
) -> Connection:
    """Sends a request whose body is said to have `length` bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"{start} HTTP/1.1\r\nHost: {host}\r\n{more}Content-Length: {length or len(body)}\r\n\r\n"
    writer.write(head.encode(errors="surrogateescape") + body)
    await writer.drain()
    return reader, writer


async def complete(port: int, **fields: Any) -> Connection:
    """Sends a request for a completion."""
    more = "Content-Type: application/json\r\n"
    return await connect(port, json.dumps(fields).encode(), start="POST /v1/completions", more=more)


async def status_of(connection: Connection) -> tuple[int, Any]:
    """Status and JSON of the answer."""
    reader, writer = connection
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    length = int(head.lower().split(b"content-length: ")[1].split()[0])
    content = await reader.readexactly(length)
    writer.close()
    return int(head.split()[1]), json.loads(content)


async def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up
        await asyncio.sleep(0.01)


def run(client: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(client, 120))
