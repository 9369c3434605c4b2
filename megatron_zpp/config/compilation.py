"""Whether torch.compile makes kernels for this model, and where they are kept."""

import importlib.util
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_zpp.config.options import Options, option, option_error


@dataclass(frozen=True, kw_only=True)
class CompilationConfig(Options):
    """compilation: kernels made for this model"""

    compile: bool | None = option(
        None, "Let torch.compile fuse what layers do between matrix products; default on GPUs."
    )
    compile_cache_dir: str | None = option(
        None,
        "Where its kernels are kept for later runs; default TORCHINDUCTOR_CACHE_DIR, else torch_compile "
        "beside our own kernels.",
        metavar="DIR",
    )

    def check(self) -> None:
        """What is not made is not kept."""
        if self.compile is False and self.compile_cache_dir is not None:
            raise option_error("--compile-cache-dir", self.compile_cache_dir, "--no-compile makes no kernels")

    def wanted(self, device: str, *, apex: bool) -> bool:
        """Whether layers are to be compiled on `device`; `apex` says that --fused-backend asks for that.

        Raises ValueError for settings that contradict each other.
        """
        if apex and self.compile:
            fix = "torch.compile makes LayerNorm part of what it fuses; leave out --fused-backend apex"
            raise option_error("--compile", "(given)", fix)
        return device == "cuda" and not apex if self.compile is None else self.compile


@dataclass(frozen=True)
class Compilation:
    """What --compile comes to on a device; `missing` is what there would have to be."""

    wanted: bool
    missing: str | None


def resolve_compilation(
    config: CompilationConfig, device: str, environ: Mapping[str, str], *, apex: bool
) -> Compilation:
    """What --compile means here, on `device` ("cpu" or "cuda"), where torch.compile needs another compiler.

    Raises ValueError when it is asked for and cannot serve.
    """
    if not config.wanted(device, apex=apex):
        if config.compile_cache_dir is not None:
            fix = f"nothing is compiled on a {device} unless --compile says so"
            raise option_error("--compile-cache-dir", config.compile_cache_dir, fix)
        return Compilation(False, None)
    missing = _missing(device, environ)
    if missing and config.compile:
        raise option_error("--compile", "(given)", f"needs {missing}")
    return Compilation(not missing, missing)


def _missing(device: str, environ: Mapping[str, str]) -> str | None:
    """What torch.compile needs beside torch: Triton builds a small C module a kernel, CPU kernels are C++."""
    language, variable, names = (
        ("C", "CC", ("cc", "gcc", "clang")) if device == "cuda" else ("C++", "CXX", ("g++", "clang++"))
    )
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        return "the package triton, which is not installed"
    given = environ.get(variable)
    if not any(
        shutil.which(name, path=environ.get("PATH", os.defpath)) for name in ([given] if given else names)
    ):
        return f"a {language} compiler: {given or ' or '.join(names)} is not there; {variable} names another"
    return None
