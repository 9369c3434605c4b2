"""Requests whose answers do not come, or say to try again: what is repeated, how long, and what it leaves."""

from typing import Any

import pytest
from botocore.client import BaseClient
from botocore.exceptions import ClientError, EndpointConnectionError

from megatron_zpp.storage.object_errors import ObjectError
from megatron_zpp.storage.objects import requests as object_store
from megatron_zpp.storage.objects.path import ObjectPath
from megatron_zpp.storage.objects.requests import NoUpload
from megatron_zpp.storage.objects.upload import ChecksummedUpload
from tests.object_server import BUCKET, ObjectServer
from tests.support import nightly, refusal

CONTENT = bytes(range(256)) * 64
GONE = 'Could not connect to the endpoint URL: "http://here"'
REFUSED = {"SlowDown": 503, "InternalError": 500, "AccessDenied": 403}  # codes of answers, and their status


class Faults:
    """Counts requests from 1 on; the one of number `at`, and all later ones if `lasts`, end in `what`.

    "unsent" and "unanswered" are lost connections, others codes of answers. Where moto forgives more than
    S3's protocol demands, it is as with MinIO: an upload that has ended does not exist.
    """

    def __init__(self) -> None:
        self.count, self.at, self.what, self.lasts = 0, 0, "", False
        self._ended: set[str] = set()

    def set(self, what: str, at: int, *, lasts: bool = False) -> None:
        self.count, self.at, self.what, self.lasts = 0, at, what, lasts

    def request(self, send: Any, client: BaseClient, operation: str, arguments: dict[str, Any]) -> Any:
        self.count += 1
        what = self.what if self.count == self.at or (self.lasts and self.count > self.at) else ""
        upload = arguments.get("UploadId")
        if upload in self._ended:
            raise answered("NoSuchUpload", 404, operation)
        if what in REFUSED:
            raise answered(what, REFUSED[what], operation)
        if what == "unsent":
            raise EndpointConnectionError(endpoint_url="http://here")
        answer = send(client, operation, arguments)
        if operation in ("CompleteMultipartUpload", "AbortMultipartUpload"):
            self._ended.add(upload)
        if what == "unanswered":
            raise EndpointConnectionError(endpoint_url="http://here")
        return answer


def answered(code: str, status: int, operation: str) -> ClientError:
    said = {"Error": {"Code": code, "Message": "as told"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(said, operation)


@pytest.fixture
def faults(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Faults:
    """None yet, of the client of this process."""
    faults, send = Faults(), BaseClient._make_api_call
    monkeypatch.setattr(BaseClient, "_make_api_call", lambda *given: faults.request(send, *given))
    monkeypatch.setattr(object_store, "_PAUSE", 0.001)
    return faults


def upload(path: ObjectPath) -> None:
    writer = ChecksummedUpload(path, len(CONTENT))
    try:
        writer.write(CONTENT)
        writer.finish()
    finally:
        writer.close()


@pytest.mark.parametrize(
    "what", ["unanswered", *(nightly(what) for what in ("SlowDown", "InternalError", "unsent"))]
)
def test_one_lost_attempt_is_no_error(server: ObjectServer, faults: Faults, what: str) -> None:
    path, at = ObjectPath(BUCKET, f"one/{what}/x"), 0
    while at <= faults.count:
        at += 1
        faults.set(what, at)
        upload(path)
        path.write(path.read_whole()[0])
        assert path.status().size == len(CONTENT)
        assert path.read(256, 256, path.status().tag) == CONTENT[:256]
        path.unlink()
    assert at > 9
    path.parent.abort_uploads()
    assert not server.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads")
    assert not server.keys("one/")


@pytest.mark.parametrize(
    ("what", "attempts", "line"),
    [
        ("SlowDown", 5, "the store refuses put_object: SlowDown as told; tried 5 times"),
        ("InternalError", 5, "the store refuses put_object: InternalError as told; tried 5 times"),
        ("AccessDenied", 1, "the store denies put_object; give credentials that may do that"),
        ("unsent", 5, f"the server does not answer ({GONE}); tried 5 times"),
    ],
)
def test_a_store_that_goes_on_refusing_is_named(faults: Faults, what: str, attempts: int, line: str) -> None:
    faults.set(what, 1, lasts=True)
    said = refusal(ObjectPath(BUCKET, "refused").write, CONTENT, error=ObjectError)
    assert (faults.count, said) == (attempts, f"s3://{BUCKET}/refused: {line}")


def test_an_upload_that_is_gone_counts_as_ended_only_if_the_object_is_there(faults: Faults) -> None:
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
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """moto lists all of them at once, so its answer is cut here, into answers of two."""
    directory, send = ObjectPath(BUCKET, "parts"), BaseClient._make_api_call
    for name in "abcde":
        (directory / name).begin_upload()
    listed: list[str] = []

    def cut(client: BaseClient, operation: str, arguments: dict[str, Any]) -> Any:
        if operation != "ListMultipartUploads":
            return send(client, operation, arguments)
        after = arguments.pop("KeyMarker", ""), arguments.pop("UploadIdMarker", "")
        found = send(client, operation, arguments).get("Uploads", [])
        found = sorted((upload["Key"], upload["UploadId"]) for upload in found)
        page = [each for each in found if each > after][:2]
        listed.extend(key for key, _ in page)
        answer = {"Uploads": [{"Key": key, "UploadId": name} for key, name in page]}
        if page and page[-1] != found[-1]:
            answer |= {"IsTruncated": True, "NextKeyMarker": page[-1][0], "NextUploadIdMarker": page[-1][1]}
        return answer

    monkeypatch.setattr(BaseClient, "_make_api_call", cut)
    directory.remove_tree()
    assert listed == [f"parts/{name}" for name in "abcde"]
    monkeypatch.undo()
    assert not server.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads")


def test_a_password_of_the_endpoint_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://me:hush@127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setattr(object_store, "ATTEMPTS", 1)
    object_store._client.cache_clear()
    try:
        said = refusal(ObjectPath("bucket", "name").read_whole, error=ObjectError)
    finally:
        object_store._client.cache_clear()
    assert "127.0.0.1" in said
    assert "hush" not in said
