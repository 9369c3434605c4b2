"""Builds the model with its initial weights, sharded over the ranks."""

import os
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from megatron_zpp.config.root import Config
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.model.fp8 import Float8Linear
from megatron_zpp.model.gpt import GPT, ModelComponents, norm_classes
from megatron_zpp.train.compiling import compile_parts, prepare_compiler
from megatron_zpp.train.device import Device, check_attention
from megatron_zpp.train.run_schedule import RunSchedule
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.sections import UNTIMED, TimedSections

# Parameters of GPT that --decoupled-lr is for, as in Megatron-LM. If they are tied there is only the first.
DECOUPLED = ("embedding.tokens.weight", "head.output.weight")


def build_engine(config: Config, vocab_size: int, device: Device, topology: Topology) -> ZeroEngine:
    """The engine with initial weights; all ranks of `topology` have joined and must call it.

    Raises ValueError if the chosen attention kernel does not run on the device.
    """
    check_attention(config, device)
    model = _build_model(config, vocab_size, device, topology)
    return ZeroEngine(
        model,
        partial(model.initialize_parameter, seed=config.training.seed),
        zero=zero_of(config, topology.world_size),
        optimizer=config.optimizer,
        precision=config.precision,
        topology=topology,
        device=device.device,
        fused_backend=device.fused_backend,
        operations=device.operations,
        timeout=config.distributed.timeout,
        sections=TimedSections(device.device) if config.timing.level else UNTIMED,
        say=device.say,
        decoupled=DECOUPLED if config.learning_rate.decoupled_lr is not None else (),
    )


def zero_of(config: Config, ranks: int) -> ZeroConfig:
    """The settings of ZeRO with the default that depends on the warm-up: --zero-delta4-iterations."""
    zero = config.zero
    if not zero.narrows_differences or zero.zero_delta4_iterations is not None:
        return zero
    warmup = RunSchedule.from_config(config, ranks).warmup_iterations
    return replace(zero, zero_delta4_iterations=2 * warmup)


def _build_model(config: Config, vocab_size: int, device: Device, topology: Topology) -> GPT:
    """The model on the meta device, compiled if the device compiles."""
    linear = Float8Linear if config.precision.fp8 else nn.Linear
    parts = ModelComponents(norm_classes(device.fused_backend), linear, device.attention)
    with torch.device("meta"):
        model = GPT(config.model, vocab_size, config.recompute, parts)
    if device.compiles:
        prepare_compiler(config.compilation, topology, os.environ)
        shape = (config.training.micro_batch_size, config.model.seq_length)
        on_gpu = device.device.type == "cuda"
        compile_parts(model, shape, device.say, masked=config.data.reset_attention_mask, on_gpu=on_gpu)
    return model
