"""Contestant: the engine of pretrain_gpt.py with the ZeRO settings of contestants.OURS."""

import os
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.contest.contestants import OURS
from benchmarks.contest.protocol import ADAMW, MUON, SEED, Rank, contestant_parser, join, report
from megatron_zpp.config.engine import EngineConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.model.build import build_model
from megatron_zpp.model.shape import trained_matrices
from megatron_zpp.ops.library import load_operations
from megatron_zpp.train.setup.compiling import compile_parts
from megatron_zpp.zero.engine import ZeroEngine


def build_engine(rank: Rank, topology: Topology) -> ZeroEngine:
    """The engine as pretrain_gpt.py builds it: compiled layers, kernels of csrc/."""
    options, config = rank.options, rank.config
    optimizer = MUON if options.optimizer == "muon" else ADAMW
    with torch.device("meta"):
        model = build_model(config, options.vocab_size)
    if not options.no_compile:
        shape = (options.micro_batch_size, config.seq_length)
        compile_parts(model, shape, print, on_gpu=rank.on_gpu)
    return ZeroEngine(
        model,
        topology.mesh(),
        EngineConfig(
            zero=ZeroConfig(**OURS[options.settings]),
            optimizer=optimizer,
            precision=PrecisionConfig(bf16=options.dtype == "bf16", fp32=options.dtype == "fp32"),
        ),
        initialize=partial(model.initialize_parameter, seed=SEED),
        device=rank.device,
        matrices=trained_matrices(config, optimizer),
        operations=load_operations(rank.device.type, require_kernels=rank.on_gpu, say=print),
    )


def main() -> None:
    """Train on every rank."""
    parser = contestant_parser(__doc__)
    parser.add_argument("--settings", choices=list(OURS), required=True)
    parser.add_argument("--alone", action="store_true", help="train each rank alone, all at once")
    options = parser.parse_args()
    rank = join(options)
    topology = Topology() if options.alone else Topology.from_environment(os.environ)
    engine = build_engine(rank, topology)

    def step(batches: Sequence[Tensor], learning_rate: float) -> Tensor:
        losses = [
            engine.accumulate(tokens, index=index, micro_batches=len(batches))
            for index, tokens in enumerate(batches)
        ]
        engine.step(learning_rate)
        return torch.stack(losses).mean()

    report(rank, step)
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
