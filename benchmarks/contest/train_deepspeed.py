"""Contestant: DeepSpeed's ZeRO-3 and ZeRO++ on a plain GPT.

Each layer is one leaf of ZeRO-3 (set_z3_leaf_modules), so that DeepSpeed's hooks run once per layer and the
layer compiles to one graph. --keep asks DeepSpeed to keep weights from the forward for the backward, which is
what a node of one rank does best: nothing is gathered twice.

DeepSpeed takes a node to be the GPUs that a process sees (device_count()), so a run on emulated nodes has to
show each rank only the GPUs of its node.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.contest.protocol import (
    ADAMW,
    MUON,
    Rank,
    contestant_parser,
    join,
    muon_matrices,
    plain_adamw,
    plain_model,
    report,
    set_learning_rate,
)
from benchmarks.plain_models import PlainGPT, PlainLlama, cross_entropy

_EVERYTHING = 10**13  # parameters


def settings(rank: Rank) -> dict[str, Any]:
    """DeepSpeed's configuration, as it would be in a file."""
    options = rank.options
    zero: dict[str, Any] = {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_scatter": options.optimizer != "muon",  # which DeepSpeed refuses together
        "zero_quantized_weights": options.quantized_weights,
        "zero_quantized_gradients": options.quantized_gradients,
        "zero_hpz_partition_size": options.hpz,
    }
    if options.keep:
        zero["stage3_max_live_parameters"] = zero["stage3_max_reuse_distance"] = _EVERYTHING
    if options.optimizer == "muon":
        zero["save_muon_momentum_buffer_in_memory"] = True
    return {
        "train_micro_batch_size_per_gpu": options.micro_batch_size,
        "gradient_accumulation_steps": options.micro_batches,
        "gradient_clipping": ADAMW.clip_grad,
        "bf16": {"enabled": options.dtype == "bf16"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # it makes its Muon itself only with every table under Muon
        "steps_per_print": _EVERYTHING,
    }


def muon(model: PlainGPT | PlainLlama) -> torch.optim.Optimizer:
    """DeepSpeed's Muon for the layers' matrices, and its fused AdamW for the rest."""
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    matrices = muon_matrices(model)
    chosen = {id(each) for each in matrices}
    for parameter in model.parameters():
        parameter.use_muon = id(parameter) in chosen  # type: ignore[attr-defined]
    decay = {"momentum": MUON.muon_momentum, "weight_decay": MUON.weight_decay}
    groups: list[dict[str, Any]] = [{"params": matrices, "use_muon": True, "lr": 0.0, **decay}]
    groups += [
        {
            "use_muon": False,
            "lr": 0.0,
            "betas": (ADAMW.adam_beta1, ADAMW.adam_beta2),
            "eps": ADAMW.adam_eps,
            **{key: group[key] for key in ("params", "weight_decay")},
        }
        for group in plain_adamw(model, on_gpu=True, beside_muon=True).param_groups
    ]
    return MuonWithAuxAdam(groups, adam_optimizer=FusedAdam, adam_optimizer_kwargs={"adam_w_mode": True})


def main() -> None:
    """Train on every rank."""
    parser = contestant_parser(__doc__)
    parser.add_argument("--quantized-weights", action="store_true")
    parser.add_argument("--quantized-gradients", action="store_true")
    parser.add_argument("--hpz", type=int, default=1, help="ranks that share a secondary copy; 1 is none")
    parser.add_argument("--keep", action="store_true", help="keep gathered weights for the backward")
    options = parser.parse_args()
    import deepspeed  # prints during the import, and --help does not need it

    rank = join(options)
    if torch.cuda.is_available():  # DeepSpeed builds its kernels at first use, and cannot read "9.0a" there
        os.environ["TORCH_CUDA_ARCH_LIST"] = ".".join(map(str, torch.cuda.get_device_capability()))
    model = plain_model(rank.config, rank.options.vocab_size, rank.device)
    if not options.no_compile:
        for layer in model.blocks:
            layer.forward = torch.compile(layer.forward, dynamic=False)  # inside the hooks of ZeRO-3
        model.loss = torch.compile(cross_entropy, dynamic=False)
    deepspeed.utils.set_z3_leaf_modules(model, [type(model.blocks[0])])
    tables = (model.tokens, model.positions) if isinstance(model, PlainGPT) else ()
    for table in tables:  # the root's forward reads their weights directly
        deepspeed.zero.register_external_parameter(model, table.weight)
    optimizer = muon(model) if options.optimizer == "muon" else plain_adamw(model, rank.on_gpu)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings(rank))

    def step(batches: Sequence[Tensor], learning_rate: float) -> Tensor:
        set_learning_rate(engine.optimizer, learning_rate)
        losses = []
        for tokens in batches:
            loss = engine(tokens[:, :-1], tokens[:, 1:])
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    report(rank, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
