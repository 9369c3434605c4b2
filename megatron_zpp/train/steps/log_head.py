"""The head of a run's log: what a reader has to know to repeat the run, and how much memory it takes."""

import platform
from dataclasses import replace

import torch

from megatron_zpp.config.root import Config
from megatron_zpp.config.words import counted
from megatron_zpp.mesh import Mesh
from megatron_zpp.model.flops import parameter_count
from megatron_zpp.model.gpt import GPT
from megatron_zpp.train.run import Run
from megatron_zpp.zero.engine import ZeroEngine


def head_lines(run: Run) -> list[str]:
    """Lines on the versions, the devices, the model, the data and the planned memory of a run."""
    config, engine, vocab_size = run.config, run.engine, run.tokenizer["vocab_size"]
    model, topology = config.model, engine.topology
    parameters = parameter_count(model, vocab_size)
    name = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else "CPU"
    shared = model.num_query_groups != model.num_attention_heads
    groups = f" in {model.num_query_groups} groups" if shared else ""
    lines = [
        f" torch {torch.__version__}, python {platform.python_version()}, {topology.world_size} × {name}, "
        f"{config.precision.compute_dtype(engine.device.type)}"
        f"{config.precision.describe_products()}, {config.zero.describe(engine.mesh.shard_ranks)}"
        f"{', compiled layers' if engine.model.compiled else ''}{_sharing_ranks(engine.mesh)}",
        f" GPT of {parameters / 1e6:.1f} M parameters: {counted(model.num_layers, 'layer')} × "
        f"{model.hidden_size}, {model.num_attention_heads} heads{groups}, sequence {model.seq_length}, "
        f"vocabulary {vocab_size} padded to {model.embedding_rows(vocab_size)}",
    ]
    assert isinstance(engine.model, GPT)
    if windows := [window for window in model.layer_windows if window]:
        lines.append(f" windows of {windows[0]} tokens in {len(windows)} of {model.num_layers} layers")
    if 0 < (rotated := sum(model.layers_with_rope)) < model.num_layers:
        lines.append(f" rope in {rotated} of {model.num_layers} layers")
    if attention := engine.model.attention.describe():
        lines.append(f" attention: {attention}")
    if optimizer := config.optimizer.describe():
        lines.append(f" optimizer: {optimizer}")
    if config.islands.takes_outer_steps:
        lines.append(f" outer steps: {config.islands.describe()}")
    if config.optimizer.optimizer_in_backward:
        clip = config.optimizer.clip_grad
        norm = "the last step's norm, or that of the gradients so far if it is larger"
        clips = f"clipped to {clip:g} by {norm}" if clip else "without clipping (--clip-grad 0)"
        lines.append(f" units step in the backward, {clips}")
    if spare := engine.spare.count:
        lines.append(f" matrix products leave {spare} multiprocessors to NCCL")
    for split in ("train", "valid", "test"):
        samples = getattr(run.splits, split)
        if samples is not None:
            lines.append(f" {split}: {samples.describe()}")
    return [*lines, *_plan_lines(config, vocab_size, engine)]


def _sharing_ranks(mesh: Mesh) -> str:
    if mesh.tensor_ranks * mesh.context_ranks == 1:
        return ""
    context = f" × {mesh.context_ranks} context ranks" if mesh.context_ranks > 1 else ""
    tensor = f" × {mesh.tensor_ranks} tensor ranks with sequence parallelism" if mesh.tensor_ranks > 1 else ""
    return f", {counted(mesh.data_ranks, 'data rank')}{context}{tensor}"


def _plan_lines(config: Config, vocab_size: int, engine: ZeroEngine) -> list[str]:
    """On rank 0, the planned memory of each GPU. That of a CPU is not planned; it is assumed to suffice."""
    if engine.topology.rank != 0 or engine.device.type != "cuda":
        return []
    from megatron_zpp.plan.job import job_of
    from megatron_zpp.plan.memory import memory_of

    job = replace(job_of(config, vocab_size, engine.mesh), copy_engines=engine.plan.copy_engines)
    memory = memory_of(job)
    sizes = memory.resident, memory.peak, torch.cuda.get_device_properties(engine.device).total_memory
    states, peak, there = (f"{size / 2**30:.2f} GiB" for size in sizes)
    return [f" memory planned: {states} of states and buffers, {peak} {memory.peak_at}, of {there}"]
