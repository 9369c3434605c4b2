"""The plan as lines of text, for a person: what to take, why, and the figures of this run beside the best."""

from collections.abc import Iterator

from megatron_zpp.config.words import counted, decimal_bytes, duration
from megatron_zpp.model.flops import parameter_count
from megatron_zpp.plan.changes import changed_flags, changes
from megatron_zpp.plan.exchanges import exchanged_bytes, ledgers_of
from megatron_zpp.plan.hardware import (
    CPU_BYTES_PER_SECOND,
    FP8_OUTPUT,
    INSIDE_SHARE,
    MEMORY_SHARE,
    TENSOR_SLOWDOWN,
    USABLE,
    Gpu,
    Machine,
)
from megatron_zpp.plan.job import Job
from megatron_zpp.plan.memory import PARTS, copies_bytes
from megatron_zpp.plan.search import WORTH, Found, Plan, longest_sample, search
from megatron_zpp.plan.step_time import overlap_slowdown, product_time

_DAY, _GIB = 86400, 2**30
_NAME, _COLUMN = 42, 22


def report(
    job: Job,
    gpu: Gpu,
    machine: Machine,
    iterations: int,
    samples: int,
    *,
    island_mbit: float | None = None,
) -> list[str]:
    """The lines of the whole plan, its assumptions included; the run reads `samples` in its `iterations`.

    `island_mbit` is the rate between an island and the hub, in Mbit/s, if it is known.
    """
    tokens = samples * job.model.seq_length
    found = search(job, machine, gpu.memory)
    plans = [found.run]
    if found.best is not None and changed_flags(job, found.best.job):
        plans.append(found.best)
    lines = [*_head(found.run, gpu, iterations, tokens), "", *_answer(found, gpu), _longest(job, gpu), ""]
    lines += [*_memory(plans), "", *_time(plans, iterations, tokens), *_traffic(plans), ""]
    if job.islands.islands_at is not None:
        from megatron_zpp.plan.islands import outer_lines

        lines += [*outer_lines(job, found.run.seconds, island_mbit), ""]
    return [*lines, *_assumptions(plans, gpu, machine)]


def _head(plan: Plan, gpu: Gpu, iterations: int, tokens: int) -> Iterator[str]:
    job, model = plan.job, plan.job.model
    parameters = parameter_count(model, job.vocab_size) / 1e6
    yield (
        f"plan for {job.nodes} × {job.local} {gpu.name}, {job.precision.compute_dtype('cuda')}"
        f"{job.precision.describe_products()}, {job.zero.describe(job.mesh.shard_ranks)}"
    )
    yield (
        f"  GPT of {parameters:,.1f} M parameters: {counted(model.num_layers, 'layer')} × "
        f"{model.hidden_size}, sequence {model.seq_length}, "
        f"vocabulary {job.vocab_size} padded to {job.padded_vocab_size}"
    )
    yield (
        f"  a step: {_data_ranks(job)} × {counted(job.micro_batches, 'micro-batch', 'micro-batches')} × "
        f"{counted(job.micro_batch_size, 'sample')} = {job.tokens_per_step:,} tokens; "
        f"{counted(iterations, 'step')} = {tokens / 1e9:,.3f} B tokens"
    )


def _data_ranks(job: Job) -> str:
    if job.tensor * job.context == 1:
        return counted(job.ranks, "rank")
    kinds = {"context": job.context, "tensor": job.tensor}
    shared = " × ".join(f"{size} {kind}" for kind, size in kinds.items() if size > 1)
    return f"{counted(job.mesh.data_ranks, 'data rank')} of {shared} ranks"


def _answer(found: Found, gpu: Gpu) -> Iterator[str]:
    """Lines on the best settings, others that are worth a thought, and this run's."""
    run, best = found.run, found.best

    def flags(plan: Plan) -> str:
        return changes(run.job, plan.job) or "as given"

    usable = f"{USABLE * gpu.memory:.2f} GiB ({gpu.memory:g} less {1 - USABLE:.0%} for CUDA and NCCL)"
    if best is None:
        least = f"{flags(found.least)}: {found.least.memory.peak / _GIB:.2f} GiB"
        yield f"best: nothing fits {usable}; least memory: {least}"
        return
    yield f"best: {flags(best)}: {_figures(best)}"
    if found.second:
        yield f"second: {flags(found.second)}: {_figures(found.second)}; {_trade(run, best, found.second)}"
    if found.rounded:
        yield f"with 8 and 4 bits: {flags(found.rounded)}: {_figures(found.rounded)}; rounds what is sent"
    if not run.memory.fits(gpu.memory):
        peak = f"{run.memory.peak / _GIB:.2f}, in {run.memory.peak_at}, of {usable}"
        yield f"this run: does NOT fit: {peak}; would take {duration(run.seconds)} per step"
    elif changed_flags(run.job, best.job):
        yield f"this run: {_figures(run)}; {_why(run, best)}"
    else:
        yield f"this run fits: {run.memory.peak / _GIB:.2f}, in {run.memory.peak_at}, of {usable}"


def _longest(job: Job, gpu: Gpu) -> str:
    """A line on the longest sample that fits with this run's settings."""
    tokens = longest_sample(job, gpu.memory)
    return f"longest sample: {f'{tokens:,}' if tokens else 'fewer than 1,024'} tokens"


def _figures(plan: Plan) -> str:
    sent = f", {decimal_bytes(plan.sent.inter / plan.job.nodes)} from each node" if plan.sent.inter else ""
    return f"{duration(plan.seconds)} per step, {plan.memory.peak / _GIB:.2f} GiB{sent}"


def _trade(run: Plan, best: Plan, other: Plan) -> str:
    """What another plan has that the best has not."""
    parts = []
    if other.memory.peak < 0.9 * best.memory.peak:
        parts.append(f"{(best.memory.peak - other.memory.peak) / _GIB:.1f} GiB less")
    if other.sent.inter < 0.9 * best.sent.inter:
        parts.append(f"{decimal_bytes((best.sent.inter - other.sent.inter) / best.job.nodes)} less to send")
    if len(changed_flags(run.job, other.job)) < len(changed_flags(run.job, best.job)):
        parts.append("fewer flags")
    slower = other.seconds / best.seconds - 1
    time = f"in the same time, within {WORTH:.0%}" if abs(slower) <= WORTH else f"for {slower:+.1%} time"
    return f"{' and '.join(parts)} {time}"


def _why(run: Plan, best: Plan) -> str:
    """Which parts of the step make the run slower than the best plan."""
    if run.seconds <= (1 + WORTH) * best.seconds:
        return "as fast as the best"
    lost = run.seconds - best.seconds
    rest = {"links": run.time.exposed - best.time.exposed, "again": run.time.again - best.time.again}
    rest["optimizer"] = run.time.optimizer - best.time.optimizer
    rest["sums"] = lost - sum(rest.values())
    often = ""
    if run.job.micro_batches > 1 and run.sent.inter > 1.5 * best.sent.inter:
        often = f", in each of {run.job.micro_batches} micro-batches"
    texts = {
        "links": "waits for links",
        "again": "recomputed layers",
        "optimizer": "updates",
        "sums": "small products, or those of tensor ranks, and sums of gradients",
    }
    main = sorted((seconds, name) for name, seconds in rest.items() if seconds > 0.1 * lost)
    parts = [f"{texts[name]} take {duration(seconds)} longer" for seconds, name in reversed(main)]
    return f"{duration(lost)} slower: {'; '.join(parts)}{often}"


def _row(name: str, values: list[str]) -> str:
    return (f"  {name:{_NAME - 2}}" + "".join(f"{value:>{_COLUMN}}" for value in values)).rstrip()


def _columns(title: str, plans: list[Plan]) -> str:
    return f"{title:{_NAME}}" + "".join(f"{name:>{_COLUMN}}" for name in ("this run", "best")[: len(plans)])


def _memory(plans: list[Plan]) -> Iterator[str]:
    yield _columns("GiB of each GPU", plans)
    for part, name in (*PARTS.items(), ("peak", "peak"), ("cpu", "CPU memory")):
        sizes = [getattr(plan.memory, part) / _GIB for plan in plans]
        if any(sizes):
            yield _row(name, [f"{size:,.2f}" for size in sizes])
    if plans[0].job.async_save:
        yield _row(
            "CPU memory of a node for --async-save",
            [f"{copies_bytes(each.job) / _GIB:,.2f}" for each in plans],
        )


def _time(plans: list[Plan], iterations: int, tokens: int) -> Iterator[str]:
    yield _columns("a step takes", plans)
    rows = {
        "forward": [plan.time.forward for plan in plans],
        "backward": [plan.time.backward for plan in plans],
        "  of this, recomputation": [plan.time.again for plan in plans],
        "waiting for links in the forward": [plan.time.exposed_forward for plan in plans],
        "waiting for links in the backward": [plan.time.exposed_backward for plan in plans],
        "  of these, for tensor or context ranks": [plan.time.exchanges for plan in plans],
        "optimizer": [plan.time.optimizer for plan in plans],
        "in all": [plan.seconds for plan in plans],
        "busy meanwhile: the link of a node": [plan.time.link for plan in plans],
        "busy meanwhile: NVLink": [plan.time.inside for plan in plans],
    }
    for name, seconds in rows.items():
        if any(each > 1e-9 for each in seconds):
            yield _row(name, [duration(each) for each in seconds])
    rates = [plan.job.tokens_per_step / plan.seconds for plan in plans]
    yield _row("tokens/s", [f"{rate:,.0f}" for rate in rates])
    flops = [
        rate * plan.job.flops_per_token / plan.job.ranks for rate, plan in zip(rates, plans, strict=True)
    ]
    yield _row("TFLOP/s per GPU (PaLM)", [f"{each / 1e12:,.1f}" for each in flops])
    yield _row("B tokens per day", [f"{rate * _DAY / 1e9:,.2f}" for rate in rates])
    if iterations > 1:
        yield _row(f"{iterations:,} steps", [duration(tokens / rate) for rate in rates])


def _traffic(plans: list[Plan]) -> Iterator[str]:
    sent = [ledgers_of(plan.job, plan.sent) for plan in plans]
    yield _row("inter_node_bytes", [f"{each.inter:,}" for each in sent])
    yield _row("intra_node_bytes", [f"{each.intra:,}" for each in sent])
    if any(plan.job.tensor * plan.job.context > 1 for plan in plans):
        gpus = [decimal_bytes(exchanged_bytes(plan.job)) for plan in plans]
        yield _row("activations from each GPU, inside nodes", gpus)


def _assumptions(plans: list[Plan], gpu: Gpu, machine: Machine) -> Iterator[str]:
    job, jobs = plans[0].job, [plan.job for plan in plans]
    yield "assumptions (docs/internals/planner.md says how well they hold)"
    share = f"{gpu.compute_share:g} of its peak ({gpu.seen})"
    yield f"  compute at {machine.flops / 1e12:,.0f} TFLOP/s per GPU, {share}"
    if job.precision.fp8:
        memory = "" if job.precision.fp8_delayed else "; memory as bf16's, or less"
        time = f"{product_time(job):.2f} of bf16's time, as on an H200"
        yield f"  layers' products of --fp8 take {time}{memory}"
    if job.precision.fp8_output_layer:
        yield f"  the output layer's products take {FP8_OUTPUT:.2f} of bf16's time, as at 1.3B on an H100"
    if job.mesh.shard_ranks > 1:
        yield f"  compute takes {overlap_slowdown(job):g} × as long beside the transfers that run behind it"
    links = f"memory at {machine.memory_rate / 1e12:.2f} TB/s ({MEMORY_SHARE:g} of the data sheet)"
    if job.local > 1:
        links += f", NVLink at {machine.inside / 1e9:,.0f} GB/s each way ({INSIDE_SHARE:g})"
    if job.nodes > 1:
        links += f", a node's link at {machine.link * 8 / 1e9:g} Gbit/s"
    yield f"  {links}"
    if any(each.tensor > 1 for each in jobs):
        yield f"  1/T of the compute takes tensor ranks {TENSOR_SLOWDOWN:g}/T of its time, as on two H100s"
    if any(each.zero.zero_offload_optimizer for each in jobs):
        yield f"  AdamW in CPU memory at {CPU_BYTES_PER_SECOND / 1e9:g} GB/s per rank"
    yield from _limits(jobs, gpu)


def _limits(jobs: list[Job], gpu: Gpu) -> Iterator[str]:
    """What the model was not fitted to, and what the search does not try."""
    job = jobs[0]
    beyond = [gpu.name] if gpu.name not in ("H100", "H200") else []
    beyond += [counted(job.nodes, "node")] if job.nodes > 2 else []
    beyond += [f"{job.local} GPUs per node"] if job.local > 2 else []
    beyond += [f"{most} tensor ranks"] if (most := max(each.tensor for each in jobs)) > 2 else []
    beyond += [f"{most} context ranks"] if (most := max(each.context for each in jobs)) > 1 else []
    if beyond:
        yield f"extrapolated from one and two H100s and H200s, without latencies: {', '.join(beyond)}"
    kept = "" if job.may_resize else "other micro-batches (they change the numerics of this run), "
    yield (
        f"never tried: {kept}another batch, --zero-prefetch-units, groups of a part of a node, "
        "int8 gradients, bf16 sums, --recompute-offload, chunks of several layers, --fp8, "
        "--use-precision-aware-optimizer, --optimizer-in-backward"
    )
