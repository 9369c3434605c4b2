"""AdamW on fp32 master weights (Decoupled Weight Decay Regularization, algorithm 2)."""

from typing import Literal

import torch
from torch import Tensor

from megatron_zpp.config.optimizer import OptimizerConfig


def build_adamw(
    config: OptimizerConfig, named_weights: dict[str, Tensor], backend: Literal["apex", "torch"]
) -> torch.optim.Optimizer:
    """AdamW over `named_weights`; matrices decay, biases and norms do not."""
    matrices = [weight for weight in named_weights.values() if weight.dim() >= 2]
    vectors = [weight for weight in named_weights.values() if weight.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    settings = {"lr": 0.0, "betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps}
    if backend == "apex":
        from apex.optimizers import FusedAdam

        return FusedAdam(groups, adam_w_mode=True, **settings)
    return torch.optim.AdamW(groups, fused=True, **settings)


def clip_factor(norm: float, limit: float) -> float:
    """What gradients of global norm `norm` are multiplied with so that it is at most `limit`; 0: no limit."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
