"""Jobs to plan, from what a test wants to vary; and what --dry-run prints."""

import io
from contextlib import redirect_stdout
from typing import Any

from megatron_zpp.config.model import ModelConfig, RecomputeConfig
from megatron_zpp.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron_zpp.config.options import usage_errors
from megatron_zpp.config.root import parse_args
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.topology import Topology, planned
from megatron_zpp.model.shape import trained_matrices
from megatron_zpp.plan.job import Job, units_of
from megatron_zpp.train.dry_run import dry_run
from megatron_zpp.train.inputs import check_inputs
from megatron_zpp.zero.engine import ZeroEngine
from tests.zero import engines
from tests.zero.engines import operations

FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
QWZ = {"zero_quantized_weights": True}
HPZ = {"zero_hpz_partition_size": "auto"}
QGZ = {"zero_quantized_gradients": True}
FOUR_BITS = {"zero_quantized_weights_format": "delta4", "zero_quantized_gradients_format": "rotated4"}
FOUR_BITS |= {"zero_stage": 3} | QWZ | HPZ | QGZ


def job_of(
    model: ModelConfig,
    vocab_size: int,
    *,
    zero: dict[str, Any] | None = None,
    recompute: dict[str, Any] | None = None,
    precision: PrecisionConfig | None = None,
    nodes: int = 1,
    local: int = 1,
    micro_batch_size: int = 1,
    micro_batches: int = 1,
    tensor: int = 1,
    copy_engines: bool = True,
    optimizer: OptimizerConfig | None = None,
    device: str = "cuda",
) -> Job:
    """A job of bf16 and one rank by default; `tensor` ranks of `local` share each layer."""
    settings = ZeroConfig(**(zero or {}))
    return Job(
        model=model,
        vocab_size=vocab_size,
        recompute=RecomputeConfig(**(recompute or {})),
        zero=settings,
        precision=precision or PrecisionConfig(bf16=True),
        nodes=nodes,
        local=local,
        micro_batch_size=micro_batch_size,
        micro_batches=micro_batches,
        optimizer=optimizer or OptimizerConfig(),
        units=units_of(model, vocab_size, tensor, settings),
        tensor=tensor,
        copy_engines=copy_engines,
        device=device,
    )


def engine_of(job: Job, topology: Topology | None = None) -> ZeroEngine:
    """The engine of a job as a rank of `topology` has it, with the kernels that a GPU has."""
    return engines.engine_of(
        job.model,
        job.vocab_size,
        zero=job.zero,
        recompute=job.recompute,
        precision=job.precision,
        optimizer=job.optimizer,
        topology=topology,
        operations=operations(),
        tensor=job.tensor,
        overlapped=job.overlapped,
        matrices=trained_matrices(job.model, job.optimizer),
    )


def printed(*argv: str, speaks: bool = True) -> str:
    """What a command line with --dry-run prints. Raises ValueError for one that is refused."""
    config = parse_args(argv)
    with usage_errors():
        distributed = config.distributed
        mesh = planned(config.plan, Topology()).mesh(
            distributed.tensor_model_parallel_size, distributed.context_parallel_size
        )
    with redirect_stdout(io.StringIO()) as out:
        dry_run(check_inputs(config, mesh, print), mesh, speaks=speaks)
    return out.getvalue()
