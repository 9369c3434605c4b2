"""GPT in plain PyTorch, alone, with FSDP2 or with DTensor, as others would write it: to compare ours with.

torchrun --nproc-per-node 2 benchmarks/plain_training.py --kind fsdp2 --preset 1.3b --micro-batch-size 8 \\
    --steps 30 --metrics-file FILE

plain       fp32 weights, autocast to bf16, a graph per layer by torch.compile, fused AdamW, clipping
torchao-tensorwise, torchao-rowwise  the same with torchao's 8-bit matmuls, of that recipe, in all layers
whole       as plain, with the whole model and its loss one graph
whole-bf16  the same with bf16 weights alone: half the memory, and no fp32 masters
fsdp2       fp32 shards, bf16 compute, fp32 reduction, a graph per layer, prefetch of the next layer in both
            passes, fused AdamW, clipping
fsdp2-torchao  the same with torchao's tensorwise 8-bit matmuls; all scales are made at once, codes gathered
…-selective  the last two with torchtitan's selective checkpointing: the backward computes layers again, but
            for attention and every other matmul
fsdp2-our-gpt  FSDP2 around megatron_zpp's GPT, with its kernels, which tells the sharding from the model
dtensor     torch's tensor parallelism of all ranks, see plain_tensor_parallel.py; else as plain
dtensor-async  the same in its asynchronous form
context-parallel  fsdp2, with torch's context_parallel of all ranks around it; samples are theirs together

The loss is a graph too, whatever the kind.
Shares only shapes with megatron_zpp, but for its GPT in fsdp2-our-gpt. Random tokens come from pinned memory;
the loss is read every --log-interval steps, when a line of JSON is written to --metrics-file.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.common import program_parser
from benchmarks.plain_models import (
    PlainGPT,
    PlainLlama,
    cross_entropy,
    model_arguments,
    model_of,
    tables_apart,
)
from benchmarks.plain_tensor_parallel import TensorParallelGPT, parallelize
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.model.context.parts import own_part
from megatron_zpp.model.gpt import GPT
from megatron_zpp.train.setup.compiling import compile_parts

TENSOR_PARALLEL = ("dtensor", "dtensor-async")
CONTEXT_PARALLEL = "context-parallel"
SELECTIVE = ("fsdp2-selective", "fsdp2-torchao-selective")
FSDP2 = ("fsdp2", "fsdp2-torchao", *SELECTIVE, "fsdp2-our-gpt", CONTEXT_PARALLEL)
RECOMPUTED = ("plain", "fsdp2", "fsdp2-torchao", CONTEXT_PARALLEL)
KINDS = ("plain", "torchao-tensorwise", "torchao-rowwise", "whole", "whole-bf16", *FSDP2, *TENSOR_PARALLEL)
BF16_WEIGHTS = (*FSDP2, "whole-bf16")  # the others compute in bf16 by autocast
_MATMULS = (torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default)
_SAVED = (  # beside every other matmul; the maximum is a scale of 8 bits
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten.max.default,
)


def build(
    kind: str,
    config: ModelConfig,
    vocabulary: int,
    micro_batch: int,
    device: torch.device,
    recompute: bool = False,
) -> nn.Module:
    """The model as a user of this kind would set it up, for micro-batches of one size.

    `recompute`: the backward computes layers again, in the kinds with a graph for each.
    """
    torch.manual_seed(1)
    if kind in TENSOR_PARALLEL:
        with device:
            split = TensorParallelGPT(config, vocabulary)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        parallelize(split, mesh, asynchronous=kind == "dtensor-async", compiles=device.type == "cuda")
        return split
    if kind == "fsdp2-our-gpt":
        return shard(our_gpt(config, vocabulary, micro_batch, device), "layers")
    with device:
        rotates = config.position_embedding_type == "rope"
        model = PlainLlama(config, vocabulary) if rotates else PlainGPT(config, vocabulary)
    if kind.startswith("whole"):
        model = model.bfloat16() if kind in BF16_WEIGHTS else model
        model.compile(dynamic=False)
        return model
    model.loss = torch.compile(cross_entropy, dynamic=False)
    if "torchao" in kind:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        recipe = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        if kind not in FSDP2:
            recipe = Float8LinearConfig.from_recipe_name(kind.removeprefix("torchao-"))
        for block in model.blocks:
            convert_to_float8_training(block, config=recipe)
    for index, block in enumerate(model.blocks):
        if kind in SELECTIVE:
            block = checkpoint_wrapper(block, context_fn=selective_contexts)
            model.blocks[index] = block
        block.compile(dynamic=False)
        if recompute:
            model.blocks[index] = checkpoint_wrapper(block)
    return shard(model, "blocks") if kind in FSDP2 else model


def selective_contexts() -> Any:
    """What torch's checkpointing of a layer saves, and what it computes again."""
    counts = {True: 0, False: 0}  # matmuls of the recomputation, and of the forward

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        counts[context.is_recompute] += operator in _MATMULS
        saved = operator in _SAVED or (operator in _MATMULS and counts[context.is_recompute] % 2 == 1)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def our_gpt(config: ModelConfig, vocabulary: int, micro_batch: int, device: torch.device) -> GPT:
    """The package's model without its engine, compiled as a run compiles it."""
    with device:
        model = GPT(config, vocabulary).initialize(1)
    shape = (micro_batch, config.seq_length)
    compile_parts(model, shape, print, on_gpu=device.type == "cuda")
    return model


def shard(model: nn.Module, layers: str) -> nn.Module:
    """FSDP2 around each layer and the rest; each layer gathers the next one while it computes."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    blocks = list(getattr(model, layers))
    for block in blocks:
        fully_shard(block, mp_policy=policy)
    for unit in tables_apart(model):
        fully_shard(unit, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mp_policy=policy)
    for this, following in pairwise(blocks):
        this.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([this])
    return model


def train(options: argparse.Namespace, device: torch.device, rank: int) -> None:
    """Take the steps and write the metrics."""
    kind, micro_batch = options.kind, options.micro_batch_size
    model = build(kind, model_of(options), options.vocab_size, micro_batch, device, options.recompute)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=options.kind not in BF16_WEIGHTS)
    scales_of_all: Callable[[nn.Module], None] | None = None
    if options.kind.startswith("fsdp2-torchao"):
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        scales_of_all = precompute_float8_dynamic_scale_for_fsdp
    shared = kind in TENSOR_PARALLEL  # all ranks have the same tokens, and the model runs its backward
    in_parts, sharing = kind == CONTEXT_PARALLEL, ExitStack()
    if in_parts:  # once, because each entry would compile the layers again
        from torch.distributed.tensor.experimental import context_parallel

        mesh, buffers = init_device_mesh(device.type, (dist.get_world_size(),)), list(model.buffers())
        if isinstance(model, PlainGPT):
            model.places = torch.arange(options.seq_length, device=device)
            buffers = [model.places]
        parts = context_parallel(mesh, buffers=buffers, buffer_seq_dims=[0] * len(buffers))
        sharing.enter_context(parts)
    draw = torch.Generator().manual_seed(0 if shared or in_parts else rank)
    shape = micro_batch, options.seq_length + 1
    on_gpu, started = device.type == "cuda", time.perf_counter()
    for step in range(1, options.steps + 1):
        for left in reversed(range(options.micro_batches)):
            tokens = torch.randint(options.vocab_size, shape, generator=draw)
            tokens = (tokens.pin_memory() if on_gpu else tokens).to(device, non_blocking=True)
            inputs, targets = tokens[:, :-1], tokens[:, 1:]
            if in_parts:  # as context_parallel shards its buffers
                inputs, targets = (own_part(part, dist.get_world_size(), rank) for part in (inputs, targets))
            if isinstance(model, FSDPModule):
                model.set_is_last_backward(left == 0)
            with autocast:
                loss = model(inputs, targets)
            if not shared:
                (loss / options.micro_batches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        if scales_of_all is not None:
            scales_of_all(model)
        adamw.zero_grad()
        if step % options.log_interval == 0:
            read = loss.item()
            elapsed, started = time.perf_counter() - started, time.perf_counter()
            if rank == 0:
                record = {
                    "iteration": step,
                    "lm_loss": read,
                    "elapsed_ms": 1000 * elapsed / options.log_interval,
                }
                if on_gpu:
                    record["memory_peak_bytes"] = torch.cuda.max_memory_allocated()
                with open(options.metrics_file, "a") as file:
                    file.write(json.dumps(record) + "\n")
    sharing.close()


def main() -> None:
    parser = program_parser(__doc__)
    parser.add_argument("--kind", choices=KINDS, required=True)
    model_arguments(parser)
    parser.add_argument("--recompute", action="store_true", help="compute layers again in the backward")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--log-interval", type=int, default=10)
    parser.add_argument("--metrics-file", required=True)
    options = parser.parse_args()
    if options.recompute and options.kind not in RECOMPUTED:
        parser.error(f"--recompute: of {', '.join(RECOMPUTED)} alone, not {options.kind}")
    if options.micro_batches > 1 and options.kind in TENSOR_PARALLEL:
        parser.error(
            f"--micro-batches {options.micro_batches}: {options.kind} sums their gradients undivided"
        )
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    backend, alone = "nccl" if device.type == "cuda" else "gloo", world == 1 and options.kind in FSDP2
    if alone:  # FSDP2 asks for a group on one GPU too
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    elif world > 1:
        dist.init_process_group(backend)
    train(options, device, rank)
    if world > 1 or alone:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
