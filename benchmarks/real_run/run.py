"""Trains GPT-2 124M on real text in several ways with equal seeds and data, in calls of bounded time.

python benchmarks/real_run/run.py --tokens DIR --work DIR --output DIR --variants plain fp8 --seconds 560
python benchmarks/real_run/run.py … --archives DIR --parts 3      unpacks tokens first
python benchmarks/real_run/run.py … --million-tokens 0.7          5 steps of each: does all work here?

plain        benchmarks/real_run/plain.py: PyTorch compiled, AdamW, nothing of megatron_zpp
plain_again  the same once more: how far GPUs, which do not repeat all sums, let two equal runs part
plain_bf16   the same, with the sum that all layers add to in bf16, as ours has it
stage_0      pretrain_gpt.py at stage 0
wide         the same, with that sum in fp32
zeropp       stage 3 with delta4 and rotated4, between two nodes of one rank
fp8          8-bit products of layers and output layer
resumed      stage_0, stopped five times and resumed on other meshes and stages
muon         stage_0 with Muon; with fewer --million-tokens its schedule ends there

DIR of --tokens is that of make_tokens.py, or gets what is in the archives (benchmarks/README.md makes them).
A machine to which not all archives can be copied at once gets them in several calls: until there are --parts
training parts, a call only unpacks. Checkpoints, batches, compiled kernels and the curves of pretrain_gpt.py
for TensorBoard and W&B (offline) are in --work. --output gets
the lines of metrics of each variant, and run.json. The exit status is 75 where --seconds ended the call; the
same command resumes.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from the root, not installed

import torch  # noqa: F401  # for the names of GPUs in the result

from benchmarks.common import ROOT, STOPPED, commit, machine, program_parser

PLAIN = {"plain": "", "plain_again": "", "plain_bf16": "--bf16-residual"}  # flags of plain.py
VARIANTS = {
    **PLAIN,
    "stage_0": "",  # and of pretrain_gpt.py
    "wide": "--bf16 --fp32-residual-connection",
    "zeropp": "--zero-stage 3 --zero-hpz-partition-size auto --zero-quantized-weights "
    "--zero-quantized-weights-format delta4 --zero-quantized-gradients "
    "--zero-quantized-gradients-format rotated4",
    "fp8": "--fp8 --fp8-recipe delayed --fp8-param-gather --fp8-output-layer",
    "resumed": "",
    "muon": "--optimizer muon --muon-momentum 0.9 --muon-nesterov --muon-extra-scale-factor 0.2 "
    "--weight-decay 0.3 --lr 0.004 --min-lr 0.0004 --decoupled-lr 0.008 --decoupled-min-lr 0.0008",
}
LEGS = ((1, 0), (2, 2), (1, 0), (2, 3), (1, 3), (2, 1))  # resumed: nodes of one rank, and the stage
# Layers, hidden size, heads, tokens of a sample.
SIZES = {"124m": (12, 768, 12, 1024), "tiny": (2, 64, 2, 64)}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = program_parser(__doc__)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--archives", type=Path, help="a folder of *.tar.xz; unpacked into --tokens")
    parser.add_argument("--parts", type=int, default=1, help="training parts that must be there")
    parser.add_argument("--saving-seconds", type=float, default=25, help="that the end of a process takes")
    parser.add_argument("--least-seconds", type=float, default=60, help="for which a process is started")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of this call")
    parser.add_argument("--size", choices=list(SIZES), default="124m")
    parser.add_argument("--million-tokens", type=float, default=300, help="seen by each run")
    parser.add_argument("--micro-batch-size", type=int, default=32)
    parser.add_argument("--global-batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--eval-interval", type=int, default=100)
    parser.add_argument("--eval-iters", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--fp32", action="store_true", help="compute in fp32, without torch.compile")
    options = parser.parse_args(argv)
    length = SIZES[options.size][3]
    options.steps = int(options.million_tokens * 1e6) // (options.global_batch_size * length)
    options.warmup = max(1, options.steps // 20)
    options.cache = options.work.resolve() / "cache"
    return options


def unpack(options: argparse.Namespace) -> bool:
    """Unpack the archives that are new; whether all training parts are there."""
    options.tokens.mkdir(parents=True, exist_ok=True)
    for path in sorted(options.archives.glob("*.tar.xz")) if options.archives else ():
        marker = options.tokens / f"{path.name}.unpacked"
        if not marker.exists():
            with tarfile.open(path) as archive:
                archive.extractall(options.tokens, filter="data")
            marker.touch()
            print(f"{path.name}: unpacked", flush=True)
    found = len(training_prefixes(options.tokens))
    if found < options.parts:
        print(f"run.py: {found} of {options.parts} training parts are in {options.tokens}")
    return found >= options.parts


def training_prefixes(folder: Path) -> list[str]:
    """The data sets to train on."""
    return [str(path.with_suffix("")) for path in sorted(folder.glob("training-*_text_document.idx"))]


def common_flags(options: argparse.Namespace) -> list[str]:
    """The flags of pretrain_gpt.py that all variants share, and that decide what is read and trained."""
    layers, hidden, heads, length = SIZES[options.size]
    held_out = sorted(options.tokens.glob("held_out-*_text_document.idx"))
    flags = (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --seq-length {length} "
        f"--micro-batch-size {options.micro_batch_size} --global-batch-size {options.global_batch_size} "
        f"--train-iters {options.steps} --lr {options.lr} --min-lr {options.lr / 10} "
        f"--lr-warmup-iters {options.warmup} --eval-interval {options.eval_interval} "
        f"--eval-iters {options.eval_iters} --seed {options.seed} --device {options.device} "
        "--lr-decay-style cosine --weight-decay 0.1 --adam-beta2 0.95 --attention-dropout 0 "
        "--hidden-dropout 0 --tokenizer-type GPT2BPETokenizer"
    ).split()
    flags += ["--vocab-file", f"{options.tokens}/vocab.json", "--merge-file", f"{options.tokens}/merges.txt"]
    flags += ["--train-data-path", *training_prefixes(options.tokens)]
    flags += ["--valid-data-path", *(str(path.with_suffix("")) for path in held_out)]
    return flags + ["--fp32", "--no-compile"] * options.fp32


class Variant:
    """One run, and how far it is."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.options = name, options
        self.folder = options.work / name
        self.save, self.metrics = self.folder / "checkpoint", self.folder / f"{name}.jsonl"
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def iteration(self) -> int:
        """Steps taken, as far as the metrics tell."""
        if not self.metrics.exists():
            return 0
        records = map(json.loads, self.metrics.read_text().splitlines())
        return max((record["iteration"] for record in records), default=0)

    @property
    def done(self) -> bool:
        """Whether the last step was taken and saved."""
        return (self.folder / "done").exists()

    def command(self, seconds: float) -> list[str]:
        """What trains for so many seconds."""
        options = self.options
        if self.name in PLAIN:
            layers, hidden, heads, _ = SIZES[options.size]
            flags = (
                f"--layers {layers} --width {hidden} --heads {heads} --steps {options.steps} "
                f"--micro-batch-size {options.micro_batch_size} "
                f"--global-batch-size {options.global_batch_size} "
                f"--lr {options.lr} --min-lr {options.lr / 10} --warmup {options.warmup} "
                f"--eval-interval {options.eval_interval} --seconds {seconds} --device {options.device}"
            ).split()
            command = [sys.executable, "-m", "benchmarks.real_run.plain", *flags]
            command += VARIANTS[self.name].split()
            command += ["--inputs", str(options.work / "inputs"), "--save", str(self.save)]
            command += ["--metrics-file", str(self.metrics)]
            return command + ["--fp32", "--no-compile"] * options.fp32
        command = ["--save", str(self.save), "--load", str(self.save), "--metrics-file", str(self.metrics)]
        command += ["--log-interval", "1", *VARIANTS[self.name].split()]
        command += ["--tensorboard-dir", str(self.folder / "tensorboard"), "--wandb-project", "real_run"]
        command += ["--wandb-exp-name", self.name, "--wandb-save-dir", str(self.folder)]
        if seconds < float("inf"):
            command += ["--exit-duration-in-mins", f"{seconds / 60:.3f}"]
        nodes = 2 if self.name == "zeropp" else 1
        if self.name == "resumed":
            each = -(-options.steps // len(LEGS))
            nodes, stage = LEGS[min(self.iteration // each, len(LEGS) - 1)]
            command += ["--exit-interval", str(each), "--zero-stage", str(stage)]
        launcher = [sys.executable]
        if nodes > 1:
            launcher = ["launch/emulate_nodes.sh", "--nodes", str(nodes), "--ranks-per-node", "1", "--"]
        return [*launcher, "pretrain_gpt.py", *common_flags(options), *command]

    def train(self, deadline: float) -> bool:
        """Train until the end or the deadline; whether the run is complete."""
        while not self.done:
            seconds = deadline - time.monotonic() - self.options.saving_seconds
            if seconds < self.options.least_seconds:
                return False
            before, started = self.iteration, time.monotonic()
            command = self.command(max(seconds, 0.1))
            with (self.folder / "log").open("a") as log:
                log.write(f"{' '.join(command)}\n")
                log.flush()
                ended = subprocess.run(
                    command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment(self.options)
                )
            took = time.monotonic() - started
            print(
                f"{self.name}: iterations {before} to {self.iteration} in {took:.0f} s, "
                f"status {ended.returncode}",
                flush=True,
            )
            if ended.returncode not in (0, STOPPED):
                tail = (self.folder / "log").read_text()[-3000:]
                sys.exit(f"run.py: {self.name} ended with status {ended.returncode}:\n{tail}")
            if self.iteration == before < self.options.steps:
                sys.exit(f"run.py: {self.name} took no step in {seconds:.0f} s; give more --seconds")
            if self.iteration >= self.options.steps and ended.returncode == 0:
                (self.folder / "done").touch()
        return True


def environment(options: argparse.Namespace) -> dict[str, str]:
    """Compiled kernels stay in --work from call to call."""
    caches = {
        "MEGATRON_ZPP_CACHE": str(options.cache),
        "TORCHINDUCTOR_CACHE_DIR": str(options.cache / "torch_compile"),
        "PYTHON": sys.executable,
        "PYTHONUNBUFFERED": "1",
        "WANDB_MODE": "offline",
    }
    return os.environ | caches


def export(options: argparse.Namespace) -> None:
    """Write the inputs of plain.py, unless they are there."""
    folder = options.work / "inputs"
    flags = common_flags(options)
    if (folder / "flags.json").exists() and json.loads((folder / "flags.json").read_text()) == flags:
        return
    started = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.real_run.export", "--output", str(folder), "--", *flags]
    subprocess.run(command, cwd=ROOT, check=True, env=environment(options))
    (folder / "flags.json").write_text(json.dumps(flags))
    print(f"inputs of plain.py: {time.monotonic() - started:.0f} s", flush=True)


def collect(variants: Sequence[Variant], options: argparse.Namespace) -> None:
    """Copy what is worth keeping to --output."""
    options.output.mkdir(parents=True, exist_ok=True)
    described = {
        "commit": commit(),
        "machine": machine(),
        "settings": {k: str(v) for k, v in vars(options).items()},
    }
    described["flags"] = common_flags(options)
    (options.output / "run.json").write_text(json.dumps(described, indent=2) + "\n")
    for variant in variants:
        if variant.metrics.exists():
            shutil.copy(variant.metrics, options.output / variant.metrics.name)


def main() -> None:
    options = parse(sys.argv[1:])
    deadline = time.monotonic() + options.seconds
    options.work.mkdir(parents=True, exist_ok=True)
    if not unpack(options):
        sys.exit(STOPPED)
    variants = [Variant(name, options) for name in options.variants]
    if PLAIN.keys() & set(options.variants):
        export(options)
    complete = True
    for variant in variants:
        complete = variant.train(deadline) and complete
        collect(variants, options)
    sys.exit(0 if complete else STOPPED)


if __name__ == "__main__":
    main()
