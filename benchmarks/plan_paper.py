"""Plans of --dry-run for the 18B model of the ZeRO++ paper (2306.10209), beside what the paper published.

The paper ran DeepSpeed's ZeRO-3 and ZeRO++ on 24 DGX-2 of 16 V100. A plan has the bytes of our engine, so the
paper's bytes are inserted here: 3 and 0.75 models between nodes per step. Each row is predicted twice: with
transfers behind the compute, and with none behind it. The paper's TFLOP/s are assumed to count the
recomputation. Next to these rows is the plan of our engine for the same model on the same machines.
"""

from benchmarks.contest.contestants import OURS as CONTESTANTS
from benchmarks.plan_rows import GPU_VOCAB, Row
from megatron_zpp.config.model import ModelConfig, RecomputeConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.plan import PlanConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.model.flops import parameter_count
from megatron_zpp.plan.hardware import Machine, machine
from megatron_zpp.plan.job import Job, units_of
from megatron_zpp.plan.step_time import compute_seconds, pass_seconds, step_time
from megatron_zpp.plan.traffic import Pass, total, traffic_of
from megatron_zpp.zero.hop import SentBytes

PAPER_NODES, PAPER_GPUS = 24, 16
PAPER_VOLUMES = {  # models sent: forward, backward, gradients
    "ZeRO-3": (1.0, 1.0, 1.0),
    "ZeRO++": (0.5, 0.0, 0.25),
}
# (link Gbit/s, tokens per GPU) -> published for the 18B model, or for all sizes where the entry says so
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


def published_rows() -> list[Row]:
    """Rows of the paper's 18B model: TFLOP/s per GPU with transfers `behind` the compute, and `alone`."""
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
    """Rows of the same model in our engine: models sent between nodes, TFLOP/s per GPU by link and tokens."""
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


def _one_model(job: Job) -> int:
    """Bytes that all nodes send to other nodes to transfer the model once."""
    return 2 * parameter_count(job.model, GPU_VOCAB) * (PAPER_NODES - 1)


def _paper(tokens: int, volumes: tuple[float, float, float], rates: Machine) -> tuple[float, float]:
    """TFLOP/s per GPU with recomputation counted: transfers overlapped, and not overlapped."""
    job = _paper_job(tokens, {"zero_stage": 3})
    whole = _one_model(job)
    forward, backward, gradients = volumes
    behind = alone = computes = 0.0
    for is_forward, models in ((True, forward), (False, backward + gradients)):
        sent = SentBytes(inter=int(models * whole))
        one = Pass(is_forward, 1, sent, SentBytes(), SentBytes(), decoded=0, cast=0, summed=0)
        compute = compute_seconds(job, rates, is_forward)
        behind += pass_seconds(job, rates, one, compute)
        alone += compute + pass_seconds(job, rates, one, 0.0)
        computes += compute
    tflops = rates.flops / 1e12 * computes
    return round(tflops / behind, 1), round(tflops / alone, 1)
