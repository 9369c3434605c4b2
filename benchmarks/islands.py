"""Two islands with a slow link between them, on CPUs or on two GPUs: what is left of the rate without a link.

    python benchmarks/islands.py --mbit 8 --output benchmarks/results
    python benchmarks/islands.py --gpus --output benchmarks/results

On CPUs each island has 2 nodes × 2 ranks at ZeRO stage 3 in a network namespace of its own, and the hub is
beside the first one. All ranks share the cores of the machine, so a step takes longer than on machines of
their own: shape the link in proportion. It needs root. `synchronous` is one run of all ranks, over both
namespaces, of two steps, each of five minutes at 9 Mbit/s. On GPUs each island has one, and the link is TCP
over loopback, which cannot be shaped.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.common import end_group, program_parser, save_result
from benchmarks.faults.network import Link
from tests.support import ROOT, environment, free_port, records_of

NAMES, INTERVAL, PORT, SYNCHRONOUS = ("west", "east"), 30, 29500, "synchronous"
ALL = "--mock-data --tokenizer-type NullTokenizer --lr 1e-4 --eval-iters 0"
SMALL = "--num-layers 7 --hidden-size 512 --num-attention-heads 8 --seq-length 16 --vocab-size 16384"
ON_CPUS = f"{ALL} {SMALL} --micro-batch-size 1 --zero-stage 3 --log-interval 1"
LARGE = "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 1024 --vocab-size 50256"
ON_GPUS = f"{ALL} {LARGE} --micro-batch-size 8 --bf16 --log-interval 10"
CASES = {"alone": None, "overlap": "--outer-overlap 15", "no overlap": "--outer-overlap 0"}  # flags


def start(link: Link | None, node: int, argv: list[str], log: Path, **place: str) -> subprocess.Popen[bytes]:
    """A program in the namespace of a node, or on its GPU."""
    place |= {} if link else {"CUDA_VISIBLE_DEVICES": str(node)}
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, *argv], cwd=ROOT, env=environment(**place), stdout=out, stderr=out,
            preexec_fn=partial(link.enter, node) if link else None, start_new_session=True,
        )  # fmt: skip


def ranks(link: Link | None, node: int, flags: str, log: Path, world: int = 0, master: str = "") -> list:
    """The ranks of a run, or of one of its nodes, that are on a node."""
    count = 4 if link else 1
    argv = ["pretrain_gpt.py", *(ON_CPUS if link else ON_GPUS).split(), *flags.split()]
    place = {"MASTER_ADDR": master or "127.0.0.1", "MASTER_PORT": str(PORT + (0 if link else node))}
    place |= {"WORLD_SIZE": str(world or count), "LOCAL_WORLD_SIZE": str(min(count, 2))}
    first = count * node if world else 0
    place |= {"GLOO_SOCKET_IFNAME": link.INTERFACE} if link and world else {}
    numbers = (
        (rank, {"RANK": str(rank), "LOCAL_RANK": str(rank % 2)}) for rank in range(first, first + count)
    )
    return [start(link, node, argv, Path(f"{log}.{rank}"), **place, **own) for rank, own in numbers]


def finished(programs: list) -> None:
    """Wait until all have ended well, and end them otherwise."""
    try:
        for program in programs:
            assert program.wait() == 0, program.args
    finally:
        for program in programs:
            end_group(program)


def of_islands(link: Link | None, directory: Path, flags: str | None, steps: int) -> dict[str, Any]:
    """Seconds per step of the slower island, in all and by interval, and what a step of both sends.

    Without the first two intervals, in which memory is pinned, and the last, whose exchange no step hides.
    """
    secret, hub = directory / "secret", f"{link.address(0) if link else '127.0.0.1'}:{free_port()}"
    secret.write_text("sixteen characters or more")
    argv = ["-m", "megatron_zpp", "islands", "--listen", hub, "--directory", str(directory / "log")]
    server = start(link, 0, [*argv, "--secret-file", str(secret), "--names", *NAMES], directory / "hub")
    programs, metrics = [], [directory / f"{name}.jsonl" for name in NAMES]
    for node, name in enumerate(NAMES):
        own = f"--train-iters {steps} --metrics-file {metrics[node]}"
        if flags is not None:
            own += f" --islands-at {hub} --island-names {' '.join(NAMES)} --island-secret {secret} {flags}"
            own += f" --island {name} --outer-interval {INTERVAL} --outer-format rotated4"
        programs += ranks(link, node, own, directory / name)
    try:
        finished(programs)
    finally:
        end_group(server)
    records = [[r for r in records_of(each) if "elapsed_ms" in r] for each in metrics]
    firsts = range(2 * INTERVAL, steps - INTERVAL, INTERVAL)
    means = [
        [mean_seconds(r for r in each if 0 < r["iteration"] - first <= INTERVAL) for first in firsts]
        for each in records
    ]
    slower = max(means, key=statistics.mean)
    return {
        "seconds": statistics.mean(slower),
        "by_interval": slower,
        "sent_bytes": sum(each[-1].get("outer_sent_bytes", 0) for each in records) / INTERVAL,
        "waited": max(each[-1].get("outer_wait_seconds", 0.0) for each in records),
    }


def mean_seconds(records: Iterable[dict[str, Any]]) -> float:
    """Of a step."""
    return statistics.mean(record["elapsed_ms"] for record in records) / 1000


def synchronous(link: Link, directory: Path, steps: int) -> dict[str, float]:
    """Seconds per step of one run over both namespaces, without the first step."""
    flags = f"--train-iters {steps} --metrics-file {directory / 'one.jsonl'}"
    flags += " --heartbeat-timeout 0 --distributed-timeout-minutes 60"  # a slow link is no stuck rank
    both = [ranks(link, node, flags, directory / "one", 8, link.address(0)) for node in (0, 1)]
    finished([*both[0], *both[1]])
    return {
        "seconds": mean_seconds([r for r in records_of(directory / "one.jsonl") if "elapsed_ms" in r][1:])
    }


def main() -> None:
    parser = program_parser(__doc__)
    parser.add_argument("--gpus", action="store_true", help="on two GPUs")
    parser.add_argument("--mbit", type=float, default=20, help="of the slow link, in each direction")
    parser.add_argument("--steps", type=int, default=6 * INTERVAL)
    parser.add_argument("--cases", nargs="+", choices=[*CASES, SYNCHRONOUS], default=[*CASES])
    parser.add_argument("--output", type=Path)
    options, taken = parser.parse_args(), {}
    for case in options.cases:
        with (
            tempfile.TemporaryDirectory() as directory,
            nullcontext() if options.gpus else slow_link() as link,
        ):
            if link and case != "alone":
                link.slow(f"{options.mbit}mbit")
            if link and case == SYNCHRONOUS:
                taken[case] = synchronous(link, Path(directory), 2)
            else:
                taken[case] = of_islands(link, Path(directory), CASES[case], options.steps)
        print(case, taken[case], flush=True)
    if options.output:
        for figures in taken.values() if "alone" in taken else ():
            figures["rate"] = taken["alone"]["seconds"] / figures["seconds"]
        where = {} if options.gpus else {"mbit": options.mbit}
        save_result(f"islands_{'gpus' if options.gpus else 'cpus'}", where | {"cases": taken}, options.output)


@contextmanager
def slow_link() -> Iterator[Link]:
    """Two namespaces and their link."""
    link = Link(f"zpp-islands-{os.getpid()}")
    try:
        yield link
    finally:
        link.remove()


if __name__ == "__main__":
    main()
