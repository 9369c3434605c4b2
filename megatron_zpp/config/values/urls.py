"""Flags that name a directory: of this machine alone, or also of an object store."""

from pathlib import Path

from megatron_zpp.config.options import option_error, usage_errors
from megatron_zpp.storage.files import check_writable
from megatron_zpp.storage.location import location


def check_location(flag: str, value: str) -> None:
    """Raise ValueError unless `value` is a path or a usable s3:// URL."""
    try:
        location(value)
    except ValueError as error:
        raise option_error(flag, value, str(error)) from None


def local_path(flag: str, value: str) -> Path:
    """Return the path that `value` names. Raises ValueError if it is a URL."""
    if "://" in value:
        raise option_error(flag, value, "is a URL; give a path of this machine")
    return Path(value)


def check_local_directory(flag: str, value: str) -> None:
    """Raise UsageError if `value` is a URL, ValueError if files cannot be created there.

    Not for the `check` of options, which also checkpoints of earlier runs must pass.
    """
    with usage_errors():
        local_path(flag, value)
    check_writable(flag, value)
