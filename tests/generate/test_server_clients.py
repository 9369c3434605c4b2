"""The server and clients that are slow, many, gone or hostile; in this process, with a model that waits."""

import asyncio
import gzip
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from megatron_zpp.generate.server_options import ServerOptions

web = pytest.importorskip(
    "aiohttp.web", reason="the server's package; pip install -r launch/requirements-serve.txt"
)

from megatron_zpp.generate import server  # noqa: E402 - needs aiohttp

CHUNKED = b"PUT /api HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
GOOD = json.dumps({"prompts": ["a"], "no_log": True}).encode()


@dataclass
class Model:
    """Writes nothing until released; asks at each token whether a client still waits, as the real one."""

    go_on: threading.Event = field(default_factory=threading.Event)
    busy: threading.Event = field(default_factory=threading.Event)
    stopped: int = 0

    def answer(
        self, request: Any, *_: object, before_token: Callable[[], None], **__: object
    ) -> dict[str, Any]:
        self.busy.set()
        try:
            while not self.go_on.wait(0.01):
                before_token()
        except server.TooLate:
            self.stopped += 1
            raise
        finally:
            self.busy.clear()
        return {"text": list(request.prompts)}


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    made = Model()
    monkeypatch.setattr(server, "answer", made.answer)
    monkeypatch.setattr(server, "encode_prompts", lambda *_: [[1]])
    return made


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[int]:
    """The port of a server with these options."""
    given = ServerOptions(**options)
    service = server.Service(None, None, given)
    runner = web.AppRunner(
        server.application(service, given), access_log=None, handler_cancellation=True, shutdown_timeout=0.1
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
        service.close()


async def connect(
    port: int, body: bytes = GOOD, *, host: str = "localhost", length: int | None = None, more: str = ""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Sends a request whose body is said to have `length` bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"PUT /api HTTP/1.1\r\nHost: {host}\r\n{more}Content-Length: {length or len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return reader, writer


async def status_of(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> tuple[int, str]:
    """Status and JSON of the answer."""
    reader, writer = connection
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    length = int(head.lower().split(b"content-length: ")[1].split()[0])
    content = await reader.readexactly(length)
    writer.close()
    return int(head.split()[1]), content.decode()


async def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up
        await asyncio.sleep(0.01)


def run(client: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(client, 60))


def test_clients_that_send_slowly_hold_up_nobody_and_are_sent_away(model: Model) -> None:
    async def client() -> None:
        async with serving(max_waiting=0, body_timeout=1.0) as port:
            slow = [await connect(port, b"{", length=99) for _ in range(5)]
            status, _ = await status_of(await connect(port))
            assert status == 200
            for one in slow:
                assert not one[0].at_eof()
                status, said = await status_of(one)
                assert status == 408
                assert "has not arrived within --body-timeout 1 s" in said

    model.go_on.set()
    run(client())


def test_more_than_may_wait_are_sent_away(model: Model) -> None:
    async def client() -> None:
        async with serving(max_waiting=1) as port:
            first = await connect(port)
            await until(model.busy.is_set)
            second = await connect(port)
            answers = [await status_of(await connect(port)) for _ in range(3)]
            while answers[0][0] != 503:  # the second had not arrived yet
                answers = [await status_of(await connect(port))]
            assert "2 requests are here already; try again later" in answers[-1][1]
            model.go_on.set()
            assert [(await status_of(one))[0] for one in (first, second)] == [200, 200]
            assert (await status_of(await connect(port)))[0] == 200

    run(client())


def test_a_client_that_leaves_is_forgotten_without_a_word(
    model: Model, capfd: pytest.CaptureFixture[str]
) -> None:
    async def client() -> None:
        async with serving(max_waiting=0) as port:
            (await connect(port, b"{", length=99))[1].close()
            _, writer = await connect(port)
            await until(model.busy.is_set)
            writer.close()
            await until(lambda: model.stopped == 1)
            model.go_on.set()
            assert (await status_of(await connect(port)))[0] == 200

    run(client())
    assert capfd.readouterr() == ("", "")


def test_what_is_no_http_gets_one_line(model: Model, capfd: pytest.CaptureFixture[str]) -> None:
    async def client() -> None:
        async with serving() as port:
            for sent in (b"\x16\x03\x01hello\r\n\r\n", CHUNKED + b"zz\r\n"):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(sent)
                await reader.read()
                writer.close()

    run(client())
    out, err = capfd.readouterr()
    assert err == ""
    assert out.count("Error handling request from 127.0.0.1: ") == len(out.splitlines()) == 2


def test_a_compressed_request_is_refused_and_never_expanded(model: Model) -> None:
    """A megabyte of gzip can become a gigabyte, in the thread that serves everybody."""
    bomb = gzip.compress(bytes(64 << 20))

    async def client() -> None:
        async with serving() as port:
            for encoding in ("gzip", "deflate", "br", "GZIP, identity"):
                sent = await connect(port, bomb, more=f"Content-Encoding: {encoding}\r\n")
                status, said = await status_of(sent)
                assert status == 415
                assert f"Content-Encoding {encoding}: send the request as it is, not compressed" in said
            assert (await status_of(await connect(port, more="Content-Encoding: identity\r\n")))[0] == 200

    model.go_on.set()
    run(client())


@pytest.mark.parametrize(
    ("options", "allowed", "refused"),
    [
        ({}, ["localhost", "LOCALHOST:80", "127.0.0.1:5000", "[::1]:5000", "localhost."], ["evil.example"]),
        ({}, [], ["", "localhost.evil.example", "10.0.0.1", "[", "x@localhost:1:2"]),
        ({"allowed_hosts": ("gpu7", "Models.lan")}, ["gpu7:5000", "models.LAN", "localhost"], ["gpu8"]),
        (
            {"host": "0.0.0.0"},
            ["10.0.0.1:5000", "[fe80::1]", "localhost"],
            ["evil.example", "10.0.0.1.nip.io"],
        ),
        ({"host": "10.0.0.1"}, ["10.0.0.1", "localhost"], ["10.0.0.2"]),
    ],
    ids=["local", "odd", "added", "everywhere", "one address"],
)
def test_only_what_is_addressed_to_this_server_is_answered(
    model: Model, options: dict[str, Any], allowed: list[str], refused: list[str]
) -> None:
    async def client() -> None:
        async with serving(**options) as port:
            for host in allowed:
                assert (await status_of(await connect(port, host=host)))[0] == 200, host
            for host in refused:
                status, said = await status_of(await connect(port, host=host))
                assert status == 403, host
                assert f"Host {host or '(not given)'}: is not this server; --allowed-hosts adds names" in said

    model.go_on.set()
    run(client())
