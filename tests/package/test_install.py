"""`pip install .` and `pip install -e .`: what is installed, and that it runs from another directory."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib import import_module
from pathlib import Path

import pytest

from megatron_zpp.version import TORCH_TESTED
from tests.config.command_line import SMALLEST
from tests.support import ROOT

SHARED = sysconfig.get_path("purelib")  # torch and the others, which are not installed again
RENAMED = (
    "pretrain preprocess build-corpus train-tokenizer evaluate sample plot huggingface torchrun "
    "build-kernels import-checkpoint report"
).split()
SCRIPTS = ("megatron-zpp", *(f"megatron-zpp-{name}" for name in RENAMED))
HELP = """
import sys
from importlib.metadata import distribution
for script in distribution("megatron-zpp").entry_points:  # in one process: each takes seconds to start
    sys.argv = [script.name, *["export"] * script.name.endswith("-huggingface"), "--help"]
    if script.name != "megatron-zpp-torchrun":
        print("\\nhelp of", script.name, flush=True)
        try:
            script.load()()
        except SystemExit as end:
            assert not end.code, script.name
"""


def environment(cache: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RANK")}
    return {**kept, "MEGATRON_ZPP_CACHE": str(cache), "OMP_NUM_THREADS": "1"}


def run(*argv: str | Path, cwd: Path, cache: Path) -> str:
    done = subprocess.run(
        list(map(str, argv)), cwd=cwd, env=environment(cache), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy without what other runs left, because an installation writes beside the sources."""
    target = tmp_path_factory.mktemp("install") / "repository"
    target.mkdir()
    files = "pyproject.toml setup.py requirements.txt MANIFEST.in README.md LICENSE pretrain_gpt.py"
    for name in files.split():
        shutil.copy(ROOT / name, target)
    for name in ("megatron_zpp", "csrc"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    return target


@pytest.fixture(scope="module", params=["whole", "editable"])
def environment_bin(request: pytest.FixtureRequest, repository: Path) -> Path:
    """bin/ of a virtual environment with the package, which sees the packages of this environment."""
    pytest.importorskip("setuptools")
    place = repository.parent / request.param
    venv.create(place, with_pip=False)
    (site,) = place.glob("lib/python*/site-packages")
    (site / "shared.pth").write_text(f"{SHARED}\n")
    how = ["-e"] if request.param == "editable" else []
    pip = [sys.executable, "-m", "pip", "--python", place / "bin/python", "install", "--quiet"]
    offline = ["--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    run(*pip, *offline, *how, repository, cwd=repository.parent, cache=repository.parent / "cache")
    return place / "bin"


@pytest.mark.nightly
def test_the_scripts_are_there_and_a_run_works_elsewhere(environment_bin: Path, tmp_path: Path) -> None:
    there = {path.name for path in environment_bin.glob("megatron-zpp-*")}
    assert {"megatron-zpp", *there} == set(SCRIPTS)
    said = run(environment_bin / "python", "-c", HELP, cwd=tmp_path, cache=tmp_path)
    assert said.count("\nhelp of ") == len(SCRIPTS) - 1
    assert all("--" in words for words in said.split("\nhelp of ")[1:])
    argv = [*SMALLEST, "--device", "cpu", "--save", "run", "--metrics-file", "metrics.jsonl"]
    run(environment_bin / "megatron-zpp", "train", *argv, cwd=tmp_path, cache=tmp_path)
    run(environment_bin / "megatron-zpp", "report", "metrics.jsonl", cwd=tmp_path, cache=tmp_path)
    assert "</html>" in (tmp_path / "report.html").read_text()
    argv = ["--load", "run", "--device", "cpu", "--prompt", "1 2", "--max-new-tokens", "2"]
    assert "1 2" in run(environment_bin / "megatron-zpp", "sample", *argv, cwd=tmp_path, cache=tmp_path)


@pytest.mark.nightly
def test_sources_of_the_kernels_are_found(environment_bin: Path, repository: Path, tmp_path: Path) -> None:
    code = "from megatron_zpp.ops.toolchain import SOURCES; print(SOURCES)"
    found = Path(run(environment_bin / "python", "-c", code, cwd=tmp_path, cache=tmp_path).strip())
    inside = environment_bin.parent if environment_bin.parent.name == "whole" else repository
    assert found.is_relative_to(inside)
    assert sorted(path.name for path in found.iterdir()) == sorted(
        path.name for path in (ROOT / "csrc").iterdir()
    )


def test_each_script_names_a_function_and_is_installed_at_night() -> None:
    tomllib = pytest.importorskip("tomllib")
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(scripts) == set(SCRIPTS)
    for place in scripts.values():
        module, _, function = place.partition(":")
        assert callable(getattr(import_module(module), function))


def test_the_package_requires_what_requirements_txt_says_and_no_version_is_named_twice(
    tmp_path: Path,
) -> None:
    """setup.py reads the groups; `torch` has the tested range's first version in place of the pinned one."""
    argv = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(argv, cwd=ROOT, check=True, capture_output=True)
    metadata = (tmp_path / "megatron_zpp.egg-info" / "PKG-INFO").read_text()
    found: dict[str, set[str]] = {}
    for package, extra in re.findall(r'^Requires-Dist: ([^;\n]+)(?:; extra == "(\w+)")?$', metadata, re.M):
        found.setdefault(extra, set()).add(package)
    assert f"torch>={TORCH_TESTED[0]}" in found[""]
    assert {name for name in found if name} == {"plots", "data", "logging", "s3", "all"}
    assert found["all"] == set.union(*(found[name] for name in found if name not in ("", "all")))
    files = [ROOT / "requirements.txt", ROOT / "docs/requirements.txt"]
    files += (ROOT / "tests").glob("requirements*.txt")
    lines = [line for file in files for line in file.read_text().splitlines()]
    pinned = [match[0] for line in lines if (match := re.match(r"[\w.-]+[=>]=\S+", line))]
    assert found[""] | found["all"] <= {*pinned, f"torch>={TORCH_TESTED[0]}"}
    names = [re.split("[=>]=", each)[0].lower() for each in pinned]
    assert len(names) == len(set(names))
    stated = (ROOT / "pyproject.toml").read_text()
    assert not [each for each in names if each != "setuptools" and re.search(rf"\b{each}[=>]=", stated)]
