"""--dry-run: prints a run's memory, traffic and time after the checks that need no device."""

import sys

import torch
from torch.nn.attention import SDPBackend

from megatron_zpp.config.fused_backend import resolve_fused_backend
from megatron_zpp.config.plan import PlanConfig
from megatron_zpp.config.root import Config
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.model.attention import TORCH_BACKENDS, check_flash3_settings
from megatron_zpp.plan.hardware import GPUS, machine
from megatron_zpp.plan.job import Job, units_of
from megatron_zpp.plan.report import report
from megatron_zpp.train.compiling import check_cache
from megatron_zpp.train.inputs import RunInputs
from megatron_zpp.train.run_schedule import RunSchedule
from megatron_zpp.zero.plan_communication import check_topology


def planned(plan: PlanConfig, started: Topology) -> Topology:
    """The ranks to check and plan for: those started, unless a dry run names others."""
    if not plan.dry_run:
        return started
    local = plan.plan_gpus_per_node or started.local_world_size
    return Topology(world_size=(plan.plan_nodes or started.nodes) * local, local_world_size=local)


def job_of(
    config: Config, vocab_size: int, schedule: RunSchedule, topology: Topology, tensor: int = 1
) -> Job:
    """The values that a plan is made from; of all ranks, those of `topology`, `tensor` share each layer."""
    batches = schedule.batches
    data_ranks = topology.world_size // tensor
    return Job(
        model=config.model,
        vocab_size=vocab_size,
        recompute=config.recompute,
        zero=config.zero,
        precision=config.precision,
        nodes=topology.nodes,
        local=topology.local_world_size,
        micro_batch_size=batches.micro_batch_size,
        micro_batches=batches.global_batch_size // (batches.micro_batch_size * data_ranks),
        units=units_of(config.model, vocab_size, tensor),
        tensor=tensor,
        compiled=_compiles(config),
    )


def _compiles(config: Config) -> bool:
    return config.compilation.wanted("cuda", apex=config.optimizer.fused_backend == "apex")


def dry_run(inputs: RunInputs, topology: Topology, *, speaks: bool) -> None:
    """Print the plan if this process `speaks` for the others. Raises ValueError if the run would."""
    config, schedule = inputs.config, inputs.schedule
    check_topology(config.zero, topology)
    config.recompute.check_device("cuda")
    compiles = _compiles(config)
    if compiles:
        check_cache(config.compilation)
    resolve_fused_backend(config.optimizer, config.zero, "cuda", compiles=compiles)
    dtype = config.precision.compute_dtype("cuda")
    assert config.plan.plan_gpu is not None  # PlanConfig fills its default in with --dry-run
    gpu, rates = GPUS[config.plan.plan_gpu], machine(config.plan, dtype)
    config.precision.check_device("cuda", gpu.capability)
    if config.attention.attention_backend == "flash3":
        check_flash3_settings(config.model.attention_dropout, getattr(torch, dtype))
    if speaks:
        job = job_of(config, inputs.tokenizer["vocab_size"], schedule, topology)
        lines = [*report(job, gpu, rates, schedule.iterations), *_not_planned(config)]
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()


def _not_planned(config: Config) -> list[str]:
    """Lines, to follow the plan's list of assumptions, on settings of this run that it ignores."""
    lines, backend = [], config.attention.attention_backend
    if TORCH_BACKENDS.get(backend) is SDPBackend.MATH:
        lines.append(
            f"  attention that keeps no scores; --attention-backend {backend} keeps them, for each layer and "
            "head, and takes longer"
        )
    if config.data.reset_attention_mask:
        lines.append("  attention over whole samples, also with --reset-attention-mask")
    return lines
