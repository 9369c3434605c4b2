"""The order of test files: the longest first, which matters where several workers share them. Set-ups."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from benchmarks.faults.network import Link
from megatron_zpp.commands.scripts import COMMANDS

if TYPE_CHECKING:
    from tests.object_server import ObjectServer

# One of these that began last would leave the other workers without work.
LONGEST = """
    slurm/test_jobs plan/test_traffic plan/test_search faults/test_bad_inputs supervision/test_heartbeat
    zero/test_stages zero/test_tensor_parallel exchange/test_reductions zero/test_own_axes
    train/test_tensor_parallel train/test_faults zero/test_quantized checkpoint/huggingface/test_hub
    zero/test_own_modules distributed/test_rendezvous checkpoint/test_tensor_parallel commands/test_scripts
    zero/test_differences supervision/test_preflight train/test_compiling plan/test_dry_run plan/test_memory
    benchmarks/test_emulation zero/test_sublayers checkpoint/test_slow_ranks zero/test_muon
    zero/test_context_parallel train/test_fp8_differences distributed/test_lifelines api/test_states
    model/test_attention train/test_fp8_scaling commands/test_evaluate exchange/test_gathers
    model/test_compiled_functions distributed/test_exchange
""".split()


def pytest_configure() -> None:
    """Undo what a machine may hand on to programs that tests start.

    A shell that starts programs in its background has them ignore Ctrl-C, and theirs after them. And torch's
    store looks up the name of each address that connects: where no name server answers, that takes 10 s
    unless told otherwise (resolv.conf(5)).
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    # How long an example takes says more about the machine than the program; fixtures may serve all examples.
    unchecked = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    settings.register_profile("untimed", deadline=None, suppress_health_check=unchecked)
    settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    places = {tests / f"{file}.py": place for place, file in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(LONGEST)))


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command of `megatron-zpp` in this process, with arguments, and return what it prints."""

    def run(command: str, *argv: object) -> str:
        monkeypatch.setattr(sys, "argv", [f"megatron-zpp {command}", *map(str, argv)])
        capsys.readouterr()
        import_module(f"megatron_zpp.{COMMANDS[command].module}").main()
        return capsys.readouterr().out

    return run


@pytest.fixture
def link() -> Iterator[Link]:
    """The link of two nodes that are network namespaces; a test is skipped where there can be none."""
    if shutil.which("ip") is None:
        pytest.skip("needs ip")
    name = f"zpp-test-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", f"{name}-0"], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"needs network namespaces: {made.stderr.strip()}")
    found = Link(name)
    yield found
    found.remove()


@pytest.fixture(scope="module")
def server() -> Iterator["ObjectServer"]:
    """An object store, whose client the environment describes."""
    from tests.object_server import object_server  # needs packages that other tests do not

    with object_server() as server:
        yield server
