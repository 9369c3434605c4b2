"""Which library provides norms and AdamW: NVIDIA apex or torch."""

import importlib.util
from typing import Literal

from megatron_zpp.config.optimizer import OptimizerConfig
from megatron_zpp.config.options import option_error
from megatron_zpp.config.zero import ZeroConfig

# NVIDIA's apex has these if built with --cpp_ext --cuda_ext; the package "apex" on PyPI is something else.
_APEX_MODULES = ("apex", "amp_C", "fused_layer_norm_cuda")


def resolve_fused_backend(
    optimizer: OptimizerConfig, zero: ZeroConfig, device: str, *, compiles: bool, several_rates: bool
) -> Literal["apex", "torch"]:
    """Return what --fused-backend means on `device` ("cpu" or "cuda").

    `compiles`: layers are compiled, so norms are torch's. `several_rates`: parameters have several learning
    rates, which apex's AdamW has not. Raises ValueError if apex is requested and cannot be used, and for
    --zero-offload-optimizer without a GPU.
    """
    requested, offload = optimizer.fused_backend, zero.zero_offload_optimizer
    muon = optimizer.optimizer == "muon"
    if muon and requested == "apex":
        raise option_error("--fused-backend", "apex", "has no Muon; with --optimizer muon use torch")
    if offload and device != "cuda":
        raise option_error(
            "--zero-offload-optimizer", "(given)", "the states are in CPU memory already; omit it"
        )
    if offload and requested == "apex":
        raise option_error(
            "--fused-backend", "apex", "steps on the GPU; with --zero-offload-optimizer use torch"
        )
    missing = [name for name in _APEX_MODULES if importlib.util.find_spec(name) is None]
    if requested == "auto":
        own = optimizer.compact or optimizer.optimizer_in_backward
        others = missing or offload or compiles or several_rates or muon or own
        serves = device == "cuda" and not others
        return "apex" if serves else "torch"
    if requested == "apex" and device != "cuda":
        raise option_error("--fused-backend", "apex", "its kernels need a GPU; on CPUs use torch")
    if requested == "apex" and missing:
        raise option_error(
            "--fused-backend",
            "apex",
            f"module {missing[0]} is not installed; docs/guide/gpus.md, 'NVIDIA apex', shows how to build it",
        )
    return "apex" if requested == "apex" else "torch"
