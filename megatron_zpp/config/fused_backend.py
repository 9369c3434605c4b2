"""Whose fused LayerNorm and Adam a run uses: NVIDIA apex or torch."""

import importlib.util
from typing import Literal

from megatron_zpp.config.optimizer import OptimizerConfig
from megatron_zpp.config.options import option_error
from megatron_zpp.config.zero import ZeroConfig

# NVIDIA's apex has these once it is built with --cpp_ext --cuda_ext; PyPI's package named "apex" has neither.
_APEX_MODULES = ("apex", "amp_C", "fused_layer_norm_cuda")


def resolve_fused_backend(
    optimizer: OptimizerConfig, zero: ZeroConfig, device: str, *, compiles: bool
) -> Literal["apex", "torch"]:
    """What --fused-backend means on `device` ("cpu" or "cuda"), with the optimizer there or offloaded.

    Compiled layers have torch's LayerNorm.

    Raises ValueError when apex cannot serve, and for an offload from the CPU to the CPU.
    """
    requested, offload = optimizer.fused_backend, zero.zero_offload_optimizer
    if offload and device != "cuda":
        raise option_error(
            "--zero-offload-optimizer", "(given)", "the states are in CPU memory already; leave it out"
        )
    if offload and requested == "apex":
        raise option_error(
            "--fused-backend", "apex", "steps on the GPU; with --zero-offload-optimizer use torch"
        )
    missing = [name for name in _APEX_MODULES if importlib.util.find_spec(name) is None]
    if requested == "auto":
        return "apex" if device == "cuda" and not (missing or offload or compiles) else "torch"
    if requested == "apex" and device != "cuda":
        raise option_error("--fused-backend", "apex", "its kernels need a GPU; on CPUs use torch")
    if requested == "apex" and missing:
        raise option_error(
            "--fused-backend",
            "apex",
            f"module {missing[0]} is not installed; README.md, 'NVIDIA apex', says how to build it",
        )
    return "apex" if requested == "apex" else "torch"
