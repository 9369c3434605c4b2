"""Plans of --dry-run for settings that were measured in benchmarks/results/: a row for each measurement.

Memory follows from the settings alone. Time follows from the constants of plan/hardware.py, with the share of
the peak fitted to one GPU alone in the same result; other models on one GPU have the planner's share, and the
larger model on two H100s has that of 1.3B on another machine. Steps between nodes are planned from the rates
that NCCL's collectives reached in the same result.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from statistics import mean
from typing import Any

from benchmarks.common import figures_of
from benchmarks.contest.contestants import OURS as CONTESTANTS
from megatron_zpp.config.model import ModelConfig, RecomputeConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.plan import PlanConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.peer_rows import region_bytes
from megatron_zpp.plan.hardware import GPUS, Machine, machine
from megatron_zpp.plan.job import Job, units_of
from megatron_zpp.plan.memory import memory_of
from megatron_zpp.plan.step_time import step_time
from megatron_zpp.plan.traffic import traffic_of

Row = dict[str, Any]
TWO_H200 = "zero_speed_1.3b_mbs8_1x2_compiled"  # 8 samples per GPU
SHAPES: dict[tuple[str, int], str] = {  # model and micro-batch size on one GPU -> result
    ("345m", 16): "345m_2.7b",
    ("2.7b", 8): "345m_2.7b",
    ("6.7b", 10): "6.7b",
}
GPU_VOCAB = 50304
LLAMA_VOCAB = 128384
# Results of steps between nodes of one H100. They have the rates of collectives there, and one GPU alone.
SOCKETS = ("mbs8_acc1_2x1_default_h100", "mbs8_acc1_2x1_4sockets_h100", "mbs8_acc8_2x1_default")
NVLINK = ("1.3b_mbs8_acc1_1x2_default", "6.7b_mbs4_acc1_1x2_default")  # on two H100s of one node
ONE_H100 = "1.3b_mbs8_acc1_2x1_default_h100"  # has one GPU alone


def job_of(
    model: ModelConfig, vocab: int, zero: Row, nodes: int, local: int, size: int, micro_batches: int = 1
) -> Job:
    """A job whose steps compute bf16 micro-batches of `size` samples without recomputation."""
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
        compiled=True,
    )


def fitted(job: Job, measured: float, at: Callable[[float], Machine], low: float, high: float) -> Machine:
    """Find the rate at which the job's step takes `measured` seconds, and return `at` of that rate.

    A step must take less time at a higher rate.
    """
    passes = traffic_of(job)
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if step_time(job, at(middle), passes).seconds > measured else (low, middle)
    return at(low)


def shape_rows() -> list[Row]:
    """Rows of other models on one H200, measured by throughput.py."""
    rows = []
    for (preset, size), result in SHAPES.items():
        figures = figures_of(f"throughput_{result}")
        shape = f"{preset}:{size}"
        job = job_of(_measured_model(preset), GPU_VOCAB, {}, 1, 1, size)
        rows.append(row_of(job, h200(), figures[shape]["stage 0"], shape=shape))
    return rows


def h200_rows() -> list[Row]:
    """Rows of two H200s on NVLink at each stage."""
    figures, rows, gpu = figures_of(TWO_H200), [], _one_h200()
    for run, figure in figures.items():
        if run in CONTESTANTS or run == "one_gpu":
            local = 1 if run == "one_gpu" else 2
            job = job_of(_measured_model(), GPU_VOCAB, CONTESTANTS.get(run, {}), 1, local, 8)
            rows.append(row_of(job, gpu, figure, fitted=local == 1, run=run))
    return rows


def _one_h200() -> Machine:
    """An H200 with the share of its peak that one reaches alone at 1.3B."""
    figures = figures_of(TWO_H200)
    alone = job_of(_measured_model(), GPU_VOCAB, {}, 1, 1, 8)
    return fitted(alone, figures["one_gpu"]["milliseconds"] / 1e3, _h200_at, 0.2, 1.0)


def llama_rows() -> list[Row]:
    """Rows of Llama-3 8B on four H200s. The share of the peak is that of one GPU with 8 of its layers."""
    figures = figures_of("throughput_llama_8b")
    alone, rows = figures["one GPU, 8 layers"], []
    one = _llama_job("stage 0", 8, 1, 1, 1)
    gpu = fitted(one, alone["stage 0"]["milliseconds"] / 1e3, _h200_at, 0.2, 1.0)
    for grid, layers, gpus, micro_batches in (
        ("one GPU, 8 layers", 8, 1, 1),
        ("two GPUs, 8 layers", 8, 2, 1),
        ("four GPUs", 32, 4, 1),
        ("four GPUs, eight micro-batches", 32, 4, 8),
    ):
        for run, figure in figures[grid].items():
            if run.startswith("stage"):
                samples = figure["samples_per_micro_batch"]
                job = _llama_job(run, layers, gpus, micro_batches, samples)
                rows.append(row_of(job, gpu, figure, fitted=figure is alone["stage 0"], run=f"{grid}: {run}"))
    return rows


def _llama_job(run: str, layers: int, gpus: int, micro_batches: int, samples: int) -> Job:
    stage, *parts = run.split(", ")
    tensor = 2 if "tensor" in parts else 1
    model = ModelConfig(
        model_preset="llama3.1-8b",
        num_layers=layers,
        seq_length=8192,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    bits: Row = (
        {"fp8": True, "fp8_recipe": "delayed", "fp8_param_gather": True} if "fp8 codes" in parts else {}
    )
    job = job_of(model, LLAMA_VOCAB, {"zero_stage": int(stage[-1])}, 1, gpus, samples, micro_batches)
    return replace(
        job,
        precision=PrecisionConfig(bf16=True, fp8_output_layer="fp8 output" in parts, **bits),
        tensor=tensor,
        overlapped=tensor > 1 and not bits,
        units=units_of(model, LLAMA_VOCAB, tensor),
    )


def context_rows() -> list[Row]:
    """Rows of long samples of 1.3B on H200s that share them; two of them fitted attention's time."""
    rows = []
    for measured, figures in figures_of("throughput_context").items():
        length, gpus = 1024 * int(measured.split("k")[0]), len(figures["machine"]["gpus"])
        given = figures["command"]
        for run, figure in figures.items():
            if not run.startswith("stage"):
                continue
            context, comm_type = (2, run.split()[-1]) if "context" in run else (1, "auto")
            kind = "rope" if "embedding-type=rope" in given else "learned_absolute"
            model = _measured_model(seq_length=length, position_embedding_type=kind)
            job = job_of(model, GPU_VOCAB, {"zero_stage": 2}, 1, 1 if "256k" in measured else gpus, 1)
            job = replace(job, context=context, comm_type=comm_type)
            if "--recompute" in given:
                full: Row = {"recompute_granularity": "full", "recompute_method": "uniform"}
                full["recompute_offload"] = "recompute-offload" in given
                job = replace(job, recompute=RecomputeConfig(**full))
            rows.append(row_of(job, h200(), figure, run=f"{measured}: {run}"))
    return rows


def socket_rows() -> list[Row]:
    """Rows of steps between nodes with one GPU per rank: memory, and time by the rates of NCCL's sockets.

    The share of the peak is that of one GPU alone in the same result.
    """
    rows = []
    for name in SOCKETS:
        figures = _zero_speed(f"1.3b_{name}")
        rates = _fitted_to_one(figures, partial(_sockets, figures["links"]["rounds"]))
        for run, figure, job in _contested(figures):
            gather = rates.link if job.zero.sends_differences else rates.gather
            names = {"nccl": figures["nccl"]["name"], "micro_batches": job.micro_batches, "run": run}
            rows.append(row_of(job, replace(rates, gather=gather), figure, **names))
    return rows


def nvlink_rows() -> list[Row]:
    """Rows of two models on two H100s. The share of the peak is that of another H100 alone, at 1.3B."""
    gpu = _fitted_to_one(_zero_speed(ONE_H100), h100)
    return [
        row_of(job, gpu, figure, model=figures["settings"]["preset"], run=run)
        for figures in map(_zero_speed, NVLINK)
        for run, figure, job in _contested(figures)
    ]


def row_of(job: Job, gpu: Machine, measured: Row, *, fitted: bool = False, **names: Any) -> Row:
    """The plan of a job beside its measured peak and time; `names` say which one it is."""
    return {
        **names,
        "gib": round((memory_of(job).peak + counted_otherwise(job)) / 2**30, 2),
        "measured_gib": round(measured["peak_gib"], 2),
        "milliseconds": round(1000 * step_time(job, gpu, traffic_of(job)).seconds, 1),
        "measured_ms": round(measured["milliseconds"], 1),
        "fitted": fitted,
    }


def _contested(figures: Row) -> Iterator[tuple[str, Row, Job]]:
    """The contestants of a result of zero_speed.py that are of this package: name, figures, and job."""
    settings = figures["settings"]
    grid = (figures["nodes"], figures["ranks_per_node"], settings["micro_batch_size"])
    for run, figure in figures["contestants"].items():
        if run in CONTESTANTS:
            model = _measured_model(settings["preset"])
            yield run, figure, job_of(model, GPU_VOCAB, CONTESTANTS[run], *grid, settings["micro_batches"])


def _fitted_to_one(figures: Row, at: Callable[[float], Machine]) -> Machine:
    """The machine whose GPU alone takes as long as in this result."""
    settings = figures["settings"]
    grid = (1, 1, settings["micro_batch_size"])
    one = job_of(_measured_model(), GPU_VOCAB, {}, *grid, settings["micro_batches"])
    return fitted(one, figures["contestants"]["one_gpu"]["milliseconds"] / 1e3, at, 0.2, 1.0)


def _zero_speed(name: str) -> Row:
    return figures_of(f"zero_speed_{name}")


def _sockets(rounds: list[Row], share: float) -> Machine:
    """H100s that reach a share of their peak, and whose nodes are linked by NCCL's sockets.

    Rates are the mean of all rounds and sizes. Gathers of weights are all-gathers on one communicator.
    Exchanges on two in turn have what two reach together.
    """

    def rate(collective: str) -> float:
        return 1e9 * mean(figure for one in rounds for figure in one[collective].values())

    together = rate("all_gather_beside_all_to_all")
    return replace(h100(share), gather=rate("all_gather"), exchange=together, link=together)


def _measured_model(preset: str = "1.3b", **changes: Any) -> ModelConfig:
    shape = {"seq_length": 1024, "hidden_dropout": 0.0, "attention_dropout": 0.0} | changes
    return ModelConfig(model_preset=preset, **shape)


def counted_otherwise(job: Job) -> int:
    """Bytes that GPUs write for each other, negative: a plan has them, torch's count of a peak does not."""
    communication = job.communication
    rooms = communication.rooms.items() if job.mesh.data_ranks > 1 else ()
    counted = sum(room.received for by, its in rooms if communication.peer_writes(by) for room in its.near)
    if job.overlapped:
        counted += region_bytes(job.tensor, job.rows, job.model.hidden_size, job.dtype)
    return -counted


def h200() -> Machine:
    return machine(PlanConfig(dry_run=True, plan_gpu="h200"), "bfloat16")


def _h200_at(share: float) -> Machine:
    return replace(h200(), flops=h200().flops * share / GPUS["h200"].compute_share)


def h100(share: float = GPUS["h100"].compute_share) -> Machine:
    """An H100 that reaches `share` of its peak; default the planner's."""
    gpu = machine(PlanConfig(dry_run=True, plan_gpu="h100"), "bfloat16")
    return replace(gpu, flops=gpu.flops * share / GPUS["h100"].compute_share)
