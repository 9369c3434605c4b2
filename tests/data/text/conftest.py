"""A text whose tokens identify their positions, and functions that open it."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_zpp.config.data import DataConfig
from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.data.corpus.encode import Encoder
from megatron_zpp.data.open import Splits
from megatron_zpp.data.text.cache import TokenCache
from megatron_zpp.data.text.open import open_text
from megatron_zpp.tokenizer import build_tokenizer, describe
from tests.data.conftest import open_data

EOD = 70_000
NULL = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=EOD)


@pytest.fixture(scope="session")
def documents() -> list[list[int]]:
    """Write 500 documents of 1 to 99 tokens; every token occurs once, in rising order."""
    lengths = np.random.default_rng(0).integers(1, 100, 500)
    return [part.tolist() for part in np.split(np.arange(lengths.sum()), np.cumsum(lengths)[:-1])]


def json_lines(documents: list[list[int]]) -> bytes:
    return b"".join(json.dumps({"text": " ".join(map(str, ids))}).encode() + b"\n" for ids in documents)


@pytest.fixture
def text(documents: list[list[int]], tmp_path: Path) -> str:
    """A file of about 150 KB, so that blocks have the smallest size, 1 KiB."""
    (tmp_path / "text.jsonl").write_bytes(json_lines(documents))
    return str(tmp_path / "text.jsonl")


def opened(
    path: str,
    *,
    tokenizer: TokenizerConfig = NULL,
    say: Callable[[str], None] = lambda line: None,
    **settings,
) -> TokenCache:
    """A text as a run opens it."""
    data = DataConfig(data_path=(path,), **{"num_workers": 0, **settings})
    description = describe(build_tokenizer(tokenizer))
    return open_text("--data-path", path, data=data, tokenizer=tokenizer, description=description, say=say)


def open_run(data: DataConfig, tokenizer: TokenizerConfig = NULL, **more: object) -> Splits:
    """Open data as pretrain_gpt.py does."""
    description = describe(build_tokenizer(tokenizer))
    return open_data(
        data,
        vocab_size=description["vocab_size"],
        tokenizer_description=description,
        tokenizer=tokenizer,
        **more,
    )


def documents_of(text: TokenCache, eod: int) -> list[list[int]]:
    """Return all documents in the order of the file; each ends with the token `eod`."""
    tokens = text.tokens(np.arange(text.source.blocks))
    return [part.tolist() for part in np.split(tokens, np.flatnonzero(tokens == eod) + 1)[:-1]]


def with_ends(documents: list[list[int]]) -> list[list[int]]:
    return [[*ids, EOD] for ids in documents]


class NotingEncoder(Encoder):
    """Records which process encodes each block."""

    def __init__(self, notes: Path, *arguments: object) -> None:
        super().__init__(*arguments)
        self._notes = notes

    def __call__(self, block: bytes) -> object:
        with self._notes.open("a") as notes:
            notes.write(f"{os.getpid()}\n")
        return super().__call__(block)
