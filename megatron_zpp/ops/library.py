"""Load the kernels, or the reference if they cannot be built."""

import os
from collections.abc import Callable

import torch

from megatron_zpp.native.cache import BuildError
from megatron_zpp.ops import reference
from megatron_zpp.ops.build import build
from megatron_zpp.ops.operations import Operations
from megatron_zpp.ops.toolchain import capability_problem, cuda_problem

COMMAND = "python -m megatron_zpp.ops.build"


def load_operations(device_type: str, *, require_kernels: bool, say: Callable[[str], None]) -> Operations:
    """The operations for tensors of `device_type`, "cpu" or "cuda". Builds the kernels at first use.

    If the kernels cannot be built or loaded, plain torch computes the same bits and `say` is called with a
    warning of one line; with `require_kernels`, BuildError is raised instead.
    """
    try:
        load_kernels(device_type, say)
    except BuildError as error:
        if require_kernels:
            raise
        reason = str(error).splitlines()[0]
        say(f"warning: no kernels, so plain torch is used, which is slower: {reason}; see `{COMMAND}`")
        return Operations(reference, compiled=False)
    return Operations(torch.ops.megatron_zpp, compiled=True)


def load_kernels(device_type: str, say: Callable[[str], None]) -> None:
    """Load the library of csrc/ as torch.ops.megatron_zpp. Raises BuildError.

    Loads it once per process, because torch keeps one set of operators of a name. Does not build it where
    the present GPU is too old for its device code.
    """
    if device_type == "cuda" and torch.cuda.is_available():
        problem = capability_problem(torch.cuda.get_device_capability())
        if problem is not None:
            raise BuildError(problem)
    if not loaded():
        library = build(say=say)
        try:
            torch.ops.load_library(str(library))
        except OSError as error:
            raise BuildError(f"{library} cannot be loaded ({error}); remove it") from error
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device_type)
    if key is None:
        raise BuildError(f"there are no kernels for devices of type {device_type}")
    if not torch._C._dispatch_has_kernel_for_dispatch_key("megatron_zpp::quantize", key):
        raise BuildError(f"the kernels were built without CUDA: {cuda_problem(os.environ)}")


def loaded() -> bool:
    """Return whether this process has loaded the operators."""
    return hasattr(torch.ops.megatron_zpp, "quantize")
