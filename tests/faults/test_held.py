"""The memory that is in use is told from what the allocator merely keeps."""

import ctypes

from tests.faults.held import in_use

SIZE = 64 * 2**10  # bytes, below what malloc takes from the kernel alone


def test_what_is_freed_is_not_in_use() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    before = in_use()["malloc_bytes"]
    blocks = [libc.malloc(SIZE) for _ in range(100)]
    assert in_use()["malloc_bytes"] - before > 90 * SIZE
    for block in blocks:
        libc.free(block)
    assert in_use()["malloc_bytes"] - before < 10 * SIZE
