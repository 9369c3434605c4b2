"""Where something is: a path of the file system, or a name in an object store, s3://BUCKET/KEY.

Both have the part of pathlib's interface that checkpoints use. A run that names no object store imports
nothing of storage/objects/, so that what differs there is behind `isinstance(location, Path)`.
"""

from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar, Union

from megatron_zpp.storage.object_errors import S3

if TYPE_CHECKING:
    from megatron_zpp.storage.objects.path import ObjectPath

Location: TypeAlias = Union[Path, "ObjectPath"]
AnyLocation = TypeVar("AnyLocation", Path, "ObjectPath")


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
