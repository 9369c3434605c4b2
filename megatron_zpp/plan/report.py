"""The plan as lines of text, for a person."""

from collections.abc import Iterator

from megatron_zpp.model.flops import parameter_count
from megatron_zpp.plan.advice import (
    Plan,
    advice_of,
    at_stage,
    least_that_pays,
    plan_of,
    ways_to_fit,
    why,
    zeropp_plans,
)
from megatron_zpp.plan.exchanges import hidden_state_bytes
from megatron_zpp.plan.hardware import (
    CPU_BYTES_PER_SECOND,
    INSIDE_SHARE,
    MEMORY_SHARE,
    USABLE,
    Gpu,
    Machine,
)
from megatron_zpp.plan.job import Job
from megatron_zpp.plan.memory import memory_of
from megatron_zpp.plan.step_time import overlap_slowdown
from megatron_zpp.plan.tensor_parallel import assumption_lines, exchange_line, tensor_lines

_PARTS = {
    "weights": "weights, as they compute and are sent",
    "optimizer": "fp32 weights and AdamW's moments",
    "buffers": "buffers of gathers and reductions",
    "zeropp": "secondary shards, references",
    "gradients": "gradients, at the optimizer's step",
    "activations": "activations, at the loss",
    "loss": "the loss",
    "peak": "peak",
}
_DAY = 86400


def report(job: Job, gpu: Gpu, machine: Machine, iterations: int) -> list[str]:
    """The lines of the whole plan, its assumptions included; `iterations` is the length of the run."""
    plan = plan_of("this run", job, machine)
    lines = [*_head(plan, gpu, iterations), "", *_memory(plan, gpu, machine), "", *_traffic(plan), ""]
    lines += [*_time(plan, iterations), ""]
    if advice := list(_zeropp(plan, gpu, machine)):
        lines += [*advice, ""]
    if tensor := list(tensor_lines(plan, machine, gpu.memory)):
        lines += [*tensor, ""]
    return [*lines, *_assumptions(job, gpu, machine)]


def _head(plan: Plan, gpu: Gpu, iterations: int) -> Iterator[str]:
    job, model = plan.job, plan.job.model
    parameters = parameter_count(model, job.vocab_size) / 1e6
    run = job.tokens_per_step * iterations / 1e9
    yield (
        f"plan for {job.nodes} × {job.local} {gpu.name}, {job.precision.compute_dtype('cuda')}"
        f"{' with 8-bit products' if job.precision.fp8 else ''}, {job.zero.describe()}"
    )
    yield (
        f"  GPT of {parameters:,.1f} M parameters: {model.num_layers} layers × {model.hidden_size}, sequence "
        f"{model.seq_length}, vocabulary {job.vocab_size} padded to {job.padded_vocab_size}"
    )
    yield (
        f"  a step: {_data_ranks(job)} × {job.micro_batches} micro-batches × "
        f"{job.micro_batch_size} samples = {job.tokens_per_step:,} tokens; "
        f"{iterations:,} steps = {run:,.3f} B tokens"
    )


def _data_ranks(job: Job) -> str:
    if job.tensor == 1:
        return f"{job.ranks} ranks"
    return f"{job.data_ranks} data ranks of {job.tensor} tensor ranks"


def _memory(plan: Plan, gpu: Gpu, machine: Machine) -> Iterator[str]:
    job = plan.job
    stages = {stage: memory_of(at_stage(job, stage)) for stage in range(4)}
    stages[job.zero.zero_stage] = plan.memory
    marks = [f"stage {stage}{'*' if stage == job.zero.zero_stage else ' '}" for stage in stages]
    yield f"{'GiB of each GPU':40}" + "".join(f"{mark:>11}" for mark in marks).rstrip()
    for part, name in _PARTS.items():
        sizes = [getattr(memory, part) for memory in stages.values()]
        if any(sizes):
            yield f"  {name:38}" + "".join(f"{size / 2**30:10.2f} " for size in sizes).rstrip()
    room = f"{plan.memory.peak / 2**30:.2f} GiB, in {plan.memory.moment}, of {gpu.memory:g}"
    if plan.memory.cpu:
        room += f"; {plan.memory.cpu / 2**30:.2f} GiB of CPU memory for each rank"
    if plan.fits(gpu.memory):
        yield f"  * this run fits: {room}"
        return
    yield f"  * this run does NOT fit: {room}. What would change that:"
    for other in ways_to_fit(job, machine):
        fits = "fits" if other.fits(gpu.memory) else "does not fit"
        peak, milliseconds = other.memory.peak / 2**30, 1e3 * other.time.seconds
        yield f"    {other.name:56}{peak:10.2f} GiB {milliseconds:12,.1f} ms  {fits}"


def _traffic(plan: Plan) -> Iterator[str]:
    sent, job = plan.sent, plan.job
    yield "bytes sent in a step by all ranks together, as metrics.jsonl will say"
    yield f"  inter_node_bytes {sent.inter:>20,}   {sent.inter / job.nodes / 1e9:10.3f} GB from each node"
    inside = sent.intra + job.ranks * hidden_state_bytes(job)
    yield f"  intra_node_bytes {inside:>20,}   {inside / job.ranks / 1e9:10.3f} GB from each GPU"
    if job.tensor > 1:
        yield exchange_line(job)


def _time(plan: Plan, iterations: int) -> Iterator[str]:
    time, job = plan.time, plan.job
    seconds = time.seconds
    tokens = job.tokens_per_step / seconds
    tflops = tokens * job.flops_per_token / job.ranks / 1e12
    yield f"a step takes {1e3 * seconds:,.1f} ms"
    for name, part in (
        ("forward", time.forward),
        ("backward, with recomputation", time.backward),
        ("waiting for links in the forward", time.exposed_forward),
        ("waiting for links in the backward", time.exposed_backward),
        *((("  of these, for tensor ranks", time.exchanges),) if job.tensor > 1 else ()),
        ("optimizer", time.optimizer),
    ):
        yield f"  {name:36}{1e3 * part:10,.1f} ms {part / seconds:7.1%}"
    link, inside = 1e3 * time.link, 1e3 * time.inside
    yield f"  busy meanwhile: the link of a node {link:,.1f} ms, NVLink {inside:,.1f} ms"
    yield f"  {tokens:,.0f} tokens/s, {tflops:,.1f} TFLOP/s per GPU (PaLM)"
    span = _span(iterations * seconds)
    yield f"  {tokens * _DAY / 1e9:,.2f} B tokens per day; {iterations:,} steps take {span}"


def _zeropp(plan: Plan, gpu: Gpu, machine: Machine) -> Iterator[str]:
    """Lines that compare no option, each option and all options, and name the smallest set that pays."""
    plans = zeropp_plans(plan.job, machine)
    if len(plans) == 1:
        return
    plain, best = plans[0], least_that_pays(plans, gpu.memory)
    alone = [other for other in plans if " " not in other.name]
    yield f"{'ZeRO++ at this stage':32}{'ms per step':>13}{'GB per node':>13}{'GiB':>8}  (! does not fit)"
    for other in [plain, *alone, plans[-1]]:
        figures = f"{1e3 * other.time.seconds:13,.1f}{other.sent.inter / other.job.nodes / 1e9:13.3f}"
        reason = "" if other is plain else why(plain, other)
        fits = " " if other.fits(gpu.memory) else "!"
        mark = "*" if other.job.zero == plan.job.zero else " "
        yield f"{mark} {other.name:30}{figures}{other.memory.peak / 2**30:8.2f}{fits} {reason}".rstrip()
    for advice in advice_of(plan.job, gpu.memory):
        yield f"  advice: {advice}"
    gain = plain.time.seconds / best.time.seconds
    yield f"  take {best.name}: {1e3 * best.time.seconds:,.1f} ms, {gain:.2f} × as fast as none of them"


def _assumptions(job: Job, gpu: Gpu, machine: Machine) -> Iterator[str]:
    yield "assumptions (docs/internals/planner.md says how well they hold)"
    flops = machine.flops / 1e12
    yield f"  compute at {flops:,.0f} TFLOP/s per GPU ({gpu.seen}); --plan-compute-share sets it"
    if job.precision.fp8:
        yield "  products of --fp8 take the time and memory of bf16: on an H200 1.3B was 1.09 × as fast"
    if job.ranks > 1:
        yield f"  compute takes {overlap_slowdown(job):g} × as long beside the transfers that run behind it"
    if job.nodes > 1:
        yield f"  a node's link at {machine.link * 8 / 1e9:g} Gbit/s in each direction: --plan-link-gbit"
    inside = f"NVLink at {machine.inside / 1e9:,.0f} GB/s each way ({INSIDE_SHARE:g} of the data sheet)"
    yield f"  {inside}, memory at {machine.memory_rate / 1e12:.2f} TB/s ({MEMORY_SHARE:g})"
    if job.tensor > 1:
        yield from assumption_lines(job)
    if job.zero.zero_offload_optimizer:
        yield f"  AdamW in CPU memory at {CPU_BYTES_PER_SECOND / 1e9:g} GB/s per rank"
    yield f"  {1 - USABLE:.0%} of a GPU's memory is left for CUDA, NCCL and fragmentation"


def _span(seconds: float) -> str:
    days, rest = divmod(seconds, _DAY)
    if days >= 1:
        return f"{seconds / _DAY:,.1f} days"
    return f"{rest / 3600:.1f} hours" if rest >= 3600 else f"{rest:,.0f} seconds"
