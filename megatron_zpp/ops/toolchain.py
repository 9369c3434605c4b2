"""Find the compilers of this machine, and make the commands that compile csrc/ to a library."""

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_zpp.native.cache import BuildError

_PACKAGE = Path(__file__).resolve().parents[1]
_INSTALLED = _PACKAGE / "csrc"
SOURCES = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.with_name("csrc")  # the latter in the repository

# Results must not depend on the compiler: no contraction of a * b + c, no fast-math.
HOST_FLAGS = ("-O3", "-std=c++20", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-Wall")
DEVICE_FLAGS = (
    "-O3",
    "-std=c++17",
    "--fmad=false",
    "--threads=2",  # both architectures in parallel, because the slowest file determines the time of a build
    "-Xcompiler=-fPIC,-ffp-contract=off",
)
ARCHITECTURES = (
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90,code=[sm_90,compute_90]",  # PTX too, which later devices compile at load time
)
CHECKED = ("80", "86", "89", "90", "100", "120")  # for which device code is compiled without a GPU
LEAST_CAPABILITY = (8, 0)  # the compute capability of the oldest of them


@dataclass(frozen=True)
class Toolchain:
    """Compilers and their versions; `nvcc` is None if there is a `cuda_problem`."""

    cxx: str
    cxx_version: str
    ninja: str
    nvcc: str | None = None
    nvcc_version: str = ""
    cuda_home: Path | None = None


@dataclass(frozen=True)
class Command:
    """A call of a compiler: the file that it writes, and the outputs of other commands that it needs."""

    output: str
    needs: tuple[str, ...]
    argv: tuple[str, ...]


def find_toolchain(environ: Mapping[str, str]) -> Toolchain:
    """The compilers named by CXX, CUDA_HOME and PATH. Raises BuildError if CXX or ninja is missing."""
    path = environ.get("PATH", os.defpath)
    cxx = shutil.which(environ.get("CXX") or "g++", path=path)
    if cxx is None:
        raise BuildError(f"the C++ compiler {environ.get('CXX') or 'g++'} is not installed")
    ninja = shutil.which("ninja", path=f"{path}{os.pathsep}{Path(sys.executable).parent}")
    if ninja is None:
        raise BuildError("ninja is not installed (pip install ninja)")
    version = _run(cxx, "--version").splitlines()[0]
    nvcc = find_nvcc(environ) if cuda_problem(environ) is None else None
    if nvcc is None:
        return Toolchain(cxx, version, ninja)
    return Toolchain(cxx, version, ninja, nvcc, nvcc_version(nvcc), _cuda_home(nvcc))


def cuda_problem(environ: Mapping[str, str]) -> str | None:
    """The reason why no device code can be built for this torch, or None."""
    nvcc = find_nvcc(environ)
    if torch.version.cuda is None:
        return "this torch has no CUDA"
    if nvcc is None:
        return "nvcc is not installed (set CUDA_HOME or PATH)"
    version = nvcc_version(nvcc)
    if version.split(".")[0] == torch.version.cuda.split(".")[0]:
        return None
    return f"{nvcc} is of CUDA {version} but torch of CUDA {torch.version.cuda} (set CUDA_HOME)"


def capability_problem(capability: tuple[int, int]) -> str | None:
    """The reason why device code does not run on a GPU of this compute capability, or None."""
    if capability >= LEAST_CAPABILITY:
        return None
    least, has = (".".join(map(str, each)) for each in (LEAST_CAPABILITY, capability))
    return f"they need a GPU of compute capability {least} or later; this one has {has}"


def find_nvcc(environ: Mapping[str, str]) -> str | None:
    """CUDA's compiler, from CUDA_HOME, PATH or the usual directory of CUDA; None if not found."""
    folders = [f"{environ['CUDA_HOME']}/bin"] if environ.get("CUDA_HOME") else []
    folders += [environ.get("PATH", os.defpath), "/usr/local/cuda/bin"]
    return shutil.which("nvcc", path=os.pathsep.join(folders))


def nvcc_version(nvcc: str) -> str:
    """The version of CUDA, such as 13.0. Raises BuildError."""
    output = _run(nvcc, "--version")
    release = re.search(r"release (\d+\.\d+)", output)
    if release is None:
        raise BuildError(f"{nvcc} --version prints no release: {output.strip()[-200:]}")
    return release.group(1)


def library_commands(tools: Toolchain, sources: Path, library: str) -> list[Command]:
    """The commands that compile csrc/ to `library`, with device code if nvcc is available."""
    compiler = (tools.cxx, *HOST_FLAGS, *_torch_flags(tools))
    commands = [_object(sources, file, compiler) for file in _files(sources, "cpp")]
    if tools.nvcc is not None:
        commands += device_commands(tools.nvcc, tools.cxx, sources)
    if not commands:
        raise BuildError(f"{sources} contains no sources")
    objects = tuple(command.output for command in commands)
    return [*commands, Command(library, objects, (tools.cxx, *objects, *_link_flags(tools), "-o", library))]


def device_commands(
    nvcc: str,
    cxx: str,
    sources: Path,
    architectures: Sequence[str] = ARCHITECTURES,
    flags: Sequence[str] = (),
) -> list[Command]:
    """The commands that compile every .cu file for `architectures`, with additional `flags`."""
    compiler = (nvcc, f"-ccbin={cxx}", *DEVICE_FLAGS, *architectures, *flags)
    return [_object(sources, file, compiler) for file in _files(sources, "cu")]


def check_commands(nvcc: str, cxx: str, sources: Path) -> tuple[list[Command], tuple[str, ...]]:
    """The commands that compile every .cu file for all of CHECKED that nvcc knows, unoptimised if it can.

    Returns them and the architectures. Raises BuildError.
    """
    known = _run(nvcc, "--list-gpu-code").split()
    found = tuple(each for each in CHECKED if f"sm_{each}" in known)
    codes = [f"-gencode=arch=compute_{each},code=sm_{each}" for each in found]
    flags = ("-Ofc=max",) if "-Ofc" in _run(nvcc, "--help") else ()
    return device_commands(nvcc, cxx, sources, codes, flags), found


def ninja_text(commands: list[Command]) -> str:
    """The contents of build.ninja for the commands."""
    lines = ["rule run", "  command = $line", "  description = $what", ""]
    for command in commands:
        line = shlex.join(command.argv).replace("$", "$$")
        lines += [f"build {' '.join((f'{command.output}: run', *command.needs))}", f"  line = {line}"]
        lines += [f"  what = {Path(command.argv[0]).name} {command.output}"]
    return "\n".join(lines) + "\n"


def build_key(tools: Toolchain, sources: Path, commands: list[Command]) -> str:
    """A name for the library that changes with everything that its bytes depend on."""
    files = [file for suffix in ("cpp", "cu", "cuh", "h") for file in _files(sources, suffix)]
    facts = {
        "sources": {str(p.relative_to(sources)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files},
        "torch": [torch.__version__, torch.version.cuda, torch.compiled_with_cxx11_abi()],
        "compilers": [tools.cxx_version, tools.nvcc_version],
        "processor": _processor(),
        "commands": [[word.replace(str(sources), "csrc") for word in command.argv] for command in commands],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]


def _object(sources: Path, file: Path, compiler: tuple[str, ...]) -> Command:
    output = str(file.relative_to(sources)).replace("/", ".") + ".o"
    return Command(output, (), (*compiler, f"-I{sources}", "-c", str(file), "-o", output))


def _files(sources: Path, suffix: str) -> list[Path]:
    return sorted(sources.rglob(f"*.{suffix}"))


def _torch_root() -> Path:
    return Path(torch.__file__).resolve().parent


def _torch_flags(tools: Toolchain) -> tuple[str, ...]:
    includes = [_torch_root() / "include", _torch_root() / "include/torch/csrc/api/include"]
    flags = [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    if torch.backends.openmp.is_available():
        flags.append("-fopenmp")  # at::parallel_for needs it to use more than one core
    if tools.cuda_home is not None:
        includes.append(tools.cuda_home / "include")
        flags.append("-DWITH_CUDA")
    # As system headers, whose warnings are not shown.
    return (*flags, *(part for include in includes for part in ("-isystem", str(include))))


def _link_flags(tools: Toolchain) -> tuple[str, ...]:
    """Flags of the linker. OpenMP's runtime is torch's, because a second one would start more threads."""
    libraries = _torch_root() / "lib"
    flags = ["-shared", f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch_cpu", "-lc10"]
    if tools.cuda_home is not None:
        flags += [f"-L{tools.cuda_home / 'lib64'}", f"-L{tools.cuda_home / 'lib'}"]
        flags += ["-ltorch_cuda", "-lc10_cuda", "-lcudart"]
    return tuple(flags)


def _cuda_home(nvcc: str) -> Path:
    """The directory of CUDA's headers and libraries as nvcc reports it; nvcc may be a wrapper elsewhere."""
    top = re.search(r"^#\$ TOP=(.*)$", _run(nvcc, "--dryrun", "-c", "-x", "cu", "/dev/null"), re.MULTILINE)
    return Path(top.group(1) if top else Path(nvcc).parent.parent).resolve()


def _processor() -> list[str]:
    """The properties of the processor that -march=native depends on."""
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        first = []
    return [platform.machine(), *(line for line in first if line.split(":")[0].strip() in wanted)]


def _run(*argv: str) -> str:
    """The output of a command on both streams. Raises BuildError if it fails."""
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"{' '.join(argv)} failed: {getattr(error, 'output', error)}") from error
    return done.stdout
