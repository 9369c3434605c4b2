"""Requests per second of the server under parallel requests: `python benchmarks/serving.py [--before DIR]`.

Saves a GPT with random weights, starts `megatron_zpp.commands.serve` on it, and sends --requests requests at
once, each with a prompt of its own. Texts are greedy. --before names a checkout of another commit, whose
server answers the same requests: with its defaults, and with a queue for all. Then one client asks alone, one
request after the other. Servers take turns for --rounds rounds, and the figures are those of the fastest. CPU
seconds are the server's own and hardly depend on what else the machine does.
"""

import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

import aiohttp

from benchmarks.common import write_result
from megatron_zpp.config.command_line import run_tool
from megatron_zpp.config.options import Options, option, option_error, parse_options

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 8191
SHAPE = "--num-layers 6 --hidden-size 384 --num-attention-heads 6 --seq-length 256".split()
TRAIN = "--mock-data --micro-batch-size 1 --train-iters 1 --eval-iters 0 --lr 1e-4 --device cpu".split()


@dataclass(frozen=True, kw_only=True)
class Settings(Options):
    """serving benchmark"""

    requests: int = option(40, "Requests that are sent at once.", at_least=1)
    alone: int = option(10, "Requests of the client that asks alone.", at_least=1)
    prompt_tokens: tuple[int, ...] = option((16, 96), "Shortest and longest prompt.", at_least=1)
    rounds: int = option(5, "Times that each is measured.", at_least=1)
    new_tokens: int = option(32, "Tokens that are written after each.", at_least=1)
    before: str | None = option(None, "Checkout to compare with.")


class Server:
    """The server of a checkout, in a `with` block."""

    def __init__(self, root: Path, checkpoint: Path, *flags: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "megatron_zpp.commands.serve", "--load", str(checkpoint)]
        self._process = subprocess.Popen(
            [*command, "--port", str(self.port), "--request-timeout", "1000", *flags],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise option_error("--before", root, "its server does not start")

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the process until now."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()


def request_of(prompt: str, settings: Settings, endpoint: str) -> dict[str, Any]:
    """A greedy request in the form of `endpoint`."""
    if endpoint == "/api":
        named = {"prompts": [prompt], "tokens_to_generate": settings.new_tokens, "no_log": True}
        return {**named, "temperature": 0, "echo_prompts": False}
    return {"prompt": prompt, "max_tokens": settings.new_tokens, "temperature": 0}


async def ask(
    client: aiohttp.ClientSession, url: str, endpoint: str, body: dict[str, Any]
) -> tuple[int, float, str]:
    """Status, seconds and text of one request."""
    started = time.perf_counter()
    method = client.put if endpoint == "/api" else client.post
    async with method(url + endpoint, json=body) as response:
        content = await response.json()
    text = ""
    if response.status == 200:
        text = content["text"][0] if endpoint == "/api" else content["choices"][0]["text"]
    return response.status, time.perf_counter() - started, text


async def burst(
    server: Server, prompts: Sequence[str], settings: Settings, endpoint: str
) -> tuple[dict[str, Any], list[str]]:
    """The row of requests that are sent at once, and their texts."""
    url = f"http://127.0.0.1:{server.port}"
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(2000)) as client:
        bodies = [request_of(prompt, settings, endpoint) for prompt in prompts]
        await ask(client, url, endpoint, bodies[0])  # the first one pays for what is built at first use
        cpu, started = server.cpu_seconds, time.perf_counter()
        answers = await asyncio.gather(*[ask(client, url, endpoint, body) for body in bodies])
        seconds, cpu = time.perf_counter() - started, server.cpu_seconds - cpu
        started = time.perf_counter()
        for body in bodies[: settings.alone]:
            await ask(client, url, endpoint, body)
        alone = (time.perf_counter() - started) / min(settings.alone, len(bodies))
    served = Counter(status for status, _, _ in answers)[200]
    waited = sorted(time for status, time, _ in answers if status == 200)
    row = {
        "served": served,
        "refused": len(answers) - served,
        "seconds": seconds,
        "requests_per_second": served / seconds,
        "cpu_seconds_per_request": cpu / served,
        "median_seconds_of_a_request": waited[len(waited) // 2],
        "longest_seconds_of_a_request": waited[-1],
        "requests_per_second_of_one_client": 1 / alone,
    }
    return row, [text for _, _, text in answers]


def fastest(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row of the fastest round, with the best of the figures that are measured apart from it."""
    best = dict(max(rows, key=lambda row: row["requests_per_second"]))
    best["cpu_seconds_per_request"] = min(row["cpu_seconds_per_request"] for row in rows)
    alone = "requests_per_second_of_one_client"
    best[alone] = max(row[alone] for row in rows)
    return {name: round(value, 3) for name, value in best.items()}


def save_model(directory: Path) -> Path:
    """A checkpoint of one step."""
    save = directory / "checkpoints"
    words = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCABULARY)]
    command = [sys.executable, "pretrain_gpt.py", *SHAPE, *TRAIN, *words, "--save", str(save)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return save


def main() -> None:
    """Measure and write benchmarks/results/serving.json."""
    settings: Settings = parse_options(Settings, "serving.py", __doc__, sys.argv[1:])
    drawn = random.Random(1234)
    shortest, longest = min(settings.prompt_tokens), max(settings.prompt_tokens)
    lengths = [drawn.randint(shortest, longest) for _ in range(settings.requests)]
    prompts = [" ".join(str(drawn.randrange(VOCABULARY)) for _ in range(length)) for length in lengths]
    cases: list[tuple[str, Path, str, list[str]]] = [
        ("this commit", ROOT, "/api", []),
        ("this commit", ROOT, "/v1/completions", []),
    ]
    if settings.before is not None:
        old = Path(settings.before).resolve()
        longer = ["--max-waiting", str(settings.requests)]
        before = f"before: {old.name}"
        cases = [(before, old, "/api", []), (f"{before}, longer queue", old, "/api", longer), *cases]
    rounds: list[list[dict[str, Any]]] = [[] for _ in cases]
    written: list[list[str]] = []
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        checkpoint = save_model(Path(directory))
        servers = [stack.enter_context(Server(root, checkpoint, *flags)) for _, root, _, flags in cases]
        for _ in range(settings.rounds):
            for server, (name, _, endpoint, _), found in zip(servers, cases, rounds, strict=True):
                row, texts = asyncio.run(burst(server, prompts, settings, endpoint))
                found.append(row)
                written.append(texts)
                print(name, json.dumps(row), flush=True)
    rows = [
        {"server": name, "endpoint": endpoint, "flags": flags, **fastest(found)}
        for (name, _, endpoint, flags), found in zip(cases, rounds, strict=True)
    ]
    figures = {
        "model": " ".join(SHAPE) + f" --vocab-size {VOCABULARY}",
        "requests": settings.requests,
        "prompt_tokens": [shortest, longest],
        "new_tokens": settings.new_tokens,
        "rounds": settings.rounds,
        "texts_that_all_servers_write_alike": sum(
            len(set(texts) - {""}) == 1 for texts in zip(*written, strict=True)
        ),
        "rows": rows,
    }
    write_result("serving", figures)


if __name__ == "__main__":
    run_tool("serving.py", main)
