"""The only place that hooks into a model: tells gathers and reductions where the pass is."""

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron_zpp.zero.gathers import Gathers
from megatron_zpp.zero.reductions import Reductions
from megatron_zpp.zero.unit import Unit


def register_hooks(
    modules: list[nn.Module], units: list[Unit], gathers: Gathers, reductions: Reductions
) -> list[RemovableHandle]:
    """Hooks every module that is a unit; the handles take the hooks away again.

    Before a forward its parameters are needed; when the gradient of its output is there its backward is
    about to begin; when a parameter's `.grad` is there, that parameter is done with.
    """
    handles = []
    for index, (module, unit) in enumerate(zip(modules, units, strict=True)):
        handles += _hook_passes(module, index, gathers)
        for parameter in unit.parameters:
            handles.append(
                parameter.register_post_accumulate_grad_hook(
                    lambda _, unit=unit: reductions.gradient_arrived(unit)
                )
            )
    return handles


def _hook_passes(module: nn.Module, index: int, gathers: Gathers) -> list[RemovableHandle]:
    def before_forward(module: nn.Module, arguments: tuple) -> None:
        gathers.before_forward(index)

    def after_forward(module: nn.Module, arguments: tuple, output: Tensor) -> None:
        if torch.is_grad_enabled() and output.requires_grad:
            output.register_hook(lambda gradient: gathers.before_backward(index))

    return [module.register_forward_pre_hook(before_forward), module.register_forward_hook(after_forward)]
