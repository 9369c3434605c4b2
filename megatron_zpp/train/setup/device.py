"""The device of a rank and the kernels it uses. Settings that these cannot obey are refused here."""

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatron_zpp.config.compilation import resolve_compilation
from megatron_zpp.config.options import option_error, usage_errors
from megatron_zpp.config.root import Config
from megatron_zpp.distributed.process_group import select_device
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.exchange.route import check_routes
from megatron_zpp.model.attention import AttentionKernel
from megatron_zpp.model.attention_choice import Choice, check_runs, choose_attention
from megatron_zpp.model.scores import Scores
from megatron_zpp.ops.operations import Operations

# NVIDIA's apex has these if built with --cpp_ext --cuda_ext; the package "apex" on PyPI is something else.
_APEX_MODULES = ("apex", "amp_C", "fused_layer_norm_cuda")


@dataclass(frozen=True)
class Device:
    """`operations` is None if nothing is quantised and torch's own kernels suffice."""

    device: torch.device
    fused_backend: Literal["apex", "torch"]
    operations: Operations | None
    attention: AttentionKernel
    compiles: bool
    say: Callable[[str], None]  # a line on stderr, by one rank of each node

    def settings(self) -> dict[str, dict[str, Any]]:
        """Choices that must be equal on all ranks, because their states have to stay equal bit for bit."""
        compiled = self.operations is not None and self.operations.compiled
        kernels = {
            "fused_backend": self.fused_backend,
            "compiled": compiled,
            "attention": self.attention.describe(),
            "torch_compile": self.compiles,
        }
        return {"kernels": kernels}


def prepare_device(config: Config, topology: Topology) -> Device:
    """Choose this rank's device, without occupying it yet, and build the kernels if they are needed.

    Raises ValueError for settings that need another device, other ranks or other variables of libraries,
    BuildError if --require-kernels is given and there is no compiler.
    """
    device = select_device(config.distributed.device, topology)
    tensor_ranks = config.distributed.tensor_model_parallel_size
    with usage_errors():
        check_routes(config.zero, topology.mesh(tensor_ranks, config.distributed.context_parallel_size))
    config.recompute.check_device(device.type)
    on_gpu = device.type == "cuda"
    capability = torch.cuda.get_device_capability(device) if on_gpu and config.precision.fp8 else None
    config.precision.check_device(device.type, capability)

    def say(line: str) -> None:
        if topology.local_rank == 0:
            sys.stderr.write(f"{line}\n")

    for note in config.timing.missing_ranks(topology.world_size):
        say(f"warning: {note}")
    apex = config.optimizer.fused_backend == "apex"
    compiles, missing = resolve_compilation(config.compilation, device.type, os.environ, apex=apex)
    if missing:
        say(f"warning: layers are not compiled and run more slowly: compiling needs {missing}")
    deterministic = config.training.deterministic_mode
    if deterministic:
        from megatron_zpp.train.setup.determinism import fix_order_of_sums

        if compiles or on_gpu:  # torch may compile something
            from megatron_zpp.train.setup.compiling import prepare_compiler

            prepare_compiler(topology, os.environ)  # as the mode lets torch read these variables
        fix_order_of_sums(os.environ)  # before kernels are tried and ranks join
    with usage_errors():
        backend = resolve_fused_backend(config, device.type, compiles=compiles)
    attention = attention_choice(config, device).make()
    if deterministic and on_gpu:
        from megatron_zpp.train.setup.determinism import check_compiler

        with usage_errors():
            check_compiler(config.training, layers=compiles, attention=attention.compiled)
    operations = _operations(
        device,
        say,
        required=config.distributed.require_kernels,
        needed=config.zero.quantizes or config.optimizer.compact,
    )
    return Device(device, backend, operations, attention, compiles, say)


def resolve_fused_backend(config: Config, device: str, *, compiles: bool) -> Literal["apex", "torch"]:
    """What --fused-backend, the library of norms and AdamW, means on `device` ("cpu" or "cuda").

    `compiles`: layers are compiled, so norms are torch's. Raises ValueError if apex is requested and cannot
    be used, and for --zero-offload-optimizer without a GPU.
    """
    if config.zero.zero_offload_optimizer and device != "cuda":
        raise config.zero.error("zero_offload_optimizer", "the states are in CPU memory already; omit it")
    missing = [name for name in _APEX_MODULES if importlib.util.find_spec(name) is None]
    if config.optimizer.fused_backend == "auto":
        return "torch" if device != "cuda" or missing or compiles or config.beyond_apex else "apex"
    if config.optimizer.fused_backend == "torch":
        return "torch"
    if device != "cuda":
        raise option_error("--fused-backend", "apex", "its kernels need a GPU; on CPUs use torch")
    if missing:
        fix = "is not installed; docs/guide/gpus.md, 'NVIDIA apex', shows how to build it"
        raise option_error("--fused-backend", "apex", f"module {missing[0]} {fix}")
    return "apex"


def attention_choice(config: Config, device: torch.device | None) -> Choice:
    """The kernel of attention on a device, or on any GPU; see `choose_attention`."""
    return choose_attention(
        config.attention.attention_backend,
        windowed=any(config.model.layer_windows),
        scored=config.model.changed_scores,
        device=device,
        **_attention(config, "cuda" if device is None else device.type),
    )


def check_attention(config: Config, device: Device) -> None:
    """Try the chosen attention kernel on the device. Raises ValueError if it does not run."""
    model, kernel = config.model, device.attention
    lengths: Sequence[int] = (_longest(config),)
    windows: set[int | None] = {None} if kernel.compiled else set(model.layer_windows)
    if config.evaluation.sample_prompt is not None and not kernel.compiled:
        lengths = (1, 2, *lengths)  # a text grows token by token
    heads = torch.zeros(model.num_attention_heads // model.num_query_groups, device=device.device)
    scores = Scores(
        model.softmax_scale,
        model.attn_logit_softcapping,
        heads if model.position_embedding_type == "alibi" else None,
        heads if model.softmax_type != "vanilla" else None,
    )
    backend = config.attention.attention_backend
    check_runs(
        *(kernel, backend, lengths),
        windows=windows,
        queries_per_group=len(heads),
        scores=scores,
        device=device.device,
        **_attention(config, device.device.type),
    )


def _longest(config: Config) -> int:
    """The tokens to which a kernel attends at once: of a sample, or of a chunk if keys go around a ring."""
    tokens, ranks = config.model.seq_length, config.distributed.context_parallel_size
    if ranks > 1:
        from megatron_zpp.model.context.sharing import exchanges_heads

        heads = config.model.num_attention_heads // config.distributed.tensor_model_parallel_size
        if not exchanges_heads(config.distributed.cp_comm_type, ranks, heads):
            return tokens // (2 * ranks)
    return tokens


def _attention(config: Config, device_type: str) -> dict[str, Any]:
    """Settings on which both the choice of an attention kernel and its trial depend."""
    return {
        "masked": config.data.reset_attention_mask,
        "head_width": config.model.kv_channels,
        "dropout": config.model.attention_dropout,
        "dtype": getattr(torch, config.precision.compute_dtype(device_type)),
    }


def _operations(
    device: torch.device, say: Callable[[str], None], *, required: bool, needed: bool
) -> Operations | None:
    """The compiled operations; None on CPUs where none is needed, since torch's kernels are as fast."""
    if not (required or needed or device.type == "cuda"):
        return None
    from megatron_zpp.ops.library import load_operations

    operations = load_operations(device.type, require_kernels=required, say=say)
    return operations if operations.compiled or needed else None
