"""Multiprocessors that matmuls leave to NCCL: where, and how cuBLAS is told."""

import ctypes
import threading
from types import SimpleNamespace

import pytest
import torch

from megatron_zpp.distributed.spare_multiprocessors import (
    SpareMultiprocessors,
    count_for,
    spare_multiprocessors,
)

CPU = torch.device("cpu")


def test_a_cpu_has_none_to_spare() -> None:
    spare = spare_multiprocessors(2, CPU, {})
    assert spare.count == 0
    spare.reserve()
    spare.close()


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


def test_only_hopper_over_tcp_with_cublas_has_some_to_spare(
    cublas: Cublas, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [count_for(able, tcp) for able in ((9, 0), (8, 0)) for tcp in (True, False)] == [4, 0, 0, 0]

    def find(name: str) -> Cublas:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", find)
    assert count_for((9, 0), True) == 0


def test_an_error_of_cublas_ends_the_run(cublas: Cublas, monkeypatch: pytest.MonkeyPatch) -> None:
    spare = SpareMultiprocessors(4, CPU)
    monkeypatch.setattr(cublas, "_status", 7)
    with pytest.raises(RuntimeError, match=r"cublasSetSmCountTarget\(128\) failed with status 7"):
        spare.reserve()
    torch._C._set_sm_carveout_experimental(None)
