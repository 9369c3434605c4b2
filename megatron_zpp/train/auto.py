"""--zero-stage auto and --micro-batch-size auto: what the plan of this run finds, before anything is built.

All ranks compute it from the same command line and equal devices. Ranks that nevertheless differ are refused
like any other settings that differ, when they join.
"""

from dataclasses import replace

import torch

from megatron_zpp.config.options import AUTO, flag_name, option_error
from megatron_zpp.config.plan import DEFAULT_LINK, LINK
from megatron_zpp.config.root import Config
from megatron_zpp.config.words import duration
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.process_group import select_device
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.mesh import Mesh
from megatron_zpp.plan.changes import changes
from megatron_zpp.plan.hardware import GPUS, Machine, cpu_ranks, machine, rates_of, real_gpu
from megatron_zpp.plan.job import job_of
from megatron_zpp.plan.search import fastest, search
from megatron_zpp.plan.space import Space


def resolved(config: Config, vocab_size: int, mesh: Mesh) -> tuple[Config, str]:
    """The run's settings without auto, and a line that says them. Nothing that quantises is chosen.

    Raises ValueError if nothing fits, unless it is a dry run, which says that of stage 3 and one sample.
    """
    space = Space(
        stage=config.zero.zero_stage == AUTO,
        micro_batch=config.training.micro_batch_size == AUTO,
        others=False,
    )
    zero = replace(config.zero, zero_stage=3) if space.stage else config.zero
    least = _with(config, zero, 1 if space.micro_batch else config.training.micro_batch_size)
    batch = least.training.global_batch_size
    if batch is not None and batch % (least.training.micro_batch_size * mesh.data_ranks):
        return least, _line(config, least, "refused below")  # by the schedule, which names the sizes
    device, name, gibibytes, rates = hardware(config, mesh, config.plan.link or DEFAULT_LINK)
    job = job_of(least, vocab_size, mesh, device)
    found = fastest(job, rates, gibibytes, space)
    if found is None:
        if config.plan.dry_run:
            return least, _line(config, least, "nothing fits")
        best, fix = search(job, rates, gibibytes).best, "give more GPUs, or GPUs of more memory"
        if best is not None:
            stage, size = best.job.zero.zero_stage, best.job.micro_batch_size
            flags = {"--zero-stage": stage, "--micro-batch-size": size}
            auto = [f"{flag} {value}" for flag, value in flags.items() if flag in config.automatic]
            with_auto = replace(job, zero=replace(job.zero, zero_stage=stage), micro_batch_size=size)
            fix = f"give {' '.join([*auto, changes(with_auto, best.job)])}"
        raise option_error(" and ".join(config.automatic), AUTO, f"nothing fits {name}; {fix}")
    chosen = _with(config, found.job.zero, found.job.micro_batch_size)
    link = "" if config.plan.link or mesh.nodes == 1 else f"; {LINK} {DEFAULT_LINK:g} is assumed"
    room = f"{found.memory.peak / 2**30:.2f} of {name}"
    return chosen, _line(config, chosen, f"planned {duration(found.seconds)} per step in {room}{link}")


def _with(config: Config, zero: ZeroConfig, size: int) -> Config:
    """The settings with this part and micro-batch size."""
    return replace(config, zero=zero, training=replace(config.training, micro_batch_size=size))


def _line(config: Config, chosen: Config, why: str) -> str:
    zero, parts = chosen.zero, []
    if config.zero.zero_stage == AUTO:
        parts.append(f"--zero-stage {zero.zero_stage}")
        for name in ("zero_hpz_partition_size", "zero_gradient_partition_size"):
            if getattr(zero, name) != getattr(config.zero, name):
                parts.append(f"{flag_name(name)} {getattr(zero, name)}")
    if config.training.micro_batch_size == AUTO:
        parts.append(f"--micro-batch-size {chosen.training.micro_batch_size}")
    return f"{AUTO}: {' '.join(parts)}: {why}"


def hardware(config: Config, mesh: Mesh, link_gbit: float) -> tuple[str, str, float, Machine]:
    """Type, name, memory in GiB and rates of each rank: those of --dry-run, or of this rank's device."""
    plan = config.plan
    dtype = config.precision.compute_dtype("cuda")
    if plan.dry_run:
        gpu = GPUS[plan.plan_gpu or "h100"]
        return "cuda", f"{gpu.memory:g} GiB on {gpu.name}", gpu.memory, machine(plan, dtype, mesh.nodes)
    device = select_device(config.distributed.device, Topology.of(mesh))
    if device.type == "cpu":
        gibibytes, rates = cpu_ranks(mesh.node_size, link_gbit)
        return "cpu", f"{gibibytes:g} GiB for each rank on CPUs", gibibytes, rates
    properties = torch.cuda.get_device_properties(device)
    gpu = real_gpu(properties.name, properties.total_memory)
    return "cuda", f"{gpu.memory:g} GiB on {properties.name}", gpu.memory, rates_of(gpu, dtype, link_gbit)
