"""Training speed of ZeRO and ZeRO++ against FSDP2 and DeepSpeed, each contestant in separate processes.

python benchmarks/zero_speed.py --nodes 2 --ranks-per-node 1 [--nccl default] [--contestants NAME...]
python benchmarks/zero_speed.py --tables RESULT.json...   prints the tables of results

Nodes are emulated as by launch/emulate_nodes.sh: a torchrun per node, a GPU per rank if there are enough,
NCCL over sockets between nodes. Where ranks share a GPU the result says so ("shared_gpu"), and its
times do not measure a network. Contestants take turns, --rounds times, so that drift shows; all of them
train the same weights on the same tokens with the same NCCL settings, and their losses are in the result. The
rates of NCCL's collectives are measured in the same rounds, so that results can be scaled to another link.

The result is written after every contestant. A call stops before --limit-seconds with exit status 75, and the
same command resumes. Failures are recorded and not retried without --retry-failed. benchmarks/README.md
has the commands of the comparison on two GPUs.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.common import RESULTS, ROOT, STOPPED, commit, package_version, program_parser, save_result
from benchmarks.contest import grid, summary
from benchmarks.contest.contestants import Contestant, contestants, default_names
from benchmarks.contest.launch import run_on_nodes
from benchmarks.contest.protocol import shape_arguments

LINKS = "links"  # measured in every round like a contestant
_FIXED = (
    "preset num_layers hidden_size num_attention_heads seq_length vocab_size micro_batch_size micro_batches "
    "dtype warmup steps no_compile lr lr_warmup_iters"
).split()
_MARGIN = 1.2  # times the seconds of a contestant's last turn


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = program_parser(__doc__)
    shape_arguments(parser)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--nccl", choices=list(grid.NCCL_SETTINGS), default="default")
    parser.add_argument("--contestants", nargs="+", help="names, or the families ours, fsdp2, deepspeed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit-seconds", type=float, default=570, help="of this call")
    parser.add_argument(
        "--contestant-seconds", type=float, default=240, help="of one contestant in one round"
    )
    parser.add_argument("--retry-failed", action="store_true")
    parser.add_argument("--no-links", action="store_true", help="do not measure the collectives alone")
    parser.add_argument("--tables", type=Path, nargs="+", help="print these results and measure nothing")
    parser.add_argument("--list", action="store_true", help="print the contestants of this grid")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    if options.preset is None and options.num_layers is None:
        options.preset = "1.3b"
    every = contestants(options.nodes, options.ranks_per_node, options.micro_batches)
    options.names = []
    default = default_names(options.nodes, options.ranks_per_node, options.micro_batches)
    for name in options.contestants or default:
        family = [each for each, contestant in every.items() if contestant.family == name]
        if not family and name not in every:
            parser.error(f"--contestants {name}: not one of {', '.join(every)}, ours, fsdp2, deepspeed")
        options.names += family or [name]
    options.names = list(dict.fromkeys(options.names))
    return options


def result_name(options: argparse.Namespace) -> str:
    """The name of the result: model, micro-batches, grid and NCCL's settings."""
    model = options.preset or f"{options.num_layers}x{options.hidden_size}"
    batch = f"mbs{options.micro_batch_size}_acc{options.micro_batches}"
    return f"zero_speed_{model}_{batch}_{options.nodes}x{options.ranks_per_node}_{options.nccl}"


class Contest:
    """The rounds of one result, which is written after each round."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._deadline = options, time.perf_counter() + options.limit_seconds
        self._mapped = grid.gpu_map(options.nodes, options.ranks_per_node, grid.visible_gpus())
        self._name = result_name(options)
        self.path = options.output / f"{self._name}.json"
        self._taken: dict[str, float] = {}  # seconds of the last round
        self.figures = self._begin()

    def run(self) -> bool:
        """Run what is missing; return False if time is up before all of it has run."""
        options = self._options
        every = contestants(options.nodes, options.ranks_per_node, options.micro_batches)
        rows = self.figures["contestants"]
        for name in options.names:
            if (why := every[name].absent()) is not None:
                rows[name] = {"title": every[name].title, "absent": why}
                print(f"{name}: absent: {why}", flush=True)
            else:
                row = rows.setdefault(name, {"title": every[name].title, "rounds": []})
                row.pop("absent", None)
                row.setdefault("rounds", [])
                if options.retry_failed:
                    row.pop("failed", None)
        present = [name for name in options.names if "absent" not in rows[name]]
        alone = options.nodes * options.ranks_per_node == 1
        links = [] if alone or options.no_links else [LINKS]
        for number in range(options.rounds):
            for name in [*links, *present]:
                row = self.figures[LINKS] if name == LINKS else rows[name]
                if "failed" in row or len(row["rounds"]) > number:
                    continue
                if not self._fits(name):
                    return False
                self._round(name, row, None if name == LINKS else every[name])
        self._save()
        return True

    def _begin(self) -> dict[str, Any]:
        """The figures so far. Exits if the result has other settings, GPUs or another mapping."""
        options = self._options
        settings = {name: getattr(options, name) for name in _FIXED}
        fresh: dict[str, Any] = {
            "settings": settings,
            "nodes": options.nodes,
            "ranks_per_node": options.ranks_per_node,
            "gpu_map": self._mapped,
            "shared_gpu": grid.shares_gpus(self._mapped),
            "nccl": {"name": options.nccl, "environment": grid.NCCL_SETTINGS[options.nccl]},
            "deepspeed": package_version("deepspeed"),
            LINKS: {"rounds": []},
            "contestants": {},
        }
        if not self.path.exists():
            return fresh
        kept = json.loads(self.path.read_text())["figures"]
        for key in ("settings", "nodes", "ranks_per_node", "gpu_map", "nccl"):
            if kept[key] != fresh[key]:
                sys.exit(f"{self.path}: has {key} {kept[key]}, this run {fresh[key]}; give another --output")
        return {**kept, "deepspeed": fresh["deepspeed"]}

    def _fits(self, name: str) -> bool:
        """Whether one more round of `name` is likely to end in time."""
        left = self._deadline - time.perf_counter()
        expected = _MARGIN * self._taken.get(name, min(60.0, self._options.contestant_seconds))
        if expected <= left:
            return True
        print(f"{left:.0f} s are left and {name} needs about {expected:.0f}: run the same command again")
        return False

    def _round(self, name: str, row: dict[str, Any], contestant: Contestant | None) -> None:
        """One contestant's turn, or that of the links; adds its report or failure to `row`."""
        options = self._options
        with tempfile.TemporaryDirectory() as scratch:
            report = Path(scratch) / "report.json"
            if contestant is None:
                module, arguments = "benchmarks.contest.link_rates", ["--nodes", str(options.nodes)]
            else:
                module, arguments = contestant.module, [*contestant.arguments, *self._flags()]
            limit = min(options.contestant_seconds, self._deadline - time.perf_counter())
            outcome = run_on_nodes(
                module,
                [*arguments, "--report", str(report)],
                self._environments(name),
                options.ranks_per_node,
                limit,
            )
            self._taken[name] = outcome.seconds
            seconds = round(outcome.seconds, 1)
            if outcome.failed or not report.exists():
                failed = outcome.failed or "ended without a report"
                cut_off = limit < options.contestant_seconds and failed.startswith("ran past")
                if not cut_off:  # a call that ended is not the contestant's failure
                    row["failed"] = failed
                print(f"{name}: failed after {seconds} s: {failed.splitlines()[0]}", flush=True)
            else:
                row["rounds"].append(
                    {"commit": commit(), "seconds": seconds, **json.loads(report.read_text())}
                )
                said = row["rounds"][-1]
                shown = said if contestant is None else f"{statistics.median(said['step_ms']):.1f} ms"
                print(f"{name}: {shown}, in {seconds} s", flush=True)
        self._save()

    def _flags(self) -> list[str]:
        given = {name: getattr(self._options, name) for name in _FIXED if name != "no_compile"}
        flags = [
            (f"--{name.replace('_', '-')}", str(value)) for name, value in given.items() if value is not None
        ]
        return [part for pair in flags for part in pair] + ["--no-compile"] * self._options.no_compile

    def _environments(self, name: str) -> list[dict[str, str]]:
        """Of each node; every contestant keeps its compiled kernels apart, in build/, from call to call."""
        options = self._options
        processors = len(os.sched_getaffinity(0)) // (options.nodes * options.ranks_per_node)
        cache = ROOT / "build" / "zero_speed" / name
        own = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
        settings = grid.NCCL_SETTINGS[options.nccl]
        return [
            {**grid.node_environment(node, gpus, settings, processors), **own}
            for node, gpus in enumerate(self._mapped)
        ]

    def _save(self) -> None:
        summary.summarise(self.figures)
        save_result(self._name, self.figures, self._options.output)


def main() -> None:
    options = parse()
    if options.tables:
        print(summary.tables([json.loads(path.read_text()) for path in options.tables]))
        return
    if options.list:
        every = contestants(options.nodes, options.ranks_per_node, options.micro_batches)
        for name, contestant in every.items():
            print(f"{'*' if name in options.names else ' '} {name:24} {contestant.title}")
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        contest = Contest(options)
    except ValueError as error:
        sys.exit(str(error))
    if contest.figures["shared_gpu"]:
        print("warning: ranks share GPUs and take turns on them; these times are no measure of a network")
    finished = contest.run()
    if contest.path.exists():
        print(summary.tables([json.loads(contest.path.read_text())]))
    print(f"{'complete' if finished else 'not complete'}: {contest.path}")
    sys.exit(0 if finished else STOPPED)


if __name__ == "__main__":
    main()
