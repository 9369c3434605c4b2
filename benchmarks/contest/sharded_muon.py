"""Muon for matrices that FSDP2 has sharded by rows, as its users write it (dion, torchtitan).

Once per step an all-to-all of the updates of each shape, in bf16, gives each rank whole matrices. It makes
these orthogonal, all of a shape at once, and sends them back, beside the compute of other shapes.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from megatron_zpp.config.optimizer import OptimizerConfig
from megatron_zpp.zero.newton_schulz import Coefficients, coefficients


class ShardedMuon(torch.optim.Optimizer):
    """Of matrices (R, C) whose rows the ranks divide evenly; with HSDP each node does all of it."""

    def __init__(self, parameters: Iterable[Tensor], config: OptimizerConfig, dtype: torch.dtype) -> None:
        """`dtype`: of what is sent, and of matmuls. With Nesterov's momentum, whatever `config` says."""
        super().__init__(parameters, {"lr": 0.0})
        self._config, self._dtype = config, dtype
        self._coefficients = coefficients(config.muon_coefficient_type, config.muon_num_ns_steps)
        shapes: dict[torch.Size, list[DTensor]] = defaultdict(list)
        for parameter in self.param_groups[0]["params"]:
            assert isinstance(parameter, DTensor)
            assert parameter.placements[-1] == Shard(0)
            shapes[parameter.shape].append(parameter)
        self._batches = list(shapes.values())
        self._group = self._batches[0][0].device_mesh.get_group(-1)
        self._momenta = [[torch.zeros_like(each.to_local()) for each in batch] for batch in self._batches]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step; all exchanges there start at once, and each back as soon as its matrices are done."""
        config, rate = self._config, self.param_groups[0]["lr"]
        arriving = [self._send(*each) for each in zip(self._batches, self._momenta, strict=True)]
        returning = []
        for whole, work in arriving:
            work.wait()
            made = newton_schulz(whole.transpose(0, 1).flatten(1, 2), self._coefficients)  # (n, R, C)
            made = made.unflatten(1, (self._ranks, -1)).transpose(0, 1).contiguous()
            received = torch.empty_like(made)
            returning.append(
                (received, dist.all_to_all_single(received, made, group=self._group, async_op=True))
            )
        for batch, (received, work) in zip(self._batches, returning, strict=True):
            work.wait()
            weights = [each.to_local() for each in batch]
            updates = [update.float() for update in received.flatten(0, 1)[: len(batch)].unbind()]
            scale = max(batch[0].shape) ** 0.5 * config.muon_extra_scale_factor
            torch._foreach_mul_(weights, 1 - rate * config.weight_decay)
            torch._foreach_add_(weights, updates, alpha=-rate * scale)

    @property
    def _ranks(self) -> int:
        return dist.get_world_size(self._group)

    def _send(self, batch: list[DTensor], momenta: list[Tensor]) -> tuple[Tensor, dist.Work]:
        """Start an exchange after which a rank has n matrices: (ranks, n, R / ranks, C)."""
        gradients = [each.grad.to_local() for each in batch]  # type: ignore[union-attr]
        torch._foreach_lerp_(momenta, gradients, 1 - self._config.muon_momentum)
        updates = torch._foreach_lerp(gradients, momenta, self._config.muon_momentum)
        each = -(-len(batch) // self._ranks)
        sent = torch.zeros(self._ranks * each, *updates[0].shape, dtype=self._dtype, device=updates[0].device)
        torch._foreach_copy_(list(sent[: len(batch)].unbind()), updates)
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=self._group, async_op=True)
        return received.unflatten(0, (self._ranks, each)), work


def newton_schulz(x: Tensor, given: Coefficients) -> Tensor:
    """Matrices (n, R, C) with singular values near 1."""
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.float().norm(dim=(1, 2), keepdim=True).clamp_min(1e-7).to(x.dtype)
    for a, b, c in given:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
