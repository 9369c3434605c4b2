"""Trains the runs of final_weights.py with the package of the working directory; prints their digests.

python final_weights_ranks.py SCRATCH <RUNS.json, with the checkout as working directory and PYTHONPATH
"""

import argparse
import hashlib
import importlib
import json
import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import safe_open

COMMON = shlex.split(
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 1001 --num-layers 3 --hidden-size 96 "
    "--num-attention-heads 4 --seq-length 34 --global-batch-size 12 --lr 1e-2 --lr-warmup-iters 2 "
    "--train-iters 4 --log-interval 3 --eval-iters 1 --eval-interval 2 --weight-decay 0.1 --device cpu"
)
CHUNKS = ("megatron_zpp.exchange.route", "megatron_zpp.zero.reduction_plan")  # which of them, by commit


def small_chunks() -> None:
    """Let shards have several chunks, as those of large models do."""
    for module in CHUNKS:
        with suppress(ModuleNotFoundError):
            importlib.import_module(module).SMALLEST_CHUNK = 256  # type: ignore[attr-defined]


def train(starts: list[tuple[str, list[str]]], save: Path) -> str:
    """The digest of a run's states; how it failed, if it did."""
    from tests.support import Run

    for number, (mesh, flags) in enumerate(starts):
        nodes, local = map(int, mesh.split("x"))
        argv = [*COMMON, *flags, "--save", str(save), "--load", str(save), "--save-interval", "2"]
        argv += ["--exit-interval", "2"] if number == 0 else []
        with Run(save.with_suffix(f".{number}"), nodes * local) as run:
            for rank in range(nodes * local):
                place = {"LOCAL_RANK": str(rank % local), "LOCAL_WORLD_SIZE": str(local)}
                run.start(rank, *argv, change=small_chunks, **place)
            statuses = run.statuses()
            if any(statuses.values()):
                said = " ".join(run.errors()) or run.err(0)
                return f"failed: start {number}: {statuses}: {said[-500:]}"
    return digest(save)


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scratch", type=Path)
    scratch, found = parser.parse_args().scratch, {}
    for number, (name, starts) in enumerate(json.load(sys.stdin).items()):
        save = scratch / f"run_{number}"
        found[name] = train(starts, save)
        shutil.rmtree(save, ignore_errors=True)
        print(f"{number}: {name}: {found[name]}", file=sys.stderr, flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
