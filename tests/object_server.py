"""A server of objects, moto's, as a process: S3's protocol over HTTP, without Amazon."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_zpp.storage.objects.requests import _client
from tests.support import free_port, wait_until

BUCKET = "runs"


@dataclass(frozen=True)
class ObjectServer:
    """A running server with an empty bucket, and a client that shares nothing with the code under test."""

    environment: dict[str, str]
    client: Any
    process: subprocess.Popen[bytes]

    def keys(self, prefix: str = "") -> list[str]:
        """The keys of all objects below `prefix`, without it."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [found["Key"].removeprefix(prefix) for page in pages for found in page.get("Contents", [])]

    def get(self, key: str) -> bytes:
        """The content of an object."""
        return self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()

    def put(self, key: str, content: bytes) -> None:
        """Create or replace an object."""
        self.client.put_object(Bucket=BUCKET, Key=key, Body=content)

    def remove(self, key: str) -> None:
        """Remove an object."""
        self.client.delete_object(Bucket=BUCKET, Key=key)


@contextlib.contextmanager
def object_server() -> Iterator[ObjectServer]:
    """Start a server, and name it in the environment of this process and of those that it starts."""
    import boto3

    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }
    before = dict(os.environ)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            os.environ.update(environment)
            _client.cache_clear()  # of another server
            wait_until(lambda: _answers(port) or process.poll() is not None)
            assert process.poll() is None, "the server has ended"
            client = boto3.session.Session().client("s3")
            client.create_bucket(Bucket=BUCKET)
            yield ObjectServer(environment, client, process)
        finally:
            process.kill()
            os.environ.clear()
            os.environ.update(before)
            _client.cache_clear()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port)).close()
        return True
    return False
