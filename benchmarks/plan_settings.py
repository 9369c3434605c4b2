"""Whether the plan's `best:` line is about the fastest: runs of many settings beside the plan of each.

python benchmarks/plan_settings.py --ranks-per-node 2 -- --model-preset 1.3b --global-batch-size 64
python benchmarks/plan_settings.py --nodes 2 --ranks-per-node 1 --link-gbit 40 -- --model-preset 1.3b \\
    --global-batch-size 64
python benchmarks/plan_settings.py --ranks-per-node 2 --steps 4 --warmup 2 --output build -- --device cpu \\
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --global-batch-size 16

What follows `--` are flags of pretrain_gpt.py. Settings are those of the search that fit: the best one, then
the fastest size of micro-batches of each combination of other settings, then more sizes, by planned time.
Each is a run of its own, on the devices here; several nodes are emulated (launch/emulate_nodes.sh). Time is
the median of the steps after --warmup; memory is the peak that torch counts, without buffers between GPUs.
The result is written after every setting; the same command skips what has been measured.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
from operator import attrgetter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.common import RESULTS, ROOT, program_parser, save_result
from benchmarks.throughput import measure
from megatron_zpp.config.root import parse_args
from megatron_zpp.mesh import Mesh
from megatron_zpp.plan.changes import changes
from megatron_zpp.plan.hardware import Machine
from megatron_zpp.plan.job import Job, job_of
from megatron_zpp.plan.search import Plan, plan_of, search
from megatron_zpp.plan.space import FULL, OFF, Space, families, in_micro_batches_of, sizes_of
from megatron_zpp.train.auto import hardware

COMMON = "--mock-data --tokenizer-type NullTokenizer --eval-iters 0 --lr 1e-4 --log-interval 1 "
COMMON += "--attention-dropout 0 --hidden-dropout 0 --vocab-size 50303 --micro-batch-size 1"


def settings(job: Job, rates: Machine, gibibytes: float, count: int) -> list[Plan]:
    """The best plan, then others that fit, of as many kinds as there are."""
    best = search(job, rates, gibibytes).best
    assert best is not None, "nothing fits"
    chosen, more, seconds = list[Plan](), list[Plan](), attrgetter("seconds")
    for family in families(job, Space()):
        for recompute in (OFF, FULL):
            one = family.varied(recompute=recompute)
            sizes = sizes_of(one, Space())
            plans = [plan_of(in_micro_batches_of(one, size), rates) for size in sizes]
            plans = [plan for plan in plans if plan.memory.fits(gibibytes) and changes(best.job, plan.job)]
            plans.sort(key=seconds)
            chosen, more = chosen + plans[:1], more + plans[1:]
    return [best, *sorted(chosen, key=seconds), *sorted(more, key=seconds)][:count]


def measured(flags: list[str], options: argparse.Namespace, cache: Path) -> dict[str, Any]:
    """Milliseconds of a step and the peak in GiB of a run, or how it failed."""
    program = [str(ROOT / "pretrain_gpt.py"), "--train-iters", str(options.steps), *flags]
    ranks = str(options.ranks_per_node)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    if options.nodes > 1:
        grid = ["--nodes", str(options.nodes), "--ranks-per-node", ranks, "--"]
        launcher = [str(ROOT / "launch" / "emulate_nodes.sh"), *grid]
    run = measure([*launcher, *program], cache, math.inf)
    if "failed" in run:
        return run
    elapsed = statistics.median(run["intervals_ms"][options.warmup :])
    return {"measured_ms": round(elapsed, 2), "measured_gib": run["peak_gib"]}


def main() -> None:
    parser = program_parser(__doc__)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--link-gbit", default="100", help="of a node to others, for the plan")
    parser.add_argument("--count", type=int, default=12, help="settings that are run")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--name", default="plan_settings")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("flags", nargs="+")
    options = parser.parse_args()
    given, rows = [*COMMON.split(), *options.flags], list[dict[str, Any]]()
    path = options.output / f"{options.name}.json"
    there = json.loads(path.read_text())["figures"]["settings"] if path.exists() else []
    known = {row["flags"]: row for row in there}
    config = parse_args([*given, "--train-iters", "1"])
    mesh = Mesh(nodes=options.nodes, local_ranks=options.ranks_per_node)
    device, name, gibibytes, rates = hardware(config, mesh, float(options.link_gbit))
    job = job_of(config, (config.tokenizer.vocab_size or 0) + 1, mesh, device)
    figures = {"flags": options.flags, "grid": [options.nodes, options.ranks_per_node], "memory": name}
    with tempfile.TemporaryDirectory() as cache:
        for plan in settings(job, rates, gibibytes, options.count):
            flags = changes(job, plan.job)
            row = {"flags": flags, "planned_ms": round(1e3 * plan.seconds, 2)}
            row |= {"planned_gib": round(plan.memory.peak / 2**30, 2)}
            row |= known.get(flags) or measured([*given, *flags.split()], options, Path(cache))
            rows.append(row)
            print(rows[-1], flush=True)
            times = [each["measured_ms"] for each in rows if "measured_ms" in each]
            best, fastest = rows[0].get("measured_ms"), min(times, default=None)
            ratio = round(best / fastest, 4) if best and fastest else None
            summary = {"best_over_fastest": ratio, "within_5_percent": ratio is not None and ratio <= 1.05}
            save_result(options.name, {**figures, **summary, "settings": rows}, options.output)
    print(summary)


if __name__ == "__main__":
    main()
