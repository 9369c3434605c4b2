"""The server and clients that are slow, many, gone or hostile; in this process, with a model that waits."""

import asyncio
import contextlib
import gzip
import http.client
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, TextIO

import pytest
import torch

pytest.importorskip("aiohttp", reason="the server's package; pip install -r launch/requirements-serve.txt")

from megatron_zpp.generate import server
from megatron_zpp.generate.server_options import ServerOptions
from tests.generate.http_site import IDS, Connection, Gate, complete, run, serving, status_of, until
from tests.generate.http_site import connect as connect_with
from tests.support import free_port

CHUNKED = b"PUT /api HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
GOOD = json.dumps({"prompts": ["1"], "tokens_to_generate": 4, "no_log": True}).encode()


@pytest.fixture
def gate() -> Gate:
    return Gate()


async def connect(port: int, body: bytes = GOOD, **how: Any) -> Connection:
    return await connect_with(port, body, **how)


def test_clients_that_send_slowly_hold_up_nobody_and_are_sent_away(gate: Gate) -> None:
    async def client() -> None:
        async with serving(gate, max_waiting=0, batch_size=1, body_timeout=1.0) as site:
            slow = [await connect(site.port, b"{", length=99) for _ in range(5)]
            status, _ = await status_of(await connect(site.port))
            assert status == 200
            for one in slow:
                assert not one[0].at_eof()
                status, said = await status_of(one)
                assert status == 408
                assert "has not arrived within --body-timeout 1 s" in said["message"]

    run(client())


def test_more_than_may_wait_are_sent_away(gate: Gate) -> None:
    async def client() -> None:
        async with serving(gate, max_waiting=1, batch_size=1) as site:
            gate.go_on.clear()
            here = [await connect(site.port) for _ in range(2)]
            await until(lambda: site.service._present == 2)
            for refused in [await connect(site.port), await complete(site.port, prompt="1")]:
                status, said = await status_of(refused)
                assert status == 503
                assert "2 requests are here already; try again later" in json.dumps(said)
            gate.go_on.set()
            assert [(await status_of(one))[0] for one in here] == [200, 200]
            assert (await status_of(await connect(site.port)))[0] == 200

    run(client())


def test_a_client_that_leaves_is_forgotten_without_a_word(
    gate: Gate, capfd: pytest.CaptureFixture[str]
) -> None:
    async def client() -> None:
        async with serving(gate, max_waiting=0, batch_size=1) as site:
            (await connect(site.port, b"{", length=99))[1].close()
            for stream in (None, False, True):
                gate.passes, gate.last = 0, 10
                if stream is None:
                    fields = {"prompts": ["1"], "tokens_to_generate": 90, "temperature": 0, "no_log": True}
                    more = json.dumps(fields).encode()
                    _, writer = await connect(site.port, more)
                else:
                    _, writer = await complete(
                        site.port, prompt="1", max_tokens=90, temperature=0, stream=stream
                    )
                await until(lambda: gate.passes > 10)
                writer.close()
                await until(lambda: not site.service._present)
                gate.last = None
                gate.go_on.set()
                await until(lambda: not site.service.scheduler.running)
                assert gate.passes < 20
                assert (await status_of(await connect(site.port)))[0] == 200

    run(client())
    assert capfd.readouterr() == ("", "")


@pytest.fixture(params=["a pipe that nobody reads", "closed"])
def deaf(request: pytest.FixtureRequest) -> Iterator[TextIO | None]:
    """What stdout or stderr is when nobody can read it: None if it was closed before Python began."""
    if request.param == "closed":
        yield None
        return
    reads, writes = os.pipe()
    os.close(reads)
    with contextlib.suppress(BrokenPipeError), open(writes, "w") as stream:
        yield stream


def test_requests_are_answered_after_the_terminal_is_closed(
    gate: Gate, deaf: TextIO | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", deaf)
    monkeypatch.setattr(sys, "stderr", deaf)

    async def client() -> None:
        async with serving(gate) as site:
            logged = json.dumps({"prompts": ["1"], "tokens_to_generate": 4}).encode()
            for _ in range(2):
                assert (await status_of(await connect(site.port, logged)))[0] == 200
                assert (await status_of(await complete(site.port, prompt="1")))[0] == 200
            with torch.no_grad():
                gate.model.embedding.tokens.weight[13] = torch.nan
                gate.model.head.output = torch.nn.Linear(32, IDS + 1, bias=False)
            status, said = await status_of(await complete(site.port, prompt="1 13"))
            assert (status, "not finite" in said["error"]["message"]) == (500, True)
            assert (await status_of(await connect(site.port, logged)))[0] == 200

    run(client())


def answers_at(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_sigterm_gives_running_requests_five_seconds(gate: Gate) -> None:
    """One that ends within them is answered; one of 18 s is not waited for."""
    port, gate.pause = free_port(), 0.2
    answers: dict[int, object] = {}
    told: list[float] = []
    ended = threading.Event()

    def ask(tokens: int) -> None:
        body = json.dumps({"prompts": ["1"], "tokens_to_generate": tokens, "temperature": 0})
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.request("PUT", "/api", body)
            answers[tokens] = connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            answers[tokens] = error

    def terminate() -> None:
        asking = [threading.Thread(target=ask, args=(tokens,), daemon=True) for tokens in (5, 90)]
        while not ended.is_set() and not answers_at(port):
            time.sleep(0.05)
        for thread in asking:
            thread.start()
        gate.busy.wait(60)
        time.sleep(0.3)  # until the other has joined
        told.append(time.monotonic())
        if not ended.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
        for thread in asking:
            thread.join(60)

    thread = threading.Thread(target=terminate, daemon=True)
    thread.start()
    try:
        server.run(gate.model, gate.tokenizer, ServerOptions(port=port), "tiny")
        seconds = time.monotonic() - told[0]
    finally:
        ended.set()
    thread.join(60)
    assert answers[5] == 200
    assert isinstance(answers[90], OSError | http.client.HTTPException)
    assert 4 < seconds < 9  # aiohttp waits twice, which made it ten


def test_what_is_no_http_gets_one_line(gate: Gate, capfd: pytest.CaptureFixture[str]) -> None:
    async def client() -> None:
        async with serving(gate) as site:
            for sent in (b"\x16\x03\x01hello\r\n\r\n", CHUNKED + b"zz\r\n"):
                reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
                writer.write(sent)
                await reader.read()
                writer.close()

    run(client())
    out, err = capfd.readouterr()
    assert err == ""
    assert out.count("Error handling request from 127.0.0.1: ") == len(out.splitlines()) == 2


def test_a_compressed_request_is_refused_and_never_expanded(gate: Gate) -> None:
    """A megabyte of gzip can become a gigabyte, in the thread that serves everybody."""
    bomb = gzip.compress(bytes(64 << 20))

    async def client() -> None:
        async with serving(gate) as site:
            for encoding in ("gzip", "deflate", "br", "GZIP, identity"):
                sent = await connect(site.port, bomb, more=f"Content-Encoding: {encoding}\r\n")
                status, said = await status_of(sent)
                assert status == 415
                assert (
                    f"Content-Encoding {encoding}: send the request as it is, not compressed"
                    in said["message"]
                )
            assert (await status_of(await connect(site.port, more="Content-Encoding: identity\r\n")))[
                0
            ] == 200

    run(client())


def test_headers_that_are_not_utf_8_are_refused_in_a_line(
    gate: Gate, capfd: pytest.CaptureFixture[str]
) -> None:
    async def client() -> None:
        async with serving(gate) as site:
            status, said = await status_of(await connect(site.port, host="caf\udce9"))
            assert (status, said["message"].split(": ")[0]) == (403, "Host caf\\udce9")
            how = {"start": "POST /v1/completions", "more": "Content-Type: caf\udce9\r\n"}
            status, said = await status_of(await connect(site.port, **how))
            assert status == 415
            status, said = await status_of(await connect(site.port, more="Content-Encoding: caf\udce9\r\n"))
            assert (status, said["message"].split(": ")[0]) == (415, "Content-Encoding caf\\udce9")

    run(client())
    assert capfd.readouterr() == ("", "")


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
    gate: Gate, options: dict[str, Any], allowed: list[str], refused: list[str]
) -> None:
    async def client() -> None:
        async with serving(gate, **options) as site:
            for host in allowed:
                assert (await status_of(await connect(site.port, host=host)))[0] == 200, host
            for host in refused:
                status, said = await status_of(await connect(site.port, host=host))
                assert status == 403, host
                assert (
                    f"Host {host or '(not given)'}: is not this server; --allowed-hosts adds names"
                    in said["message"]
                )

    run(client())
