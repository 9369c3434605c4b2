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
    """Hook every module that is a unit; the returned handles remove the hooks again.

    A module's parameters are needed before its forward, and before its backward, which begins when the
    gradient of its output has arrived. When a parameter's `.grad` has arrived, it needs that parameter no
    more.
    """
    handles = []
    for index, (module, unit) in enumerate(zip(modules, units, strict=True)):
        handles += _hook_passes(module, index, prefetcher, exchanges)
        for parameter in unit.parameters:
            handles.append(
                parameter.register_post_accumulate_grad_hook(
                    lambda _, unit=unit: gradients.gradient_arrived(unit)
                )
            )
    return handles


def _hook_passes(
    module: nn.Module, index: int, prefetcher: Prefetcher, exchanges: ExchangeCounter
) -> list[RemovableHandle]:
    def before_forward(module: nn.Module, arguments: tuple) -> None:
        prefetcher.before_forward(index)
        exchanges.forward(index)

    def before_backward(gradient: Tensor) -> None:
        prefetcher.before_backward(index)
        exchanges.backward(index)

    def after_forward(module: nn.Module, arguments: tuple, output: Tensor) -> None:
        if torch.is_grad_enabled() and output.requires_grad:
            output.register_hook(before_backward)

    return [module.register_forward_pre_hook(before_forward), module.register_forward_hook(after_forward)]
