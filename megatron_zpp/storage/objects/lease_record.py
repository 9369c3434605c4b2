"""The record of a lease in an object store, by conditional requests: see storage/lease.py."""

import contextlib
import errno
import os
from typing import Any

from megatron_zpp.storage.object_errors import Conflict, NoObject, ObjectError
from megatron_zpp.storage.objects.path import ObjectPath

_NO_TAG = f'"{"0" * 32}"'  # no object has this one
_UNCONDITIONAL = (
    "the store ignores conditions of requests (If-None-Match, If-Match), so that two runs could save here at "
    "once; use a store that has them, such as Amazon S3 or MinIO"
)


class ObjectRecord:
    """As FileRecord, of an object."""

    def __init__(self, path: ObjectPath) -> None:
        self._path, self._tag = path, ""

    def read(self) -> bytes | None:
        try:
            content, self._tag = self._path.read_whole()
        except NoObject:
            return None
        return content

    def create(self, content: bytes) -> None:
        self._check_conditions()
        self._tag = self._path.write(content, if_absent=True)

    def take_over(self, content: bytes, name: str) -> None:
        with contextlib.suppress(Conflict):  # which the caller finds out
            self._tag = self._path.write(content, if_tag=self._tag)

    def renew(self, content: bytes) -> None:
        self._tag = self._path.write(content, if_tag=self._tag)

    def remove(self) -> None:
        self._path.unlink()

    def close(self) -> None:
        """Nothing is open between requests."""

    def _check_conditions(self) -> None:
        """Raise ObjectError for a store that ignores conditions, which S3's protocol allows."""
        probe = self._path.with_name(f"{self._path.name}.probe-{os.urandom(8).hex()}")
        probe.write(b"first")
        conditions: tuple[dict[str, Any], ...] = {"if_absent": True}, {"if_tag": _NO_TAG}
        try:
            for condition in conditions:
                with contextlib.suppress(Conflict):
                    probe.write(b"second", **condition)
                    raise ObjectError(errno.ENOTSUP, _UNCONDITIONAL, str(self._path.parent))
        finally:
            probe.unlink()
