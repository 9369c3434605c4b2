"""--dry-run: prints a run's memory, traffic and time after the checks that need no device."""

import math
import sys
from dataclasses import replace

import torch
from torch.nn.attention import SDPBackend

from megatron_zpp.config.fused_backend import resolve_fused_backend
from megatron_zpp.config.options import option_error, usage_errors
from megatron_zpp.config.root import Config
from megatron_zpp.config.words import counted
from megatron_zpp.exchange.checks import check_routes
from megatron_zpp.mesh import Mesh
from megatron_zpp.model.attention import (
    FLAG,
    TORCH_BACKENDS,
    check_flash3_settings,
    check_scores,
    flex_hindrance,
    no_masks,
    packed_flash_hindrance,
)
from megatron_zpp.plan.hardware import GPUS, machine
from megatron_zpp.plan.memory import memory_of
from megatron_zpp.plan.report import report
from megatron_zpp.train.inputs import RunInputs
from megatron_zpp.train.plan_job import compiles_on_gpus, job_of

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
    compiles = compiles_on_gpus(config.compilation, config.optimizer)
    resolve_fused_backend(config, "cuda", compiles=compiles)
    dtype = config.precision.compute_dtype("cuda")
    assert config.plan.plan_gpu is not None  # PlanConfig fills its default in with --dry-run
    gpu = GPUS[config.plan.plan_gpu]
    with usage_errors():
        config.plan.link_of(mesh.nodes)
    rates = machine(config.plan, dtype, mesh.nodes)
    config.precision.check_device("cuda", gpu.capability)
    scores, dense = _scores_in_memory(config), _dense_mask(config, getattr(torch, dtype))
    if speaks:
        job = job_of(config, inputs.tokenizer["vocab_size"], mesh)
        lines = report(job, gpu, rates, schedule.iterations)
        lines += _not_planned(config, scores, dense)
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()


def _scores_in_memory(config: Config) -> str:
    """Return for which settings attention keeps its scores on any GPU; empty if it need not.

    Raises ValueError for settings that --attention-backend cannot obey on any GPU.
    """
    model, backend = config.model, config.attention.attention_backend
    hindrance = flex_hindrance(model.kv_channels, model.attention_dropout)
    if backend == "flex" and hindrance:
        raise option_error(FLAG, backend, f"{hindrance}; use auto")
    if TORCH_BACKENDS.get(backend) is SDPBackend.MATH:
        return f"--attention-backend {backend}"
    if not model.changed_scores:
        return ""
    check_scores(backend, model.changed_scores)
    return f"{model.changed_scores}, because FlexAttention {hindrance}," if hindrance else ""


def _dense_mask(config: Config, dtype: torch.dtype) -> str:
    """Return why masks of documents and windows are dense on any GPU; empty if they need not be.

    Raises ValueError for settings that --attention-backend cannot obey on any GPU.
    """
    model, backend = config.model, config.attention.attention_backend
    if backend == "flash3":
        check_flash3_settings(model.attention_dropout, dtype)
        return ""
    masked = config.data.reset_attention_mask
    if backend == "flex" or (not masked and not any(model.layer_windows)):
        return ""
    no_flex = flex_hindrance(model.kv_channels, model.attention_dropout)
    if model.changed_scores and backend == "auto":
        return f"FlexAttention {no_flex}" if no_flex else ""
    if backend not in ("auto", "flash"):
        return f"--attention-backend {backend} knows no other"
    hindrance = packed_flash_hindrance(model.kv_channels, model.attention_dropout, dtype)
    if hindrance and backend == "flash":
        raise no_masks(hindrance, masked=masked)
    return f"flash attention {hindrance}" if hindrance and no_flex else ""


def _not_planned(config: Config, scores: str, dense: str) -> list[str]:
    """Lines, to follow the plan's list of assumptions, on settings of this run that it ignores.

    `scores`: what keeps scores of attention, if anything does; `dense`: why masks are dense, if they are.
    """
    masked, lines = config.data.reset_attention_mask, []
    if scores:
        lines.append(
            f"  attention that keeps no scores; {scores} keeps them, for each layer and head, and takes "
            "longer"
        )
    if masked:
        lines.append("  attention over whole samples, also with --reset-attention-mask")
    if dense:
        tokens = config.model.seq_length
        rows = tokens * config.training.micro_batch_size if masked else tokens
        lines.append(
            f"  attention without masks in memory; this run's are dense, {rows:,} × {tokens:,} numbers, and "
            f"layers compute whole attention: {dense}"
        )
    return lines
