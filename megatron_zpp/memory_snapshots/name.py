"""`memory_snapshots.txt` in --save: under which name nodes hold the memory snapshots of a run.

    {"name": 16 hex digits, "directory": [path, inode, file system]} CHECK

CHECK is the beginning of the SHA-256 of the JSON text. `directory` is --save itself: a copy of --save has the
same file, and is another run. Earlier versions wrote NAME CHECK. A run that begins anew in an emptied --save
gets another name.
"""

import hashlib
import json
import re
import secrets
from typing import Any, NamedTuple

from megatron_zpp.config.command_line import one_line
from megatron_zpp.config.memory_snapshots import NAME_FILE
from megatron_zpp.memory_snapshots.directory_identity import DirectoryIdentity
from megatron_zpp.storage.checksums import DamagedFile
from megatron_zpp.storage.files import write_text
from megatron_zpp.storage.location import ObjectError, location
from megatron_zpp.storage.regular import read_limited

_CHECK_DIGITS = 8
_NAME = re.compile(r"[0-9a-f]{16}")
_LONGEST = 1 << 16  # bytes; a path has at most 4096, each of which JSON writes as up to 6


class MemoryName(NamedTuple):
    """What the file says: a name, and the directory that it was written to, unless by an earlier version."""

    name: str
    directory: DirectoryIdentity | None


def memory_name(save: str) -> tuple[str | None, list[str]]:
    """(the name that an earlier start has written to --save, lines for the log); None if none has.

    A name that came with a copy of another directory is none, and a line says so. Raises DamagedFile if the
    file has anything else, and OSError if an object store does not answer or --save cannot be examined.
    """
    found = _read(save)
    if found is None:
        return None, []
    if found.directory is None or found.directory.is_same(DirectoryIdentity.of(location(save))):
        return found.name, []
    line = (
        f" {NAME_FILE} in {save} was written in another directory, {found.directory.path}: the memory "
        "snapshots of that run are not used"
    )
    return None, [line]


def write_memory_name(save: str, name: str | None) -> str:
    """Write the name of the run, or a new one, to --save, which exists; return it. Raises OSError."""
    name, directory = name or secrets.token_hex(8), location(save)
    fields = {"name": name, "directory": DirectoryIdentity.of(directory)}
    write_text(directory / NAME_FILE, _line_of(json.dumps(fields)))
    return name


def checked_name(name: Any) -> str:
    """`name`, which another rank sent; a directory gets it. Raises ValueError if it is none."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"a rank sent what is no name of memory snapshots: {name!r}")
    return name


def _read(save: str) -> MemoryName | None:
    try:
        line = read_limited(location(save) / NAME_FILE, _LONGEST).decode(errors="replace")
    except FileNotFoundError:
        return None
    except ObjectError:
        raise  # it says nothing about the file
    except (OSError, ValueError) as error:
        raise DamagedFile(_problem(f"cannot be read ({one_line(error)})")) from None
    text = line[: -_CHECK_DIGITS - 2]
    if line != _line_of(text):
        raise DamagedFile(_problem("is damaged"))
    try:
        return _parsed(text)
    except (ValueError, KeyError, TypeError):
        raise DamagedFile(_problem("is not what a run writes")) from None


def _parsed(text: str) -> MemoryName:
    """Raises ValueError, KeyError or TypeError for a text that no version writes."""
    earlier = _NAME.fullmatch(text) is not None
    fields = {"name": text} if earlier else json.loads(text)
    if not _NAME.fullmatch(fields["name"]):
        raise ValueError(f"not a name: {fields['name']!r}")
    return MemoryName(fields["name"], None if earlier else DirectoryIdentity(*fields["directory"]))


def _line_of(text: str) -> str:
    """What the file has: a text and the first digits of its SHA-256."""
    return f"{text} {hashlib.sha256(text.encode()).hexdigest()[:_CHECK_DIGITS]}\n"


def _problem(what: str) -> str:
    return (
        f"{NAME_FILE} there says which copies in memory are this run's, and {what}; remove it to resume "
        "without them, from the newest checkpoint"
    )
