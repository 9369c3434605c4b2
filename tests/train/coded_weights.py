"""Engines that hold weights as 8-bit codes, and what is read from them."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.checkpoint.load import load_checkpoint
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.model.fp8.delayed import DelayedProduct
from megatron_zpp.zero.engine import ZeroEngine
from tests.checkpoint.saving import TOKENIZER, save
from tests.model.test_fp8_delayed import nearest
from tests.train.test_fp8_scaling import batch, engine_of, state_of

HELD, E4M3 = "--fp8-param-gather", torch.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Measured:
    """Of one rank: losses and norms of steps, bytes sent, and bytes of memory."""

    numbers: list[float]
    sent: tuple[int, int]  # inside nodes and between them, in a step of one micro-batch
    weights: int  # slots, and what is sent or kept outside of them
    secondary: int
    multiplied: list[bytes] = dataclasses.field(default_factory=list)  # the codes after each step


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
        found[name] = product.codes.view(torch.uint8).clone()
    return found


def masters_of(engine: ZeroEngine) -> dict[str, Tensor]:
    """The fp32 weights of an engine that has all of them."""
    return {
        name: view.clone()
        for unit in engine.units
        for name, view in zip(unit.names, unit.views(unit.master), strict=True)
    }


def scales_of(engine: ZeroEngine) -> dict[str, float]:
    """By weight, those that the state has."""
    state = state_of(engine)
    return {name: state[name.removesuffix(".weight")]["scales"][1] for name in products(engine)}


def check_codes(engine: ZeroEngine, scales: dict[str, float] | None = None) -> None:
    """Require codes of the master weights; without `scales` by 448 over the largest magnitude of each."""
    masters = masters_of(engine)
    for name, codes in codes_of(engine).items():
        scale = torch.tensor(448.0) / masters[name].abs().max() if scales is None else scales[name]
        assert torch.equal(codes, nearest(masters[name] * torch.as_tensor(scale), E4M3)), name


def take_step(engine: ZeroEngine, step: int) -> tuple[float, float]:
    """Loss and norm."""
    loss = engine.accumulate(batch(step, engine.mesh.data_rank), index=0, micro_batches=1)
    return loss.item(), engine.step(1e-2).grad_norm.item()


def steps(engine: ZeroEngine) -> Iterator[list[float]]:
    """Steps of one micro-batch, of two, and of one: the losses and the norm of each."""
    for step, count in enumerate((1, 2, 1)):
        numbers = []
        for index in range(count):
            tokens = batch(step + 5 * index, engine.mesh.data_rank)
            loss = engine.accumulate(tokens, index=index, micro_batches=count)
            numbers.append(engine.mean_over_ranks(loss).item())
        yield [*numbers, engine.step(1e-2).grad_norm.item()]


def resumed(
    topology: Topology,
    directory: str,
    flags: Sequence[str],
    at_save: Callable[[ZeroEngine], Any] = lambda engine: None,
) -> tuple[list[Any], list[Any], Any]:
    """Steps 3 and 4 of a run, those of one that begins with what it saved after step 2; `at_save` of it."""
    whole = engine_of(topology, HELD, *flags)
    for step in range(2):
        take_step(whole, step)
    save(Path(directory), whole)
    seen = at_save(whole)
    expected = [take_step(whole, step) for step in (2, 3)]
    whole.close()
    again = engine_of(topology, HELD, *flags)
    take_step(again, 5)  # whose exchanges may be under way when the checkpoint is loaded
    load_checkpoint(Path(directory) / "iter_0000005", again, TOKENIZER, with_optimizer=True)
    found = [take_step(again, step) for step in (2, 3)]
    again.close()
    return expected, found, seen
