"""The Triton kernels of compiled layers where there is no GPU; tests/gpu/ has them on one."""

import importlib
import importlib.metadata
import itertools
import pkgutil
import re
from collections.abc import Callable
from typing import Any

import pytest

FP32 = "factors maxima mean rstd sums cos sin largest log2_totals numbers".split()
FP32 += "momentum master scales divisor found_inf".split()
FLOATS = "eps cap z_coeff momentum shrink step".split()
CODES = "by_rows by_columns codes".split()
E4M3, E5M2 = "*fp8e4nv", "*fp8e5"


def version() -> tuple[int, ...]:
    """Of Triton; (0,) where there is none."""
    try:
        return tuple(map(int, importlib.metadata.version("triton").split(".")[:2]))
    except importlib.metadata.PackageNotFoundError:
        return (0,)


def assembly(kernel: Any, codes: str = E4M3, *, odd: str = "", num_warps: int, **settings: Any) -> str:
    """PTX of a kernel for Hopper, which a compiler makes without one, of bf16 and `codes`.

    Numbers are multiples of 16, but for `odd`.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = dict.fromkeys(settings, "constexpr") | dict.fromkeys(FLOATS, "fp32")
    kinds |= dict.fromkeys(["targets_ptr", "table_ptr"], "*i64")
    kinds |= dict.fromkeys([f"{name}_ptr" for name in FP32], "*fp32")
    kinds |= dict.fromkeys([f"{name}_ptr" for name in CODES], codes)
    names = kernel.arg_names
    others = {name: "*bf16" if name.endswith("_ptr") else "i32" for name in names}
    signature = {name: (others | kinds)[name] for name in names}
    even = [name for name in names if signature[name] not in ("constexpr", "fp32") and name != odd]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in settings.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in even},
    )
    target = GPUTarget(backend="cuda", arch=90, warp_size=32)
    return triton.compile(source, target=target, options={"num_warps": num_warps}).asm["ptx"]


def rotations(joins: bool) -> str:
    """For the heads of Llama 3.2 1B and 3B, and half-rotated ones, of halves and of neighbours."""
    from megatron_zpp.model.fused import rotary

    shapes = (rotary._shape(*sizes) for sizes in ((48, 64, 32), (40, 128, 64), (48, 64, 16)))
    kinds = itertools.product(shapes, (False, True))
    return "".join(
        assembly(rotary._rotate_kernel, JOINS=joins, INTERLEAVED=pairs, **shape) for shape, pairs in kinds
    )


def gates(name: str) -> str:
    from megatron_zpp.model.fused import gates

    return "".join(assembly(getattr(gates, name), GELU=gelu, **gates._PROGRAM) for gelu in (False, True))


def norm() -> str:
    from megatron_zpp.model.fp8.kernels import coded_norm
    from megatron_zpp.model.fused.norm import _shape

    return assembly(coded_norm._coded_norm_kernel, ADDS=True, CENTRED=False, OFFSET=0.0, **_shape(2048))


def encoded() -> str:
    from megatron_zpp.model.fp8.kernels import weight_codes

    return assembly(weight_codes._encode_kernel, num_warps=weight_codes.WARPS)


def tiles(file: str, kernel: str, codes: str = E4M3, **settings: Any) -> str:
    module = importlib.import_module(f"megatron_zpp.model.fp8.kernels.{file}")
    return assembly(getattr(module, kernel), codes, num_warps=module.WARPS, **settings)


def muon(name: str, **settings: int) -> str:
    from megatron_zpp.zero.fused import muon

    return assembly(getattr(muon, name), ALIGNED=muon._ALIGNED, num_warps=muon._WARPS, **settings)


ONE, TWO = "global.b32", "global.v2.b32"
SCALED = [f"ld.{ONE}"] * 2  # the factor and the maximum
BY_ROWS = [f"st.{TWO}"] * 4  # 8 codes
ACTIVATION: dict[str, Any] = {"GATED": True, "BIASED": False}
BOTH = {"BY_ROWS": True, "BY_COLUMNS": True}
WIDE, TALL = ({"GROUPS": groups, "COLUMNS": columns} for groups, columns in ((16, 64), (32, 32)))
LOSS = {"odd": "vocab_size"}
USUAL, ALL = ({"CAPPED": each, "Z_LOSS": each} for each in (False, True))
OF_A_PART = [f"ld.{ONE}"] * 2 + ["ld.global.b64"] * 3  # of its numbers, and where it is
STATISTICS = [f"ld.{ONE}"] * 8 + ["ld.global.b64"] * 4  # of rows, and targets


@pytest.mark.skipif(version() < (3, 7), reason="needs Triton 3.7, whose compiler takes sources like these")
@pytest.mark.parametrize(
    ("compiled", "less"),
    [
        (lambda: rotations(False), []),
        (lambda: rotations(True), []),
        (lambda: gates("_forward_kernel"), []),
        (lambda: gates("_backward_kernel"), []),
        (norm, [*SCALED, f"st.{ONE}"]),
        (encoded, SCALED),
        (lambda: tiles("cast", "_turn_kernel", "*u8"), [f"ld.{TWO}"] * 4),
        (
            lambda: tiles("cast", "_cast_kernel", KIND=0, JOINS=False, SUMS=False, **BOTH, **WIDE),
            [*SCALED, *BY_ROWS],
        ),
        (
            lambda: tiles("cast", "_cast_kernel", E5M2, KIND=2, JOINS=True, SUMS=True, **BOTH, **TALL),
            [*SCALED, *BY_ROWS, f"st.{ONE}"],
        ),
        (
            lambda: tiles("coded_activation", "_forward_kernel", BY_COLUMNS=True, **ACTIVATION),
            [*SCALED, *BY_ROWS],
        ),
        (
            lambda: tiles("coded_activation", "_backward_kernel", E5M2, **ACTIVATION),
            [*SCALED, *BY_ROWS * 2],
        ),
        (lambda: muon("_average_kernel", NESTEROV=True, HALVES=False), OF_A_PART),
        (lambda: muon("_apply_kernel", WRITES=True), OF_A_PART),
        (lambda: tiles("coded_loss", "_codes_kernel", E5M2, **USUAL, **LOSS), [*STATISTICS, *BY_ROWS]),
        (lambda: tiles("coded_loss", "_codes_kernel", E5M2, **ALL, **LOSS), [*STATISTICS, *BY_ROWS]),
    ],
    ids="rotate back gate gate-back norm weights turn cast parts act act-back mean add loss capped".split(),
)
def test_kernels_move_16_bytes_at_a_time(compiled: Callable[[], str], less: list[str]) -> None:
    """All but codes by rows, and what a row or a tensor has one of."""
    accesses = re.findall(r"(?:ld|st)\.global\S*", compiled())
    assert sorted(access for access in accesses if ".v4" not in access) == sorted(less)
    assert len(accesses) > len(less) + 1


@pytest.mark.skipif(version() == (0,), reason="needs Triton")
@pytest.mark.parametrize("package", ["model.fp8.kernels", "model.fused"])
def test_torch_2_11_can_write_every_kernel_into_a_graph(package: str) -> None:
    """It does not escape what it puts between three quotes there."""
    from torch._inductor.codegen.wrapper import user_defined_triton_kernel_transitive_closure_source_code
    from triton import JITFunction

    folder = importlib.import_module(f"megatron_zpp.{package}")
    modules = [
        importlib.import_module(f"{folder.__name__}.{each.name}")
        for each in pkgutil.iter_modules(folder.__path__)
    ]
    kernels = {
        value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and name.endswith("_kernel")
    }
    assert len(kernels) > 5
    for kernel in kernels:
        assert "\\" not in user_defined_triton_kernel_transitive_closure_source_code(kernel), kernel
