"""Contestant: FSDP2 on a plain GPT, a graph per layer, fused AdamW, Muon as in sharded_muon.py.

--layout shard   every micro-batch's gradients are reduce-scattered over all ranks
--layout once    only the last micro-batch's are; until then whole gradients and weights stay on every rank
--layout hsdp    shards inside a node; gradients are all-reduced between nodes once per step
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from benchmarks.contest.protocol import (
    ADAMW,
    MUON,
    Rank,
    compile_plain,
    contestant_parser,
    join,
    muon_matrices,
    plain_adamw,
    plain_model,
    report,
    set_learning_rate,
)
from benchmarks.contest.sharded_muon import ShardedMuon
from benchmarks.plain_models import PlainGPT, PlainLlama, tables_apart

FORMATS = {"bf16": torch.bfloat16, "fp32": torch.float32}


def reshard_setting(text: str) -> bool | int:
    """FSDP2's reshard_after_forward: true, false, or the ranks that keep a copy among them."""
    return {"true": True, "false": False}[text] if text in ("true", "false") else int(text)


def sharded_model(rank: Rank) -> PlainGPT | PlainLlama:
    """The model with its layers and its root as FSDP2's units."""
    options = rank.options
    model = plain_model(rank.config, rank.options.vocab_size, rank.device)
    if not options.no_compile:
        compile_plain(model)
    policy = MixedPrecisionPolicy(param_dtype=FORMATS[options.dtype], reduce_dtype=FORMATS[options.reduce])
    shape: tuple[int, ...] = (rank.world_size,)
    names: tuple[str, ...] = ("shard",)
    if options.layout == "hsdp":
        shape, names = (options.nodes, rank.world_size // options.nodes), ("replicate", "shard")
    mesh = init_device_mesh(rank.device.type, shape, mesh_dim_names=names)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=options.reshard)
    for unit in tables_apart(model):
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    # The root's parameters are used at both ends of a pass, so they stay gathered, as is FSDP2's default.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return model


def main() -> None:
    """Train on every rank."""
    parser = contestant_parser(__doc__)
    parser.add_argument("--layout", choices=("shard", "once", "hsdp"), default="shard")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--reduce", choices=list(FORMATS), default="bf16")
    parser.add_argument("--reshard", type=reshard_setting, default=True)
    options = parser.parse_args()
    rank = join(options)
    model = sharded_model(rank)
    assert isinstance(model, FSDPModule)
    with_muon = options.optimizer == "muon"
    optimizers: list[torch.optim.Optimizer] = [plain_adamw(model, rank.on_gpu, beside_muon=with_muon)]
    if with_muon:
        optimizers.append(ShardedMuon(muon_matrices(model), MUON, FORMATS[options.dtype]))

    def step(batches: Sequence[Tensor], learning_rate: float) -> Tensor:
        losses = []
        for index, tokens in enumerate(batches):
            last = index + 1 == len(batches)
            if options.layout == "hsdp":
                model.set_requires_all_reduce(last)
            elif options.layout == "once":
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(last)
            model.set_is_last_backward(last)
            loss = model(tokens[:, :-1], tokens[:, 1:])
            (loss / len(batches)).backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), ADAMW.clip_grad)
        for optimizer in optimizers:
            set_learning_rate(optimizer, learning_rate)
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack(losses).mean()

    report(rank, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
