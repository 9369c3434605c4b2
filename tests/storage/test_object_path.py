"""Names, requests and errors of an object store, against a real server."""

import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from megatron_zpp.storage.checksums import DamagedFile, VerifiedFile, checksums_of
from megatron_zpp.storage.files import check_writable
from megatron_zpp.storage.location import location
from megatron_zpp.storage.object_errors import NoObject, ObjectError
from megatron_zpp.storage.objects import requests as object_store
from megatron_zpp.storage.objects import upload as object_upload
from megatron_zpp.storage.objects.path import ObjectPath
from megatron_zpp.storage.objects.upload import ChecksummedUpload, part_bytes
from megatron_zpp.storage.regular import UnfitFile, read_limited
from tests.object_server import BUCKET, ObjectServer

CHUNK = 4 << 20


@pytest.fixture(autouse=True)
def _own_client() -> Iterator[None]:
    yield
    object_store._client.cache_clear()  # a test may have changed the environment


def test_text_names_a_file_or_an_object() -> None:
    assert location("s3://a/b/c/") == ObjectPath("a", "b/c")
    assert str(location("s3://a/b/c/")) == "s3://a/b/c"
    assert str(location("s3://a")) == "s3://a"
    assert location("s3://a") / "x" == ObjectPath("a", "x")
    assert location("./b") == Path("b")
    for wrong in ("s3://", "s3:///b", "s3://a//b", "s3://a/../b", "gs://a/b", "https://a/b"):
        with pytest.raises(ValueError, match="s3://BUCKET/PREFIX"):
            location(wrong)


def test_directories_are_what_objects_are_below(server: ObjectServer) -> None:
    directory = ObjectPath(BUCKET, "names")
    for key in ("a_1/x", "a_1/y/z", "a_2", "b"):
        server.put(f"names/{key}", b"12345")
    server.put("names_of_others", b"")
    assert [path.name for path in sorted(directory.glob("a_*"))] == ["a_1", "a_2"]
    assert directory.sizes() == {"a_2": 5, "b": 5}
    assert [(directory / name).is_dir() for name in ("a_1", "a_2", "a")] == [True, False, False]
    assert [(directory / name).is_file() for name in ("a_1", "a_2", "a")] == [False, True, False]
    assert directory.exists()
    assert not (directory / "c").exists()
    upload = (directory / "a_1/unfinished").begin_upload()
    (directory / "a_1/unfinished").upload_part(upload, 1, b"part")
    (directory / "a_1").remove_tree()
    assert server.keys("names") == ["/a_2", "/b", "_of_others"]
    assert "Uploads" not in server.client.list_multipart_uploads(Bucket=BUCKET)


def test_more_objects_than_one_answer_lists_are_removed(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        server.put(f"many/{number}", b"")
    whole = object_store.request
    monkeypatch.setattr(
        "megatron_zpp.storage.objects.path.request",
        lambda url, operation, **arguments: whole(
            url, operation, **arguments, **({"MaxKeys": 2} if operation == "list_objects_v2" else {})
        ),
    )
    assert len(list(ObjectPath(BUCKET, "many").glob("*"))) == 5
    ObjectPath(BUCKET, "many").remove_tree()
    assert server.keys("many/") == []


@pytest.mark.parametrize(("size", "at_once"), [(0, 4), (CHUNK, 4), (9 * CHUNK + 77, 1)])
def test_an_upload_has_the_bytes_and_checksums_of_a_file(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, at_once: int
) -> None:
    monkeypatch.setattr(object_upload, "_AT_ONCE", at_once)
    content = os.urandom(size)
    (tmp_path / "file").write_bytes(content)
    path = ObjectPath(BUCKET, f"upload/{size}")
    upload = ChecksummedUpload(path, size)
    for start in range(0, size, 3_000_001):
        upload.write(content[start : start + 3_000_001])
    assert not path.is_file()
    checksums = upload.finish()
    upload.close()
    assert checksums == checksums_of(tmp_path / "file")
    assert server.get(path.key) == content
    if size > CHUNK + 10:
        target = bytearray(CHUNK)
        VerifiedFile(path, checksums).read_into(5, memoryview(target))
        assert target == content[5 : 5 + CHUNK]
        server.put(path.key, content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(DamagedFile, match=f"^{path}: damaged between bytes {9 * CHUNK} and {size}: "):
            VerifiedFile(path, checksums).check_rest()
        server.remove(path.key)
        with pytest.raises(DamagedFile, match=f"^{path}: missing"):
            VerifiedFile(path, checksums)


def test_an_upload_that_is_given_up_leaves_nothing(server: ObjectServer) -> None:
    path = ObjectPath(BUCKET, "given_up")
    upload = ChecksummedUpload(path, 5 * CHUNK)
    upload.write(bytes(5 * CHUNK))
    upload.close()
    assert not path.is_file()
    assert "Uploads" not in server.client.list_multipart_uploads(Bucket=BUCKET)


def test_an_object_of_any_size_fits_in_the_parts_of_an_upload() -> None:
    for size in (0, 1, 16 << 20, 160 << 30, 5 << 40):
        assert part_bytes(size) % CHUNK == 0
        assert part_bytes(size) >= 5 << 20
        assert -(-size // part_bytes(size)) <= 10_000


def test_an_object_that_is_replaced_while_it_is_read_is_an_error(server: ObjectServer) -> None:
    server.put("replaced", b"0123456789")
    ranges = ObjectPath(BUCKET, "replaced").status()
    assert ranges.read(2, 3) == b"234"
    server.put("replaced", b"9876543210")
    with pytest.raises(OSError, match=f"^s3://{BUCKET}/replaced: was replaced or removed"):
        ranges.read(2, 3)


def test_reading_has_a_limit(server: ObjectServer) -> None:
    server.put("ten", b"0123456789")
    server.put("empty", b"")
    assert read_limited(ObjectPath(BUCKET, "ten"), 10) == b"0123456789"
    assert read_limited(ObjectPath(BUCKET, "empty"), 0) == b""
    with pytest.raises(UnfitFile, match="longer than 9 bytes"):
        read_limited(ObjectPath(BUCKET, "ten"), 9)
    with pytest.raises(FileNotFoundError):
        read_limited(ObjectPath(BUCKET, "none"), 9)


def test_what_is_wrong_is_one_line(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^--save s3://nowhere/x: the bucket does not exist; create it"):
        check_writable("--save", "s3://nowhere/x")
    check_writable("--save", f"s3://{BUCKET}/probed")
    assert server.keys("probed") == []
    with pytest.raises(NoObject, match=f"^s3://{BUCKET}/none: no such object$"):
        ObjectPath(BUCKET, "none").read_whole()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    object_store._client.cache_clear()
    with pytest.raises(ValueError, match=r"^--save s3://runs/x: no credentials; set AWS_ACCESS_KEY_ID and"):
        check_writable("--save", f"s3://{BUCKET}/x")


def test_without_the_package_the_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("boto3", "botocore.exceptions"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)  # as if it was not installed
            with pytest.raises(
                ValueError, match=r"^--save s3://runs/x: needs the package boto3; install it: pip"
            ):
                check_writable("--save", f"s3://{BUCKET}/x")


@pytest.mark.parametrize("lost", [2, 99])
def test_a_connection_that_is_lost_in_a_body_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    requests: list[str] = []

    class Lossy(BaseHTTPRequestHandler):
        """Sends a part of each of the first `lost` bodies, then whole ones."""

        def do_GET(self) -> None:
            requests.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"x" * (10 if len(requests) <= lost else 100))

        def log_message(self, *_: object) -> None:
            """Write nothing."""

    monkeypatch.setattr(object_store, "_PAUSE", 0.001)
    with ThreadingHTTPServer(("127.0.0.1", 0), Lossy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, value in (
            ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}"),
            ("AWS_ACCESS_KEY_ID", "x"),
            ("AWS_SECRET_ACCESS_KEY", "x"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
        ):
            monkeypatch.setenv(name, value)
        object_store._client.cache_clear()
        if lost < object_store.ATTEMPTS:
            assert ObjectPath("a", "b").read_whole()[0] == b"x" * 100
            assert len(requests) == lost + 1
        else:
            with pytest.raises(ObjectError, match=r"does not answer .*; tried 5 times"):
                ObjectPath("a", "b").read_whole()
            assert len(requests) == object_store.ATTEMPTS
        server.shutdown()
