"""The only place that hooks into a model: tells prefetcher and gradients where the pass is."""

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron_zpp.zero.gradients import Gradients
from megatron_zpp.zero.prefetch import Prefetcher
from megatron_zpp.zero.sharded_unit import Unit
from megatron_zpp.zero.tensor_parallel import ExchangeCounter


def register_hooks(
    modules: list[nn.Module],
    units: list[Unit],
    prefetcher: Prefetcher,
    gradients: Gradients,
    exchanges: ExchangeCounter,
) -> list[RemovableHandle]:
    """Hook every module that reads a unit, in forward order; the returned handles remove the hooks again.

    A module's parameters are needed before its forward, and before its backward, which begins when the
    gradient of its output has arrived. When a parameter's `.grad` has arrived, it needs that parameter no
    more.
    """
    handles = []
    for place, module in enumerate(modules):
        handles += _hook_passes(module, place, prefetcher, exchanges)
    for unit in units:
        for number, parameters in enumerate(unit.by_place):
            for parameter in parameters:
                handles.append(
                    parameter.register_post_accumulate_grad_hook(
                        lambda _, unit=unit, number=number: gradients.gradient_arrived(unit, number)
                    )
                )
    return handles


def _hook_passes(
    module: nn.Module, place: int, prefetcher: Prefetcher, exchanges: ExchangeCounter
) -> list[RemovableHandle]:
    def before_forward(module: nn.Module, arguments: tuple) -> None:
        prefetcher.before_forward(place)
        exchanges.forward(place)

    def before_backward(gradient: Tensor) -> None:
        prefetcher.before_backward(place)
        exchanges.backward(place)

    def after_forward(module: nn.Module, arguments: tuple, output: Tensor) -> None:
        if torch.is_grad_enabled() and output.requires_grad:
            output.register_hook(before_backward)

    return [module.register_forward_pre_hook(before_forward), module.register_forward_hook(after_forward)]
