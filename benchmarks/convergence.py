"""Trains the same model with and without each technique of ZeRO++ and compares the validation loss.

torchrun --nproc-per-node 2 benchmarks/convergence.py --data-path PREFIX --vocab-size 32000 --nodes 2
python benchmarks/convergence.py --plot RESULT.json...  draws docs/images/convergence.png from results
python benchmarks/convergence.py --emulate --help   pairs of emulated runs in one process, which see 0.05%

Nodes are emulated by what the ranks are told, so that the hops of qgZ run (both where a node has two ranks),
over whatever link there is: the numbers that are sent are those of real nodes. Ranks have the GPUs that
launch/emulate_nodes.sh would give them; where some share one the result says so. On GPUs layers are compiled.
Runs of one seed see the same samples from the same weights. A result that is there already is kept: call it
again with other --runs and --seeds to add to it.

GPUs do not repeat the sums of attention's backward, and training propagates the difference: "stage 3, again"
says how far. With --deterministic they do, more slowly; it and hpZ must then end with the bits of stage 3.
"""

import argparse
import json
import os
import sys
import time
from contextlib import nullcontext
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.common import RESULTS, commit, write_result
from benchmarks.contest.grid import gpu_map, shares_gpus
from benchmarks.emulation import campaign
from megatron_zpp.config.data import DataConfig
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import LearningRateConfig, OptimizerConfig, PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.data.open import Splits, open_splits
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.model.gpt import GPT
from megatron_zpp.ops.library import load_operations
from megatron_zpp.train.schedule.learning_rate import LearningRate
from megatron_zpp.train.setup.compiling import compile_parts
from megatron_zpp.train.steps.evaluation import evaluate
from megatron_zpp.zero.engine import ZeroEngine

QWZ = {"zero_quantized_weights": True}
HPZ = {"zero_hpz_partition_size": "auto"}
QGZ = {"zero_quantized_gradients": True}
RUNS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "stage 3, again": {},
    "qwZ": QWZ,
    "hpZ": HPZ,
    "qgZ": QGZ,
    "all": QWZ | HPZ | QGZ,
    "all, 4 bits": QWZ
    | HPZ
    | QGZ
    | {"zero_quantized_weights_format": "delta4", "zero_quantized_gradients_format": "rotated4"},
}
NAME = "convergence_{nodes}x{ranks}"
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "convergence.png"


def train(
    options: argparse.Namespace, settings: dict[str, Any], seed: int, topology: Topology, splits: Splits
) -> dict[str, Any]:
    """Training losses, validation losses and the final one of a run."""
    assert splits.train is not None, "main opens both"
    assert splits.valid is not None
    device = torch.device(f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu")
    config = ModelConfig(
        model_preset=options.preset,
        num_layers=options.num_layers,
        hidden_size=options.hidden_size,
        num_attention_heads=options.num_attention_heads,
        seq_length=options.seq_length,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    with torch.device("meta"):
        model = GPT(config, options.vocab_size)
    if device.type == "cuda":
        torch._dynamo.reset()  # or what other runs compiled counts as this one's
        compile_parts(model, (options.micro_batch_size, config.seq_length), print, on_gpu=True)
    engine = ZeroEngine(
        model,
        partial(model.initialize_parameter, seed=seed),
        zero=ZeroConfig(zero_stage=3, **settings),
        optimizer=OptimizerConfig(weight_decay=0.1, adam_beta2=0.95),
        precision=PrecisionConfig(bf16=True),
        topology=topology,
        device=device,
        operations=load_operations(device.type, require_kernels=True, say=print),
    )
    size, ranks = options.micro_batch_size, topology.world_size
    rate = LearningRate.from_config(
        LearningRateConfig(
            lr=options.lr, min_lr=options.min_lr, lr_decay_style="cosine", lr_warmup_fraction=0.05
        ),
        samples=options.steps * size * ranks,
        samples_per_iteration=size * ranks,
    )
    held_out = partial(
        evaluate,
        engine,
        splits.valid,
        count=options.eval_samples,
        micro_batch_size=options.micro_batch_size,
        before_round=lambda number, rounds: None,
    )
    curve, validation, total = [], [], torch.zeros((), device=device)
    first_sample = seed * options.steps * size * ranks  # other samples for other seeds
    started = time.perf_counter()
    for step in range(options.steps):
        consumed = step * size * ranks
        place = first_sample + consumed + topology.rank * size
        tokens = torch.from_numpy(splits.train.batch(np.arange(place, place + size)))
        total += engine.accumulate(tokens, index=0, micro_batches=1)
        result = engine.step(rate(consumed))
        if (step + 1) % options.interval == 0:
            curve.append((step + 1, engine.mean_over_ranks(total / options.interval).item()))
            total.zero_()
            if result.skipped:
                raise SystemExit(f"step {step} was skipped: not a finite gradient")
        if (step + 1) % (5 * options.interval) == 0 or step + 1 == options.steps:
            validation.append((step + 1, held_out()))
            if topology.rank == 0:
                minutes = (time.perf_counter() - started) / 60
                print(f"step {step + 1}: {validation[-1][1]:.4f} after {minutes:.1f} minutes", flush=True)
    seconds = time.perf_counter() - started
    engine.close()
    return {
        "train": curve,
        "valid": validation,
        "final_valid_loss": validation[-1][1],
        "seconds": round(seconds, 1),
    }


def compare(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Percent by which each run's final validation loss is above stage 3's, by seed."""
    baseline = runs.get("stage 3", {})
    return {
        name: {
            seed: round(100 * (run["final_valid_loss"] / baseline[seed]["final_valid_loss"] - 1), 4)
            for seed, run in by_seed.items()
            if seed in baseline
        }
        for name, by_seed in runs.items()
    }


def plot(results: list[Path]) -> None:
    """Validation losses of the first result of each grid, and how far above stage 3's the runs of all end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    all_figures = [json.loads(result.read_text())["figures"] for result in results]
    grids = [result.stem.split("_")[1].replace("x", " × ") for result in results]
    curves = [all_figures[grids.index(grid)] for grid in dict.fromkeys(grids)]
    figure, (*panels, right) = plt.subplots(
        1, len(curves) + 1, figsize=(6 * len(curves) + 6, 4.5), layout="constrained"
    )
    colors = dict(zip(RUNS, plt.cm.tab10.colors, strict=False))
    for panel, grid, figures in zip(panels, dict.fromkeys(grids), curves, strict=True):
        for name, by_seed in figures["runs"].items():
            for number, run in enumerate(by_seed.values()):
                label = name if number == 0 else None
                panel.plot(*zip(*run["valid"], strict=True), color=colors[name], label=label, linewidth=1)
        panel.set(xlabel="step", ylabel="validation loss", title=_description(grid, figures))
        panel.legend(fontsize=8)
    compared = [figures["percent_above_stage_3"] for figures in all_figures]
    names = [name for name in RUNS if name != "stage 3" and any(above.get(name) for above in compared)]
    for marker, grid, figures in zip(cycle("os^D"), grids, all_figures, strict=False):
        above = [figures["percent_above_stage_3"].get(name, {}) for name in names]
        rows = [row for row, by_seed in enumerate(above) for _ in by_seed]
        percents = [percent for by_seed in above for percent in by_seed.values()]
        if percents:
            right.plot(percents, rows, marker, fillstyle="none", label=_description(grid, figures))
    right.axvline(0, color="gray", linewidth=0.8)
    right.set_yticks(range(len(names)), names)
    right.set_ylim(len(names) - 0.5, -0.5)
    right.set(xlabel="final validation loss above stage 3's of the same seed, percent")
    right.legend(fontsize=8)
    figure.savefig(PICTURE, dpi=110)
    print(f"written to {PICTURE}")


def _description(grid: str, figures: dict[str, Any]) -> str:
    return f"{grid}, learning rate {figures['settings']['lr']:g}"


def main() -> None:
    if "--emulate" in sys.argv[1:]:
        sys.exit(campaign.main([argument for argument in sys.argv[1:] if argument != "--emulate"]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plot", type=Path, nargs="+")
    parser.add_argument("--data-path")
    parser.add_argument("--vocab-size", type=int)
    parser.add_argument("--preset", default="gpt2-125m")
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--hidden-size", type=int)
    parser.add_argument("--num-attention-heads", type=int)
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--min-lr", type=float, default=6e-5, help="0 ends runs where noise is least")
    parser.add_argument("--interval", type=int, default=20)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--eval-samples", type=int, default=512)
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.plot:
        plot(options.plot)
        return
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without which torch refuses
        torch.use_deterministic_algorithms(True)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    topology = Topology(rank, world, rank % (world // options.nodes), world // options.nodes)
    mapped = gpu_map(
        topology.nodes, topology.local_world_size, [str(gpu) for gpu in range(torch.cuda.device_count())]
    )
    if torch.cuda.is_available():
        device = torch.device("cuda", int(mapped[topology.node_of(rank)][topology.local_rank]))
        torch.cuda.set_device(device)
        if world > torch.cuda.device_count():  # NCCL lets only ranks of different hosts share a GPU
            os.environ |= {"NCCL_HOSTID": f"node{topology.node_of(rank)}", "NCCL_SOCKET_IFNAME": "lo"}
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    splits = open_splits(
        DataConfig(data_path=(options.data_path,), split="98,2,0"),
        seq_length=options.seq_length,
        vocab_size=options.vocab_size,
        seed=1234,
        tokenizer_description=None,
    )
    name_of_result = NAME.format(nodes=topology.nodes, ranks=topology.local_world_size)
    path = options.output / f"{name_of_result}.json"
    runs = json.loads(path.read_text())["figures"]["runs"] if path.exists() else {}
    for seed in options.seeds:
        for name in options.runs:
            if str(seed) in runs.get(name, {}):
                continue
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if options.deterministic else nullcontext():
                run = train(options, RUNS[name], seed, topology, splits)
            runs.setdefault(name, {})[str(seed)] = {"commit": commit(), **run}
            if rank == 0:
                print(name, seed, run["final_valid_loss"], run["seconds"], flush=True)
                settings = {key: value for key, value in vars(options).items() if key != "output"}
                figures = {
                    "gpu_map": mapped,
                    "shared_gpu": shares_gpus(mapped),
                    "settings": settings,
                    "percent_above_stage_3": compare(runs),
                    "runs": runs,
                }
                write_result(name_of_result, figures, options.output)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
