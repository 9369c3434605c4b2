"""The library is built once per version of the sources, by one process, in a private directory."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_zpp.native.cache import BuildError, cache_directory
from megatron_zpp.ops.build import build, check_device_code
from megatron_zpp.ops.toolchain import cuda_problem, find_nvcc, find_toolchain
from tests.support import ROOT, environment, wait_until

SOURCE = 'extern "C" int answer() { return 42; }\n'


class Site:
    """A source directory, a cache and a C++ compiler that hangs while a file exists."""

    def __init__(self, root: Path) -> None:
        self.sources, self.cache, self.hang, self.started = (
            root / n for n in ("src", "cache", "hang", "started")
        )
        self.sources.mkdir()
        (self.sources / "answer.cpp").write_text(SOURCE)
        self.cxx = root / "compiler"
        self.cxx.write_text(
            "#!/bin/sh\n"
            f'case "$*" in *--version*) ;; *) touch "{self.started}"\n'
            f'while [ -e "{self.hang}" ]; do sleep 0.05; done;; esac\n'
            'exec g++ "$@"\n'
        )
        self.cxx.chmod(0o755)
        self.environ = dict(os.environ, MEGATRON_ZPP_CACHE=str(self.cache), CXX=str(self.cxx))
        self.said: list[str] = []

    def build(self, **settings: object) -> Path:
        return build(say=self.said.append, sources=self.sources, environ=self.environ, **settings)

    def wait_until_compiling(self) -> None:
        wait_until(self.started.exists)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def answer(library: Path) -> int:
    return ctypes.CDLL(str(library)).answer()


def test_a_library_is_built_once_and_again_when_something_changes(site: Site) -> None:
    first = site.build()
    assert answer(first) == 42
    assert len(site.said) == 1
    assert site.build() == first
    assert len(site.said) == 1  # it was found
    (site.sources / "answer.h").write_text("// a header counts\n")
    second = site.build()
    assert second != first
    site.cxx.write_text(site.cxx.read_text().replace('exec g++ "$@"', 'g++ "$@" | sed "1s/^/other /"'))
    third = site.build()
    assert third not in (first, second)
    site.sources = site.sources.rename(site.sources.with_name("moved"))  # their place does not count
    assert site.build() == third
    assert not list(site.cache.glob("*building*"))
    assert site.cache.stat().st_mode & 0o777 == 0o700


def test_a_failure_shows_the_compilers_words_and_where_the_rest_is(site: Site) -> None:
    (site.sources / "broken.cpp").write_text("int broken( { return 1; }\n")
    with pytest.raises(BuildError, match=r"broken\.cpp") as raised:
        site.build()
    message = str(raised.value)
    assert "error:" in message
    log = next(site.cache.glob("*.log"))
    assert str(log) in message.splitlines()[0]
    assert "broken.cpp" in log.read_text()
    assert not list(site.cache.glob("*.so"))
    (site.sources / "broken.cpp").unlink()
    assert answer(site.build()) == 42


def of_another_user(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can make a directory of another user")
    path.mkdir(mode=0o700)
    os.chown(path, 12345, -1)


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (of_another_user, "belongs to user 12345"),
        (lambda path: path.mkdir() or path.chmod(0o777), "others can write to .*cache: chmod 700 it"),
        (lambda path: path.symlink_to(path.parent / "src"), "is a symbolic link"),
        (lambda path: path.symlink_to("/nowhere"), "cannot be created|is a symbolic link"),
        (lambda path: path.write_text("a file"), "cannot be created"),
    ],
    ids=["another-user", "world-writable", "symbolic-link", "dangling-link", "file"],
)
def test_a_cache_that_is_not_ours_alone_is_refused(site: Site, prepare: object, words: str) -> None:
    prepare(site.cache)
    with pytest.raises(BuildError, match=words) as raised:
        site.build()
    assert "\n" not in str(raised.value)


def test_a_cache_below_a_directory_that_others_can_change_is_refused(site: Site) -> None:
    above = site.cache.parent / "above"
    site.cache = above / "deep" / "cache"
    site.environ["MEGATRON_ZPP_CACHE"] = str(site.cache)
    above.mkdir()
    for mode in (0o777, 0o775):
        above.chmod(mode)
        with pytest.raises(BuildError, match=f"others can write to {above} .*: chmod go-w {above}, or set"):
            site.build()
    above.chmod(0o1777)  # sticky, as /tmp
    assert answer(site.build()) == 42
    if os.geteuid() == 0:
        os.chown(above, 12345, -1)
        with pytest.raises(BuildError, match=f"{above}, above .*, belongs to user 12345"):
            site.build()


def test_where_the_cache_lies(tmp_path: Path) -> None:
    home, xdg = {"HOME": str(tmp_path)}, {"XDG_CACHE_HOME": str(tmp_path / "xdg")}
    assert cache_directory(home) == tmp_path / ".cache" / "megatron_zpp"
    assert cache_directory({**home, **xdg}) == tmp_path / "xdg" / "megatron_zpp"
    chosen = tmp_path / "deep" / "chosen"
    assert cache_directory({**home, **xdg, "MEGATRON_ZPP_CACHE": str(chosen)}) == chosen
    assert chosen.stat().st_mode & 0o777 == 0o700


def test_missing_tools_are_named(site: Site, tmp_path: Path) -> None:
    site.environ |= {"PATH": str(tmp_path), "CXX": ""}
    with pytest.raises(BuildError, match=r"C\+\+ compiler g\+\+ is not installed"):
        site.build()
    site.environ["CXX"] = "no-such-compiler"
    with pytest.raises(BuildError, match="C\\+\\+ compiler no-such-compiler is not installed"):
        site.build()
    site.cxx.write_text("#!/bin/sh\necho no licence >&2; exit 1\n")
    site.environ["CXX"] = str(site.cxx)
    with pytest.raises(BuildError, match="--version failed: no licence"):
        site.build()


def test_nvcc_is_that_of_cuda_home_or_else_of_the_path(tmp_path: Path) -> None:
    for name in ("home/bin", "path"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "nvcc").touch(0o755)
    path = {"PATH": str(tmp_path / "path")}
    assert find_nvcc(path) == str(tmp_path / "path" / "nvcc")
    assert find_nvcc(path | {"CUDA_HOME": str(tmp_path / "home")}) == str(tmp_path / "home" / "bin" / "nvcc")
    assert find_nvcc(path | {"CUDA_HOME": str(tmp_path)}) == str(tmp_path / "path" / "nvcc")


def test_a_killed_builder_blocks_nobody_and_a_living_one_not_for_ever(site: Site) -> None:
    """Waiting for the process that holds the lock is limited; once it is killed, the next one builds."""
    site.hang.touch()
    program = (
        "from pathlib import Path\nfrom megatron_zpp.ops.build import build\n"
        f"build(say=print, sources=Path({str(site.sources)!r}))"
    )
    extra = {name: site.environ[name] for name in ("MEGATRON_ZPP_CACHE", "CXX")}
    builder = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=environment(**extra))
    try:
        site.wait_until_compiling()
        begin = time.monotonic()
        with pytest.raises(BuildError, match=f"process {builder.pid} on .* over 0.3 s") as raised:
            site.build(wait_seconds=0.3)
        assert time.monotonic() - begin < 60
        assert "MEGATRON_ZPP_CACHE" in str(raised.value)
        assert site.said == [
            f"waiting for process {builder.pid} on {os.uname().nodename}, which is building the kernels"
        ]
        assert not list(site.cache.glob("*.so"))
    finally:
        builder.send_signal(signal.SIGKILL)
        builder.wait()
    assert len(list(site.cache.glob("*.building-*"))) == 1
    site.hang.unlink()
    assert answer(site.build(wait_seconds=120)) == 42
    assert not list(site.cache.glob("*.building-*"))


def test_a_slow_build_shows_its_progress_and_who_waits_loads_what_it_built(site: Site) -> None:
    """A minute of silence looks like a hang. Threads exclude each other like processes, by the open file."""
    site.hang.touch()
    waiter_said: list[str] = []
    built: list[Path] = []
    of_both = {"sources": site.sources, "environ": site.environ, "every_seconds": 0.05}
    threads = [
        threading.Thread(target=lambda said=said: built.append(build(say=said.append, **of_both)))
        for said in (site.said, waiter_said)
    ]
    threads[0].start()
    site.wait_until_compiling()
    threads[1].start()
    wait_until(lambda: len(site.said) >= 3 and len(waiter_said) >= 2)
    site.hang.unlink()
    for thread in threads:
        thread.join(60)
    assert re.fullmatch(r"compiling the kernels: 0 of \d+ files done, 0 s so far", site.said[1])
    assert re.fullmatch(r"built the kernels in \d+ s", site.said[-1])
    assert re.fullmatch(r"waiting for process \d+ on \S+, which is building the kernels", waiter_said[0])
    assert waiter_said[1] == f"{waiter_said[0]}, 0 s so far"
    assert len(built) == 2
    assert built[0] == built[1]
    assert not [line for line in waiter_said if line.startswith("building")]


def test_the_check_of_device_code_says_when_there_is_no_nvcc(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_zpp.ops import build as module

    monkeypatch.setattr(module, "find_nvcc", lambda environ: None)
    check_device_code(site.said.append, sources=site.sources, environ=site.environ)
    assert site.said == ["csrc: nvcc is not installed; device code was not compiled"]


def test_a_toolkit_of_another_cuda_than_torchs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 11.8, V11.8.89\n")
    nvcc.chmod(0o755)
    environ = {**os.environ, "CUDA_HOME": str(tmp_path)}
    monkeypatch.setattr("torch.version.cuda", "13.0")
    assert "is of CUDA 11.8 but torch of CUDA 13.0" in cuda_problem(environ)
    assert find_toolchain(environ).nvcc is None
    monkeypatch.setattr("torch.version.cuda", "11.4")
    assert cuda_problem(environ) is None
