"""Which device a rank takes."""

from pathlib import Path

import pytest
import torch

from megatron_zpp.distributed import process_group
from megatron_zpp.distributed.process_group import select_device
from megatron_zpp.distributed.topology import Topology


def test_a_gpu_that_torch_does_not_see_is_not_left_out_in_silence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As with the build of torch for CPUs, which launch/setup_venv.sh installs on a login node."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(process_group, "_GPUS", f"{tmp_path}/nvidia[0-9]*")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "nvidiactl").touch()
    assert select_device("auto", Topology()).type == "cpu"
    (tmp_path / "nvidia3").touch()
    assert select_device("cpu", Topology()).type == "cpu"
    with pytest.raises(ValueError, match=r"^--device auto: torch \S+ does not see .*/nvidia3; install torch"):
        select_device("auto", Topology())
    for hidden in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert select_device("auto", Topology()).type == "cpu"
