"""--dry-run: prints a run's memory, traffic and time after the checks that need no device."""

import math
import sys
from dataclasses import replace

import torch

from megatron_zpp.config.options import option_error, usage_errors
from megatron_zpp.config.root import Config
from megatron_zpp.config.words import counted
from megatron_zpp.exchange.route import check_routes
from megatron_zpp.mesh import Mesh
from megatron_zpp.model.attention_choice import Choice
from megatron_zpp.plan.hardware import GPUS, machine
from megatron_zpp.plan.job import compiles_on_gpus, job_of
from megatron_zpp.plan.memory import memory_of
from megatron_zpp.plan.report import report
from megatron_zpp.train.inputs import RunInputs
from megatron_zpp.train.setup.device import attention_choice, resolve_fused_backend

_PIPELINE = "--pipeline-model-parallel-size"


def at_fitting_stage(inputs: RunInputs, mesh: Mesh, stages: int) -> tuple[RunInputs, list[str]]:
    """Return the inputs at the lowest ZeRO stage from theirs on that fits, and a note on the ranks.

    It takes the place of a pipeline of `stages`, whose ranks are data ranks of `mesh`. The memory is that of
    --plan-gpu, or of the GPU that is here; any stage fits CPUs. Raises ValueError if no stage fits.
    """
    config, asked, peak = inputs.config, inputs.config.zero.zero_stage, 0.0
    if config.plan.plan_gpu is not None:
        gibibytes = GPUS[config.plan.plan_gpu].memory
    elif torch.cuda.is_available():
        gibibytes = torch.cuda.mem_get_info()[1] / 2**30
    else:
        gibibytes = math.inf
    for stage in range(asked, 4):
        try:
            zero = replace(config.zero, zero_stage=stage)
            check_routes(zero, mesh)
        except ValueError:  # of a setting that other stages have
            continue
        planned = replace(config, zero=zero)
        memory = memory_of(job_of(planned, inputs.tokenizer["vocab_size"], mesh))
        peak = memory.peak / 2**30
        if memory.fits(gibibytes):
            ranks = f"{_PIPELINE} {stages}: {counted(mesh.data_ranks, 'data rank')} with whole layers"
            note = f"{ranks} at --zero-stage {stage}, the lowest from {asked} on that fits"
            return replace(inputs, config=planned), [f"{note}; the same samples in every update"]
    fix = (
        f"its ranks would be data ranks, which need {peak:.0f} of {gibibytes:g} GiB at the highest "
        "--zero-stage; use more ranks, --tensor-model-parallel-size or --recompute-granularity full"
    )
    with usage_errors():
        raise option_error(_PIPELINE, stages, fix)


def dry_run(inputs: RunInputs, mesh: Mesh, *, speaks: bool) -> None:
    """Print the plan if this process `speaks` for the others. Raises ValueError if the run would."""
    config, schedule = inputs.config, inputs.schedule
    with usage_errors():
        check_routes(config.zero, mesh)
    config.recompute.check_device("cuda")
    resolve_fused_backend(config, "cuda", compiles=compiles_on_gpus(config))
    dtype = config.precision.compute_dtype("cuda")
    assert config.plan.plan_gpu is not None  # PlanConfig fills its default in with --dry-run
    gpu = GPUS[config.plan.plan_gpu]
    with usage_errors():
        config.plan.link_of(mesh.nodes)
    rates = machine(config.plan, dtype, mesh.nodes)
    config.precision.check_device("cuda", gpu.capability)
    attention = attention_choice(config, None)
    if speaks:
        job = job_of(config, inputs.tokenizer["vocab_size"], mesh)
        mbit = config.plan.plan_island_mbit
        lines = report(job, gpu, rates, schedule.iterations, schedule.samples, island_mbit=mbit)
        lines += _not_planned(config, attention)
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()


def _not_planned(config: Config, attention: Choice) -> list[str]:
    """Lines, to follow the plan's list of assumptions, on settings of this run that it ignores."""
    masked, lines = config.data.reset_attention_mask, []
    if attention.scores:
        lines.append(
            f"  attention that keeps no scores; {attention.scores} keeps them, for each layer and head, and "
            "takes longer"
        )
    if masked:
        lines.append("  attention over whole samples, also with --reset-attention-mask")
    if attention.dense:
        tokens = config.model.seq_length
        rows = tokens * config.training.micro_batch_size if masked else tokens
        lines.append(
            f"  attention without masks in memory; this run's are dense, {rows:,} × {tokens:,} numbers, and "
            f"layers compute whole attention: {attention.dense}"
        )
    return lines
