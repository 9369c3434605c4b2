"""Waits between looks at the files of another process: how soon, how often, and never for a dead process."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.data.corpus.encode import Encoder
from megatron_zpp.data.indexed import token_dtype
from megatron_zpp.data.text import cache as tokens
from megatron_zpp.data.text.sources import JsonLinesText
from megatron_zpp.native import cache as native
from megatron_zpp.storage.waits import growing_waits

LONG = 60.0  # seconds of the clock below


class Clock:
    """A clock that only sleeping moves; the file locks of another process, which it holds until `free_at`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: object, lock: str) -> None:
        self.now, self.waits, self.requests, self.free_at = 0.0, [], 0, LONG * 99
        self._lock = getattr(module.fcntl, lock)
        names = {name: getattr(module.fcntl, name) for name in ("LOCK_EX", "LOCK_NB", "LOCK_UN")}
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep))
        monkeypatch.setattr(module, "fcntl", SimpleNamespace(**names, **{lock: self._request}))

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self.waits.append(seconds)

    def _request(self, *arguments: int) -> None:
        self.requests += 1
        if self.now < self.free_at:
            raise BlockingIOError
        self._lock(*arguments)


def test_waits_grow_from_the_first_to_the_longest() -> None:
    waits = [wait for wait, _ in zip(growing_waits(0.02), range(100), strict=False)]
    assert waits[0] <= 0.02
    assert sum(waits[:5]) < 0.3
    assert all(0.5 <= wait <= 1 for wait in waits[20:])
    assert len(set(waits[20:])) > 70  # ranks that began together do not ask together


@pytest.fixture
def text(tmp_path: Path) -> tokens.TokenCache:
    (tmp_path / "text.jsonl").write_text('{"text": "1 2 3"}\n' * 20)
    (tmp_path / "tokens").mkdir()
    config = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=100)
    source = JsonLinesText("--data-path", "text.jsonl", str(tmp_path / "text.jsonl"))
    return tokens.TokenCache(
        tmp_path / "tokens",
        source,
        lambda: Encoder(config, ("text",), True),
        token_dtype(101),
        skip=False,
        workers=0,
    )


def test_who_waits_for_a_block_seldom_asks_for_its_lock(
    text: tokens.TokenCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, counts = Clock(monkeypatch, tokens, "lockf"), text.counts

    def finished_by_another(blocks: np.ndarray) -> np.ndarray:
        if clock.now >= LONG:
            text._tokenise(0)
        return counts(blocks)

    monkeypatch.setattr(text, "counts", finished_by_another)
    assert (text.fill(np.arange(1)) > 0).all()
    assert LONG <= clock.now <= LONG + 1
    assert clock.waits[0] <= 0.02
    assert clock.requests <= LONG
    assert len(clock.waits) <= 2 * LONG + 20


def test_the_block_of_a_dead_process_is_tokenised(
    text: tokens.TokenCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, tokens, "lockf")
    clock.free_at = LONG
    assert (text.fill(np.arange(1)) > 0).all()
    assert clock.now <= LONG + 5


@pytest.mark.parametrize("dies", [False, True])
def test_who_waits_for_a_library_leaves_without_the_lock_or_builds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """Otherwise all ranks would need it in turn, only to see that the library is there."""
    clock, library = Clock(monkeypatch, native, "flock"), tmp_path / "library.so"
    if dies:
        clock.free_at = LONG
        native.build_once(library, lambda made: made.touch(), print, wait_seconds=900)
        assert f"process {os.getpid()} on" in (tmp_path / "library.lock").read_text()
    else:
        monkeypatch.setattr(Path, "exists", lambda path: clock.now > LONG)
        assert native.build_once(library, pytest.fail, print, wait_seconds=900) == library
    assert LONG <= clock.now <= LONG + (5 if dies else 1)
    assert clock.requests <= LONG
