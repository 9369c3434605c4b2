"""The plan as lines of text, for a person."""

from collections.abc import Iterator

from megatron_zpp.config.words import counted
from megatron_zpp.model.flops import parameter_count
from megatron_zpp.plan.advice import (
    WORTH,
    Plan,
    advice_of,
    at_stage,
    least_that_pays,
    options_on,
    plan_of,
    zeropp_plans,
)
from megatron_zpp.plan.exchanges import ledgers_of
from megatron_zpp.plan.fitting import faster_stage, ways_to_fit
from megatron_zpp.plan.hardware import (
    CPU_BYTES_PER_SECOND,
    FP8_OUTPUT,
    INSIDE_SHARE,
    MEMORY_SHARE,
    USABLE,
    Gpu,
    Machine,
)
from megatron_zpp.plan.job import Job
from megatron_zpp.plan.memory import memory_of
from megatron_zpp.plan.save_copies import copies_bytes
from megatron_zpp.plan.step_time import overlap_slowdown, product_time
from megatron_zpp.plan.tensor_parallel import assumption_lines, exchange_line, tensor_lines

_PARTS = {
    "weights": "weights, as they compute and are sent",
    "optimizer": "fp32 weights and AdamW's moments",
    "buffers": "buffers of gathers and reductions",
    "zeropp": "secondary shards, references",
    "gradients": "gradients, at the optimizer's step",
    "activations": "activations, at the loss",
    "loss": "the loss",
}
_DAY = 86400
_OPTION, _CHANGE = 38, 56  # columns of the names of rows


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
        f"{job.precision.describe_products()}, {job.zero.describe(job.mesh.data_ranks)}"
    )
    yield (
        f"  GPT of {parameters:,.1f} M parameters: {counted(model.num_layers, 'layer')} × "
        f"{model.hidden_size}, sequence {model.seq_length}, "
        f"vocabulary {job.vocab_size} padded to {job.padded_vocab_size}"
    )
    yield (
        f"  a step: {_data_ranks(job)} × {counted(job.micro_batches, 'micro-batch', 'micro-batches')} × "
        f"{counted(job.micro_batch_size, 'sample')} = {job.tokens_per_step:,} tokens; "
        f"{counted(iterations, 'step')} = {run:,.3f} B tokens"
    )


def _data_ranks(job: Job) -> str:
    if job.tensor == 1:
        return counted(job.ranks, "rank")
    return f"{counted(job.mesh.data_ranks, 'data rank')} of {job.tensor} tensor ranks"


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
    peaks = stages.values()
    marked = (f"{each.peak / 2**30:10.2f}{' ' if each.fits(gpu.memory) else '!'}" for each in peaks)
    yield f"  {'peak (! does not fit)':38}" + "".join(marked).rstrip()
    yield from _verdict(plan, gpu, machine)


def _verdict(plan: Plan, gpu: Gpu, machine: Machine) -> Iterator[str]:
    """Whether the run fits, what would make it fit if not, and what else fits in less time or memory."""
    room = (
        f"{plan.memory.peak / 2**30:.2f} GiB, in {plan.memory.peak_at}, of {USABLE * gpu.memory:.2f} "
        f"({gpu.memory:g} less {1 - USABLE:.0%} for CUDA, NCCL and fragmentation)"
    )
    if plan.memory.cpu:
        yield f"  {plan.memory.cpu / 2**30:.2f} GiB of CPU memory for each rank"
    if plan.job.async_save:
        copies = copies_bytes(plan.job) / 2**30
        yield f"  {copies:.2f} GiB of CPU memory of the ranks of each node for --async-save"
    if plan.fits(gpu.memory):
        yield f"  * this run fits: {room}"
        if faster := faster_stage(plan, machine, gpu.memory):
            now, then = 1e3 * plan.time.seconds, 1e3 * faster.time.seconds
            peak = f"{faster.memory.peak / 2**30:.2f} GiB"
            gain = f"{then:,.1f} ms per step, not {now:,.1f}"
            yield f"  {faster.name} fits as well, in {peak}, and is faster: {gain}"
    else:
        yield f"  * this run does NOT fit: {room}"
        yield "  what would change that:"
        for other in ways_to_fit(plan.job, machine):
            verdict = "fits" if other.fits(gpu.memory) else "does not fit"
            peak, milliseconds = f"{other.memory.peak / 2**30:10.2f} GiB", 1e3 * other.time.seconds
            name = _padded(other.name, _CHANGE, 4)
            yield f"    {name}{peak} {milliseconds:12,.1f} ms  {verdict}"


def _traffic(plan: Plan) -> Iterator[str]:
    job, sent = plan.job, ledgers_of(plan.job, plan.sent)
    yield "bytes sent in a step by all ranks together, as metrics.jsonl will say"
    yield f"  inter_node_bytes {sent.inter:>20,}   {sent.inter / job.nodes / 1e9:10.3f} GB from each node"
    yield f"  intra_node_bytes {sent.intra:>20,}   {sent.intra / job.ranks / 1e9:10.3f} GB from each GPU"
    if job.tensor > 1:
        yield exchange_line(job)


def _time(plan: Plan, iterations: int) -> Iterator[str]:
    time, job = plan.time, plan.job
    seconds = time.seconds
    tokens = job.tokens_per_step / seconds
    tflops = tokens * job.flops_per_token / job.ranks / 1e12
    yield f"a step takes {1e3 * seconds:,.1f} ms"
    recomputes = job.recompute.recompute_granularity is not None
    for name, part in (
        ("forward", time.forward),
        ("backward, with recomputation" if recomputes else "backward", time.backward),
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
    steps = "1 step takes" if iterations == 1 else f"{iterations:,} steps take"
    yield f"  {tokens * _DAY / 1e9:,.2f} B tokens per day; {steps} {span}"


def _zeropp(plan: Plan, gpu: Gpu, machine: Machine) -> Iterator[str]:
    """Lines that compare no option, each option and all options, and name the smallest set that pays."""
    plans = zeropp_plans(plan.job, machine)
    if len(plans) == 1:
        return
    plain, best = plans[0], least_that_pays(plans, gpu.memory)
    alone = [other for other in plans if sum(options_on(other.job.zero)) == 1]
    title = f"{'ZeRO++ at this stage':{_OPTION + 2}}"
    yield f"{title}{'ms per step':>13}{'GB per node':>13}{'GiB':>8}  (! does not fit)"
    for other in [plain, *alone, plans[-1]]:
        figures = f"{1e3 * other.time.seconds:13,.1f}{other.sent.inter / other.job.nodes / 1e9:13.3f}"
        fits = " " if other.fits(gpu.memory) else "!"
        mark = "*" if other.job.zero == plan.job.zero else " "
        name = _padded(other.name, _OPTION, 2)
        yield f"{mark} {name}{figures}{other.memory.peak / 2**30:8.2f}{fits}".rstrip()
    for advice in advice_of(plan.job, gpu.memory):
        yield f"  advice: {advice}"
    if best is plain:
        reason = f"no set of them that fits shortens the step by more than {WORTH:.0%}"
    else:
        reason = f"{1e3 * best.time.seconds:,.1f} ms per step, not {1e3 * plain.time.seconds:,.1f}"
        reason += "" if best.fits(gpu.memory) else ", once it fits"
    yield f"  take {best.name}:\n    {reason}"


def _padded(name: str, width: int, indent: int) -> str:
    """A name as a column of a table; one that is too long has the rest of its row on the next line."""
    return f"{name:{width}}" if len(name) <= width else f"{name}\n{'':{indent + width}}"


def _assumptions(job: Job, gpu: Gpu, machine: Machine) -> Iterator[str]:
    yield "assumptions (docs/internals/planner.md says how well they hold)"
    yield f"  compute at {machine.flops / 1e12:,.0f} TFLOP/s per GPU, {gpu.compute_share:g} of its peak,"
    yield f"    {gpu.seen}"
    if job.precision.fp8:
        memory = "" if job.precision.fp8_delayed else "; memory as bf16's, or less"
        time = f"{product_time(job):.2f} of bf16's time, as on an H200"
        yield f"  layers' products of --fp8 take {time}{memory}"
    if job.precision.fp8_output_layer:
        yield f"  the output layer's products take {FP8_OUTPUT:.2f} of bf16's time, as at 1.3B on an H100"
    if job.mesh.data_ranks > 1:
        yield f"  compute takes {overlap_slowdown(job):g} × as long beside the transfers that run behind it"
    if job.nodes > 1:
        yield f"  a node's link at {machine.link * 8 / 1e9:g} Gbit/s in each direction: --plan-link-gbit"
    inside = f"NVLink at {machine.inside / 1e9:,.0f} GB/s each way ({INSIDE_SHARE:g} of the data sheet)"
    yield f"  {inside}, memory at {machine.memory_rate / 1e12:.2f} TB/s ({MEMORY_SHARE:g})"
    if job.tensor > 1:
        yield from assumption_lines(job)
    if job.zero.zero_offload_optimizer:
        yield f"  AdamW in CPU memory at {CPU_BYTES_PER_SECOND / 1e9:g} GB/s per rank"


def _span(seconds: float) -> str:
    days, rest = divmod(seconds, _DAY)
    if days >= 1:
        return f"{seconds / _DAY:,.1f} days"
    return f"{rest / 3600:.1f} hours" if rest >= 3600 else f"{rest:,.0f} seconds"
