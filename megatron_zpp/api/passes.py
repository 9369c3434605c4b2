"""Refuses batches, losses and steps that would train otherwise than what was called for."""

import hashlib
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_zpp.config.options import option_error
from megatron_zpp.zero.read_guard import Unreadable, frozen_late
from megatron_zpp.zero.sharded_unit import Unit


class MicroBatchOrder:
    """Which micro-batches a step has so far: each must come once, in order, and all of them."""

    def __init__(self) -> None:
        self._done, self._count, self._weighted = 0, 1, False

    def check(self, index: int, micro_batches: int, weight: float | None, *, unfinished: bool) -> None:
        """Raise ValueError unless micro-batch `index` may come now. The first one begins a step anew.

        `unfinished`: the newest backward has raised, so that a part of its gradients is counted.
        """
        if not 0 <= index < micro_batches:
            raise option_error(
                "index", index, f"must be 0 to micro_batches - 1, which is {micro_batches - 1}"
            )
        if index == 0:
            if self._done == self._count:
                warnings.warn(
                    "accumulate: micro-batch 0 drops the gradients since the last step, which no step has "
                    "taken; to add gradients up give index and micro_batches",
                    stacklevel=3,
                )
            self._done, self._count, self._weighted = 0, micro_batches, weight is not None
        elif unfinished:
            fix = "the backward of this step has raised with a part of the gradients; begin at index 0 again"
            raise option_error("index", index, fix)
        elif (index, micro_batches) != (self._done, self._count):
            fix = f"the step has {self._done} of {self._count} micro-batches; each comes once, in order"
            raise option_error("index", f"{index} of {micro_batches}", fix)
        elif (weight is not None) is not self._weighted:
            raise option_error("weight", weight, "give one to each micro-batch of a step, or to none")

    def count(self) -> None:
        """The gradients of one more micro-batch are there."""
        self._done += 1

    def check_whole(self) -> None:
        """Raise ValueError unless all micro-batches of the step are there."""
        if self._done < self._count:
            missing = f"{self._done} of {self._count} micro-batches are there"
            raise ValueError(f"step: {missing}; call accumulate, which runs the backward, for each first")


class UnitOrder:
    """Whether ranks have sent units in the same order, read without waiting for the device."""

    def __init__(self) -> None:
        self._in_order: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def note(self, in_order: Tensor | None) -> None:
        """Start to read whether (), in the newest step."""
        self._in_order = None if in_order is None else in_order.to("cpu", non_blocking=True)
        if in_order is not None and in_order.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def check(self) -> None:
        """Raise RuntimeError if they have not, as far as this is known by now."""
        if self._in_order is None or (self._copied is not None and not self._copied.query()):
            return
        if not self._in_order:
            raise RuntimeError(
                "step: is skipped, because ranks have read units or made their gradients in different "
                "orders, or differ in the number of micro-batches or in whether these have a weight; all "
                "must use the same parameters in a micro-batch: add 0 times the others to what a unit returns"
            )


def check_batch(batch: Any) -> None:
    """Raise ValueError unless `batch` is tokens, or a sequence of what the forward takes."""
    what = "is no batch: give (B, T + 1) tokens, or a sequence of the forward's arguments, tensors or None"
    if isinstance(batch, Tensor):
        if batch.dim() < 2:
            raise option_error("batch", f"of shape {tuple(batch.shape)}", what)
        return
    if not isinstance(batch, Sequence) or isinstance(batch, str) or not batch:
        raise option_error("batch", type(batch).__name__, what)
    for number, part in enumerate(batch):
        if not isinstance(part, Tensor) and (part is not None or number == 0):
            raise option_error("batch", f"with {type(part).__name__} at {number}", what)


def check_loss(loss: Any) -> None:
    """Raise ValueError unless `loss` is one number, with a gradient where gradients are made."""
    fix = "the forward must return the mean loss, a tensor of one floating-point number"
    if not isinstance(loss, Tensor):
        raise option_error("loss", type(loss).__name__, fix)
    if loss.numel() != 1 or not loss.is_floating_point():
        raise option_error("loss", f"{loss.dtype} of shape {tuple(loss.shape)}", fix)
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise option_error("loss", "without a gradient", "the forward must compute it of parameters")


def check_default_dtype() -> None:
    """Raise ValueError unless torch makes fp32 tensors, as master weights, states and sums are."""
    if (dtype := torch.get_default_dtype()) is not torch.float32:
        fix = "master weights and sums are fp32; set torch.float32 again once the model is built"
        raise option_error("torch.set_default_dtype", dtype, fix)


def check_parameters(units: Sequence[Unit]) -> None:
    """Raise RuntimeError for a parameter that was frozen, changed or replaced, or has a .grad."""
    for unit in units:
        unit.guard.check_held()
        if not unit.reads_master:
            unit.guard.check_unwritten()
        for name, parameter in zip(unit.names, unit.parameters, strict=True):
            if parameter.requires_grad is unit.frozen:
                raise frozen_late(name)
            if parameter.grad is not None:
                fix = "add a term with that gradient to the loss, and set .grad to None"
                raise RuntimeError(f"{name}: has a .grad, and no step takes one as it is; {fix}")


def check_same_parameters(model: nn.Module, known: Collection[str], units: Sequence[Unit]) -> None:
    """Raise RuntimeError unless the model has parameters of these names, all of `units`, and no others."""
    trained = {id(parameter) for unit in units for parameter in unit.parameters}
    found = {
        name: isinstance(parameter, Unreadable) or id(parameter) in trained or not parameter.numel()
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    for name in sorted(found.keys() | known):
        if name not in known or not found.get(name):
            what = "is new in the model" if name in found else "is no longer in the model"
            raise RuntimeError(
                f"{name}: {what} since the engine was built, which trains what was there then; build another "
                "model and engine, and load the state_dict of this one"
            )


def check_equal_buffers(buffers: Mapping[str, Tensor], ranks: int) -> None:
    """Raise RuntimeError unless all ranks hold the same buffers. Every rank must call it; it waits for all.

    A forward that changes a buffer by `.data` is seen by nothing else.
    """
    if ranks == 1 or not buffers:
        return
    here = {
        name: hashlib.sha256(
            buffer.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()
        ).digest()
        for name, buffer in buffers.items()
    }
    found: list[dict[str, bytes]] = [{} for _ in range(ranks)]
    dist.all_gather_object(found, here)
    for name in here:
        if any(other.get(name) != found[0].get(name) for other in found):
            raise RuntimeError(
                f"{name}: a buffer that the {ranks} ranks hold different values of; a checkpoint has those "
                "of rank 0. Register it with persistent=False if each rank may have its own"
            )
