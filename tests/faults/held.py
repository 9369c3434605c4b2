"""The memory that a process has in use, as its allocators count it: not what they keep for later."""

import ctypes
import gc
import sys
from typing import ClassVar

_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()


class _MallInfo(ctypes.Structure):
    """glibc's struct mallinfo2: mallinfo(3)."""

    _fields_: ClassVar = [(name, ctypes.c_size_t) for name in _FIELDS]


def in_use() -> dict[str, int]:
    """Bytes that malloc has given out, bytes that it keeps for later, and blocks of Python's allocator.

    Of all threads' arenas. Tensors on the CPU are among the first. Growth of the first or the last is a leak;
    growth of the second alone is fragmentation, which ends. Garbage in cycles does not count.
    """
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _MallInfo
    found = mallinfo2()
    return {
        "malloc_bytes": found.uordblks + found.hblkhd,
        "malloc_free_bytes": found.fordblks,
        "python_blocks": sys.getallocatedblocks(),
    }
