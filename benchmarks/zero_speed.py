"""ZeRO stages and ZeRO++ against one GPU and against FSDP2 on the same model, side by side in one run.

torchrun --nproc-per-node 2 benchmarks/zero_speed.py [--micro-batch-size 8] [--ranks-per-node 1]

With fewer ranks a node than there are, nodes are emulated: NCCL takes them for different hosts, so that they
talk over TCP instead of NVLink, and ranks of different nodes may share a GPU.
Figures: tokens a second of the whole job, TFLOP/s a GPU (PaLM), peak memory and cudaMalloc calls during the
timed steps; ratios are of rates measured in this run. Layers are compiled, ours and FSDP2's.
"""

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.common import write_result
from benchmarks.plain_training import build
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.model.flops import flops_per_token
from megatron_zpp.model.gpt import GPT
from megatron_zpp.ops.library import load_operations
from megatron_zpp.train.compiling import compile_parts
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.topology import Topology

VOCAB = 50304
Step = Callable[[torch.Tensor], None]
Contestant = tuple[Step, Callable[[], None]]  # one training step, and how to let go of it


CONTESTANTS: dict[str, dict[str, Any]] = {  # our settings
    "stage_0": {"zero_stage": 0},
    "stage_1": {"zero_stage": 1},
    "stage_2": {"zero_stage": 2},
    "stage_3": {"zero_stage": 3},
    "stage_3_prefetch_2": {"zero_stage": 3, "zero_prefetch_units": 2},
    "stage_3_offload": {"zero_stage": 3, "zero_offload_optimizer": True},
    "qwz": {"zero_stage": 3, "zero_quantized_weights": True},
    "hpz": {"zero_stage": 3, "zero_hpz_partition_size": "auto"},
    "qgz": {"zero_stage": 3, "zero_quantized_gradients": True},
    "zeropp": {
        "zero_stage": 3,
        "zero_quantized_weights": True,
        "zero_hpz_partition_size": "auto",
        "zero_quantized_gradients": True,
    },
}


def our_step(
    config: ModelConfig, settings: dict[str, Any], topology: Topology, micro_batch_size: int
) -> Contestant:
    """The engine."""
    with torch.device("meta"):
        model = GPT(config, VOCAB)
    compile_parts(model, (micro_batch_size, config.seq_length), print, on_gpu=True)
    engine = ZeroEngine(
        model,
        partial(model.initialize_parameter, seed=1),
        zero=ZeroConfig(**settings),
        optimizer=OptimizerConfig(),
        precision=PrecisionConfig(bf16=True),
        topology=topology,
        device=torch.device("cuda", torch.cuda.current_device()),
        operations=load_operations("cuda", require_kernels=True, say=print),
    )

    def step(tokens: torch.Tensor) -> None:
        engine.accumulate(tokens, index=0, micro_batches=1)
        engine.step(1e-4)

    return step, engine.close


def fsdp2_step(config: ModelConfig, reshard: bool | int = True) -> Contestant:
    """FSDP2 as benchmarks/plain_training.py has it.

    `reshard` is its reshard_after_forward of the layers: a number is the size of its hpZ groups.
    """
    model = build("fsdp2", config, VOCAB, torch.device("cuda", torch.cuda.current_device()), reshard)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(tokens: torch.Tensor) -> None:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()

    return step, lambda: None


def measure(build: Callable[[], Contestant], tokens: torch.Tensor, warmup: int, steps: int) -> dict[str, Any]:
    """Milliseconds of a step, of each rank and the slowest, peak memory of this rank, cudaMalloc calls.

    The latter during the timed steps. GPUs of one kind differ by percents, and no stage is faster than the
    slower one is alone.
    """
    torch._dynamo.reset()  # or what other contestants compiled counts as theirs
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()  # FSDP2 leaves some behind
    step, close = build()
    for _ in range(warmup):
        step(tokens)
    torch.cuda.synchronize()
    dist.barrier()
    mallocs = torch.cuda.memory_stats()["num_device_alloc"]
    started = time.perf_counter()
    for _ in range(steps):
        step(tokens)
    torch.cuda.synchronize()
    elapsed = time.perf_counter() - started
    close()
    of_ranks = [0.0] * dist.get_world_size()
    dist.all_gather_object(of_ranks, round(1000 * elapsed / steps, 2))
    return {
        "milliseconds": max(of_ranks),
        "of_ranks_ms": of_ranks,
        "peak_gib": round((torch.cuda.max_memory_allocated() - before) / 2**30, 2),
        "mallocs_in_timed_steps": torch.cuda.memory_stats()["num_device_alloc"] - mallocs,
    }


def trace(build: Callable[[], Contestant], tokens: torch.Tensor, path: str) -> None:
    """Three steps to a trace that Perfetto opens."""
    step, close = build()
    for _ in range(3):
        step(tokens)
    with torch.profiler.profile() as profile:
        for _ in range(3):
            step(tokens)
        torch.cuda.synchronize()
    profile.export_chrome_trace(path)
    close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="1.3b")
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--contestants", nargs="+", default=["one_gpu", "stage_1", "stage_2", "stage_3", "fsdp2"]
    )
    parser.add_argument("--ranks-per-node", type=int)
    parser.add_argument("--trace")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    topology = Topology.from_environment(os.environ)
    ranks_per_node = options.ranks_per_node or topology.local_world_size
    if ranks_per_node < topology.local_world_size:
        topology = Topology(
            topology.rank, topology.world_size, topology.rank % ranks_per_node, ranks_per_node
        )
        os.environ |= {
            "NCCL_HOSTID": f"node{topology.node_of(topology.rank)}",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
        }
    device = torch.device("cuda", topology.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.set_num_threads(max(1, os.cpu_count() // topology.world_size))  # torchrun leaves one
    dist.init_process_group("nccl", device_id=device)

    config = ModelConfig(
        model_preset=options.preset, seq_length=options.seq_length, hidden_dropout=0.0, attention_dropout=0.0
    )
    builders: dict[str, Callable[[], Contestant]] = {
        "one_gpu": lambda: our_step(config, {"zero_stage": 0}, Topology(), options.micro_batch_size),
        **{
            name: partial(our_step, config, settings, topology, options.micro_batch_size)
            for name, settings in CONTESTANTS.items()
        },
        "fsdp2": lambda: fsdp2_step(config),
        "fsdp2_hpz": lambda: fsdp2_step(config, reshard=ranks_per_node),
    }
    tokens = torch.randint(VOCAB, (options.micro_batch_size, options.seq_length + 1), device="cuda")
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in options.contestants}
    for _ in range(options.rounds):
        for name in options.contestants:
            rounds[name].append(measure(builders[name], tokens, options.warmup, options.steps))
            if topology.rank == 0:
                print(name, rounds[name][-1], flush=True)
    if options.trace:
        trace(builders[options.contestants[-1]], tokens, f"{options.trace}.rank{topology.rank}.json")

    per_rank = options.micro_batch_size * options.seq_length
    figures = {}
    for name, results in rounds.items():
        best = min(results, key=lambda result: result["milliseconds"])
        rate = per_rank / best["milliseconds"] * 1000  # tokens a second and GPU
        tflops = rate * flops_per_token(config, VOCAB) / 1e12
        figures[name] = {
            **best,
            "tflops_per_gpu": round(tflops, 1),
            "rounds_ms": [r["milliseconds"] for r in results],
        }
    for name, figure in figures.items():
        for base in ("fsdp2", "fsdp2_hpz", "one_gpu", "stage_3"):
            if base in figures and name != base:
                figure[f"rate_over_{base}"] = round(figures[base]["milliseconds"] / figure["milliseconds"], 3)
    if topology.rank == 0:
        nodes = f"{topology.nodes}x{topology.local_world_size}"
        name = f"zero_speed_{options.preset}_mbs{options.micro_batch_size}_{nodes}"
        write_result(
            name, {"settings": vars(options) | {"output": str(options.output)}, **figures}, options.output
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
