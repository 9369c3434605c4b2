"""Sums in a fixed order on GPUs too (--deterministic-mode)."""

from collections.abc import MutableMapping

import torch

from megatron_zpp.config.run import TrainingConfig

# What libraries read before their first use, and the values with which they sum in a fixed order.
_VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"), "NCCL_NVLS_ENABLE": ("0",)}


def fix_order_of_sums(environ: MutableMapping[str, str]) -> None:
    """Let torch, cuBLAS and NCCL sum in a fixed order in this process; what cannot raises RuntimeError.

    For torch's compiler it must come before torch._inductor.config is imported. Raises ValueError for a
    variable of `environ` that says otherwise.
    """
    for name, accepted in _VARIABLES.items():
        if environ.setdefault(name, accepted[0]) not in accepted:
            fix = f"contradicts --deterministic-mode; unset it, or use {accepted[0]}"
            raise ValueError(f"{name}={environ[name]}: {fix}")
    # From torch 2.12 on the next call sets the compiler's mode for this thread alone. The variable is for
    # those of autograd, in which parts of the backward are compiled.
    environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # not in stubs


def check_compiler(training: TrainingConfig, *, layers: bool, attention: bool) -> None:
    """Refuse the mode where torch compiles layers or attention for a GPU and times kernels to choose them."""
    from torch._inductor import config

    if (layers or attention) and not hasattr(config, "deterministic"):  # before torch 2.10
        fix = "--attention-backend math and --no-compile" if attention else "--no-compile"
        reason = f"the compiler of torch {torch.__version__} chooses among sums by their times"
        raise training.error("deterministic_mode", f"{reason}; use {fix}, or torch 2.10 or later")
