"""What --dry-run predicts beside what was measured here and what the ZeRO++ paper published; needs no GPU.

python benchmarks/plan.py   writes results/plan.json and prints the tables of docs/internals/planner.md

Memory follows from the settings alone. Runs between nodes and with an offloaded optimizer had an earlier
loss, of EARLIER_LOSS bytes a token and entry of the vocabulary at the moment of their peaks, so their memory
is compared without the loss. Time follows from the constants of plan/hardware.py, of which the share of the
peak is fitted to one H200 alone, and the CPU's rate to the offloaded optimizer.

In the results between nodes whose ranks shared a GPU ("shared_gpu") only memory is compared. Steps between
nodes with a GPU for each rank are those of sockets_independent.json, planned from the rates that NCCL's
collectives reached there: as they are, and with one factor on all rates of a set of sockets, fitted to its
steps of one micro-batch.

The paper (2306.10209) ran DeepSpeed's ZeRO-3 and ZeRO++ on 24 DGX-2 of 16 V100. Its bytes are put in here,
3 and 0.75 models between nodes a step, since a plan has those of our engine. Each row is predicted twice:
transfers behind the compute, and none behind it. Its TFLOP/s are taken to count the recomputation. Beside it
stands the plan of our engine for the same model on the same machines.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.common import RESULTS, write_result
from benchmarks.contest.contestants import OURS as CONTESTANTS
from benchmarks.slow_link import NODES, RANKS_OF_A_NODE, SHAPE, VOCAB
from megatron_zpp.config.model import ModelConfig, RecomputeConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.plan import PlanConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.model.flops import parameter_count
from megatron_zpp.plan.hardware import Machine, machine
from megatron_zpp.plan.job import Job, units_of
from megatron_zpp.plan.memory import memory_of
from megatron_zpp.plan.step_time import compute_seconds, pass_seconds, step_time
from megatron_zpp.plan.traffic import Pass, total, traffic_of
from megatron_zpp.zero.hop import Sent

Row = dict[str, Any]
GRIDS = (  # result, samples of a micro-batch, nodes, GPUs of a node
    ("mbs8_1x2_compiled", 8, 1, 2),
    ("mbs8_1x2", 8, 1, 2),
    ("mbs8_2x1", 8, 2, 1),
    # 2x2 was measured when gathers were one ring and bf16 gradients one hop: the plan is another one now
)
SHAPES = {"345m:16": "345m_2.7b", "2.7b:8": "345m_2.7b", "6.7b:10": "6.7b"}  # of one GPU, to results
GPU_VOCAB = 50304
SOCKETS = "sockets_independent"  # until zero_speed.py has measured the same
EARLIER_LOSS = 12  # fp32 softmax, gradient of its output, gradient of its input
INFINITE = float("inf")
PAPER_NODES, PAPER_GPUS = 24, 16
PAPER_VOLUMES = {
    "ZeRO-3": (1.0, 1.0, 1.0),
    "ZeRO++": (0.5, 0.0, 0.25),
}  # models: forward, backward, gradients
# (link Gbit/s, tokens a GPU) -> what is published of the 18B model, or of all sizes where it says so
PUBLISHED = {
    (100, 1024): {"ZeRO-3": "14", "ZeRO++": "31", "speed-up": "2.16"},
    (400, 1024): {"ZeRO-3": "", "ZeRO++": "", "speed-up": "1.28 to 1.36, or up to 1.56 (all sizes)"},
    (400, 2048): {"ZeRO-3": "", "ZeRO++": "", "speed-up": "1.24 to 1.29, or up to 1.41 (all sizes)"},
}

OURS: dict[str, tuple[str, bool]] = {  # row -> contestant, and whether gradients are sent in bf16
    "stage 3": ("stage_3", False),
    "stage 3, `--grad-reduce-in-bf16`": ("stage_3", True),
    "all of ZeRO++": ("zeropp", False),
}


def job_of(
    model: ModelConfig,
    vocab: int,
    zero: Row,
    nodes: int,
    local: int,
    size: int,
    compiled: bool = True,
    micro_batches: int = 1,
) -> Job:
    """Steps of bf16 micro-batches of `size` samples, nothing recomputed."""
    return Job(
        model=model,
        vocab_size=vocab,
        recompute=RecomputeConfig(),
        zero=ZeroConfig(**zero),
        precision=PrecisionConfig(bf16=True),
        nodes=nodes,
        local=local,
        micro_batch_size=size,
        micro_batches=micro_batches,
        units=units_of(model, vocab),
        compiled=compiled,
    )


def fitted(job: Job, measured: float, at: Callable[[float], Machine], low: float, high: float) -> Machine:
    """`at` of the rate at which the job's step takes `measured` seconds: a faster one takes less."""
    passes = traffic_of(job)
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if step_time(job, at(middle), passes).seconds > measured else (low, middle)
    return at(low)


def shape_rows() -> list[Row]:
    """Other models on one H200, which throughput.py measured."""
    rows, gpu = [], _h200()
    for shape, result in SHAPES.items():
        figures = json.loads((RESULTS / f"throughput_{result}.json").read_text())["figures"]
        figure, (preset, size) = figures[shape]["stage 0"], shape.split(":")
        model = ModelConfig(model_preset=preset, seq_length=1024, hidden_dropout=0.0, attention_dropout=0.0)
        job = job_of(model, GPU_VOCAB, {}, 1, 1, int(size))
        rows.append(
            {
                "shape": shape,
                "gib": round(memory_of(job).peak / 2**30, 1),
                "measured_gib": round(figure["peak_gib"], 1),
                "milliseconds": round(1000 * step_time(job, gpu, traffic_of(job)).seconds, 1),
                "measured_ms": round(figure["milliseconds"], 1),
            }
        )
    return rows


def h200_rows() -> list[Row]:
    """Every measurement of two GPUs: memory, and time where each rank had a GPU of its own."""
    model = _measured_model()
    gpu = _h200()
    rows = []
    for grid_name, micro_batch, nodes, local in GRIDS:
        name = f"zero_speed_1.3b_{grid_name}"
        compiled = grid_name.endswith("compiled")
        figures = json.loads((RESULTS / f"{name}.json").read_text())["figures"]
        timed = not figures.get("shared_gpu")
        for contestant, figure in figures.items():
            if contestant not in CONTESTANTS and contestant != "one_gpu":
                continue
            if nodes == 1 and not compiled and contestant != "stage_3_offload":
                continue  # measured again since
            if nodes > 1 and contestant == "stage_1":
                continue  # sent fp32 then
            alone = contestant == "one_gpu"
            grid = (1, 1) if alone else (nodes, local)
            job = job_of(model, GPU_VOCAB, CONTESTANTS.get(contestant, {}), *grid, micro_batch, compiled)
            memory = memory_of(job)
            earlier_loss = 0.0 if compiled else EARLIER_LOSS * job.tokens * job.vocab_size / 2**30
            planned = memory.peak if compiled else memory.resident + memory.activations
            if not alone:
                planned += _counted_otherwise(job, compiled)
            row: Row = {
                "result": name,
                "run": contestant,
                "with_loss": compiled,
                "gib": round(planned / 2**30, 2),
                "measured_gib": round(figure["peak_gib"] - earlier_loss, 2),
            }
            if timed:
                row["milliseconds"] = round(1000 * step_time(job, gpu, traffic_of(job)).seconds, 1)
                row["measured_ms"] = figure["milliseconds"]
                row["fitted"] = contestant in ("one_gpu", "stage_3_offload")
            rows.append(row)
    return rows


def socket_rows() -> list[Row]:
    """Steps between nodes, a GPU for each rank: planned from the collectives' rates, and with one factor."""
    tables = json.loads((RESULTS / f"{SOCKETS}.json").read_text())["figures"]["tables"]
    factors: dict[str, float] = {}
    rows = []
    for table in tables:
        if table["shared_gpu"]:
            continue
        steps = [
            (name, _socket_job(table, name), figure["milliseconds"] / 1000)
            for name, figure in table["contestants"].items()
            if name in CONTESTANTS
        ]
        fits = table["micro_batches"] == 1
        if fits:
            factors[table["nccl"]] = _factor(table, [(job, measured) for _, job, measured in steps])
        factor = factors[table["nccl"]]
        for name, job, measured in steps:
            passes = traffic_of(job)
            plain, scaled = (step_time(job, _sockets(table, each), passes).seconds for each in (1.0, factor))
            rows.append(
                {
                    "nccl": table["nccl"],
                    "micro_batches": table["micro_batches"],
                    "run": name,
                    "milliseconds": round(1000 * plain, 1),
                    "factor": round(factor, 3),
                    "scaled_ms": round(1000 * scaled, 1),
                    "measured_ms": 1000 * measured,
                    "fitted": fits,
                }
            )
    return rows


def _socket_job(table: Row, contestant: str) -> Job:
    grid = (table["nodes"], table["ranks_per_node"], table["micro_batch_size"])
    batches = table["micro_batches"]
    return job_of(_measured_model(), GPU_VOCAB, CONTESTANTS[contestant], *grid, micro_batches=batches)


def _sockets(table: Row, factor: float) -> Machine:
    """H200s whose nodes are joined by NCCL's sockets, at `factor` times the rates that were measured alone.

    The engine's gathers are all-gathers and its reductions all-to-alls, on a communicator each.
    """
    links = {name: factor * 1e9 * rate for name, rate in table["links"].items()}
    together = links["all_gather_beside_all_to_all"]
    return replace(_h200(), gather=links["all_gather"], exchange=links["all_to_all"], link=together)


def _factor(table: Row, steps: list[tuple[Job, float]]) -> float:
    """The factor that makes the largest relative error of `steps` smallest."""

    def worst(factor: float) -> float:
        rates = _sockets(table, factor)
        return max(
            abs(step_time(job, rates, traffic_of(job)).seconds / measured - 1) for job, measured in steps
        )

    return min((step / 1000 for step in range(700, 1401, 5)), key=worst)


def _measured_model() -> ModelConfig:
    return ModelConfig(model_preset="1.3b", seq_length=1024, hidden_dropout=0.0, attention_dropout=0.0)


def _counted_otherwise(job: Job, compiled: bool) -> int:
    """What torch's count of a peak has besides the plan, less what it has not: memory that peers write.

    Runs that were not compiled sent the gradients of each layout from two buffers of its own.
    """
    reduction = job.communication.reduction
    if compiled:
        return -reduction.buffers.received.nbytes if reduction.peer_writes else 0
    largest = max(layout.numel for layout in job.layouts)
    sent = sum(min(2, units) * layout.numel for layout, units in Counter(job.layouts).items())
    now = 0 if reduction.peer_writes else largest
    return (sent - now) * reduction.gradient_dtype.itemsize


def slow_link_rows() -> list[Row]:
    """The CPU nodes of slow_link.py. Compute is fitted to stage 3 without a limit; the link is 200 Mbit/s."""
    figures = json.loads((RESULTS / "slow_link.json").read_text())["figures"]
    model = ModelConfig(**SHAPE, hidden_dropout=0.0, attention_dropout=0.0)
    link = figures["settings"]["link_mbit"] * 1e6 / 8

    def cpus(flops: float, link: float = INFINITE) -> Machine:
        return Machine(flops, INFINITE, INFINITE, link)

    def job(name: str) -> Job:
        zero = CONTESTANTS[{"all_on": "zeropp"}.get(name, name)]
        return job_of(model, VOCAB, zero, NODES, RANKS_OF_A_NODE, 1)

    def seconds(name: str) -> float:
        return step_time(job(name), cpus(free.flops, link), traffic_of(job(name))).seconds

    free = fitted(job("stage_3"), figures["stage_3"]["seconds_without_a_limit"], cpus, 1e6, 1e15)
    return [
        {
            "run": name,
            "seconds": round(seconds(name), 3),
            "measured_seconds": figure["seconds"],
        }
        for name, figure in figures.items()
        if name != "settings"
    ]


def published_rows() -> list[Row]:
    """The paper's 18B model: TFLOP/s a GPU with transfers `behind` the compute, and each `alone`."""
    rows = []
    for (gbit, tokens), published in PUBLISHED.items():
        plan = PlanConfig(dry_run=True, plan_gpu="v100", plan_link_gbit=gbit)
        rates = machine(plan, "float16")
        row: Row = {"gbit": gbit, "tokens": tokens, "published": published, "behind": {}, "alone": {}}
        for system, volumes in PAPER_VOLUMES.items():
            row["behind"][system], row["alone"][system] = _paper(tokens, volumes, rates)
        for predicted in (row["behind"], row["alone"]):
            predicted["speed-up"] = round(predicted["ZeRO++"] / predicted["ZeRO-3"], 2)
        rows.append(row)
    return rows


def our_rows() -> list[Row]:
    """The same model in our engine: models sent between nodes, and TFLOP/s a GPU by link and tokens."""
    rows = []
    for name, (contestant, in_bf16) in OURS.items():
        row: Row = {"run": name, "tflops": []}
        for gbit, tokens in PUBLISHED:
            job = _paper_job(tokens, CONTESTANTS[contestant], in_bf16)
            rates = machine(PlanConfig(dry_run=True, plan_gpu="v100", plan_link_gbit=gbit), "float16")
            passes = traffic_of(job)
            row["models"] = round(total(passes).inter / _one_model(job), 2)
            computes = sum(compute_seconds(job, rates, is_forward) for is_forward in (True, False))
            seconds = step_time(job, rates, passes).seconds
            row["tflops"].append(round(rates.flops / 1e12 * computes / seconds, 1))
        rows.append(row)
    return rows


def _paper_job(tokens: int, zero: Row, in_bf16: bool = False) -> Job:
    model = ModelConfig(model_preset="18b", hidden_dropout=0.0, attention_dropout=0.0)
    return Job(
        model=model,
        vocab_size=GPU_VOCAB,
        recompute=RecomputeConfig(recompute_granularity="full", recompute_method="uniform"),
        zero=ZeroConfig(**zero),
        precision=PrecisionConfig(fp16=True, grad_reduce_in_bf16=in_bf16),
        nodes=PAPER_NODES,
        local=PAPER_GPUS,
        micro_batch_size=tokens // model.seq_length,
        micro_batches=1,
        units=units_of(model, GPU_VOCAB),
    )


def _h200() -> Machine:
    return machine(PlanConfig(dry_run=True, plan_gpu="h200"), "bfloat16")


def _one_model(job: Job) -> int:
    """Bytes that all nodes send to others to move the model once."""
    return 2 * parameter_count(job.model, GPU_VOCAB) * (PAPER_NODES - 1)


def _paper(tokens: int, volumes: tuple[float, float, float], rates: Machine) -> tuple[float, float]:
    """TFLOP/s a GPU, recomputation counted: overlapped, and one after the other."""
    job = _paper_job(tokens, {"zero_stage": 3})
    whole = _one_model(job)
    forward, backward, gradients = volumes
    behind = alone = computes = 0.0
    for is_forward, models in ((True, forward), (False, backward + gradients)):
        sent = Sent(inter=int(models * whole))
        one = Pass(is_forward, 1, sent, Sent(), Sent(), decoded=0, summed=0)
        compute = compute_seconds(job, rates, is_forward)
        behind += pass_seconds(job, rates, one, compute)
        alone += compute + pass_seconds(job, rates, one, 0.0)
        computes += compute
    tflops = rates.flops / 1e12 * computes
    return round(tflops / behind, 1), round(tflops / alone, 1)


def tables() -> dict[str, list[str]]:
    """The tables of docs/internals/planner.md, as lines."""
    gpus = [
        f"| {row['result'].removeprefix('zero_speed_1.3b_').replace('_', ', ')} | {row['run']} | "
        f"{row['gib']:.2f} | {row['measured_gib']:.2f} | "
        f"{_times(row) if 'measured_ms' in row else '– | – | GPUs shared'} |"
        for row in h200_rows()
    ]
    sockets = [
        f"| {row['nccl']} | {row['micro_batches']} | {row['run']} | {row['measured_ms']:.0f} | "
        f"{row['milliseconds']:.0f} | {_off(row['milliseconds'], row['measured_ms'])} | "
        f"{row['scaled_ms']:.0f} | {_off(row['scaled_ms'], row['measured_ms'])} |"
        for row in socket_rows()
    ]
    links = [
        f"| {row['run']} | {row['seconds']:.2f} | {row['measured_seconds']:.2f} | "
        f"{row['seconds'] / row['measured_seconds'] - 1:+.0%} |"
        for row in slow_link_rows()
    ]
    paper = [
        f"| {row['gbit']} | {row['tokens']} | {_figures(row['behind'])} | {_figures(row['alone'])} | "
        f"{_figures(row['published'])} |"
        for row in published_rows()
    ]
    ours = [
        f"| {row['run']} | {row['models']:.2f} | {' | '.join(map(str, row['tflops']))} |"
        for row in our_rows()
    ]
    shapes = [
        f"| {row['shape'].replace(':', ', ')} | {row['gib']} | {row['measured_gib']} | "
        f"{row['milliseconds']} | {row['measured_ms']} | "
        f"{row['milliseconds'] / row['measured_ms'] - 1:+.1%} |"
        for row in shape_rows()
    ]
    return {"gpus": gpus, "sockets": sockets, "shapes": shapes, "links": links, "paper": paper, "ours": ours}


def _times(row: Row) -> str:
    off = "fitted" if row["fitted"] else _off(row["milliseconds"], row["measured_ms"])
    return f"{row['milliseconds']:.1f} | {row['measured_ms']:.1f} | {off}"


def _off(planned: float, measured: float) -> str:
    return format(planned / measured - 1, "+.1%")


def _figures(row: Row) -> str:
    rates = f"{row['ZeRO-3']} → {row['ZeRO++']}: " if row["ZeRO-3"] else ""
    return f"{rates}{row['speed-up']}"


def main() -> None:
    """Writes the rows, and prints them as they stand in the documentation."""
    figures = {
        "h200": h200_rows(),
        "sockets": socket_rows(),
        "one_h200": shape_rows(),
        "slow_link": slow_link_rows(),
        "zeropp_paper_18b": published_rows(),
        "ours_18b": our_rows(),
    }
    write_result("plan", figures)
    for name, lines in tables().items():
        print("", name, *lines, sep="\n")


if __name__ == "__main__":
    main()
