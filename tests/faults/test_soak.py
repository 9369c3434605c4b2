"""The soak's verdict on memory: what is in use, and what the allocator merely keeps."""

import ctypes

from benchmarks.faults.held import in_use
from benchmarks.faults.soak import verdict

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


def test_the_verdict_tells_a_leak_from_fragmentation() -> None:
    def sample(held: int, used: int, blocks: int = 1000) -> dict[str, list[int]]:
        return {"anonymous_kib": [held] * 2, "in_use_kib": [used] * 2, "python_blocks": [blocks] * 2}

    first = sample(300_000, 130_000)
    for last, word in (
        (sample(330_000, 130_100), "fragmentation"),
        (sample(303_500, 133_500), "leak"),  # 35 KiB per save
        (sample(300_600, 130_100, 8000), "leak"),
        (sample(300_000, 130_000), "flat"),
    ):
        assert [line.split(":")[0] for line in verdict(first, last, 100)] == [word] * 2
    assert verdict({}, {}, 0) == []
