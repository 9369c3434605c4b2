"""Which library provides norms and AdamW: NVIDIA apex or torch."""

import importlib.util
from typing import Literal

from megatron_zpp.config.options import option_error
from megatron_zpp.config.root import Config

# NVIDIA's apex has these if built with --cpp_ext --cuda_ext; the package "apex" on PyPI is something else.
_APEX_MODULES = ("apex", "amp_C", "fused_layer_norm_cuda")


def resolve_fused_backend(config: Config, device: str, *, compiles: bool) -> Literal["apex", "torch"]:
    """Return what --fused-backend means on `device` ("cpu" or "cuda").

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
