"""Communication plans, and ZeRO++ flags against the ranks that there are."""

from typing import Any

import pytest
import torch

from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.exchange.route import check_routes
from megatron_zpp.mesh import Mesh
from megatron_zpp.zero.communication_plan import CommunicationPlan, plan_communication
from tests.zero.engines import layout_of


def zero(**settings: object) -> ZeroConfig:
    return ZeroConfig(zero_stage=3, **settings)


@pytest.mark.parametrize("flag", ["zero_hpz_partition_size", "zero_gradient_partition_size"])
@pytest.mark.parametrize(
    ("local", "size", "ranks", "would_do"),
    [
        (8, "auto", 8, None),
        (8, "2", 2, None),
        (1, "1", 1, None),
        (4, "3", None, "1, 2, 4"),  # does not divide a node
        (4, "8", None, "1, 2, 4"),  # whole nodes
        (1, "2", None, "1"),
    ],
)
def test_groups_divide_nodes(flag: str, local: int, size: str, ranks: int | None, would_do: str) -> None:
    """Others are refused with the sizes that would do."""
    config, mesh = zero(**{flag: size}), Mesh(nodes=2, local_ranks=local)
    if ranks is None:
        named = f"--{flag.replace('_', '-')} {size}"
        plural = "s" if local > 1 else ""
        said = f"{named}: not possible on nodes of {local} data rank{plural}; give {would_do} or auto$"
        with pytest.raises(ValueError, match=said):
            check_routes(config, mesh)
        return
    check_routes(config, mesh)
    found = config.hpz_ranks if flag == "zero_hpz_partition_size" else config.gradient_ranks
    assert found(local) == ranks


def test_groups_of_weights_and_of_gradients_need_not_nest() -> None:
    check_routes(
        zero(zero_hpz_partition_size="2", zero_gradient_partition_size="3"), Mesh(nodes=2, local_ranks=6)
    )


def test_differences_need_groups_that_hold_a_reference() -> None:
    config = zero(zero_quantized_weights=True, zero_quantized_weights_format="delta4")
    with pytest.raises(ValueError, match="--zero-hpz-partition-size auto, 2, 4; not 1"):
        check_routes(config, Mesh(nodes=2, local_ranks=4))


def test_the_head_of_a_log_says_what_is_on() -> None:
    everything = zero(
        zero_quantized_weights=True,
        zero_hpz_partition_size="auto",
        zero_quantized_gradients=True,
        zero_quantized_gradients_format="rotated4",
    )
    assert everything.describe() == "ZeRO stage 3 + qwZ int8 + hpZ auto + qgZ rotated4"
    assert zero().describe() == zero().describe(1) == "ZeRO stage 3"
    alone = "ZeRO stage 3 + qgZ int4 (one rank: nothing to communicate)"
    assert zero(zero_quantized_gradients=True).describe(1) == alone
    assert zero(zero_quantized_gradients=True).describe(2) == "ZeRO stage 3 + qgZ int4"


GRIDS = ((1, 1), (1, 2), (1, 4), (4, 1), (2, 2), (3, 2), (2, 8))


def plan_of(nodes: int, local: int, *, copy_engines: bool = False, **settings: Any) -> CommunicationPlan:
    """Of the last rank."""
    mesh = Mesh(nodes=nodes, local_ranks=local, rank=nodes * local - 1)
    return plan_communication(
        ZeroConfig(**settings),
        mesh,
        [layout_of(mesh, size) for size in (700, 5001, 129, 5001, 5001, 1)],
        compute_dtype=torch.bfloat16,
        reduce_in_bf16=False,
        copy_engines=copy_engines,
    )


@pytest.mark.parametrize("more", [{}, {"zero_quantized_gradients": True}])
def test_peer_writes_are_only_used_inside_one_node(more: dict[str, Any]) -> None:
    """They need no buffer to send from."""
    for nodes, local in GRIDS:
        used, without = (plan_of(nodes, local, copy_engines=each, zero_stage=1, **more) for each in (1, 0))
        ((route, layouts),) = used.reductions.items()
        writes = used.peer_writes(route)
        assert writes == (nodes == 1 < local and not more)
        assert not without.peer_writes(route)
        sent = max(layout.numel for layout in layouts) * used.units[0].gradient_dtype.itemsize
        assert without.arena_bytes - used.arena_bytes == (sent if writes else 0)
