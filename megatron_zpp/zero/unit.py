"""The flat buffers of one unit: compute parameters, fp32 master weights, fp32 gradients."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_zpp.zero.flat_layout import FlatLayout


class FlatUnit:
    """Parameters of one unit as views of flat buffers, and the reduction of their gradients.

    `parameters` (compute dtype) is what the module's parameters view; `master` (fp32) is what the optimizer
    changes, and the same storage where the compute dtype is fp32; `gradients` (fp32) accumulates.
    All three are 1-D with `layout.numel` elements.
    """

    def __init__(
        self, named_parameters: list[tuple[str, nn.Parameter]], dtype: torch.dtype, ranks: int
    ) -> None:
        self.names = [name for name, _ in named_parameters]
        self._parameters = [parameter for _, parameter in named_parameters]
        self._ranks = ranks
        self._waiting = 0  # gradients that the pending reduction still waits for
        self._work: dist.Work | None = None
        self.layout = FlatLayout(tuple(parameter.numel() for parameter in self._parameters))
        device = self._parameters[0].device
        self.master = torch.zeros(self.layout.numel, dtype=torch.float32, device=device)
        self.gradients = torch.zeros_like(self.master)
        self.parameters = (
            self.master if dtype == torch.float32 else torch.zeros_like(self.master, dtype=dtype)
        )
        for parameter, master in zip(self._parameters, self.master_views(), strict=True):
            master.copy_(parameter.detach())
        for parameter, view in zip(self._parameters, self._views(self.parameters), strict=True):
            parameter.data = view
        self.publish()
        for parameter, view in zip(self._parameters, self._views(self.gradients), strict=True):
            self._catch_gradient(parameter, view)

    def master_views(self) -> list[Tensor]:
        """The fp32 master weights, one tensor a parameter in its own shape."""
        return self._views(self.master)

    def gradient_views(self) -> list[Tensor]:
        """The fp32 gradients, one tensor a parameter in its own shape."""
        return self._views(self.gradients)

    def publish(self) -> None:
        """Casts the master weights into the parameters that the next forward reads."""
        if self.parameters is not self.master:
            self.parameters.copy_(self.master)

    def expect_last_gradients(self) -> None:
        """The next backward is the step's last: sum over ranks as soon as every gradient is there."""
        self._waiting = len(self._parameters)

    def finish_reduction(self) -> None:
        """Waits for the sum over ranks; starts it first if a parameter took no part in the backward."""
        if self._waiting:
            self._waiting = 0
            self._start_reduction()
        if self._work is not None:
            self._work.wait()
            self._work = None

    def _catch_gradient(self, parameter: nn.Parameter, view: Tensor) -> None:
        """Adds each gradient of `parameter` to its fp32 `view` and counts it."""
        in_place = parameter.dtype == torch.float32
        if in_place:
            parameter.grad = view  # autograd accumulates straight into the flat buffer

        def on_gradient(parameter: nn.Parameter) -> None:
            if not in_place:
                view.add_(parameter.grad)
                parameter.grad = None
            if self._waiting:
                self._waiting -= 1
                if self._waiting == 0:
                    self._start_reduction()

        parameter.register_post_accumulate_grad_hook(on_gradient)

    def _start_reduction(self) -> None:
        if self._ranks > 1:
            self._work = dist.all_reduce(self.gradients, async_op=True)

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [
            flat[offset : offset + parameter.numel()].view(parameter.shape)
            for offset, parameter in zip(self.layout.offsets, self._parameters, strict=True)
        ]
