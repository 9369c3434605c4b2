"""`POST /v1/completions` as a client meets it; what is written is checked by the model."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

aiohttp = pytest.importorskip(
    "aiohttp", reason="the server's package; pip install -r launch/requirements-serve.txt"
)

from tests.generate.http_site import IDS, POSITIONS, Gate, Site, run, serving, until  # noqa: E402

GREEDY = {"temperature": 0}


@pytest.fixture
def gate() -> Gate:
    return Gate()


def alone(gate: Gate, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """The likeliest ids after a prompt, and their log-probabilities, by whole forward passes."""
    ids, values = list(prompt), []
    while len(values) < count:
        logits = gate.model(torch.tensor([ids]))[0, -1].double().log_softmax(-1)
        token = int(logits.argmax())
        if token == gate.tokenizer.eod:
            break
        ids.append(token)
        values.append(logits[token].item())
    return ids[len(prompt) :], values


async def post(client: Any, site: Site, **fields: Any) -> tuple[int, Any]:
    async with client.post(f"http://127.0.0.1:{site.port}/v1/completions", json=fields) as response:
        return response.status, await response.json()


async def events(client: Any, site: Site, **fields: Any) -> AsyncIterator[Any]:
    """The objects of a stream, without its end, which must be there."""
    url, ended = f"http://127.0.0.1:{site.port}/v1/completions", False
    async with client.post(url, json={**fields, "stream": True}) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        async for line in response.content:
            assert line == b"\n" or line.startswith(b"data: ")
            assert not ended or line == b"\n"
            if line == b"data: [DONE]\n":
                ended = True
            elif line != b"\n":
                yield json.loads(line[6:])
    assert ended


def test_forty_parallel_requests_are_all_served_as_if_each_were_alone(gate: Gate) -> None:
    """With the default options; half of them over PUT /api, with prompts of many lengths."""
    prompts = [[(7 * number + place) % IDS for place in range(1 + number)] for number in range(40)]
    texts = [" ".join(map(str, prompt)) for prompt in prompts]

    async def client() -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with serving(gate) as site, aiohttp.ClientSession(connector=connector) as http:

            async def ask(number: int) -> str:
                if number % 2:
                    _, found = await post(http, site, prompt=texts[number], max_tokens=20, **GREEDY)
                    return found["choices"][0]["text"]
                body = {"prompts": [texts[number]], "tokens_to_generate": 20, "echo_prompts": False}
                url = f"http://127.0.0.1:{site.port}/api"
                async with http.put(url, json={**body, **GREEDY, "no_log": True}) as response:
                    assert response.status == 200
                    return (await response.json())["text"][0]

            found = await asyncio.gather(*map(ask, range(40)))
            assert gate.passes < 40 * 20 / 4
        for prompt, text in zip(prompts, found, strict=True):
            assert gate.tokenizer.encode(text) == alone(gate, prompt, 20)[0]

    run(client())


def test_a_short_text_overtakes_a_long_one(gate: Gate) -> None:
    async def client() -> None:
        async with serving(gate) as site, aiohttp.ClientSession() as http:
            gate.last, order = 5, []  # the long one waits there for the short one

            async def ask(tokens: int) -> None:
                _, found = await post(http, site, prompt="1 2 3", max_tokens=tokens, **GREEDY)
                assert found["usage"]["completion_tokens"] == tokens
                order.append(tokens)

            asking = [asyncio.create_task(ask(90))]
            await until(lambda: gate.passes > 5)
            asking.append(asyncio.create_task(ask(3)))
            await until(lambda: bool(site.service.scheduler._waiting))
            gate.last = None
            gate.go_on.set()
            await asyncio.gather(*asking)
            assert order == [3, 90]

    run(client())


def test_a_stream_begins_before_its_end_and_has_the_whole_text(gate: Gate) -> None:
    fields = {"prompt": "1 2 3", "max_tokens": 12, "logprobs": 2, "n": 2, "seed": 5}

    async def client() -> None:
        async with serving(gate) as site, aiohttp.ClientSession() as http:
            _, whole = await post(http, site, **fields)
            chunks: list[Any] = []
            gate.passes, gate.last = 0, 3  # there is no fourth one before the first text has arrived
            async for chunk in events(http, site, stream_options={"include_usage": True}, **fields):
                gate.last = None
                gate.go_on.set()
                chunks.append(chunk)
            assert gate.passes > 6
        usage = chunks.pop()
        assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
        assert len({chunk["id"] for chunk in chunks}) == 1
        for choice in whole["choices"]:
            mine = [chunk["choices"][0] for chunk in chunks]
            mine = [part for part in mine if part["index"] == choice["index"]]
            assert "".join(part["text"] for part in mine) == choice["text"]
            assert [part["finish_reason"] for part in mine[:-1]] == [None] * (len(mine) - 1)
            assert mine[-1]["finish_reason"] == choice["finish_reason"]
            for name, values in choice["logprobs"].items():
                found = [value for part in mine for value in part["logprobs"][name]]
                if name in ("tokens", "text_offset"):
                    assert found == values
                elif name == "token_logprobs":
                    assert found == pytest.approx(values, abs=1e-4)

    run(client())


def test_log_probabilities_echo_and_usage(gate: Gate) -> None:
    prompt = [4, 8, 15, 16, 23]
    ids, values = alone(gate, prompt, 6)
    whole = prompt + ids
    logits = gate.model(torch.tensor([whole]))[0].double().log_softmax(-1)

    async def client() -> None:
        async with serving(gate) as site, aiohttp.ClientSession() as http:
            same = {"max_tokens": 6, "logprobs": 3, **GREEDY}
            status, found = await post(http, site, prompt=prompt, echo=True, model="tiny", **same)
            assert status == 200
            (choice,) = found["choices"]
            assert choice["text"] == gate.tokenizer.decode(whole)
            assert choice["finish_reason"] == ("length" if len(ids) == 6 else "stop")
            scores = choice["logprobs"]
            assert "".join(scores["tokens"]) == choice["text"]
            for token, offset in zip(scores["tokens"], scores["text_offset"], strict=True):
                assert choice["text"][offset:].startswith(token)
            assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
            for place, (value, likeliest) in enumerate(
                list(zip(scores["token_logprobs"], scores["top_logprobs"], strict=True))[1:]
            ):
                assert value == pytest.approx(logits[place, whole[place + 1]].item(), abs=1e-4)
                best = logits[place].topk(3).values.tolist()
                assert sorted(likeliest.values())[-3:] == pytest.approx(best[::-1], abs=1e-4)
                assert scores["tokens"][place + 1] in likeliest
            assert found["usage"] == {
                "prompt_tokens": 5,
                "completion_tokens": len(ids),
                "total_tokens": 5 + len(ids),
            }
            _, plain = await post(http, site, prompt=[prompt], **same)
            assert plain["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(values, abs=1e-4)
            _, scored = await post(http, site, prompt=prompt, max_tokens=0, logprobs=0, echo=True)
            assert scored["choices"][0]["logprobs"]["token_logprobs"] == scores["token_logprobs"][:5]
            _, empty = await post(http, site, max_tokens=4, echo=True, **GREEDY)
            expected = gate.tokenizer.decode(alone(gate, [gate.tokenizer.eod], 4)[0])
            assert empty["choices"][0]["text"] == expected

    run(client())


def test_seed_n_and_stop(gate: Gate) -> None:
    async def client() -> None:
        async with serving(gate) as site, aiohttp.ClientSession() as http:

            async def texts(**fields: Any) -> list[str]:
                status, found = await post(http, site, max_tokens=10, **fields)
                assert status == 200, found
                assert [choice["index"] for choice in found["choices"]] == list(range(len(found["choices"])))
                return [choice["text"] for choice in found["choices"]]

            three = await texts(prompt="1 2", n=3, seed=7)
            assert len(set(three)) == 3
            assert await texts(prompt="1 2", n=3, seed=7, best_of=3) == three
            assert (await texts(prompt=["3", "1 2"], seed=7))[1] == three[0]
            assert await texts(prompt="1 2", n=3) != three
            likely = await texts(prompt="1 2", n=3, temperature=1e-4, user="me")
            assert likely == await texts(prompt="1 2", top_k=1, n=3)
            stop = likely[0][4:7]
            (cut,) = await texts(prompt="1 2", top_k=1, stop=["never", stop])
            assert cut == likely[0].split(stop)[0]

    run(client())


@pytest.mark.parametrize(
    ("fields", "status", "said", "param"),
    [
        ({"prompt": "1", "temperature": 3}, 400, "temperature 3: must be at most 2", "temperature"),
        ({"prompt": "1", "max_tokens": POSITIONS}, 400, f"at most {POSITIONS - 1}", "max_tokens"),
        ({"prompt": "x"}, 400, 'prompt "x": text of a NullTokenizer is whole numbers', "prompt"),
        ({"prompt": ["1", "y"]}, 400, 'prompt[1] "y"', "prompt"),
        ({"prompt": [1, 51]}, 400, "prompt 51: ids are from 0 to 50", "prompt"),
        ({"prompt": "1", "n": 5}, 400, "n (list of 5): at most 4", "n"),
        ({"prompt": "1", "suffix": "2"}, 400, 'suffix "2": text is only written at the end', "suffix"),
        ({"prompt": "1", "model": "gpt-9"}, 404, "model gpt-9: is not served; tiny is", "model"),
        ({"prompt": "\ud800"}, 400, 'prompt "\\ud800": text of a NullTokenizer', "prompt"),
        ({"prompt": "1", "model": "\ud800"}, 404, "model \\ud800: is not served; tiny is", "model"),
        ({"prompt": "1", "\ud800": 1}, 400, "\\ud800 1: no such key", None),
        ({"prompt": "1", "best_of": 3}, 400, "best_of 3: all texts are returned; give n", "best_of"),
        ({"prompt": "1", "the": 1}, 400, "the 1: no such key", None),
        ({"prompt": "1 " * 2000}, 413, "2000", None),
    ],
    ids=str,
)
def test_a_refusal_has_openais_form(
    gate: Gate, fields: dict[str, Any], status: int, said: str, param: str | None
) -> None:
    async def client() -> None:
        async with (
            serving(gate, max_prompts=4, max_request_bytes=2000) as site,
            aiohttp.ClientSession() as http,
        ):
            for stream in (False, True):
                found, answer = await post(http, site, stream=stream, **fields)
                assert found == status
                assert list(answer) == ["error"]
                assert said in answer["error"]["message"]
                assert answer["error"]["type"] == "invalid_request_error"
                assert answer["error"]["param"] == param

    run(client())


def test_models_other_paths_and_what_is_not_json(gate: Gate) -> None:
    async def client() -> None:
        async with serving(gate) as site, aiohttp.ClientSession() as http:
            url = f"http://127.0.0.1:{site.port}/v1/"

            async def ask(method: str, path: str, **how: Any) -> tuple[int, Any]:
                async with http.request(method, url + path, **how) as response:
                    return response.status, await response.json()

            status, found = await ask("GET", "models")
            assert (status, found["object"], found["data"][0]["id"]) == (200, "list", "tiny")
            assert (await ask("GET", "models/tiny")) == (200, found["data"][0])
            status, found = await ask("GET", "models/other")
            assert (status, found["error"]["code"]) == (404, "not_found")
            status, found = await ask("POST", "chat/completions", json={})
            assert (status, found["error"]["code"]) == (404, "not_found")
            assert "POST /v1/completions" in found["error"]["message"]
            status, found = await ask("GET", "completions")
            assert (status, found["error"]["message"]) == (405, "GET /v1/completions: use POST")
            # A page of another site can send this without asking the browser's user.
            status, found = await ask("POST", "completions", data='{"prompt": "1"}')
            assert status == 415
            assert "send application/json" in found["error"]["message"]
            kind = {"Content-Type": "application/json"}
            for sent, said in ((b"{", "the request is not JSON"), (b"[]", "the request is not a JSON obj")):
                status, found = await ask("POST", "completions", data=sent, headers=kind)
                assert (status, found["error"]["param"]) == (400, None)
                assert found["error"]["message"].startswith(said)

    run(client())


def test_a_stream_that_takes_too_long_ends_with_an_error(gate: Gate) -> None:
    assert len(alone(gate, [1], 90)[0]) == 90  # what is drawn could end before the time is up

    async def client() -> None:
        async with serving(gate, request_timeout=1.0) as site, aiohttp.ClientSession() as http:
            gate.passes, gate.last = 0, 4
            url = f"http://127.0.0.1:{site.port}/v1/completions"
            fields = {"prompt": "1", "max_tokens": 90, "stream": True, **GREEDY}
            async with http.post(url, json=fields) as response:
                lines = (await response.read()).decode().split("\n\n")
            last = json.loads(lines[-2].removeprefix("data: "))
            assert "not done within --request-timeout 1 s" in last["error"]["message"]
            assert len(lines) > 3
            gate.go_on.set()
            await until(lambda: not site.service.scheduler.running)

    run(client())


def test_weights_that_are_no_numbers_fail_one_request_and_not_the_server(
    gate: Gate, capfd: pytest.CaptureFixture[str]
) -> None:
    async def client() -> None:
        async with serving(gate) as site, aiohttp.ClientSession() as http:
            with torch.no_grad():
                gate.model.embedding.tokens.weight[13] = torch.nan
                gate.model.head.output = torch.nn.Linear(32, IDS + 1, bias=False)
            good, bad = await asyncio.gather(
                post(http, site, prompt="1 2", max_tokens=1), post(http, site, prompt="1 13", max_tokens=1)
            )
            assert good[0] == 200
            assert bad[0] == 500
            assert "logits that are not finite" in bad[1]["error"]["message"]
            assert (await post(http, site, prompt="1 2", max_tokens=1))[0] == 200

    run(client())
    assert "Traceback" not in capfd.readouterr().err
