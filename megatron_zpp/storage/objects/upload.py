"""Uploads an object in parts and computes its checksums from the bytes in memory."""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from megatron_zpp.storage.checksums import CHUNK_BYTES, Checksums, OnProgress, checksums_of_bytes, no_report
from megatron_zpp.storage.object_errors import ObjectError
from megatron_zpp.storage.objects.path import ObjectPath

_PART_BYTES = 16 << 20  # at least 5 MiB, by S3's rule
_PARTS = 10_000  # of an object at most, by S3's rule
_AT_ONCE = 4  # parts in memory and on their way, besides the one that is filled


def part_bytes(size: int) -> int:
    """Return the bytes per part of an object of `size` bytes: whole chunks, in no more parts than allowed."""
    chunks = max(_PART_BYTES // CHUNK_BYTES, -(-size // (_PARTS * CHUNK_BYTES)))
    return chunks * CHUNK_BYTES


class ChecksummedUpload:
    """Writes an object like `ChecksummedWriter` a file: `finish` makes it exist, `close` alone does not.

    `size` is the number of bytes that will be written. Errors of an upload are raised by a later call.
    """

    def __init__(self, path: ObjectPath, size: int, *, on_progress: OnProgress = no_report) -> None:
        self._path, self._on_progress = path, on_progress
        self._part_bytes, self._size = part_bytes(size), 0
        self._part = bytearray()
        self._sent: list[Future[tuple[str, tuple[str, ...]]]] = []  # tag and digests of each part
        self._pool = ThreadPoolExecutor(max_workers=_AT_ONCE, thread_name_prefix="upload")
        self._upload: str | None = path.begin_upload()

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes. Raises ObjectError."""
        data = memoryview(data).cast("B")
        while len(data):
            some = data[: self._part_bytes - len(self._part)]
            self._part += some
            data = data[len(some) :]
            if len(self._part) == self._part_bytes:
                self._send()

    def finish(self) -> Checksums:
        """Send the rest, make the object exist, and return its checksums. Raises ObjectError."""
        if self._part or not self._sent:
            self._send()
        sent = [part.result() for part in self._sent]
        assert self._upload is not None, "finish comes once"
        self._path.end_upload(self._upload, [tag for tag, _ in sent], self._size)
        self._upload = None
        self._on_progress()
        return Checksums(self._size, CHUNK_BYTES, tuple(digest for _, digests in sent for digest in digests))

    def close(self) -> None:
        """Wait for parts on their way; remove all of them unless the object is finished."""
        self._pool.shutdown(cancel_futures=True)
        if self._upload is not None:
            with suppress(ObjectError):  # the next save removes them
                self._path.abort_upload(self._upload)
            self._upload = None

    def _send(self) -> None:
        part, self._part = self._part, bytearray()
        self._size += len(part)
        if len(self._sent) >= _AT_ONCE:
            self._sent[-_AT_ONCE].result()  # so that no more parts are in memory
        self._sent.append(self._pool.submit(self._send_part, len(self._sent) + 1, part))

    def _send_part(self, number: int, part: bytearray) -> tuple[str, tuple[str, ...]]:
        assert self._upload is not None
        digests = checksums_of_bytes(part).digests
        tag = self._path.upload_part(self._upload, number, part)
        self._on_progress()
        return tag, digests
