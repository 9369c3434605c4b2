"""--zero-spare-multiprocessors: what auto chooses, and what is refused. tests/gpu looks at the products."""

import pytest
import torch

from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.nccl_network import NcclSettings, Network, other_network
from megatron_zpp.distributed.spare_multiprocessors import auto_count, spare_multiprocessors
from megatron_zpp.distributed.topology import Topology

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("capability", "over_tcp", "count"),
    [((9, 0), True, 4), ((9, 0), False, 0), ((8, 0), True, 0), ((10, 0), True, 0)],
)
def test_auto_is_for_what_was_measured(
    capability: tuple[int, int], over_tcp: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert auto_count(capability, over_tcp) == count


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


@pytest.mark.parametrize("value", ["-1", "four", "1.5", "1000"])
def test_what_is_no_number_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=rf"^--zero-spare-multiprocessors {value}: must be auto or a number"):
        ZeroConfig(zero_spare_multiprocessors=value)
