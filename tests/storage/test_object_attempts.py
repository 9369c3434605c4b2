"""Requests whose answers do not come, or say to try again: what is repeated, how long, and what it leaves."""

from collections.abc import Iterator
from typing import Any

import pytest

from megatron_zpp.storage import object_path, object_store
from megatron_zpp.storage.object_path import ObjectPath
from megatron_zpp.storage.object_store import NoUpload, ObjectError
from megatron_zpp.storage.object_upload import ChecksummedUpload
from tests.object_server import BUCKET
from tests.storage.faulty_store import (
    BROKEN,
    BUSY,
    DENIED,
    HALF,
    UNANSWERED,
    UNSENT,
    FaultyStore,
    RequestFault,
    faulty_store,
)

CONTENT = bytes(range(256)) * 64


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyStore]:
    with faulty_store() as server:
        yield server


@pytest.fixture
def store(server: FaultyStore) -> Iterator[FaultyStore]:
    yield server
    server.disarm()


def upload(path: ObjectPath) -> None:
    writer = ChecksummedUpload(path, len(CONTENT))
    try:
        writer.write(CONTENT)
        writer.finish()
    finally:
        writer.close()


@pytest.mark.parametrize("what", [BUSY, BROKEN, UNSENT, UNANSWERED, HALF])
def test_one_lost_attempt_is_no_error(store: FaultyStore, what: int) -> None:
    path, numbers = ObjectPath(BUCKET, f"one/{what}/x"), iter(range(1, 99))
    fault = RequestFault(what, 0)
    while fault.first <= len(store.requests) or not fault.first:
        fault = RequestFault(what, next(numbers))
        store.arm(fault)
        upload(path)
        path.write(path.read_whole()[0])
        assert path.status().size == len(CONTENT)
        assert path.read(256, 256, path.status().tag) == CONTENT[:256]
        path.unlink()
        store.disarm()
    assert fault.first > 9
    path.parent.abort_uploads()
    assert not store.uploads("one/")
    assert not store.keys("one/")


@pytest.mark.parametrize(
    ("what", "attempts", "line"),
    [
        (BUSY, 5, "the store refuses put_object: SlowDown as told; tried 5 times"),
        (BROKEN, 5, "the store refuses put_object: InternalError as told; tried 5 times"),
        (DENIED, 1, "the store denies put_object; give credentials that may do that"),
    ],
)
def test_a_store_that_goes_on_refusing_is_named(
    store: FaultyStore, what: int, attempts: int, line: str
) -> None:
    store.arm(RequestFault(what, 1, lasts=True))
    with pytest.raises(ObjectError) as raised:
        ObjectPath(BUCKET, "refused").write(CONTENT)
    assert store.disarm() == attempts
    assert str(raised.value) == f"s3://{BUCKET}/refused: {line}"


def test_attempts_last_about_15_seconds(store: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the client's own pauses are, which versions of botocore have made shorter."""
    pauses: list[float] = []
    monkeypatch.setattr(object_store, "_PAUSE", 1.0)
    monkeypatch.setattr(object_store.time, "sleep", pauses.append)
    store.arm(RequestFault(UNSENT, 1, lasts=True))
    for _ in range(30):
        with pytest.raises(ObjectError, match="does not answer"):
            ObjectPath(BUCKET, "silent").status()
    assert len(pauses) == 120
    assert max(pauses) <= 12
    assert 13 < sum(pauses) / 30 < 17


def test_an_upload_that_is_gone_counts_as_ended_only_if_the_object_is_there(store: FaultyStore) -> None:
    path = ObjectPath(BUCKET, "removed/x")
    name = path.begin_upload()
    tag = path.upload_part(name, 1, CONTENT)
    for _ in range(2):  # the second time as if the first answer had been lost
        path.end_upload(name, [tag], len(CONTENT))
    path.write(b"another size")
    with pytest.raises(NoUpload, match=f"^{path}: the store refuses complete_multipart_upload: NoSuchUpload"):
        path.end_upload(name, [tag], len(CONTENT))
    path.unlink()
    with pytest.raises(NoUpload, match=f"^{path}: the store refuses complete_multipart_upload: NoSuchUpload"):
        path.end_upload(name, [tag], len(CONTENT))


def test_all_uploads_are_removed_when_an_answer_lists_a_part_of_them(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """moto lists all of them at once, so its answer is cut here, into answers of two."""
    directory, whole = ObjectPath(BUCKET, "parts"), object_path.request
    for name in "abcde":
        (directory / name).begin_upload()
    listed: list[str] = []

    def cut(url: str, operation: str, **arguments: Any) -> dict[str, Any]:
        if operation != "list_multipart_uploads":
            return whole(url, operation, **arguments)
        after = arguments.pop("KeyMarker", ""), arguments.pop("UploadIdMarker", "")
        found = whole(url, operation, **arguments).get("Uploads", [])
        found = sorted((upload["Key"], upload["UploadId"]) for upload in found)
        page = [each for each in found if each > after][:2]
        listed.extend(key for key, _ in page)
        answer = {"Uploads": [{"Key": key, "UploadId": name} for key, name in page]}
        if page and page[-1] != found[-1]:
            answer |= {"IsTruncated": True, "NextKeyMarker": page[-1][0], "NextUploadIdMarker": page[-1][1]}
        return answer

    monkeypatch.setattr(object_path, "request", cut)
    directory.remove_tree()
    assert listed == [f"parts/{name}" for name in "abcde"]
    assert store.uploads("parts/") == []


def test_a_password_of_the_endpoint_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://me:hush@127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setattr(object_store, "ATTEMPTS", 1)
    object_store._client.cache_clear()
    try:
        with pytest.raises(ObjectError) as refused:
            ObjectPath("bucket", "name").read_whole()
    finally:
        object_store._client.cache_clear()
    assert "127.0.0.1" in str(refused.value)
    assert "hush" not in str(refused.value)
