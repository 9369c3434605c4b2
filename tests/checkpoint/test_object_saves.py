"""Saves to an object store: whole or not there, at any moment of a kill, and exact when loaded."""

import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from megatron_zpp.checkpoint.directory import TRACKER, candidates, committed, remove_old
from megatron_zpp.checkpoint.huggingface.exporting import export_checkpoint
from megatron_zpp.checkpoint.huggingface.named_directory import NamedDirectory
from megatron_zpp.checkpoint.load import load_checkpoint
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.write import SaveFailed
from megatron_zpp.generate.loading import load_model
from megatron_zpp.storage.location import location
from megatron_zpp.storage.objects import path as object_path
from megatron_zpp.tokenizer import build_tokenizer, describe
from megatron_zpp.train.resume.checkpoint_arguments import read_arguments
from tests.checkpoint.saving import FIRST, SECOND, TOKENIZER, save, small
from tests.checkpoint.test_tokenizer import SHAPE, STEPS, flags_of
from tests.object_server import BUCKET, ObjectServer
from tests.support import nightly
from tests.train.in_process import train_here
from tests.zero.engines import weights_of


@pytest.fixture
def url(server: ObjectServer, request: pytest.FixtureRequest) -> str:
    """A directory of the store that nothing is in."""
    return f"s3://{BUCKET}/{request.node.name.replace('[', '/').rstrip(']')}"


def equal(engine: Any, other: Any) -> bool:
    ours, theirs = weights_of(engine), weights_of(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_old_checkpoints_are_removed(server: ObjectServer, url: str) -> None:
    for iteration in (1, 2, 3, 4):
        newest = save(location(url), small(), Progress(iteration, iteration))
    remove_old(location(url), 2, 2, newest=newest)
    assert list(committed(location(url))) == [4, 3, 2]
    assert server.get(f"{url.removeprefix(f's3://{BUCKET}/')}/{TRACKER}") == b"4\n"
    keys = server.keys(f"{url.removeprefix(f's3://{BUCKET}/')}/")
    assert not [key for key in keys if "iter_0000001" in key]
    newest = save(location(url), small(seed=2), Progress(2, 2))  # replaces, and is older than what is kept
    remove_old(location(url), 1, None, newest=newest)
    assert [path.name for path in committed(location(url)).values()] == [
        "iter_0000004",
        "iter_0000002.replacement",
    ]


class Killed(BaseException):
    """Ends a save at a request as a kill would, without anything that comes after it."""


def killed_at(request: int, monkeypatch: pytest.MonkeyPatch, action: Any) -> bool:
    """Whether `action` was ended when it sent its request of that number that changes the store."""
    sent = 0
    whole = object_path.request

    def counting(url: str, operation: str, **arguments: Any) -> dict[str, Any]:
        nonlocal sent
        if operation.startswith(("put", "delete", "create", "upload", "complete", "abort")):
            sent += 1
            if sent > request:
                raise Killed
        return whole(url, operation, **arguments)

    with monkeypatch.context() as patch:
        patch.setattr(object_path, "request", counting)
        try:
            action()
        except Killed:
            return True
    return False


@pytest.mark.parametrize(
    ("again", "apart"),
    [nightly(False, 1, id="new"), nightly(True, 1, id="replaced"), pytest.param(True, 2, id="some")],
)
def test_a_kill_before_any_request_leaves_whole_checkpoints(
    server: ObjectServer, url: str, monkeypatch: pytest.MonkeyPatch, again: bool, apart: int
) -> None:
    old, new = small(seed=1), small(seed=2)
    request, killed = apart - 1, True
    while killed:
        root = location(f"{url}/{request}")
        save(root, old, SECOND if again else FIRST)
        killed = killed_at(request, monkeypatch, lambda at=root: save(at, new, SECOND))
        there = committed(root)
        assert (10 if again else 5) in there
        newest, loaded = candidates(str(root))[0], small(seed=9)
        load_checkpoint(newest, loaded, TOKENIZER, with_optimizer=True)
        assert equal(loaded, old) or (newest.name.startswith("iter_0000010") and equal(loaded, new))
        save(root, old, Progress(15, 150))  # removes what the kill has left
        whole = {path.name for path in committed(root).values()}
        assert {key.partition("/")[0] for key in server.keys(f"{root.key}/")} == {*whole, TRACKER}
        request += apart
    assert equal(loaded, new)
    assert request > 7
    assert "Uploads" not in server.client.list_multipart_uploads(Bucket=BUCKET)


def test_a_first_save_that_was_killed_is_no_checkpoint(
    server: ObjectServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert killed_at(5, monkeypatch, lambda: save(location(url), small()))
    assert server.keys(f"{url.removeprefix(f's3://{BUCKET}/')}/iter_0000005/")
    assert candidates(url) == []


def test_a_store_that_refuses_fails_the_save_alone(server: ObjectServer, url: str) -> None:
    with pytest.raises(SaveFailed, match=r"rank 0 on .*: s3://nowhere/x.*: the bucket does not exist"):
        save(location("s3://nowhere/x"), small(), timeout=timedelta(seconds=30))


def test_programs_read_a_checkpoint_with_its_tokenizer(url: str, tmp_path: Path) -> None:
    words = flags_of("HuggingFaceTokenizer", tmp_path / "files")
    train_here([*SHAPE, *STEPS, *words, "--save", url])
    shutil.rmtree(tmp_path / "files")
    model, tokenizer = load_model(url, None)
    assert tokenizer.decode(tokenizer.encode("The quick brown fox")) == "The quick brown fox"
    found = read_arguments(url, None)
    assert describe(build_tokenizer(found.tokenizer)) == describe(tokenizer)
    exported = tmp_path / "exported"
    named = NamedDirectory("CHECKPOINT_DIR", url, Path(url))
    export_checkpoint(named, candidates(url)[0], exported, with_tokenizer=True, file_bytes=1 << 30)
    with safe_open(exported / "model.safetensors", framework="pt") as file:
        weights = file.get_tensor("transformer.wpe.weight")
    assert torch.equal(weights, model.state_dict()["embedding.positions.weight"])
