"""Whether two commits train to the same bits: SHA-256 of all states after a fixed set of short CPU runs.

python benchmarks/final_weights.py HEAD                     # the hashes of this commit
python benchmarks/final_weights.py main~5 HEAD --runs bf16  # both commits; runs with bf16 in their name

Checks a change that must not change numbers: ZeRO stages 0 to 3, ZeRO++ alone and together
on 2 nodes x 2 ranks, fp32, bf16 and fp16, recomputation, and a resume. Every commit is checked out into a
separate directory and trains there with this Python, one thread per rank. Compare hashes of one machine
only, because the bits of a matrix product depend on the processor. A hash covers master weights and moments,
shard by shard, without the names that a checkpoint gives them. Exit status 1 when commits differ.
"""

import argparse
import hashlib
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

import torch
from safetensors import safe_open

from benchmarks.common import RESULTS, write_result

ROOT = Path(__file__).resolve().parents[1]
COMMON = shlex.split(
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 1001 --num-layers 3 --hidden-size 96 "
    "--num-attention-heads 3 --seq-length 33 --micro-batch-size 2 --global-batch-size 16 --lr 1e-2 "
    "--lr-warmup-iters 2 --train-iters 6 --log-interval 3 --eval-interval 3 --eval-iters 1 --weight-decay 0.1"
)
QUANTIZED_WEIGHTS = ("--zero-quantized-weights",)
SECONDARY_SHARDS = ("--zero-hpz-partition-size", "2")
QUANTIZED_GRADIENTS = ("--zero-quantized-gradients",)
ZEROPP = (*QUANTIZED_WEIGHTS, *SECONDARY_SHARDS, *QUANTIZED_GRADIENTS)
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform")


def runs() -> dict[str, tuple[int, int, tuple[str, ...]]]:
    """Nodes, ranks per node and flags of every run, by name."""
    found: dict[str, tuple[int, int, tuple[str, ...]]] = {}
    for precision in ("fp32", "bf16"):
        flag = f"--{precision}"
        found[f"1 x 1, stage 0, {precision}"] = (1, 1, (flag,))
        for stage in ("0", "1", "2", "3"):
            found[f"1 x 2, stage {stage}, {precision}"] = (1, 2, (flag, "--zero-stage", stage))
        stage_3 = (flag, "--zero-stage", "3")
        found[f"2 x 2, stage 3, {precision}"] = (2, 2, stage_3)
        found[f"2 x 2, qwZ, {precision}"] = (2, 2, (*stage_3, *QUANTIZED_WEIGHTS))
        found[f"2 x 2, hpZ, {precision}"] = (2, 2, (*stage_3, *SECONDARY_SHARDS))
        found[f"2 x 2, qgZ, {precision}"] = (2, 2, (*stage_3, *QUANTIZED_GRADIENTS))
        found[f"2 x 2, ZeRO++, {precision}"] = (2, 2, (*stage_3, *ZEROPP))
    zeropp = ("--bf16", "--zero-stage", "3", *ZEROPP)
    found["2 x 2, ZeRO++, recomputation, bf16"] = (2, 2, (*zeropp, *RECOMPUTE))
    formats = ("--zero-quantized-weights-format", "delta4", "--zero-quantized-gradients-format", "rotated4")
    found["2 x 2, ZeRO++, 4 bits, bf16"] = (2, 2, (*zeropp, *formats))
    found["2 x 1, ZeRO++, bf16"] = (
        2,
        1,
        ("--bf16", "--zero-stage", "3", *QUANTIZED_WEIGHTS, *QUANTIZED_GRADIENTS),
    )
    found["1 x 2, stage 2, fp16"] = (1, 2, ("--fp16", "--initial-loss-scale", "65536", "--zero-stage", "2"))
    return found


def train(checkout: Path, nodes: int, local: int, flags: tuple[str, ...], save: Path) -> None:
    """Train to iteration 3 and, in a second start, to 6. Raises RuntimeError with a rank's output."""
    ranks = nodes * local
    argv = [sys.executable, "pretrain_gpt.py", *COMMON, *flags, "--device", "cpu"]
    argv += ["--save", str(save), "--load", str(save), "--save-interval", "3"]
    for extra in (["--exit-interval", "3"], []):
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        processes = [
            subprocess.Popen(
                [*argv, *extra],
                cwd=checkout,
                env={
                    **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
                    "PYTHONPATH": str(checkout),
                    "OMP_NUM_THREADS": "1",
                    "RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_RANK": str(rank % local),
                    "LOCAL_WORLD_SIZE": str(local),
                    **(rendezvous if ranks > 1 else {}),
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(ranks)
        ]
        said = [process.communicate()[0] for process in processes]
        if any(process.returncode for process in processes):
            raise RuntimeError("\n".join(text[-2000:] for text in said))


def digest(save: Path) -> str:
    """SHA-256 over the tensors of the last checkpoint: rank by rank, their types, shapes and bytes."""
    newest = max(save.glob("iter_*"))
    found = hashlib.sha256()
    for shard in sorted(newest.glob("*.safetensors")):
        with safe_open(str(shard), framework="pt") as file:
            for name in sorted(file.keys()):
                tensor = file.get_tensor(name)
                found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
                found.update(tensor.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def hashes(commit: str, selected: dict[str, tuple[int, int, tuple[str, ...]]]) -> dict[str, str]:
    """The digest of every run of `commit`, or how it failed."""
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        checkout = Path(scratch) / "checkout"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(checkout), commit], check=True)
        try:
            for number, (name, (nodes, local, flags)) in enumerate(selected.items()):
                save = Path(scratch) / str(number)
                try:
                    train(checkout, nodes, local, flags, save)
                    found[name] = digest(save)
                except RuntimeError as error:
                    found[name] = f"failed: {error}"
                print(f"{commit}: {name}: {found[name]}", flush=True)
        finally:
            subprocess.run([*git, "remove", "--force", str(checkout)], check=True)
    return found


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commits", nargs="+")
    parser.add_argument("--runs", default="", help="only those whose name contains this")
    parser.add_argument("--name", default="final_weights")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    selected = {name: run for name, run in runs().items() if options.runs in name}
    if not selected:
        parser.error(f"--runs {options.runs!r}: no run has that in its name: {', '.join(runs())}")
    found = {commit: hashes(commit, selected) for commit in options.commits}
    first = found[options.commits[0]]
    differ = [name for name in selected if any(other[name] != first[name] for other in found.values())]
    failed = [name for name in selected if any(other[name].startswith("failed") for other in found.values())]
    write_result(options.name, {"hashes": found, "differ": differ, "failed": failed}, options.output)
    if differ or failed:
        sys.exit(f"{len(differ)} of {len(selected)} runs differ: {differ}; {len(failed)} failed: {failed}")


if __name__ == "__main__":
    main()
