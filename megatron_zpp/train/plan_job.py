"""What is planned of a run: its settings and its ranks as a `Job`."""

import math

from megatron_zpp.config.compilation import CompilationConfig
from megatron_zpp.config.optimizer import OptimizerConfig
from megatron_zpp.config.root import Config
from megatron_zpp.mesh import Mesh
from megatron_zpp.plan.job import Job, units_of


def job_of(config: Config, vocab_size: int, mesh: Mesh, device: str = "cuda") -> Job:
    """The values that a plan of a run on the ranks of `mesh` is made from."""
    training = config.training
    batch = training.global_batch_size or training.micro_batch_size * mesh.data_ranks
    return Job(
        model=config.model,
        vocab_size=vocab_size,
        recompute=config.recompute,
        zero=config.zero,
        precision=config.precision,
        nodes=mesh.nodes,
        local=mesh.node_size,
        micro_batch_size=training.micro_batch_size,
        micro_batches=batch // (training.micro_batch_size * mesh.data_ranks),
        units=units_of(config.model, vocab_size, mesh.tensor_ranks, config.zero),
        tensor=mesh.tensor_ranks,
        context=mesh.context_ranks,
        comm_type=config.distributed.cp_comm_type,
        compiled=device == "cuda" and compiles_on_gpus(config.compilation, config.optimizer),
        async_save=config.checkpoint.async_save,
        save_optim=config.checkpoint.save_optim,
        overlapped=not config.precision.fp8,
        may_offload=config.optimizer.fused_backend != "apex"
        and config.optimizer.optimizer == "adam"
        and not config.optimizer.splits_weights
        and not config.optimizer.optimizer_in_backward,
        copy_engines=device == "cuda",
        device=device,
        batch_given=training.global_batch_size is not None,
        batch_multiple=math.gcd(batch, *(training.rampup_batch_size or ())[:2]),
        may_resize=config.may_resize,
        optimizer=config.optimizer,
        islands=config.islands,
    )


def compiles_on_gpus(compilation: CompilationConfig, optimizer: OptimizerConfig) -> bool:
    """Whether the layers of a run on GPUs are compiled."""
    return compilation.wanted("cuda", apex=optimizer.fused_backend == "apex")
