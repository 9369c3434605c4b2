"""The store of a job, with values that only the ranks of the job can have written, and the secret they share.

Torch's store has no password: whoever reaches its port reads, writes and deletes keys. So nothing secret is
put there, and each value begins with a code that needs the job's secret (HMAC-SHA-256, RFC 2104). What a
stranger writes is an error that names the key. A stranger can still end a run, by deleting keys.

Each start of the job has a key of its own, for which rank 0 chooses a random text (rendezvous.py). So what an
earlier start has signed is an error too.

The secret is MEGATRON_ZPP_SECRET, which launchers pass on to all ranks. Without that variable it is a file of
mode 0600 in this user's cache directory, made at the first use: on one machine, or with a home directory that
all nodes share, nothing needs to be set.
"""

import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_zpp.config.options import option_error
from megatron_zpp.native.cache import cache_directory

VARIABLE = "MEGATRON_ZPP_SECRET"
COUNTER = "#"  # at the end of keys of numbers, to which anyone can `add`; they decide how long a rank waits
_SHORTEST = 32  # characters of a secret
_LONGEST = 4096  # characters of a file
_FILE = "job_secret"
_DIGITS = 64  # of a code, in hexadecimal


class ForeignValue(ValueError):
    """A value of the store that no rank of this start of the job has written."""


def job_key(environ: Mapping[str, str]) -> bytes:
    """The key that all starts of the job share, (32,) bytes, which follows from the secret.

    Raises ValueError for a short MEGATRON_ZPP_SECRET, and for a file that is short or that another user may
    know or have made; OSError without a private directory for a file.
    """
    secret = environ.get(VARIABLE)
    if secret is not None and len(secret) < _SHORTEST:
        fix = f"must have {_SHORTEST} characters or more, for instance those of `openssl rand -hex 32`"
        raise option_error(VARIABLE, f"(of {len(secret)} characters)", fix)
    return derived(_of_user(environ) if secret is None else os.fsencode(secret), "job")


def derived(key: bytes, purpose: str) -> bytes:
    """A key for one purpose, (32,) bytes, from which `key` cannot be found."""
    return hmac.digest(key, purpose.encode(), "sha256")


def _of_user(environ: Mapping[str, str]) -> bytes:
    """The secret of this user's file, which is created whole or not at all."""
    directory = cache_directory(environ)
    path, mine = directory / _FILE, directory / f"{_FILE}.{os.getpid()}.{secrets.token_hex(4)}"
    if not path.exists():
        try:
            descriptor = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(32))
            with suppress(FileExistsError):  # another rank was first
                os.link(mine, path)
        finally:
            mine.unlink(missing_ok=True)
    return _read(path)


def _read(path: Path) -> bytes:
    """The secret in a file. Raises ValueError if another user may know it or have made it, or it is short."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        what = "is a symbolic link" if path.is_symlink() else f"cannot be read ({error.strerror})"
        raise _unfit(path, what) from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise _unfit(path, "is not a plain file")
        if found.st_uid != os.geteuid():
            raise _unfit(path, f"belongs to user {found.st_uid}")
        if found.st_mode & 0o077:
            raise _unfit(path, f"has mode {stat.S_IMODE(found.st_mode):04o}")
        secret = os.read(descriptor, _LONGEST)
    finally:
        os.close(descriptor)
    if len(secret) < _SHORTEST:
        raise _unfit(path, f"has {len(secret)} characters")
    return secret


def _unfit(path: Path, what: str) -> ValueError:
    return ValueError(
        f"{path} {what}, and is the secret of your jobs: must be a plain file of yours, mode 0600, with "
        f"{_SHORTEST} characters or more; remove it, and the next start makes one, or set {VARIABLE}"
    )


class JobStore(dist.Store):
    """A store of torch in which every value is signed but those of counters."""

    def __init__(self, store: dist.Store, key: bytes) -> None:
        super().__init__()
        self.unsigned, self.key = store, key  # torch's own collectives use the first

    def of_start(self, salt: str) -> "JobStore":
        """The same store with the key of the start in which rank 0 has chosen a random text."""
        return JobStore(self.unsigned, derived(self.key, f"start {salt}"))

    def set(self, key: str, value: str) -> None:
        self.unsigned.set(key, self._signed(key, value))

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        """Publish a value under each key, in one request."""
        unsigned: Any = self.unsigned  # torch's stubs have no `multi_set`
        unsigned.multi_set(keys, list(map(self._signed, keys, values)))

    def get(self, key: str) -> bytes:
        """Wait for a value and return it. Raises ForeignValue."""
        return self._checked(key, self.unsigned.get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for values and return them. Raises ForeignValue."""
        return list(map(self._checked, keys, self.unsigned.multi_get(keys)))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:  # type: ignore[override]
        """Publish a value where there is none (`expected` is ""), and return the one there. See `get`."""
        assert not expected, "only the first value counts"
        return self._checked(key, self.unsigned.compare_set(key, "", self._signed(key, desired)))

    def add(self, key: str, amount: int) -> int:  # type: ignore[override]
        """Add to a number and return the sum; anyone can."""
        return self.unsigned.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys exist, whoever has written them."""
        return self.unsigned.check(keys)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:  # type: ignore[override]
        self.unsigned.wait(keys, *timeout)

    def delete_key(self, key: str) -> bool:
        return self.unsigned.delete_key(key)

    def set_timeout(self, timeout: timedelta) -> None:
        """How long a request waits for a value."""
        self.unsigned.set_timeout(timeout)

    def clone(self) -> "JobStore":
        """The same store through a connection of its own."""
        unsigned: Any = self.unsigned  # torch's stubs have no `clone`
        return JobStore(unsigned.clone(), self.key)

    def _signed(self, key: str, value: str) -> str:
        return value and self._code(key, value.encode()) + value

    def _checked(self, key: str, stored: bytes) -> bytes:
        if key.endswith(COUNTER):
            return stored
        code, value = stored[:_DIGITS], stored[_DIGITS:]
        if stored and not hmac.compare_digest(code, self._code(key, value).encode()):
            raise ForeignValue(
                f"{key!r} in the run's store was not written by a rank of this start: another program did, "
                f"or nodes have different secrets; set {VARIABLE} to the same random text on all nodes"
            )
        return value

    def _code(self, key: str, value: bytes) -> str:
        name = key.encode()
        return hmac.new(self.key, len(name).to_bytes(4, "big") + name + value, "sha256").hexdigest()


def of_torch(store: dist.Store) -> dist.Store:
    """The store for torch's own collectives, whose threads must not wait for Python."""
    return store.unsigned if isinstance(store, JobStore) else store
