"""GB/s between nodes by collective under many settings of NCCL: what --nccl-sockets auto could choose.

python benchmarks/link_settings.py --nodes 2 --ranks-per-node 1 [--settings NAME...]

Runs contest/link_rates.py once for each setting, on nodes that are emulated as in zero_speed.py, since NCCL
reads its variables once per process. Each rank needs its own GPU; where ranks share GPUs the result says so.
The result is written after every setting. A call stops before --limit-seconds with exit status 75; the same
command resumes, and repeats what failed. On CPUs, over gloo, NCCL's variables have no effect.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.common import RESULTS, commit, save_result
from benchmarks.contest import grid
from benchmarks.contest.launch import run_on_nodes
from benchmarks.contest.link_rates import CASES

_FOUR = grid.NCCL_SETTINGS["4sockets"]
_CHANNELS = {
    "NCCL_NCHANNELS_PER_NET_PEER": "4",
    "NCCL_MIN_P2P_NCHANNELS": "4",
}  # docs/internals/nccl_tcp.md: why both


def _chunk(kibibytes: int) -> dict[str, str]:
    return {"NCCL_P2P_NET_CHUNKSIZE": str(kibibytes * 1024)}


SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "2sockets": {"NCCL_SOCKET_NTHREADS": "2", "NCCL_NSOCKS_PERTHREAD": "1"},
    **{name: grid.NCCL_SETTINGS[name] for name in ("4sockets", "8sockets", "16sockets")},
    "chunk512": _chunk(512),
    "4sockets_chunk256": _FOUR | _chunk(256),
    "4sockets_chunk512": _FOUR | _chunk(512),
    "4sockets_chunk1024": _FOUR | _chunk(1024) | {"NCCL_BUFFSIZE": str(8 << 20)},
    "4sockets_task32": _FOUR | {"NCCL_SOCKET_MIN_TASKSIZE": str(32 << 10)},
    "4sockets_channels4": _FOUR | _CHANNELS,
    "4sockets_channels4_chunk512": _FOUR | _CHANNELS | _chunk(512),
    "8sockets_chunk512": grid.NCCL_SETTINGS["8sockets"] | _chunk(512),
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--megabytes", type=int, nargs="+", default=[25, 100])
    parser.add_argument("--seconds", type=float, default=0.5, help="for each figure")
    parser.add_argument("--limit-seconds", type=float, default=570, help="of this call")
    parser.add_argument("--setting-seconds", type=float, default=120, help="of one setting")
    parser.add_argument("--output", type=Path, default=RESULTS)
    return parser.parse_args(argv)


def measure(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """The figures by setting, and whether they are complete; those of an earlier call are kept."""
    deadline = time.perf_counter() + options.limit_seconds
    mapped = grid.gpu_map(options.nodes, options.ranks_per_node, grid.visible_gpus())
    name = f"link_settings_{options.nodes}x{options.ranks_per_node}"
    what = {"cases": options.cases, "megabytes": options.megabytes, "gpu_map": mapped}
    figures = {**what, "shared_gpu": grid.shares_gpus(mapped), "settings": {}}
    path = options.output / f"{name}.json"
    if path.exists():
        kept = json.loads(path.read_text())["figures"]
        if any(kept[key] != value for key, value in what.items()):
            sys.exit(f"{path}: has other cases, sizes or GPUs; give another --output")
        figures["settings"] = kept["settings"]
    for setting in options.settings:
        if "gigabytes_per_second" in figures["settings"].get(setting, {}):
            continue
        if deadline - time.perf_counter() < options.setting_seconds:
            return figures, False
        figures["settings"][setting] = {"environment": SETTINGS[setting], **_rates(options, setting, mapped)}
        save_result(name, figures, options.output)
        print(f"{setting}: {figures['settings'][setting]}", flush=True)
    return figures, True


def _rates(options: argparse.Namespace, setting: str, mapped: list[list[str]]) -> dict[str, Any]:
    """GB/s by case and size, or why there are none."""
    processors = len(os.sched_getaffinity(0)) // (options.nodes * options.ranks_per_node)
    environments = [
        grid.node_environment(node, gpus, SETTINGS[setting], processors) for node, gpus in enumerate(mapped)
    ]
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        arguments = ["--nodes", str(options.nodes), "--report", str(report)]
        arguments += ["--seconds", str(options.seconds), "--megabytes", *map(str, options.megabytes)]
        arguments += ["--cases", *options.cases]
        module = "benchmarks.contest.link_rates"
        outcome = run_on_nodes(
            module, arguments, environments, options.ranks_per_node, options.setting_seconds
        )
        if outcome.failed or not report.exists():
            return {"failed": outcome.failed or "ended without a report"}
        return {"commit": commit(), "gigabytes_per_second": json.loads(report.read_text())}


def table(figures: dict[str, Any]) -> str:
    """A line per setting: GB/s by collective, and the all-to-all's share of the all-gather's rate."""
    cases = figures["cases"]
    sizes = " / ".join(f"{size}" for size in figures["megabytes"])
    head = f"GB/s that a rank sends, in messages of {sizes} MB"
    if figures["shared_gpu"]:
        head += "; **ranks share GPUs: no measure of a network**"
    with_share = {"all_gather", "all_to_all"} <= set(cases)
    titles = ["setting", *(case.replace("_", " ") for case in cases)]
    titles += ["all-to-all / all-gather"] * with_share
    lines = [head, "", _row(titles), _row(["---"] * len(titles))]
    for setting, result in figures["settings"].items():
        if "failed" in result:
            lines.append(_row([setting, result["failed"].splitlines()[0][:160]]))
            continue
        rates = result["gigabytes_per_second"]
        cells = [" / ".join(f"{rate:.2f}" for rate in rates[case].values()) for case in cases]
        if with_share:
            pairs = zip(rates["all_to_all"].values(), rates["all_gather"].values(), strict=True)
            cells.append(" / ".join(f"{there / ring:.0%}" for there, ring in pairs))
        lines.append(_row([setting, *cells]))
    return "\n".join(lines)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    options = parse()
    try:
        figures, complete = measure(options)
    except ValueError as error:
        sys.exit(str(error))
    print(table(figures))
    sys.exit(0 if complete else 75)


if __name__ == "__main__":
    main()
