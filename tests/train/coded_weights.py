"""Engines that hold weights as 8-bit codes, and what is read from them."""

import torch
from torch import Tensor

from megatron_zpp.model.fp8.delayed import DelayedProduct
from megatron_zpp.zero.engine import ZeroEngine
from tests.train.test_fp8_scaling import batch

HELD = "--fp8-param-gather"


def products(engine: ZeroEngine) -> dict[str, DelayedProduct]:
    """By the weights that they multiply."""
    return {
        name.removesuffix("product") + "weight": module
        for name, module in engine.model.named_modules()
        if isinstance(module, DelayedProduct)
    }


def codes_of(engine: ZeroEngine) -> dict[str, Tensor]:
    """What is multiplied, of an engine that keeps weights whole; bytes."""
    found = {}
    for name, product in products(engine).items():
        assert product.codes is not None
        found[name] = product.codes.view(torch.uint8).clone()
    return found


def masters_of(engine: ZeroEngine) -> dict[str, Tensor]:
    """The fp32 weights of an engine that has all of them."""
    return {
        name: view.clone()
        for unit in engine.units
        for name, view in zip(unit.names, unit.views(unit.master), strict=True)
    }


def take_step(engine: ZeroEngine, step: int) -> tuple[float, float]:
    """Loss and norm."""
    loss = engine.accumulate(batch(step, engine.mesh.data_rank), index=0, micro_batches=1)
    return loss.item(), engine.step(1e-2).grad_norm.item()


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(codes, second[name]) for name, codes in first.items())
