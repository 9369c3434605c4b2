"""Loads the kernels, or the reference where they cannot be built."""

import os
from collections.abc import Callable

import torch

from megatron_zpp.native.cache import BuildError
from megatron_zpp.ops import fakes, reference
from megatron_zpp.ops.build import build
from megatron_zpp.ops.operations import Operations
from megatron_zpp.ops.toolchain import cuda_problem

COMMAND = "python -m megatron_zpp.ops.build"


def load_operations(device_type: str, *, require_kernels: bool, say: Callable[[str], None]) -> Operations:
    """The operations for tensors of `device_type`, "cpu" or "cuda"; builds the kernels at first use.

    Where they cannot be had, plain torch computes the same bits and `say` gets one line about it, or
    BuildError is raised if `require_kernels`.
    """
    try:
        load_kernels(device_type, say)
    except BuildError as error:
        if require_kernels:
            raise
        reason = str(error).splitlines()[0]
        say(f"warning: no kernels, so plain torch serves, more slowly: {reason}; see `{COMMAND}`")
        return Operations(reference, compiled=False)
    return Operations(torch.ops.megatron_zpp, compiled=True)


def load_kernels(device_type: str, say: Callable[[str], None]) -> None:
    """Makes torch.ops.megatron_zpp the kernels of csrc/, for compilers too. Raises BuildError.

    Once a process: torch keeps one set of operators of a name.
    """
    if not loaded():
        library = build(say=say)
        try:
            torch.ops.load_library(str(library))
        except OSError as error:
            raise BuildError(
                f"{library} cannot be loaded ({error}); build it again: {COMMAND} --force"
            ) from error
        fakes.register()
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device_type)
    if key is None:
        raise BuildError(f"there are no kernels for devices of type {device_type}")
    if not torch._C._dispatch_has_kernel_for_dispatch_key("megatron_zpp::quantize", key):
        raise BuildError(f"the kernels were built without CUDA: {cuda_problem(os.environ)}")


def loaded() -> bool:
    """Whether this process has the operators."""
    return hasattr(torch.ops.megatron_zpp, "quantize")
