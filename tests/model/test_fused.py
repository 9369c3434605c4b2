"""The Triton kernels of compiled layers where there is no GPU; tests/gpu/ has them on one."""

import importlib.metadata
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def version() -> tuple[int, ...]:
    """Of Triton; (0,) where there is none."""
    try:
        return tuple(map(int, importlib.metadata.version("triton").split(".")[:2]))
    except importlib.metadata.PackageNotFoundError:
        return (0,)


HOPPER = {"backend": "cuda", "arch": 90, "warp_size": 32}


def assembly(
    kernel: Any, tensors: dict[str, str], numbers: tuple[str, ...], odd: tuple[str, ...] = (), **settings: int
) -> str:
    """PTX of a kernel for Hopper, which a compiler makes without one; `numbers` are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    warps = settings.pop("num_warps")
    names = kernel.arg_names
    kinds = tensors | dict.fromkeys((*numbers, *odd), "i32") | dict.fromkeys(settings, "constexpr")
    source = ASTSource(
        kernel,
        {name: kinds[name] for name in names},
        {(names.index(name),): value for name, value in settings.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in (*tensors, *numbers)},
    )
    return triton.compile(source, target=GPUTarget(**HOPPER), options={"num_warps": warps}).asm["ptx"]


@pytest.mark.skipif(version() < (3, 7), reason="needs Triton 3.7, whose compiler takes sources like these")
@pytest.mark.parametrize("joins", [False, True])
def test_kernels_of_llamas_move_16_bytes_at_a_time(joins: bool) -> None:
    """In bf16, for the heads of Llama 3.2 1B and 3B and half-rotated ones, and with gates."""
    from megatron_zpp.model.fused import rotary, swiglu

    found = []
    tensors = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*bf16")
    tensors |= dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32")
    numbers = ("angles", "heads", "groups")
    for sizes in ((48, 64, 32), (40, 128, 64), (48, 64, 16)):
        shape = rotary._shape(*sizes)
        found.append(assembly(rotary._rotate_kernel, tensors, numbers, JOINS=joins, **shape))
    kernel = swiglu._backward_kernel if joins else swiglu._forward_kernel
    names = [name for name in kernel.arg_names if name.endswith("_ptr")]
    tensors = dict.fromkeys(names, "*bf16")
    found.append(assembly(kernel, tensors, ("width",), BLOCK=2048, num_warps=8))
    for ptx in found:
        accesses = re.findall(r"(?:ld|st)\.global\S*", ptx)
        assert accesses
        assert all(".v4" in access for access in accesses), accesses
