"""An object store, moto's, as a server in this process, that fails at one request or from one on.

Where moto forgives more than S3's protocol demands, it answers like MinIO: an upload that has been completed
or removed does not exist.
"""

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import boto3
from moto.core import DEFAULT_ACCOUNT_ID
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import s3_backends
from werkzeug.serving import make_server
from werkzeug.wrappers import Request, Response

from megatron_zpp.storage import object_store
from tests.object_server import BUCKET

BUSY, BROKEN, DENIED, UNSENT, UNANSWERED, HALF, FLIPPED = range(7)
_SAID = {  # status and code of answers that the store does not carry out
    BUSY: (503, "SlowDown"),
    BROKEN: (500, "InternalError"),
    DENIED: (403, "AccessDenied"),
}


@dataclass(frozen=True)
class RequestFault:
    """What happens to request number `first`, and to all later ones if `lasts`.

    `then`: what happens to the later ones, if it is another thing.
    """

    what: int
    first: int
    lasts: bool = False
    then: int | None = None

    def at(self, number: int) -> int | None:
        """What happens to a request."""
        if number < self.first or (number > self.first and not self.lasts):
            return None
        return self.then if number > self.first and self.then is not None else self.what


@dataclass
class FaultyStore:
    """The server's requests since `arm`, `METHOD PATH?QUERY`; and a client of its own."""

    client: Any = None
    requests: list[str] = field(default_factory=list)
    _fault: RequestFault | None = None
    _armed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def arm(self, fault: RequestFault | None) -> None:
        """Let `fault` happen; None only counts. The client of the code under test forgets its connections."""
        object_store._client.cache_clear()
        self.requests, self._fault, self._armed = [], fault, True

    def disarm(self) -> int:
        """Let nothing more happen; returns the number of requests since `arm`."""
        self._armed = False
        return len(self.requests)

    def keys(self, prefix: str) -> list[str]:
        """The keys of all objects below `prefix`, without it."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [found["Key"].removeprefix(prefix) for page in pages for found in page.get("Contents", [])]

    def uploads(self, prefix: str) -> list[str]:
        """The keys below `prefix` with uploads that have not ended."""
        found = self.client.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix)
        return [upload["Key"] for upload in found.get("Uploads", [])]

    def copy(self, old: str, new: str) -> None:
        """Copy all objects below one prefix to another."""
        for key in self.keys(old):
            self.client.copy_object(Bucket=BUCKET, Key=new + key, CopySource=f"{BUCKET}/{old}{key}")

    def clear(self, prefix: str) -> None:
        """Remove all objects and uploads below a prefix."""
        for upload in self.client.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix).get("Uploads", []):
            self.client.abort_multipart_upload(Bucket=BUCKET, Key=upload["Key"], UploadId=upload["UploadId"])
        for key in self.keys(prefix):
            self.client.delete_object(Bucket=BUCKET, Key=prefix + key)

    def answer(self, app: Callable, environ: dict[str, Any], start: Callable) -> Iterable[bytes]:
        """The WSGI application of the server, around that of moto."""
        what = None
        with self._lock:
            if self._armed:
                parts = environ["REQUEST_METHOD"], environ["PATH_INFO"], environ["QUERY_STRING"]
                self.requests.append("{} {}?{}".format(*parts))
                what = self._fault.at(len(self.requests)) if self._fault else None
        refused = _SAID.get(what, (404, "NoSuchUpload") if _is_of_no_upload(environ) else None)
        if refused is not None:
            Request(environ).get_data()
            said = f"<Error><Code>{refused[1]}</Code><Message>as told</Message></Error>"
            return Response(said, refused[0], content_type="application/xml")(environ, start)
        if what is None:
            return app(environ, start)
        if what == UNSENT:
            return _hang_up(environ)
        response = Response.from_app(app, environ)
        if what == UNANSWERED:
            return _hang_up(environ)
        content, length = response.get_data(), response.headers.get("Content-Length")
        if what == FLIPPED and content:
            content = bytes([content[0] ^ 1]) + content[1:]
            return Response(content, response.status, response.headers)(environ, start)
        headers = [(name, value) for name, value in response.headers.items() if name != "Content-Length"]
        start(response.status, [*headers, ("Content-Length", length or str(len(content)))])
        return _half(environ, content)


def _is_of_no_upload(environ: dict[str, Any]) -> bool:
    name = Request(environ).args.get("uploadId")
    buckets = s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets
    return name is not None and BUCKET in buckets and name not in buckets[BUCKET].multiparts


def _hang_up(environ: dict[str, Any]) -> Iterable[bytes]:
    with contextlib.suppress(OSError):
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionError("as told")


def _half(environ: dict[str, Any], content: bytes) -> Iterator[bytes]:
    yield content[: len(content) // 2]
    with contextlib.suppress(OSError):
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def faulty_store() -> Iterator[FaultyStore]:
    """Start the server with an empty bucket; it is named in the environment until the block ends."""
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    store, app = FaultyStore(), DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, lambda *given: store.answer(app, *given), threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    before = dict(os.environ)
    os.environ.update(
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{server.server_port}",
        AWS_ACCESS_KEY_ID="test",
        AWS_SECRET_ACCESS_KEY="test",
        AWS_DEFAULT_REGION="us-east-1",
        AWS_EC2_METADATA_DISABLED="true",
        AWS_CONFIG_FILE=os.devnull,
        AWS_SHARED_CREDENTIALS_FILE=os.devnull,
    )
    pause, object_store._PAUSE = object_store._PAUSE, 0.001
    try:
        store.client = boto3.session.Session().client("s3")
        store.client.create_bucket(Bucket=BUCKET)
        yield store
    finally:
        object_store._PAUSE = pause
        os.environ.clear()
        os.environ.update(before)
        object_store._client.cache_clear()
        server.shutdown()
