"""The only place that hooks into a model: tells prefetcher and gradients where the pass is."""

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from megatron_zpp.zero.gradients import Gradients
from megatron_zpp.zero.prefetch import Prefetcher
from megatron_zpp.zero.read_guard import tensors_in
from megatron_zpp.zero.reads import NamedUnits, Reads, module_of
from megatron_zpp.zero.sharded_unit import Unit
from megatron_zpp.zero.tensor_parallel import ExchangeCounter


def register_hooks(
    modules: NamedUnits,
    units: list[Unit],
    reads: Reads,
    prefetcher: Prefetcher,
    gradients: Gradients,
    exchanges: ExchangeCounter,
) -> list[RemovableHandle]:
    """Hook every module that reads a unit, in forward order; the returned handles remove the hooks again.

    A module's parameters are needed before its forward, and before its backward, which begins when the
    gradient of one of its outputs has arrived. When a parameter's `.grad` has arrived, it needs that
    parameter no more. Modules have no hooks if all units stay gathered, none are recomputed, and no exchange
    is counted.
    """
    handles = []
    if not prefetcher.always_gathered or reads.recomputed or exchanges.per_token:
        for place, ((name, reader), read) in enumerate(zip(modules, reads.units, strict=True)):
            module = module_of(reader)
            its_units = [units[index] for index in read]
            handles += _hook_passes(name, module, place, its_units, prefetcher, exchanges)
    for unit in units:
        if unit.frozen:
            continue
        for index, parameter in enumerate(unit.parameters):
            arrived = partial(gradients.gradient_arrived, unit, index)
            handles.append(parameter.register_post_accumulate_grad_hook(arrived))
    return handles


def _hook_passes(
    name: str,
    module: nn.Module,
    place: int,
    units: Sequence[Unit],
    prefetcher: Prefetcher,
    exchanges: ExchangeCounter,
) -> list[RemovableHandle]:
    takes_turns = not prefetcher.always_gathered

    def before_forward(module: nn.Module, arguments: tuple) -> None:
        # Modes see each operation, as that of a selective checkpoint, and a gather is none of the model's.
        with _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext():
            prefetcher.before_forward(place)
        exchanges.count(place, backward=False)

    def after_forward(module: nn.Module, arguments: tuple, keywords: dict, output: Any) -> None:
        counted, given = False, set(map(id, tensors_in((arguments, keywords))))

        def before_backward(gradient: Tensor) -> None:
            nonlocal counted
            prefetcher.before_backward(place)
            if not counted:
                exchanges.count(place, backward=True)
            counted = True

        for tensor in tensors_in(output):
            if takes_turns:
                for unit in units:
                    unit.guard.check_output(tensor)
            if torch.is_grad_enabled() and tensor.requires_grad:
                # What another unit made and this one passes on has its gradient behind this backward.
                if id(tensor) in given and getattr(tensor, "_version_of_unit", None) == tensor._version:
                    continue
                tensor.register_hook(before_backward)
                tensor._version_of_unit = tensor._version  # type: ignore[attr-defined]
        # Autograd compares no versions of what hooks on saved tensors return, as torch.utils.checkpoint's do.
        if torch.is_grad_enabled() and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            if takes_turns and units and not any(True for _ in tensors_in(output)):
                raise RuntimeError(
                    f"{name or 'the model'}: returns a {type(output).__name__} inside of "
                    "torch.utils.checkpoint; return tensors, in tuples or dictionaries, whose gradients say "
                    "when its backward begins"
                )
            prefetcher.end_reads(place)

    hooks: list[Callable[..., None]] = [before_forward, after_forward]
    if "torch._dynamo" in sys.modules:  # the module may be compiled with its hooks, which must run each time
        hooks = [torch.compiler.disable(hook) for hook in hooks]
    before, after = hooks
    return [  # a module's own hooks may read its weights, as those of weight_norm do
        module.register_forward_pre_hook(before, prepend=True),
        module.register_forward_hook(after, with_kwargs=True),
    ]
