"""Two islands on the CPUs of one machine, with a slow link between them: what is left of the rate.

    python benchmarks/islands.py --mbit 8 --output benchmarks/results

Each island has 2 nodes × 2 ranks at ZeRO stage 3 in a network namespace of its own, and the hub is beside the
first one. All ranks share the cores of the machine, so a step takes longer than on machines of their own:
shape the link in proportion. `synchronous` is one run of all ranks, over both namespaces. Needs root.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.common import end_group, program_parser, save_result
from benchmarks.faults.network import Link
from tests.support import ROOT, environment, free_port, records_of

NAMES, INTERVAL, PORT, SYNCHRONOUS = ("west", "east"), 30, 29500, "synchronous"
MODEL = (
    "--num-layers 7 --hidden-size 512 --num-attention-heads 8 --seq-length 16 --vocab-size 16384 --mock-data "
    "--tokenizer-type NullTokenizer --micro-batch-size 1 --lr 1e-4 --zero-stage 3 --eval-iters 0 "
    "--log-interval 1"
)
CASES = {  # flags, and whether the link is slow
    "no slow link": ("--outer-overlap 0", False),
    "overlap": ("--outer-overlap 15", True),
    "no overlap": ("--outer-overlap 0", True),
}


def start(link: Link, node: int, argv: list[str], log: Path, **place: str) -> subprocess.Popen[bytes]:
    """A program in the namespace of a node."""
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, *argv], cwd=ROOT, env=environment(**place), stdout=out, stderr=out,
            preexec_fn=partial(link.enter, node), start_new_session=True,
        )  # fmt: skip


def ranks(link: Link, node: int, flags: str, log: Path, *, world: int, first: int, master: str) -> list:
    """Four ranks of a run in the namespace of a node, from rank `first` on."""
    argv, place = ["pretrain_gpt.py", *MODEL.split(), *flags.split()], {"MASTER_ADDR": master}
    place |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": str(PORT)}
    numbers = ((rank, {"RANK": str(rank), "LOCAL_RANK": str(rank % 2)}) for rank in range(first, first + 4))
    return [start(link, node, argv, Path(f"{log}.{rank}"), **place, **own) for rank, own in numbers]


def finished(programs: list) -> None:
    """Wait until all have ended well, and end them otherwise."""
    try:
        for program in programs:
            assert program.wait() == 0, program.args
    finally:
        for program in programs:
            end_group(program)


def of_islands(link: Link, directory: Path, flags: str, steps: int) -> float:
    """Seconds per step of the slower island, without the first interval."""
    secret, hub = directory / "secret", f"{link.address(0)}:{free_port()}"
    secret.write_text("sixteen characters or more")
    argv = ["-m", "megatron_zpp", "islands", "--listen", hub, "--directory", str(directory / "log")]
    server = start(link, 0, [*argv, "--secret-file", str(secret), "--names", *NAMES], directory / "hub")
    flags += f" --islands-at {hub} --island-names {' '.join(NAMES)} --island-secret {secret}"
    flags += f" --outer-interval {INTERVAL} --outer-format rotated4 --train-iters {steps}"
    programs, metrics = [], [directory / f"{name}.jsonl" for name in NAMES]
    for node, name in enumerate(NAMES):
        own = f"{flags} --island {name} --metrics-file {metrics[node]}"
        programs += ranks(link, node, own, directory / name, world=4, first=0, master="127.0.0.1")
    try:
        finished(programs)
    finally:
        end_group(server)
    taken = [[r["elapsed_ms"] for r in records_of(each) if "elapsed_ms" in r] for each in metrics]
    return max(statistics.mean(times[INTERVAL:]) for times in taken) / 1000


def synchronous(link: Link, directory: Path, steps: int) -> float:
    """Seconds per step of one run over both namespaces, without the first step."""
    metrics = directory / "one.jsonl"
    flags, master = f"--train-iters {steps} --metrics-file {metrics}", link.address(0)
    both = [ranks(link, n, flags, directory / "one", world=8, first=4 * n, master=master) for n in (0, 1)]
    finished([*both[0], *both[1]])
    return statistics.mean(r["elapsed_ms"] for r in records_of(metrics)[1:] if "elapsed_ms" in r) / 1000


def main() -> None:
    parser = program_parser(__doc__)
    parser.add_argument("--mbit", type=float, default=20, help="of the slow link, in each direction")
    parser.add_argument("--steps", type=int, default=4 * INTERVAL)
    parser.add_argument("--cases", nargs="+", choices=[*CASES, SYNCHRONOUS], default=[*CASES, SYNCHRONOUS])
    parser.add_argument("--output", type=Path)
    options, taken = parser.parse_args(), {}
    for case in options.cases:
        with tempfile.TemporaryDirectory() as directory, closing_link() as link:
            flags, slow = CASES.get(case, ("", True))
            if slow:
                link.slow(f"{options.mbit}mbit")
            if case == SYNCHRONOUS:
                taken[case] = synchronous(link, Path(directory), 2)
            else:
                taken[case] = of_islands(link, Path(directory), flags, options.steps)
        print(f"{case}: {taken[case]:.3f} s per step", flush=True)
    if options.output:
        rates = {case: taken["no slow link"] / each for case, each in taken.items()}
        save_result("islands_cpu", {"mbit": options.mbit, "seconds": taken, "rates": rates}, options.output)


@contextmanager
def closing_link() -> Iterator[Link]:
    """Two namespaces and their link."""
    link = Link(f"zpp-islands-{os.getpid()}")
    try:
        yield link
    finally:
        link.remove()


if __name__ == "__main__":
    main()
