"""Whether two commits train to the same bits: SHA-256 of all states after a covering set of short CPU runs.

python benchmarks/final_weights.py HEAD                     # the hashes of this commit
python benchmarks/final_weights.py main~5 HEAD --runs bf16  # both commits; runs with bf16 in their name
python benchmarks/final_weights.py --list                   # the runs, and exit

Checks a change that must not change numbers. Every pair of values of two `FACTORS` that can be combined is in
one run at least. A run takes two steps on its mesh and two more, resumed, on another one, with chunks of 256
elements where the commit has such a constant. Every commit is checked out into a separate directory and
trains there with this Python, one thread per rank. Compare hashes of one machine only, because the bits of a
matrix product depend on the processor. A hash covers master weights and moments, shard by shard, without the
names that a checkpoint gives them. Exit status 1 when commits differ.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.common import RESULTS, ROOT, program_parser, save_result

RANKS = Path(__file__).with_name("final_weights_ranks.py")
SAMPLES = 12  # per step: a multiple of every number of data ranks
FACTORS: dict[str, dict[str, tuple[str, ...]]] = {  # name, and the flags of each value
    "mesh": {"1x4": (), "2x2": (), "3x2": ()},
    "resumed on": {"1x4": (), "2x2": (), "3x2": ()},
    "tensor": {"1": (), "2": ("--tensor-model-parallel-size", "2")},
    "stage": {stage: ("--zero-stage", stage) for stage in "0123"},
    "weights": {
        "plain": (),
        "int8": ("--zero-quantized-weights",),
        "delta4": ("--zero-quantized-weights", "--zero-quantized-weights-format", "delta4"),
    },
    "hpZ": {size: ("--zero-hpz-partition-size", size) for size in ("1", "2", "auto")},
    "gradients": {
        "plain": (),
        "int4": ("--zero-quantized-gradients",),
        "int8": ("--zero-quantized-gradients", "--zero-quantized-gradients-format", "int8"),
        "rotated4": ("--zero-quantized-gradients", "--zero-quantized-gradients-format", "rotated4"),
    },
    "groups": {size: ("--zero-gradient-partition-size", size) for size in ("off", "1", "2", "auto")},
    "precision": {
        "fp32": ("--fp32",),
        "bf16": ("--bf16",),
        "bf16 sums": ("--bf16", "--grad-reduce-in-bf16"),
        "fp16": ("--fp16", "--initial-loss-scale", "65536"),
    },
    "micro-batches": {"one": (), "several": ()},
    "recomputation": {
        "none": (),
        "full": ("--recompute-granularity", "full", "--recompute-method", "uniform"),
    },
    "unit": {"layer": (), "sublayer": ("--zero-unit", "sublayer")},
    "tables": {
        "tied": (),
        "untied": ("--untie-embeddings-and-output-weights",),
    },
    "rates": {"one": (), "two": ("--decoupled-lr", "3e-3")},
    "model": {"GPT": (), "Llama": ("--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear")},
}
Run = dict[str, str]  # a value of each factor


def possible(run: Run) -> bool:
    """Whether the run's settings can be combined, on both of its meshes."""
    stage, weights, hpz, groups = (run[name] for name in ("stage", "weights", "hpZ", "groups"))
    if stage == "0" and (weights, run["gradients"], groups) != ("plain", "plain", "off"):
        return False
    if stage != "3" and hpz != "1":
        return False
    if run["gradients"] != "plain" and run["precision"] == "bf16 sums":
        return False
    for mesh in (run["mesh"], run["resumed on"]):
        nodes, local = map(int, mesh.split("x"))
        local //= int(run["tensor"])
        if any(size == "2" and local % 2 for size in (hpz, groups)):
            return False
        if weights == "delta4" and (nodes == 1 or (stage == "3" and hpz == "1")):
            return False
    return True


def covering_runs(seed: int = 0, candidates: int = 400) -> Iterator[Run]:
    """Runs until every pair of values that a candidate has had is covered; the same ones each time."""
    draw, covered = random.Random(seed), set[tuple[tuple[str, str], ...]]()
    while True:
        drawn = ({name: draw.choice(list(values)) for name, values in FACTORS.items()} for _ in iter(int, 1))
        found = [run for run, _ in zip(filter(possible, drawn), range(candidates), strict=False)]
        best = max(found, key=lambda run: len(pairs_of(run) - covered))
        if pairs_of(best) <= covered:
            return
        covered |= pairs_of(best)
        yield best


def pairs_of(run: Run) -> set[tuple[tuple[str, str], ...]]:
    """All pairs of values of a run."""
    return set(combinations(run.items(), 2))


def starts_of(run: Run) -> list[tuple[str, list[str]]]:
    """The mesh and the flags of each start."""
    flags = [flag for name, value in run.items() for flag in FACTORS[name][value]]
    starts = []
    for mesh in (run["mesh"], run["resumed on"]):
        nodes, local = map(int, mesh.split("x"))
        samples = SAMPLES * int(run["tensor"]) // (nodes * local)  # of a data rank
        size = samples if run["micro-batches"] == "one" else samples // (3 if samples % 3 == 0 else 2)
        starts.append((mesh, [*flags, "--micro-batch-size", str(size)]))
    return starts


def hashes(commit: str, selected: dict[str, Run]) -> dict[str, str]:
    """The digest of every run of `commit`, or how it failed."""
    with tempfile.TemporaryDirectory() as scratch:
        checkout = Path(scratch) / "checkout"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(checkout), commit], check=True)
        try:
            found = subprocess.run(
                [sys.executable, str(RANKS), scratch],
                input=json.dumps({name: starts_of(run) for name, run in selected.items()}),
                cwd=checkout,
                env={**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
        finally:
            subprocess.run([*git, "remove", "--force", str(checkout)], check=True)
    return json.loads(found.stdout)


def main() -> None:
    parser = program_parser(__doc__)
    parser.add_argument("commits", nargs="*")
    parser.add_argument("--runs", default="", help="only those whose name contains this")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--name", default="final_weights")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    runs = {" ".join(f"{name} {value}," for name, value in run.items())[:-1]: run for run in covering_runs()}
    selected = {name: run for name, run in runs.items() if options.runs in name}
    if options.list or not selected or not options.commits:
        print("\n".join(selected), f"{len(selected)} of {len(runs)} runs", sep="\n")
        return
    found = {commit: hashes(commit, selected) for commit in options.commits}
    first = found[options.commits[0]]
    differ = [name for name in selected if any(other[name] != first[name] for other in found.values())]
    failed = [name for name in selected if any(other[name].startswith("failed") for other in found.values())]
    figures = {"hashes": found, "differ": differ, "failed": failed}
    print(json.dumps(figures, indent=2))
    print(f"written to {save_result(options.name, figures, options.output)}")
    if differ or failed:
        sys.exit(f"{len(differ)} of {len(selected)} runs differ: {differ}; {len(failed)} failed: {failed}")


if __name__ == "__main__":
    main()
