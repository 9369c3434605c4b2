"""The loss of whole runs on the same data with different arithmetic: compiled, eager, fp32, fp8.

python benchmarks/loss_curves.py --data-path PREFIX --tokenizer-model FILE [--steps 200] [--plot curves.png]

Every run is pretrain_gpt.py with fp32 master weights, the same initial weights and the same samples. What the
rounding of bf16 does to the loss is the distance of the eager bf16 run from the eager fp32 one; that of the
compiled run from the eager one is to be no larger. Distances are of the losses of single steps: the largest,
the mean, and that of the means of the last tenth of the steps, all over the loss.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.common import RESULTS, write_result

ROOT = Path(__file__).resolve().parents[1]
RUNS = {
    "eager fp32": ["--fp32", "--no-compile"],
    "eager bf16": ["--bf16", "--no-compile"],
    "compiled bf16": ["--bf16"],
    "compiled fp8": ["--bf16", "--fp8"],
    "compiled fp8 delayed": ["--bf16", "--fp8", "--fp8-recipe", "delayed"],
    "compiled fp8 codes": ["--bf16", "--fp8", "--fp8-recipe", "delayed", "--fp8-param-gather"],
}
PAIRS = {  # a run, and the run that it is compared with
    "eager bf16": "eager fp32",
    "compiled bf16": "eager bf16",
    "compiled fp8": "compiled bf16",
    "compiled fp8 delayed": "compiled bf16",
    "compiled fp8 codes": "compiled bf16",
}


def losses_of(run: str, options: argparse.Namespace) -> list[float]:
    """The loss of every step."""
    with tempfile.TemporaryDirectory() as scratch:
        metrics = Path(scratch) / "metrics.jsonl"
        flags = {
            "--model-preset": options.preset,
            "--seq-length": options.seq_length,
            "--micro-batch-size": options.micro_batch_size,
            "--train-iters": options.steps,
            "--lr": options.lr,
            "--data-path": options.data_path,
            "--tokenizer-model": options.tokenizer_model,
            "--metrics-file": metrics,
        }
        argv = [sys.executable, "pretrain_gpt.py", *RUNS[run]]
        argv += [str(part) for flag, value in flags.items() for part in (flag, value)]
        argv += "--tokenizer-type SentencePieceTokenizer --eval-iters 0 --log-interval 1".split()
        argv += ["--lr-warmup-iters", "20"]
        argv += "--attention-dropout 0 --hidden-dropout 0 --weight-decay 0.1 --adam-beta2 0.95".split()
        argv += options.extra
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{run}: {done.stderr[-2000:]}")
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [record["lm_loss"] for record in records if "lm_loss" in record]


def distance(losses: list[float], other: list[float]) -> dict[str, float]:
    """The distance to another run's losses, relative to them."""
    ratios = [abs(a - b) / b for a, b in zip(losses, other, strict=True)]
    last = max(1, len(losses) // 10)
    ends = [sum(run[-last:]) / last for run in (losses, other)]
    return {
        "largest": round(max(ratios), 6),
        "mean": round(sum(ratios) / len(ratios), 6),
        "at_the_end": round(ends[0] / ends[1] - 1, 6),
    }


def draw(losses: dict[str, list[float]], path: Path) -> None:
    """Draw the curves."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name, curve in losses.items():
        axes.plot(range(1, len(curve) + 1), curve, label=name, linewidth=1)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-path", required=True)
    parser.add_argument("--tokenizer-model", required=True, help="of SentencePiece")
    parser.add_argument("--preset", default="gpt2-125m")
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument(
        "--extra", nargs="*", default=[], help="more flags for pretrain_gpt.py, as FLAG=VALUE"
    )
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.extra = [part for flag in options.extra for part in ("--" + flag).split("=", 1)]
    losses: dict[str, list[float]] = {}
    for run in options.runs:
        losses[run] = losses_of(run, options)
        print(run, losses[run][:3], losses[run][-3:], flush=True)
    figures: dict[str, Any] = {
        "settings": {name: str(value) for name, value in vars(options).items()},
        "distances": {
            f"{run} from {other}": distance(losses[run], losses[other])
            for run, other in PAIRS.items()
            if run in losses and other in losses
        },
        "losses": {run: [round(loss, 5) for loss in curve] for run, curve in losses.items()},
    }
    if options.plot:
        draw(losses, options.plot)
    write_result("loss_curves", figures, options.output)


if __name__ == "__main__":
    main()
