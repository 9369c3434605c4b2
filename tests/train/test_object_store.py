"""Runs that save to, load from and read data of an object store: the bits of runs on a disk, or one line."""

import errno
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from megatron_zpp.config.root import parse_args
from megatron_zpp.mesh import Mesh
from megatron_zpp.storage.object_errors import ObjectError
from megatron_zpp.storage.objects import path as object_path
from megatron_zpp.train.inputs import check_inputs
from tests.object_server import BUCKET, ObjectServer
from tests.support import logged, trained
from tests.train.conftest import BYTES, TINY
from tests.train.in_process import SMALLEST, train_here

RUN = [*BYTES, *TINY, *SMALLEST, "--split", "90,10,0", "--device", "cpu", "--zero-stage", "3"]
RUN += ["--eval-iters", "1"]


@pytest.fixture(scope="module")
def stored(server: ObjectServer, corpus: str) -> str:
    """The corpus in the object store."""
    for path in Path(corpus).parent.glob("bytes.*"):
        server.put(f"corpus/{path.name}", path.read_bytes())
    return f"s3://{BUCKET}/corpus/bytes"


def shards(content: bytes, tmp_path: Path) -> dict[str, np.ndarray]:
    (tmp_path / "shards").write_bytes(content)
    with safe_open(tmp_path / "shards", framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_a_run_on_objects_has_the_bits_of_a_run_on_files(
    server: ObjectServer, corpus: str, stored: str, tmp_path: Path
) -> None:
    on_files = ["--data-path", corpus, "--save", str(tmp_path / "saved"), "--save-interval", "1"]
    on_files += ["--metrics-file", str(tmp_path / "files.jsonl")]
    trained(*RUN, *on_files, "--train-iters", "2", processes=2)
    url, cache = f"s3://{BUCKET}/equal", str(tmp_path / "cache")
    on_objects = ["--data-path", stored, "--object-storage-cache-path", cache, "--train-iters", "2"]
    on_objects += ["--save", url, "--load", url, "--save-interval", "1", "--keep-last", "1"]
    on_objects += ["--metrics-file", str(tmp_path / "objects.jsonl")]
    trained(*RUN, *on_objects, "--exit-interval", "1", "--async-save", processes=2)
    second = trained(*RUN, *on_objects, processes=2)
    assert f" loaded {url}/iter_0000001; resuming at iteration 1" in second
    assert logged(tmp_path / "objects.jsonl") == logged(tmp_path / "files.jsonl")
    names = {key.partition("/")[0] for key in server.keys("equal/")}
    assert names == {"iter_0000002", "latest_checkpointed_iteration.txt", "config.yaml"}
    there = sorted(path.name for path in (tmp_path / "saved" / "iter_0000002").iterdir())
    assert server.keys("equal/iter_0000002/") == there
    for rank in (0, 1):
        file = f"iter_0000002/rank_{rank:05d}.safetensors"
        ours = shards(server.get(f"equal/{file}"), tmp_path)
        theirs = shards((tmp_path / "saved" / file).read_bytes(), tmp_path)
        assert ours.keys() == theirs.keys()
        assert all((ours[name].view(np.uint32) == theirs[name].view(np.uint32)).all() for name in ours)


def test_a_server_that_is_gone_during_a_load_is_not_taken_for_damage(
    server: ObjectServer, corpus: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url, whole = f"s3://{BUCKET}/loaded", object_path.request
    flags = ["--data-path", corpus, "--split", "100,0,0", *BYTES, *TINY, *SMALLEST]
    flags += ["--save", url, "--load", url, "--save-interval", "2", "--train-iters"]
    train_here([*flags, "4"])

    def gone(url: str, operation: str, **arguments: Any) -> dict[str, Any]:
        if operation == "get_object" and url.endswith("iter_0000004/rank_00000.safetensors"):
            raise ObjectError(errno.EIO, "the server does not answer", url)
        return whole(url, operation, **arguments)

    with monkeypatch.context() as patch:
        patch.setattr(object_path, "request", gone)
        with pytest.raises(ValueError, match=f"^--load {url}: {url}/iter_0000004/.*: the server does not"):
            train_here([*flags, "6"])
    content = server.get("loaded/iter_0000004/rank_00000.safetensors")
    server.put("loaded/iter_0000004/rank_00000.safetensors", content[:-1])
    train_here([*flags, "6"])
    said = capsys.readouterr().out
    assert f" WARNING: {url}/iter_0000004 is skipped: {url}/iter_0000004/rank_00000.safetensors: " in said
    assert f" loaded {url}/iter_0000002; resuming at iteration 2" in said


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--save gs://a/b", "--save gs://a/b: is a URL that cannot be used here; give a path, or s3://"),
        ("--load s3://", "--load s3://: must be s3://BUCKET/PREFIX"),
        ("--save s3://nowhere/x", "--save s3://nowhere/x: the bucket does not exist; create it"),
        ("--load s3://nowhere/x", "--load s3://nowhere/x: the bucket does not exist; create it"),
        ("--data-path s3://nowhere/x", "--object-storage-cache-path (not given): name a directory"),
        ("--data-path s3://a/x.jsonl", "--data-path s3://a/x.jsonl: text is read from files; copy"),
        (
            f"--data-path s3://{BUCKET}/none --object-storage-cache-path CACHE",
            f"--data-path s3://{BUCKET}/none: s3://{BUCKET}/none.idx does not exist; give the prefix",
        ),
        ("--object-storage-cache-path CACHE", "--object-storage-cache-path CACHE: applies to s3://"),
    ],
)
def test_what_cannot_be_used_is_refused(
    server: ObjectServer, corpus: str, tmp_path: Path, flags: str, line: str
) -> None:
    cache = str(tmp_path / "cache")
    data = [] if "--data-path" in flags else ["--data-path", corpus]
    given = [*RUN, "--train-iters", "2", *data, *flags.replace("CACHE", cache).split()]
    with pytest.raises(ValueError, match="^" + re.escape(line.replace("CACHE", cache))):
        check_inputs(parse_args(given), Mesh(), print)
    assert not Path("s3:").exists()
