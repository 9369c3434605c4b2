"""Training steps of whole programs side by side: pretrain_gpt.py, plain PyTorch, FSDP2, DTensor, in one run.

python benchmarks/throughput.py --shapes 345m:16 1.3b:16 2.7b:8 --runs "stage 0" plain whole
python benchmarks/throughput.py --shapes 2.7b:8 --runs "stage 0, fp8 codes" torchao-tensorwise plain
python benchmarks/throughput.py --gpus 2 --shapes 1.3b:8 --runs "stage 0" "stage 3" zeropp fsdp2 fsdp2-our-gpt
python benchmarks/throughput.py --shapes 345m:16 --runs "stage 3" --against ../old --rounds 6
python benchmarks/throughput.py --gpus 2 --shapes 6.7b:8 --seq-length 2048 --runs tensor dtensor
python benchmarks/throughput.py --gpus 4 --shapes llama3.1-8b:1 --seq-length 8192 --vocab-size 128256 \\
    --runs "stage 3" "stage 3, fp8 codes" fsdp2-selective fsdp2-torchao-selective

Every run is a separate process (several with --gpus above 1), so that it inherits no memory, graphs or warm
cache. Runs take turns, --rounds times; the best interval of ten steps counts, which includes data loading,
clipping, the optimizer and reading the loss. Figures: milliseconds per step, tokens/s and TFLOP/s (PaLM's
count) per GPU, peak memory, seconds from the start of the program to its first line, with and without cached
kernels; and ratios of a GPU's rate to the peers' of the same shape: mean over the rounds and half-width of
its 95% interval. With --against, each run of ours also runs from another checkout, in turn; `over_against` is
such a ratio of times. With --parts a trace of three steps of ours is split by kind of kernel: idle is the
rest of a step that is not traced, because tracing slows the host down. With --recompute the backward computes
layers again.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

import torch

from benchmarks.common import RESULTS, ROOT, end_group, program_parser, save_result
from benchmarks.intervals import mean_and_interval
from benchmarks.plain_training import CONTEXT_PARALLEL, KINDS, TENSOR_PARALLEL
from benchmarks.step_parts import parts_of_trace
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.model.flops import flops_per_token

PARTS = {  # flags of pretrain_gpt.py; a run of ours is some of these, as "stage 3, tensor, fp8 codes"
    **{f"stage {stage}": ["--zero-stage", str(stage)] for stage in range(4)},
    "no compile": ["--no-compile"],
    "fp8": ["--fp8"],
    "fp8 delayed": ["--fp8", "--fp8-recipe", "delayed"],
    "fp8 codes": ["--fp8", "--fp8-recipe", "delayed", "--fp8-param-gather"],
    "fp8 output": ["--fp8-output-layer"],
    "compact": [
        *("--use-precision-aware-optimizer", "--main-params-dtype", "bf16+8"),
        *("--exp-avg-dtype", "fp8", "--exp-avg-sq-dtype", "fp8"),
    ],
    "in backward": ["--optimizer-in-backward"],
    "fp32 residual": ["--fp32-residual-connection"],
    "recompute": ["--recompute-granularity", "full", "--recompute-method", "uniform"],
    "selective": ["--recompute-activations"],
    "flex": ["--attention-backend", "flex"],
    "windows": ["--window-size", "1023,0"],
    "soft cap": ["--attn-logit-softcapping", "50"],
    "sinks": ["--softmax-type", "learnable"],
    "tensor": ["--tensor-model-parallel-size", "2"],
    "context a2a": ["--context-parallel-size", "2", "--cp-comm-type", "a2a"],
    "context p2p": ["--context-parallel-size", "2", "--cp-comm-type", "p2p"],
    "zeropp": [
        *("--zero-stage", "3", "--zero-quantized-weights", "--zero-quantized-gradients"),
        *("--zero-hpz-partition-size", "auto"),
    ],
}
SIZES = (  # of a model, as --extra may give them
    *("--num-layers", "--hidden-size", "--ffn-hidden-size"),
    *("--num-attention-heads", "--num-query-groups", "--kv-channels"),
)
AGAINST = ", against"  # behind the name of a run of ours in another checkout


def sharing(run: str, gpus: int) -> int:
    """GPUs that share a micro-batch in a run."""
    if run in (*TENSOR_PARALLEL, CONTEXT_PARALLEL):
        return gpus
    return 2 if {"tensor", "context a2a", "context p2p"} & set(run.split(", ")) else 1


def known_run(text: str) -> str:
    """A run of `--runs`. Raises ArgumentTypeError for a part that is none of ours, nor a peer."""
    if text not in KINDS and (unknown := set(text.split(", ")) - set(PARTS)):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not of {', '.join((*PARTS, *KINDS))}")
    return text


def command(run: str, shape: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """The command line of a run, but for --metrics-file."""
    flags = {"--seq-length": options.seq_length, "--vocab-size": options.vocab_size, **shape}
    common = [str(part) for flag, value in flags.items() for part in (flag, value)]
    common += ["--log-interval", str(options.log_interval)]
    if run in KINDS:
        program = ["benchmarks/plain_training.py", "--kind", run, "--steps", str(options.steps)]
        program += ["--recompute"] * options.recompute + ["--micro-batches", str(options.micro_batches)]
        common = ["--preset" if part == "--model-preset" else part for part in common]
    else:
        program = ["pretrain_gpt.py", *(flag for part in run.split(", ") for flag in PARTS[part])]
        data_ranks = options.gpus // sharing(run, options.gpus)
        samples = shape["--micro-batch-size"] * options.micro_batches * data_ranks
        program += ["--train-iters", str(options.steps), "--global-batch-size", str(samples)]
        program += "--bf16 --mock-data --tokenizer-type NullTokenizer --eval-iters 0 --lr 1e-4".split()
        program += "--attention-dropout 0 --hidden-dropout 0 --weight-decay 0.1 --adam-beta2 0.95".split()
        program += [*PARTS["recompute"] * options.recompute, *options.extra]
    launcher = (
        []
        if options.gpus == 1
        else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.gpus)]
    )
    return [sys.executable, *launcher, *program, *common]


def measure(argv: list[str], cache: Path, limit_seconds: float, root: Path = ROOT) -> dict[str, Any]:
    """Run a program with --metrics-file in `root`: times, peak and losses of its steps, or how it failed.

    Compiled kernels stay in `cache`.
    """
    with tempfile.TemporaryDirectory() as scratch:
        metrics, output = Path(scratch) / "metrics.jsonl", Path(scratch) / "output"
        kernels = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
        started, first = time.perf_counter(), None
        with open(output, "w") as file:
            process = subprocess.Popen(
                [*argv, "--metrics-file", str(metrics)],
                cwd=root,
                env={**os.environ, "PYTHON": sys.executable, **kernels},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
            try:
                while process.poll() is None and time.perf_counter() - started <= limit_seconds:
                    if first is None and metrics.exists() and metrics.stat().st_size:
                        first = time.perf_counter() - started
                    time.sleep(0.05)
            finally:  # no process may outlive the benchmark
                end_group(process)
        records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        if process.returncode or not records:
            return {"failed": output.read_text()[-2000:]}
    steps = [record for record in records if "elapsed_ms" in record]
    return {
        "milliseconds": round(min(record["elapsed_ms"] for record in steps), 2),
        "intervals_ms": [round(record["elapsed_ms"], 2) for record in steps],
        "peak_gib": round(max(record.get("memory_peak_bytes") or 0 for record in steps) / 2**30, 2),
        "first_line_seconds": round(first, 1) if first else None,
        "losses": [round(record["lm_loss"], 4) for record in steps],
    }


def shape_of(text: str) -> dict[str, Any]:
    """`PRESET:MICRO_BATCH`, `PRESET/LAYERS:MICRO_BATCH` or `LAYERSxWIDTHxHEADS:MICRO_BATCH`, as flags."""
    name, micro_batch = text.split(":")
    if "x" in name and name.replace("x", "").isdigit():
        sizes = ("--num-layers", "--hidden-size", "--num-attention-heads")
        shape: dict[str, Any] = dict(zip(sizes, map(int, name.split("x")), strict=True))
    else:
        preset, _, some = name.partition("/")
        shape = {"--model-preset": preset, **({"--num-layers": int(some)} if some else {})}
    return {**shape, "--micro-batch-size": int(micro_batch)}


def rates(
    run: str, milliseconds: float, shape: dict[str, Any], options: argparse.Namespace
) -> dict[str, float]:
    """Tokens per second of one GPU, and its TFLOP/s by PaLM's count."""
    fields = {flag.removeprefix("--").replace("-", "_"): value for flag, value in shape.items()}
    samples = fields.pop("micro_batch_size") * options.micro_batches
    for flag, value in pairwise(options.extra):
        if flag in SIZES:
            fields[flag.removeprefix("--").replace("-", "_")] = int(value)
    config = ModelConfig(**fields, seq_length=options.seq_length)
    tokens = 1000 * samples * options.seq_length / sharing(run, options.gpus) / milliseconds
    flops = tokens * flops_per_token(config, options.vocab_size)
    return {"tflops_per_gpu": round(flops / 1e12, 1), "tokens_per_second_per_gpu": round(tokens)}


def main() -> None:
    parser = program_parser(__doc__)
    parser.add_argument("--shapes", nargs="+", default=["345m:16", "1.3b:16", "2.7b:8"])
    parser.add_argument("--runs", nargs="+", default=["stage 0", "plain", "whole"], type=known_run)
    parser.add_argument("--against", type=Path, help="another checkout, whose runs take turns with ours")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--log-interval", type=int, default=10)
    parser.add_argument("--micro-batches", type=int, default=1, help="in each optimizer step")
    parser.add_argument("--run-seconds", type=float, default=600, help="after which a run has failed")
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--vocab-size", type=int, default=50304)
    parser.add_argument("--recompute", action="store_true", help="all runs compute layers again")
    parser.add_argument(
        "--extra", nargs="*", default=[], help="more flags for pretrain_gpt.py, as FLAG=VALUE"
    )
    parser.add_argument("--parts", action="store_true", help="split a step of ours")
    parser.add_argument("--name", default="throughput")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    options.extra = [part for flag in options.extra for part in ("--" + flag).split("=", 1)]
    figures: dict[str, Any] = {}
    parts: dict[str, dict[str, float]] = {}
    settings = {
        name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()
    }

    def save() -> Path:
        machine = {"settings": settings, "gpus": torch.cuda.device_count()}
        return save_result(options.name, {**machine, **figures, "parts_ms": parts}, options.output)

    with tempfile.TemporaryDirectory() as scratch:
        for text in options.shapes:
            shape, seconds = shape_of(text), options.run_seconds
            rounds: dict[str, list[dict[str, Any]]] = {}
            for number in range(options.rounds):
                for run in options.runs:
                    cache = Path(scratch) / re.sub(r"\W+", "-", f"{text}-{run}")
                    argv = command(run, shape, options)
                    rounds.setdefault(run, []).append(measure(argv, cache, seconds))
                    print(text, run, number, rounds[run][-1], flush=True)
                    if options.against and run not in KINDS:
                        other = measure(argv, cache / "against", seconds, options.against)
                        rounds.setdefault(run + AGAINST, []).append(other)
                        print(text, run + AGAINST, number, other, flush=True)
                    if options.parts and number == 0 and run not in KINDS:
                        traces, last = cache / "traces", options.steps
                        argv += ["--profile", "--tensorboard-dir", str(traces)]
                        argv += ["--profile-step-start", str(last - 3), "--profile-step-end", str(last)]
                        measure(argv, cache, seconds)
                        found = parts_of_trace(next(traces.glob("profile/rank0.*")), steps=3)
                        busy = sum(found.values()) - found["idle"]
                        found["idle"] = round(max(0.0, rounds[run][0]["milliseconds"] - busy), 3)
                        parts[f"{text} {run}"] = found
                        print(text, run, found, flush=True)
                    figures[text] = summary(rounds, shape, options)
                    save()  # what is measured stays if a limit of time ends the benchmark
    print(f"written to {save()}")


def summary(
    rounds: dict[str, list[dict[str, Any]]], shape: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    """The best round of each run, the first start and the last (kernels made, kernels kept), and ratios."""
    found: dict[str, Any] = {}
    for run, results in rounds.items():
        there = [result for result in results if "failed" not in result]
        if not there:
            found[run] = results[0]
            continue
        best = min(there, key=lambda result: result["milliseconds"])
        found[run] = {
            **best,
            **rates(run, best["milliseconds"], shape, options),
            "rounds_ms": [result["milliseconds"] for result in there],
            "first_line_seconds": [result["first_line_seconds"] for result in there],
        }
    for run, result in found.items():
        if run + AGAINST in rounds:
            result["over_against"] = _mean_ratio(rounds[run], rounds[run + AGAINST])
        for peer in set(KINDS) & rounds.keys() - {run}:
            # of one GPU, because runs differ in how many share a micro-batch
            mean, half = _mean_ratio(rounds[peer], rounds[run])
            if mean is not None:
                scale = sharing(peer, options.gpus) / sharing(run, options.gpus)
                result[f"rate_over_{peer}"] = [round(mean * scale, 4), half and round(half * scale, 4)]
    return found


def _mean_ratio(
    these: list[dict[str, Any]], those: list[dict[str, Any]]
) -> tuple[float | None, float | None]:
    """The mean over rounds of the ratio of times, and its 95% interval; None: no round of both ended."""
    ratios = [
        this["milliseconds"] / that["milliseconds"]
        for this, that in zip(these, those, strict=False)
        if "failed" not in this and "failed" not in that
    ]
    if not ratios:
        return None, None
    mean, half = mean_and_interval(ratios)
    return round(mean, 4), None if half is None else round(half, 4)


if __name__ == "__main__":
    main()
