"""Names in an object store, s3://BUCKET/KEY, with the part of pathlib's interface that checkpoints use.

An object appears whole or not at all, and replaces another at once. Objects cannot be renamed. A directory is
only the common beginning of keys, up to a slash: it exists as long as an object is below it. Every request is
answered with what earlier requests wrote.
"""

import contextlib
import errno
import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_zpp.storage.object_errors import S3, Conflict, NoObject, ObjectError
from megatron_zpp.storage.objects.requests import NoUpload, request

_REMOVED_AT_ONCE = 1000  # objects; S3's limit
_OBJECTS, _UPLOADS = "list_objects_v2", "list_multipart_uploads"


@dataclass(frozen=True, order=True)
class ObjectPath:
    """An object or a directory; the key of a bucket itself is empty. All methods raise ObjectError."""

    bucket: str
    key: str

    def __str__(self) -> str:
        return f"{S3}{self.bucket}/{self.key}".rstrip("/")

    def __truediv__(self, name: str) -> "ObjectPath":
        return ObjectPath(self.bucket, f"{self._prefix}{name}")

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2] or self.bucket

    @property
    def parent(self) -> "ObjectPath":
        return ObjectPath(self.bucket, self.key.rpartition("/")[0])

    def with_name(self, name: str) -> "ObjectPath":
        return self.parent / name

    def status(self) -> "ObjectRanges":
        """What there is now. Raises NoObject if there is no such object."""
        return ObjectRanges(self, request(str(self), "head_object", **self._named))

    def is_file(self) -> bool:
        try:
            self.status()
        except NoObject:
            return False
        return True

    def is_dir(self) -> bool:
        """Whether an object is below it."""
        return bool(self._list(_OBJECTS, PaginationConfig={"MaxItems": 1, "PageSize": 1}).get("Contents"))

    def exists(self) -> bool:
        """Whether there is such an object or directory. Raises ObjectError if there is no such bucket."""
        return self.is_dir() or (bool(self.key) and self.is_file())

    def glob(self, pattern: str) -> Iterator["ObjectPath"]:
        """Yield the objects and directories directly in this directory whose names match."""
        listed = self._list(_OBJECTS, Delimiter="/")
        keys = [found["Key"] for found in listed.get("Contents", [])]
        keys += [found["Prefix"].rstrip("/") for found in listed.get("CommonPrefixes", [])]
        for path in (ObjectPath(self.bucket, key) for key in keys):
            if fnmatch.fnmatchcase(path.name, pattern):
                yield path

    def sizes(self) -> dict[str, int]:
        """The bytes of each object directly in this directory, by name."""
        found = self._list(_OBJECTS, Delimiter="/").get("Contents", [])
        return {each["Key"].rpartition("/")[2]: each["Size"] for each in found}

    def read(self, start: int, size: int, tag: str) -> bytes:
        """Return at most `size` bytes from `start` on. Raises Conflict if the content has another tag."""
        assert size > 0, "a request cannot name an empty range"
        span = f"bytes={start}-{start + size - 1}"
        return request(str(self), "get_object", **self._named, Range=span, IfMatch=tag)["Body"]

    def read_whole(self) -> tuple[bytes, str]:
        answer = request(str(self), "get_object", **self._named)
        return answer["Body"], answer.get("ETag", "")

    def write(self, content: bytes, *, if_absent: bool = False, if_tag: str | None = None) -> str:
        """Create or replace the object, and return its tag.

        Raises Conflict with `if_absent` if it exists, and with `if_tag` unless its present tag is that one.
        """
        condition = {"IfNoneMatch": "*"} if if_absent else {"IfMatch": if_tag} if if_tag is not None else {}
        answer = request(str(self), "put_object", **self._named, Body=content, **condition)
        return answer.get("ETag", "")

    def unlink(self) -> None:
        """Remove the object, if it is there."""
        request(str(self), "delete_object", **self._named)

    def remove_tree(self) -> None:
        """Remove every object below this directory, and the parts of uploads that did not end."""
        keys = [{"Key": found["Key"]} for found in self._list(_OBJECTS).get("Contents", [])]
        for first in range(0, len(keys), _REMOVED_AT_ONCE):
            some = {"Objects": keys[first : first + _REMOVED_AT_ONCE], "Quiet": True}
            answer = request(str(self), "delete_objects", Bucket=self.bucket, Delete=some)
            for left in answer.get("Errors", []):
                reason = f"cannot be removed: {left.get('Code')} {left.get('Message')}"
                raise ObjectError(errno.EIO, reason, f"{S3}{self.bucket}/{left.get('Key')}")
        self.abort_uploads()

    def abort_uploads(self) -> None:
        """Remove the parts of all uploads below this directory that have not ended."""
        for upload in self._list(_UPLOADS).get("Uploads", []):
            ObjectPath(self.bucket, upload["Key"]).abort_upload(upload["UploadId"])

    def begin_upload(self) -> str:
        """Begin to upload the object in parts, and return the upload's id."""
        return request(str(self), "create_multipart_upload", **self._named)["UploadId"]

    def upload_part(self, upload: str, number: int, content: bytes | bytearray) -> str:
        """Upload part `number`, from 1 on, and return its tag."""
        arguments = {"UploadId": upload, "PartNumber": number, "Body": content}
        return request(str(self), "upload_part", **self._named, **arguments)["ETag"]

    def end_upload(self, upload: str, tags: list[str], size: int) -> None:
        """Make the object of all parts, by their tags and their `size` together; from then on it exists."""
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, start=1)]
        arguments = {"UploadId": upload, "MultipartUpload": {"Parts": parts}}
        try:
            request(str(self), "complete_multipart_upload", **self._named, **arguments)
        except NoUpload:  # an earlier attempt ended it and its answer was lost, or another process aborted it
            if not self.is_file() or self.status().size != size:
                raise

    def abort_upload(self, upload: str) -> None:
        """Remove the parts of an upload that has not ended."""
        with contextlib.suppress(NoUpload):  # another process was faster
            request(str(self), "abort_multipart_upload", **self._named, UploadId=upload)

    @property
    def _prefix(self) -> str:
        return f"{self.key}/" if self.key else ""

    @property
    def _named(self) -> dict[str, Any]:
        return {"Bucket": self.bucket, "Key": self.key}

    def _list(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Return everything below this directory, or as much as `arguments` ask for."""
        return request(str(self), operation, Bucket=self.bucket, Prefix=self._prefix, **arguments)


class ObjectRanges:
    """Reads ranges of an object, as FileRanges of a file, while its content stays what it was.

    Reading raises Conflict, an OSError, once another content has replaced what was opened.
    """

    def __init__(self, path: ObjectPath, answer: dict[str, Any]) -> None:
        """`answer` is the store's: `size` in bytes, `modified` in seconds, and the `tag` of the content."""
        self._path, self.size, self.tag = path, answer["ContentLength"], answer.get("ETag", "")
        self.modified: float = answer["LastModified"].timestamp()

    def read(self, start: int, size: int) -> bytes:
        """Return the bytes [start, start + size), which must be in the object."""
        if not size:
            return b""
        try:
            return self._path.read(start, size, self.tag)
        except (Conflict, NoObject) as error:
            reason = "was replaced or removed while it was read; restore it and start again"
            raise Conflict(error.errno, reason, str(self._path)) from None

    def read_into(self, start: int, target: memoryview) -> int:
        content = self.read(start, min(len(target), self.size - start))
        target[: len(content)] = content
        return len(content)

    def forget(self, start: int, size: int) -> None:
        """Nothing of an object is kept."""

    def close(self) -> None:
        """Nothing is open between requests."""
