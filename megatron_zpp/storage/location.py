"""Where something is: a path of the file system, or a name in an object store, s3://BUCKET/KEY.

Both have the part of pathlib's interface that checkpoints use. A run that names no object store imports
nothing of storage/objects/, so that what differs there is behind `isinstance(location, Path)`.
"""

from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar, Union

if TYPE_CHECKING:
    from megatron_zpp.storage.objects.path import ObjectPath

S3 = "s3://"
Location: TypeAlias = Union[Path, "ObjectPath"]
AnyLocation = TypeVar("AnyLocation", Path, "ObjectPath")


class ObjectError(OSError):
    """A request to an object store failed. `strerror` says why and what to do, `filename` is the URL."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


class NoObject(ObjectError, FileNotFoundError):
    """There is no such object."""


class Conflict(ObjectError):
    """The object is not the one that a conditional request was for."""


def is_object(text: str) -> bool:
    """Whether text names an object: s3://…"""
    return text.startswith(S3)


def location(text: str) -> Location:
    """Return the path that `text` names. Raises ValueError, only the reason, for a useless URL."""
    if not is_object(text):
        if "://" in text:
            raise ValueError(f"is a URL that cannot be used here; give a path, or {S3}BUCKET/PREFIX")
        return Path(text)
    from megatron_zpp.storage.objects.path import ObjectPath

    bucket, _, key = text.removeprefix(S3).rstrip("/").partition("/")
    if not bucket or any(part in ("", ".", "..") for part in (key.split("/") if key else [])):
        raise ValueError(f"must be {S3}BUCKET/PREFIX, without empty parts, . and ..")
    return ObjectPath(bucket, key)
