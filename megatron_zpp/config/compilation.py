"""Whether layers are compiled with torch.compile."""

import importlib.util
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_zpp.config.options import Options, optional


@dataclass(frozen=True, kw_only=True)
class CompilationConfig(Options):
    """compilation: torch.compile on layers"""

    compile: bool | None = optional(
        "Fuse the operations between the matrix products of a layer with torch.compile; default: on with "
        "GPUs. Costs compile time at the start."
    )

    def wanted(self, device: str, *, apex: bool) -> bool:
        """Return whether to compile layers on `device`; `apex`: --fused-backend apex was given."""
        return device == "cuda" and not apex if self.compile is None else self.compile


def resolve_compilation(
    config: CompilationConfig, device: str, environ: Mapping[str, str], *, apex: bool
) -> tuple[bool, str | None]:
    """Return whether layers are compiled on `device` ("cpu" or "cuda"), and what is missing for it.

    Raises ValueError if compilation was requested and is impossible.
    """
    if not config.wanted(device, apex=apex):
        return False, None
    missing = _missing(device, environ)
    if missing and config.compile:
        raise config.error("compile", f"needs {missing}")
    return not missing, missing


def _missing(device: str, environ: Mapping[str, str]) -> str | None:
    """Return the requirement of torch.compile that is missing, or None.

    Triton builds a small C module per kernel; CPU kernels are C++.
    """
    language, variable, names = (
        ("C", "CC", ("cc", "gcc", "clang")) if device == "cuda" else ("C++", "CXX", ("g++", "clang++"))
    )
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        return "the package triton, which is not installed"
    given = environ.get(variable)
    tried, path = [given] if given else names, environ.get("PATH", os.defpath)
    if any(shutil.which(name, path=path) for name in tried):
        return None
    return f"a {language} compiler: {' or '.join(tried)} is not installed; {variable} names another"
