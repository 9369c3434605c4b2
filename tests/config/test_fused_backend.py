"""What --fused-backend means where NVIDIA apex is installed."""

import importlib.util

import pytest

from megatron_zpp.config.fused_backend import resolve_fused_backend
from megatron_zpp.config.optimizer import OptimizerConfig
from megatron_zpp.config.zero import ZeroConfig


@pytest.mark.parametrize(
    ("hindrance", "chosen"),
    [
        ({}, "apex"),
        ({"device": "cpu"}, "torch"),
        ({"compiles": True}, "torch"),
        ({"decoupled": True}, "torch"),
        ({"zero": ZeroConfig(zero_offload_optimizer=True)}, "torch"),
    ],
)
def test_auto_takes_apex_only_where_it_can_do_what_is_asked(
    monkeypatch: pytest.MonkeyPatch, hindrance: dict[str, object], chosen: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    settings = {"zero": ZeroConfig(), "device": "cuda", "compiles": False, "decoupled": False} | hindrance
    assert resolve_fused_backend(OptimizerConfig(), **settings) == chosen
