"""The rate of the fused operations, compared with a copy in the same run.

    python benchmarks/quantization.py [--sizes 64 512 2048] [--operations quantize adamw]

A size is the megabytes of the bf16 input or output, of all messages together if messages are
summed, and of the fp32 weights for AdamW. Bytes are those that the operation must read and write, each
once; the copy is torch's copy_ of buffers of the same total size. A time is the median of batches of calls
between two CUDA events, queued after a sleeping kernel so that the host's launches do not count;
calls alternate between sets of buffers of at least four times the L2 cache (on a CPU 64 MB). On a CPU it is
wall-clock time.
"""

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

import torch

from benchmarks.common import RESULTS, program_parser, save_result
from benchmarks.quantization_cases import Buffers, Case, all_cases
from megatron_zpp.ops.library import load_operations
from megatron_zpp.ops.operations import Operations

MEGABYTE = 1 << 20
BATCHES, BATCH_SECONDS = 7, 4e-3
SLEEP_CYCLES = 4_000_000  # about 2 ms: the host has queued the batch by then
Call = Callable[[], Any]


class Stopwatch:
    """Measures the seconds per call on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        on_gpu = device.type == "cuda"
        self.cached = torch.cuda.get_device_properties(device).L2_cache_size if on_gpu else 64 * MEGABYTE

    def sets(self, moved: int) -> int:
        """The number of sets of buffers of `moved` bytes that do not fit in the cache."""
        return max(1, -(-4 * self.cached // moved))

    def seconds(self, calls: list[Call]) -> float:
        """Seconds per call, with the calls in turn."""
        turns = cycle(calls)
        for _ in range(max(2, len(calls))):  # also compiles
            next(turns)()
        first = self._batch(turns, 1)
        count = min(max(1, int(BATCH_SECONDS / first)), 200)
        return median(self._batch(turns, count) for _ in range(BATCHES)) / count

    def _batch(self, turns: Iterator[Call], count: int) -> float:
        if self.device.type == "cpu":
            started = time.perf_counter()
            for _ in range(count):
                next(turns)()
            return time.perf_counter() - started
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SLEEP_CYCLES)
        begin.record()
        for _ in range(count):
            next(turns)()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3


def copy_seconds(watch: Stopwatch, moved: int) -> float:
    """A copy that reads half of `moved` bytes and writes the other half."""
    pairs = [
        torch.zeros(2, moved // 2, dtype=torch.uint8, device=watch.device) for _ in range(watch.sets(moved))
    ]
    return watch.seconds([partial(pair[1].copy_, pair[0]) for pair in pairs])


def measure(case: Case, ops: Operations, megabytes: int, watch: Stopwatch) -> dict[str, Any]:
    """One row of the result."""
    elements = megabytes * MEGABYTE // case.element_bytes
    sets: list[Buffers] = [case.build(ops, elements, watch.device)]
    moved = sets[0].bytes
    sets += [case.build(ops, elements, watch.device) for _ in range(watch.sets(moved) - 1)]
    seconds = watch.seconds([buffers.call for buffers in sets])
    del sets
    return {
        "operation": case.operation,
        "variant": case.variant,
        "megabytes": megabytes,
        "bytes": moved,
        "microseconds": round(seconds * 1e6, 1),
        "gb_per_second": round(moved / seconds / 1e9, 1),
        "of_copy": round(copy_seconds(watch, moved) / seconds, 3),
    }


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes, cases = (64, 512, 2048) if device.type == "cuda" else (64,), all_cases()
    parser = program_parser(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=sizes, help="megabytes")
    parser.add_argument("--operations", nargs="+", choices=sorted({case.operation for case in cases}))
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    ops = load_operations(device.type, require_kernels=True, say=print)
    torch.manual_seed(0)
    watch, lines = Stopwatch(device), []
    begin = time.perf_counter()
    for case in cases:
        if options.operations and case.operation not in options.operations:
            continue
        for megabytes in options.sizes:
            lines.append(measure(case, ops, megabytes, watch))
            print({key: value for key, value in lines[-1].items() if key != "bytes"}, flush=True)
    figures = {"device": device.type, "seconds": round(time.perf_counter() - begin), "results": lines}
    print(f"written to {save_result(f'quantization_{device.type}', figures, options.output)}")


if __name__ == "__main__":
    main()
