"""A text gives the documents of preprocess_data.py, or an error that names the line."""

import errno
import fcntl
import gzip
import inspect
import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import zstandard

from benchmarks.faults.foreign_files import train_bpe
from megatron_zpp.config.data import DataConfig
from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.data.batches import BatchSchedule
from megatron_zpp.data.indexed import IndexedDataset
from megatron_zpp.data.loader import MicroBatches
from megatron_zpp.data.text.samples import TextDataset
from megatron_zpp.tokenizer import build_tokenizer
from tests.data.text.conftest import EOD, documents_of, json_lines, open_run, opened, with_ends
from tests.support import refusal
from tests.tools.run import succeed
from tests.tools.test_preprocess_data import AWKWARD


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> TokenizerConfig:
    """A byte-level BPE of Hugging Face's `tokenizers`."""
    directory = tmp_path_factory.mktemp("bpe")
    train_bpe(directory, [inspect.getsource(inspect)])
    return TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(directory))


def preprocessed(path: Path, tokenizer: TokenizerConfig) -> list[list[int]]:
    """Encode it with preprocess_data.py."""
    flags = ["--tokenizer-type", tokenizer.tokenizer_type, "--tokenizer-model", tokenizer.tokenizer_model]
    prefix = path.parent / "indexed"
    flags += ["--append-eod", "--workers", 1]
    succeed("preprocess_data.py", "--input", path, "--output-prefix", prefix, *flags)
    data = IndexedDataset(f"{prefix}_text_document")
    return [part.tolist() for part in np.split(np.asarray(data.tokens), np.cumsum(data.lengths)[:-1])]


def test_documents_are_those_of_the_indexed_path(tmp_path: Path, bpe: TokenizerConfig) -> None:
    """Plain and compressed, with all line endings, texts in many scripts, and empty texts."""
    texts = re.split(r"\n(?=def |class )", inspect.getsource(inspect))
    texts += ["", "日本語 — ñ 🙂\r\n", " ", "<|endoftext|>"]
    content = b"".join(json.dumps({"n": n, "text": text}).encode() + b"\n" for n, text in enumerate(texts))
    (tmp_path / "x.jsonl").write_bytes(content)
    expected = preprocessed(tmp_path / "x.jsonl", bpe)
    assert len(expected) == len(texts) - 1
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(content[:9000]) + gzip.compress(content[9000:]))
    (tmp_path / "x.json.zst").write_bytes(zstandard.compress(content))
    eod = build_tokenizer(bpe).eod
    for name in ("x.jsonl", "x.jsonl.gz", "x.json.zst"):
        text = opened(str(tmp_path / name), tokenizer=bpe, append_eod=True)
        assert text.source.blocks > 30
        assert documents_of(text, eod) == expected, name


def test_lines_without_a_document_are_skipped_on_request(tmp_path: Path) -> None:
    """The lines that preprocess_data.py skips."""
    (tmp_path / "x.jsonl").write_bytes(AWKWARD)
    text = opened(str(tmp_path / "x.jsonl"), append_eod=True, skip_bad_lines=True)
    assert documents_of(text, EOD) == with_ends([[1, 2], [3], [9] * 400_000, [10]])
    shown = TextDataset("train", text, (0, text.source.blocks), 8, 1, None).describe()
    assert shown.endswith(", samples of 8, 10 bad lines skipped so far")
    with pytest.raises(ValueError, match=r"x\.jsonl line 6: malformed line: .*--skip-bad-lines$"):
        documents_of(opened(str(tmp_path / "x.jsonl"), append_eod=True), 70_000)  # from the same cache


@pytest.mark.parametrize(("ending", "workers"), [("jsonl", 2), ("jsonl.gz", 0)])
def test_a_bad_line_is_named(documents: list[list[int]], tmp_path: Path, ending: str, workers: int) -> None:
    """Even after many empty texts, because a block keeps only its first few problems."""
    lines = json_lines(documents).splitlines(keepends=True)
    lines[300:301] = [b'{"text": ""}\n'] * 9 + [b'["text"]\n']
    path = tmp_path / f"x.{ending}"
    path.write_bytes(gzip.compress(b"".join(lines)) if ending.endswith(".gz") else b"".join(lines))
    text = opened(str(path), num_workers=workers)
    said = refusal(TextDataset, "train", text, (0, text.source.blocks), 8, 1, None)
    assert re.search(r"x\.jsonl\S* line 310: malformed line: a JSON array, not an object; .*; ", said)
    assert "worker" not in said


def test_unusable_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_bytes(b"")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "1"}\n' * 9)[:-9])
    (tmp_path / "blank.jsonl").write_bytes(b"\n\n")
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "ok.jsonl").write_bytes(b'{"text": "1 2 3"}\n')
    for name, message in (
        ("no.jsonl", "no.jsonl: No such file or directory; "),
        ("no.jsonl.gz", "no.jsonl.gz: No such file or directory; "),
        ("empty.jsonl", "empty.jsonl: the file is empty"),
        ("cut.jsonl.gz", "the file ends in the middle of its compressed data"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            opened(str(tmp_path / name))
    with pytest.raises(
        ValueError, match=r"--data-cache-path .*file/x: Not a directory; name a writable directory"
    ):
        opened(str(tmp_path / "ok.jsonl"), data_cache_path=str(tmp_path / "file" / "x"))
    for name, tokens in (("blank", 0), ("ok", 3)):
        text = opened(str(tmp_path / f"{name}.jsonl"))
        with pytest.raises(ValueError, match=rf"--seq-length 3: one sample needs 4 .* has {tokens}; "):
            TextDataset("train", text, (0, text.source.blocks), 3, 1, 1)


@pytest.mark.parametrize(("ending", "workers"), [("jsonl", 1), ("jsonl.gz", 0)])
def test_text_or_cache_that_vanishes_under_a_run_ends_it_with_a_line(
    documents: list[list[int]], tmp_path: Path, workers: int, ending: str
) -> None:
    path = tmp_path / f"x.{ending}"
    path.write_bytes(gzip.compress(json_lines(documents)) if ending == "jsonl.gz" else json_lines(documents))

    def error_after(remove: Callable[[], object]) -> str:
        text = opened(str(path), data_cache_path=str(tmp_path / "cache"), num_workers=workers)
        text.source.group = 4  # of several groups the constructor tokenises none
        samples = TextDataset("train", text, (0, text.source.blocks), 8, 1, 0)
        remove()
        with MicroBatches(samples, BatchSchedule(1, 1, 1), rank=0, num_workers=workers) as batches:
            return refusal(next, iter(batches))

    removed = error_after(lambda: shutil.rmtree(tmp_path / "cache"))
    if ending == "jsonl":
        assert re.fullmatch(r"--data-cache-path .*: was removed during the run; start the run again", removed)
        fix = f"{path}: No such file or directory; the file was there when the run began: restore it"
        assert error_after(path.unlink) == fix
        path.write_bytes(json_lines(documents))
        changed = error_after(lambda: path.write_bytes(json_lines(documents[1:])))
        assert changed == f"{path}: has changed since the run began; start the run again"
    else:
        assert re.search(r"/cache/\w+\.jsonl: No such file or directory; start the run again$", removed)


def test_another_tokenizer_or_key_gets_other_tokens(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "1 2", "other": "3 4"}\n')
    path = str(tmp_path / "x.jsonl")
    smaller = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=10)
    assert documents_of(opened(path, append_eod=True), 70_000) == [[1, 2, 70_000]]
    assert documents_of(opened(path, append_eod=True, json_key="other"), 70_000) == [[3, 4, 70_000]]
    assert documents_of(opened(path, append_eod=True, tokenizer=smaller), 10) == [[1, 2, 10]]
    assert opened(path).tokens(np.arange(1)).tolist() == [1, 2]


def test_a_hub_data_set_gives_its_rows(
    documents: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a directory with the files of one."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    hub = str(tmp_path / "set")
    for split, count in (("train", 500), ("test", 7)):
        texts = [" ".join(map(str, ids)) for ids in documents[:count]]
        table = datasets.Dataset.from_dict({"number": list(range(count)), "content": texts})
        table.to_parquet(f"{hub}/data/{split}-00000-of-00001.parquet")
    few = documents[:7]
    parts = {hub: documents, f"{hub}:default:test": few, f"{hub}::train+test": documents + few}
    for name, rows in parts.items():
        text = opened(f"hf:{name}", json_key="content", append_eod=True, num_workers=1)
        assert documents_of(text, EOD) == with_ends(rows), name
    with pytest.raises(
        ValueError, match=r"^--json-key text: hf:.* has no such column; it has number, content$"
    ):
        opened(f"hf:{hub}")
    with pytest.raises(ValueError, match=r"^--data-path hf:.*:default:nope: cannot be read .*check name"):
        opened(f"hf:{hub}:default:nope", json_key="content")
    data = DataConfig(train_data_path=(f"hf:{hub}",), valid_data_path=(f"hf:{hub}",), json_key="content")
    with pytest.raises(
        ValueError, match=r"^--valid-data-path hf:.*: would read the train split; name a split"
    ):
        open_run(data, needed=("train", "valid"))
    with pytest.raises(ValueError, match=r"number' is a number; correct"):
        documents_of(opened(f"hf:{hub}", json_key="number"), 0)
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "a.jsonl.gz").write_bytes(gzip.compress(json_lines(few)))
    assert documents_of(opened(f"hf:{tmp_path / 'lines'}", append_eod=True), EOD) == with_ends(few)
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "train.csv").write_text("text,n\n1 2,0\n3 4,1\n")
    with pytest.raises(ValueError, match=r"^--data-path hf:.*/csv: its files are not Parquet .*to_json"):
        opened(f"hf:{tmp_path / 'csv'}")
    assert not list((tmp_path / "cache").rglob("*.arrow"))


def test_without_locks_processes_that_come_at_once_find_the_same(
    documents: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads stand for processes on several hosts, which may have the same number."""

    def no_locks(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setattr(fcntl, "lockf", no_locks)
    path = tmp_path / "text.jsonl.gz"
    path.write_bytes(gzip.compress(json_lines(documents)))
    barrier = threading.Barrier(4)

    def open_and_read(_: int) -> list[list[int]]:
        barrier.wait()
        return documents_of(opened(str(path), append_eod=True), EOD)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(open_and_read, range(4))) == [with_ends(documents)] * 4
    assert not list(tmp_path.rglob("*.partial"))
