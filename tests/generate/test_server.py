"""The server as a client meets it: a process of its own, over HTTP."""

import json
import math
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_zpp.model.gpt import GPT
from megatron_zpp.tokenizer.base import Tokenizer
from tests.generate.models import POSITIONS, PROMPTS
from tests.support import ROOT, environment, free_port, run

pytest.importorskip("aiohttp", reason="the server's package; pip install -r launch/requirements-serve.txt")


class Server:
    """A server on a port of its own; `url` is where it answers."""

    def __init__(self, checkpoint: Path, *flags: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/api"
        command = [sys.executable, "-m", "megatron_zpp.commands.serve", "--load", str(checkpoint)]
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port), "--device", "cpu", *flags],
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ask(
        self, method: str = "PUT", path: str = "", body: bytes | None = None, **keys: Any
    ) -> tuple[int, Any]:
        """Status and JSON of the answer."""
        content = json.dumps(keys).encode() if body is None else body
        request = urllib.request.Request(self.url + path, content, method=method)
        try:
            with urllib.request.urlopen(request, timeout=240) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    limits = "--max-prompts 4 --max-request-bytes 2000 --batch-size 3 --max-waiting 1 --request-timeout 120"
    started = Server(checkpoint, *limits.split())
    try:
        assert started.process.stdout.readline() == f"listening on {started.url} and /v1\n"
        yield started
    finally:
        started.process.kill()
        started.process.communicate()


def test_answers_with_text_segments_and_logprobs(server: Server, model: GPT, tokenizer: Tokenizer) -> None:
    status, found = server.ask(prompts=PROMPTS[:2], tokens_to_generate=8, top_k=1, logprobs=True)
    assert status == 200
    for prompt, text, segments, logprobs in zip(
        PROMPTS, found["text"], found["segments"], found["logprobs"], strict=False
    ):
        ids = tokenizer.encode(prompt)
        expected = []
        while len(expected) < 8:
            token = int(model(torch.tensor([ids + expected]))[0, -1].argmax())
            if token == tokenizer.eod:
                break
            expected.append(token)
        whole = ids + expected
        assert text == prompt + tokenizer.decode(expected)
        assert "".join(segments) == text
        assert len(segments) == len(whole)
        logits = model(torch.tensor([whole]))[0].double().log_softmax(-1)
        for place, value in enumerate(logprobs):
            assert value == pytest.approx(logits[place, whole[place + 1]].item(), abs=1e-3)
        assert len(logprobs) == len(whole) - 1


def test_one_seed_one_text_and_none_another_each_time(server: Server) -> None:
    def text(**keys: Any) -> list[str]:
        status, found = server.ask(tokens_to_generate=12, **keys)
        assert status == 200
        assert found["logprobs"] is None
        return found["text"]

    assert text(prompts=[PROMPTS[0]], random_seed=3) == text(prompts=PROMPTS[:1], random_seed=3)
    two, one = (text(prompts=prompts, random_seed=3) for prompts in (PROMPTS[1::2], PROMPTS[3:]))
    assert two[1:] == one
    assert text(prompts=PROMPTS[:4]) != text(prompts=PROMPTS[:4])  # one alone may end at once, twice


def test_keys_that_shape_the_answer(server: Server, model: GPT, tokenizer: Tokenizer) -> None:
    _, whole = server.ask(prompts=["a"], tokens_to_generate=8, top_k=1)
    _, new = server.ask(prompts=["a"], tokens_to_generate=8, top_k=1, echo_prompts=False, logprobs=True)
    assert whole["text"][0] == "a" + new["text"][0]
    assert len(new["segments"][0]) == len(new["logprobs"][0])
    status, marked = server.ask(prompts=[""], add_BOS=True, tokens_to_generate=3, top_k=1, logprobs=True)
    assert status == 200
    assert len(marked["logprobs"][0]) == len(marked["segments"][0]) - 1 <= 3
    status, scored = server.ask(prompts=["a b c"], tokens_to_generate=0, logprobs=True)
    assert scored["text"] == ["a b c"]
    assert all(math.isfinite(value) and value < 0 for value in scored["logprobs"][0])
    stop = int(model(torch.tensor([tokenizer.encode("a")]))[0, -1].argmax())
    _, stopped = server.ask(prompts=["a"], tokens_to_generate=8, top_k=1, stop_token=stop)
    assert stopped["text"] == ["a"]


def test_completions_stream_the_text_that_the_whole_answer_has(server: Server) -> None:
    """Also with characters of several tokens, and stop strings that begin before they are complete."""
    url, free = server.url.removesuffix("/api") + "/v1/completions", ""

    def ask(**fields: Any) -> bytes:
        given = {"prompt": PROMPTS[0], "max_tokens": 12, "seed": 3, "top_p": 0.9, **fields}
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(given).encode(), kind)
        with urllib.request.urlopen(request, timeout=240) as answer:
            return answer.read()

    for round in range(2):
        stop = [free[3:6], free[5:9]] if round else []
        whole = json.loads(ask(stop=stop))["choices"][0]
        lines = ask(stop=stop, stream=True).decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        parts = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]
        assert "".join(part["text"] for part in parts) == whole["text"]
        assert parts[-1]["finish_reason"] == whole["finish_reason"]
        if round:
            assert whole["text"] == min((free.split(each)[0] for each in stop), key=len)
            assert whole["finish_reason"] == "stop"
        free = free or whole["text"]
    status, found = server.ask(prompts=[PROMPTS[0]], tokens_to_generate=12, random_seed=3, top_p=0.9)
    assert (status, found["text"]) == (200, [PROMPTS[0] + free])


@pytest.mark.parametrize(
    ("keys", "status", "said"),
    [
        ({"prompts": ["a"] * 5}, 400, "prompts (list of 5): at most 4"),
        ({"prompts": ["a"], "top_k": -1}, 400, "top_k -1: must be at least 0"),
        ({"prompts": ["a"], "tokens_to_generate": 99}, 400, f"the model {POSITIONS} positions: at most"),
        (
            {"prompts": ["\ud800"]},
            400,
            "prompts[0] '\\ud800': holds half a surrogate pair, \\ud800; give",
        ),
        ({"prompts": ["a"], "\ud800": 1}, 400, "\\ud800 1: no such key"),
        ({"prompts": ["a" * 3000]}, 413, "2000"),
        ({"body": b"{"}, 400, "the request is not JSON"),
        ({"method": "POST", "prompts": ["a"]}, 405, "POST /api: use PUT"),
        ({"prompts": ["a"], "stop": ["x"] * 65}, 400, "stop (list of 65): at most 64 strings"),
        ({"path": "/v1"}, 404, "/api/v1: not here; PUT /api, POST /v1"),
    ],
    ids=str,
)
def test_a_bad_request_gets_one_line(server: Server, keys: dict[str, Any], status: int, said: str) -> None:
    found, answer = server.ask(**keys)
    assert found == status
    assert list(answer) == ["message"]
    assert said in answer["message"]
    assert "\n" not in answer["message"]


@pytest.mark.parametrize("checkpoint", ["gpt2"], indirect=True)
def test_a_request_that_takes_too_long_is_ended_and_sigterm_ends_cleanly(checkpoint: Path) -> None:
    slow = Server(checkpoint, "--request-timeout", "0.05", "--batch-size", "1")
    try:
        assert slow.process.stdout.readline()
        answers = []
        request = {"prompts": PROMPTS[1:2] * 100, "tokens_to_generate": 16, "no_log": True}
        asking = [threading.Thread(target=lambda: answers.append(slow.ask(**request))) for _ in range(2)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        assert [status for status, _ in answers] == [504, 504]
        assert "not done within --request-timeout 0.05 s; ask for fewer" in answers[0][1]["message"]
        slow.process.send_signal(signal.SIGTERM)
        out, err = slow.process.communicate(timeout=120)
        assert (slow.process.returncode, out, err) == (0, "", "")
    finally:
        slow.process.kill()


@pytest.mark.parametrize("checkpoint", ["gpt2"], indirect=True)
def test_a_port_that_is_taken_is_said_in_a_line(checkpoint: Path, server: Server) -> None:
    done = run("-m", "megatron_zpp.commands.serve", "--load", checkpoint, "--port", str(server.port))
    assert done.returncode == 1
    assert done.stderr.startswith(f"serve: error: --port {server.port}: cannot listen on 127.0.0.1: ")
    assert len(done.stderr.splitlines()) == 1
