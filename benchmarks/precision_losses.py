"""What do 8-bit products, states in fewer bytes and the residual's format do to the loss? Pairs of runs.

python benchmarks/precision_losses.py --size 30m --text build/corpus/tokens --pairs 16 --processes 4
python benchmarks/precision_losses.py --size 30m --text build/corpus/tokens --runs "bf16, nudged" compact

Runs of one seed have the same initial weights and the same samples, and are evaluated on the same held-out
samples. The engine is the one that pretrain_gpt.py builds from the same flags. The gap of a run is its final
loss above that of bf16 with the same seed, in percent: its mean over the pairs and the 95% interval of the
mean (Student's t). "bf16, nudged" has a learning rate that is one unit in the last place of fp32 larger, and
says what rounding alone does. "plain" is PyTorch without the engine, with autocast (plain_engine.py).

Each finished run is a line of --runs-file, so the same command resumes a campaign that was stopped. The exit
status is 75 where --limit-seconds ended the call, and 0 where all pairs are there. A result is only
extended: a call whose --runs-file lacks some of its pairs is refused, and needs another --name.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.common import program_parser
from benchmarks.emulation.text import Text
from benchmarks.paired_runs import Job, PairedRuns, campaign_arguments, gap_cells, key_of

BASELINE, NUDGED, PLAIN = "bf16", "bf16, nudged", "plain"
DELAYED = "--fp8 --fp8-recipe delayed"
COMPACT = (
    "--use-precision-aware-optimizer --main-params-dtype bf16+8 --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8"
)
RUNS = {  # flags of pretrain_gpt.py
    BASELINE: "",
    NUDGED: "",
    PLAIN: "",
    "fp8": "--fp8",
    "fp8 delayed": DELAYED,
    "fp8 codes": f"{DELAYED} --fp8-param-gather",
    "fp8 codes and output": f"{DELAYED} --fp8-param-gather --fp8-output-layer",
    "compact": COMPACT,
    "residual in fp32": "--fp32-residual-connection",
}
# By size: layers, hidden size, heads, tokens of a sample, steps, samples of a step.
SIZES = {
    "tiny": (2, 64, 2, 32, 40, 8),
    "10m": (5, 384, 6, 256, 1000, 32),
    "30m": (8, 512, 8, 256, 1000, 32),
    "125m": (12, 768, 12, 1024, 2000, 16),
}
EVALUATIONS = 4  # in the last tenth of the steps: their mean is the final loss


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line, checked."""
    parser = program_parser(__doc__)
    parser.add_argument("--size", choices=list(SIZES), default="30m", help="parameters")
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--text", type=Path, required=True, help="a folder of corpus/make_tokens.py")
    campaign_arguments(parser)
    parser.add_argument("--eval-samples", type=int, default=512)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--extra", nargs="*", default=[], help="more flags of pretrain_gpt.py, as FLAG=VALUE")
    options = parser.parse_args(argv)
    for flag in ("pairs", "processes"):
        if getattr(options, flag) < 1:
            parser.error(f"--{flag} must be at least 1, got {getattr(options, flag)}")
    options.runs = list(dict.fromkeys([BASELINE, *options.runs]))
    *_, steps, samples = SIZES[options.size]
    options.steps = options.steps or steps
    options.micro_batch_size = options.micro_batch_size or samples
    options.name = options.name or f"precision_losses_{options.size}_text"
    options.runs_file = options.runs_file or Path("build") / "precision_losses" / f"{options.name}.jsonl"
    return options


def flags_of(settings: dict[str, Any], name: str, seed: int) -> list[str]:
    """The flags of pretrain_gpt.py that decide the bits of a run, beside its samples."""
    (layers, hidden, heads, tokens, *_), vocab = SIZES[settings["size"]], settings["text"]["vocabulary"]
    samples, rate = settings["micro_batch_size"], np.float32(settings["lr"])
    if name == NUDGED:
        rate = np.nextafter(rate, np.float32(1))
    flags = (
        f"--vocab-size {vocab} --num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} "
        f"--seq-length {tokens} --micro-batch-size {samples} --train-iters {settings['steps']} "
        f"--lr {float(rate)!r} --seed {seed} --device {settings['device']} "
        "--mock-data --tokenizer-type NullTokenizer --bf16 --min-lr 0 --lr-decay-style cosine "
        "--lr-warmup-fraction 0.1 --weight-decay 0.1 --adam-beta2 0.95 --attention-dropout 0 "
        "--hidden-dropout 0"
    )
    more = [part for flag in settings["extra"] for part in flag.split("=", 1)]
    return [*flags.split(), *RUNS[name].split(), *more]


def train(settings: dict[str, Any], text: Path, job: Job) -> dict[str, Any]:
    """One run: its final loss, skipped steps and its time."""
    import torch

    from benchmarks.contest.protocol import plain_model
    from benchmarks.plain_engine import PlainEngine
    from megatron_zpp.config.root import parse_args
    from megatron_zpp.distributed.topology import Topology
    from megatron_zpp.model.flops import parameter_count
    from megatron_zpp.train.schedule.learning_rate import LearningRate
    from megatron_zpp.train.setup.build_engine import build_engine
    from megatron_zpp.train.setup.device import prepare_device
    from megatron_zpp.zero.engine import ZeroEngine

    name, seed = job
    started, steps = time.perf_counter(), settings["steps"]
    source, samples = Text(text, SIZES[settings["size"]][3] + 1), settings["micro_batch_size"]
    torch._dynamo.reset()
    config, topology = parse_args(flags_of(settings, name, seed)), Topology()
    device = prepare_device(config, topology)
    vocabulary = settings["text"]["vocabulary"]
    engine: PlainEngine | ZeroEngine
    if name == PLAIN:
        plain = plain_model(config.model, vocabulary, device.device, seed)
        engine = PlainEngine(plain, config.optimizer, bf16=True, compiled=device.compiles)
    else:
        engine = build_engine(config, vocabulary, device, topology)
    rate = LearningRate.from_config(
        config.learning_rate, samples=steps * samples, samples_per_iteration=samples
    )
    held_out = source.held_out(settings["eval_samples"]).to(engine.device).split(samples)
    tokens = source.training(seed, steps * samples).to(engine.device).split(samples)
    distance = max(1, steps // 10 // EVALUATIONS)
    evaluated = {steps - distance * index for index in range(EVALUATIONS)} - {0}
    finals = []
    skipped = torch.zeros((), device=engine.device)
    for step in range(steps):
        engine.accumulate(tokens[step], index=0, micro_batches=1)
        skipped += engine.step(rate(step * samples)).skipped
        if step + 1 in evaluated:
            finals.append(torch.stack([engine.evaluate(part) for part in held_out]).double().mean().item())
    engine.close()
    return {
        "loss": sum(finals) / len(finals),
        "evaluations": finals,
        "skipped": int(skipped.item()),
        "parameters": parameter_count(config.model, vocabulary),
        "seconds": round(time.perf_counter() - started, 1),
    }


def table(figures: dict[str, Any]) -> str:
    """One line per run."""
    lines = ["| run | pairs | mean gap, % | 95% ± | least … most | skipped |", "| --- " * 6 + "|"]
    for name, row in figures["runs"].items():
        cells = gap_cells(row["gap"])
        lines.append(f"| {name} | {row['pairs']} | {cells} | {row['skipped_steps']} |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Runs what is missing and writes the table; returns the exit status."""
    options = parse(argv)
    decisive = ("size", "steps", "micro_batch_size", "lr", "eval_samples", "device", "extra")
    settings = {name: getattr(options, name) for name in decisive} | {"text": Text.described(options.text)}
    campaign = PairedRuns(
        options=options,
        settings=settings,
        key=lambda name, seed: key_of(settings, name, flags_of(settings, name, seed)),
        run=partial(train, settings, options.text),
        threads=max(1, (os.cpu_count() or 1) // 4) if options.device == "cuda" else 1,
    )
    import torch  # noqa: F401  # for the names of GPUs in the result

    return campaign.complete(
        options.runs,
        list(RUNS),
        "runs",
        lambda name, runs, _: {"flags": RUNS[name], "parameters": runs[0]["parameters"]},
        table,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
