"""--zero-spare-multiprocessors: what auto chooses, and what is refused. tests/gpu looks at the products."""

import ctypes
import threading
from types import SimpleNamespace

import pytest
import torch

from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.nccl_network import NcclSettings, Network, other_network
from megatron_zpp.distributed.spare_multiprocessors import (
    SpareMultiprocessors,
    spare_multiprocessors,
)
from megatron_zpp.distributed.topology import Topology

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("variables", "network", "reason"),
    [
        ({}, Network(), None),
        ({"NCCL_SOCKET_NTHREADS": "2", "NCCL_NSOCKS_PERTHREAD": "2"}, Network(), None),
        ({"NCCL_NET": "IB"}, Network(), "NCCL_NET is IB (environment)"),
        (
            {},
            Network(active_ports=("mlx5_0 port 1",)),
            "mlx5_0 port 1 is an active port of InfiniBand or RoCE",
        ),
    ],
)
def test_what_is_tcp(variables: dict[str, str], network: Network, reason: str | None) -> None:
    """How many sockets NCCL has does not matter here; it does for --nccl-sockets."""
    settings = NcclSettings({name: (value, "environment") for name, value in variables.items()})
    assert other_network(settings, network) == reason


@pytest.mark.parametrize("setting", ["auto", "0"])
def test_a_cpu_has_none_to_spare(setting: str) -> None:
    spare = spare_multiprocessors(setting, Topology(0, 4, 0, 2), CPU, {})
    assert spare.count == 0
    spare.reserve()
    spare.close()


def test_a_number_is_refused_on_a_cpu() -> None:
    with pytest.raises(ValueError, match=r"^--zero-spare-multiprocessors 4: needs GPUs, .* on a cpu; give 0"):
        spare_multiprocessors("4", Topology(), CPU, {})


class Cublas:
    """Stands for cuBLAS, which a machine without a GPU lacks: records what each thread tells it."""

    def __init__(self, status: int = 0) -> None:
        self._status = status
        self.told: list[tuple[bool, int]] = []  # by the main thread?, the target

    def cublasSetSmCountTarget(self, handle: ctypes.c_void_p, target: ctypes.c_int) -> int:
        self.told.append((threading.current_thread() is threading.main_thread(), target.value))
        return self._status


@pytest.fixture
def cublas(monkeypatch: pytest.MonkeyPatch) -> Cublas:
    library = Cublas()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 1)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return library


def test_each_thread_tells_cublas_once_and_all_is_undone(
    cublas: Cublas, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every rank would write torch's warning, which says that the setting is experimental."""
    spare = SpareMultiprocessors(4, CPU)
    assert torch._C._get_sm_carveout_experimental() == 4
    for _ in range(2):
        spare.reserve()
        other = threading.Thread(target=spare.reserve)
        other.start()
        other.join()
    assert cublas.told == [(True, 128), (False, 128), (False, 128)]  # each thread is a new one
    loss = torch.ones((), requires_grad=True) * 2
    spare.reserve_in_backward_of(loss)
    loss.backward()
    spare.close()
    assert torch._C._get_sm_carveout_experimental() is None
    assert {target for _, target in cublas.told[3:]} == {0}
    assert "carveout" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("count", "library", "message"),
    [
        (132, Cublas(), "132: the GPU has 132 multiprocessors; give fewer"),
        (4, None, "4: needs the library of cuBLAS .*; give 0"),
    ],
)
def test_what_a_gpu_cannot_spare_is_refused(
    cublas: Cublas, monkeypatch: pytest.MonkeyPatch, count: int, library: Cublas | None, message: str
) -> None:
    def find(name: str) -> Cublas:
        if library is None:
            raise OSError(f"{name}: cannot open shared object file")
        return library

    monkeypatch.setattr(ctypes, "CDLL", find)
    with pytest.raises(ValueError, match=f"^--zero-spare-multiprocessors {message}"):
        SpareMultiprocessors(count, CPU)


def test_an_error_of_cublas_ends_the_run(cublas: Cublas, monkeypatch: pytest.MonkeyPatch) -> None:
    spare = SpareMultiprocessors(4, CPU)
    monkeypatch.setattr(cublas, "_status", 7)
    with pytest.raises(RuntimeError, match=r"cublasSetSmCountTarget\(128\) failed with status 7"):
        spare.reserve()
    torch._C._set_sm_carveout_experimental(None)


@pytest.mark.parametrize("value", ["-1", "four", "1.5", "00", "04", "100"])
def test_what_is_no_number_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=rf"^--zero-spare-multiprocessors {value}: must be auto or a number"):
        ZeroConfig(zero_spare_multiprocessors=value)
