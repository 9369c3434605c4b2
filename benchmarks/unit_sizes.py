"""What the size of units is worth: plans of 175B on 128 × 8 H100s, and of 6.7B with two vocabularies.

python benchmarks/unit_sizes.py   writes benchmarks/results/unit_sizes.json and prints tables

Every row has the flags with which `pretrain_gpt.py --dry-run` prints the same plan. "Arena" is what stays
besides model states: slots, and the buffers of gathers and reductions.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.common import refuse_options, write_result
from megatron_zpp.config.root import parse_args
from megatron_zpp.distributed.grid import Grid
from megatron_zpp.distributed.topology import Topology, planned
from megatron_zpp.plan.advice import fits
from megatron_zpp.plan.hardware import GPUS, machine
from megatron_zpp.plan.job import Job
from megatron_zpp.plan.memory import memory_of
from megatron_zpp.plan.step_time import step_time
from megatron_zpp.plan.traffic import total, traffic_of
from megatron_zpp.train.dry_run import job_of
from megatron_zpp.train.schedule.run_schedule import RunSchedule

COMMON = (
    "--dry-run --mock-data --tokenizer-type NullTokenizer --train-iters 1000 --lr 1e-4 --bf16 --zero-stage 3 "
    "--recompute-granularity full --recompute-method uniform --hidden-dropout 0 --attention-dropout 0"
)
LARGE = (
    "--model-preset 175b --vocab-size 50257 --plan-nodes 128 --plan-gpus-per-node 8 --global-batch-size 1024 "
    "--plan-link-gbit 3200"
)
HPZ = "--zero-hpz-partition-size auto"
QWZ, QGZ = "--zero-quantized-weights", "--zero-quantized-gradients"
CODES = f"{QWZ} {HPZ} --zero-hpz-secondary quantized {QGZ}"
SUBLAYER = "--zero-unit sublayer"
UNTIED = "--untie-embeddings-and-output-weights"
ONE, EIGHT = "--micro-batch-size 1", "--tensor-model-parallel-size 8 --micro-batch-size 8"  # equal per GPU
MEANS = {  # of 175B with whole layers, to which SUBLAYER is added
    "stage 3": ONE,
    "hpZ": f"{ONE} {HPZ}",
    "hpZ, qgZ": f"{ONE} {HPZ} {QGZ}",
    "qwZ, hpZ, qgZ": f"{ONE} {QWZ} {HPZ} {QGZ}",
    "qwZ, hpZ in 8 bits, qgZ": f"{ONE} {CODES}",
    "hpZ, T = 8": f"{EIGHT} --zero-hpz-partition-size 8",
    "qwZ delta4, hpZ, qgZ": f"{ONE} {QWZ} --zero-quantized-weights-format delta4 {HPZ} {QGZ}",
}
SMALL = (
    "--model-preset 6.7b --plan-nodes 2 --plan-gpus-per-node 8 --global-batch-size 16 --plan-link-gbit 3200"
)
VOCABULARIES = (50257, 256000)
ROWS = "--zero-table-rows 16384"
GIB = 2**30
Row = dict[str, Any]


def job_for(flags: str) -> tuple[Job, Any]:
    """The job of a command line, and its configuration."""
    config = parse_args(f"{COMMON} {flags}".split())
    ranks = planned(config.plan, Topology())
    grid = Grid(ranks, config.distributed.tensor_model_parallel_size)
    schedule = RunSchedule.from_config(config.training, config.learning_rate, grid.data.world_size)
    assert config.tokenizer.vocab_size is not None
    return job_of(config, config.tokenizer.vocab_size + 1, schedule, grid), config


def arena_of(job: Job) -> float:
    """GiB of slots and buffers."""
    plan = job.communication
    slots = {slot: layout.numel for slot, layout in zip(plan.slots, plan.layouts, strict=True)}
    return (plan.compute_dtype.itemsize * sum(slots.values()) + plan.arena_bytes) / GIB


def row_of(flags: str) -> Row:
    """The plan of a command line, in GiB, and in GB where cards are sold by them."""
    job, config = job_for(flags)
    memory, gpu = memory_of(job), GPUS["h100"]
    passes = traffic_of(job)
    seconds = step_time(job, machine(config.plan, "bfloat16"), passes).seconds
    return {
        "flags": flags,
        "arena_gib": round(arena_of(job), 2),
        "secondary_gib": round(memory.zeropp / GIB, 2),
        "peak_gib": round(memory.peak / GIB, 2),
        "peak_gb": round(memory.peak / 1e9, 1),
        "peak_at": memory.peak_at,
        "fits_an_h100": fits(memory, gpu.memory),
        "loss_gib": round(memory.loss / GIB, 2),
        "gb_per_node": round(total(passes).inter / job.nodes / 1e9, 1),  # sent to other nodes in a step
        "step_ms": round(1e3 * seconds, 1),
    }


def rows_of_175b() -> dict[str, Row]:
    """With whole layers and with sublayers."""
    rows = {}
    for name, flags in MEANS.items():
        rows[name] = row_of(f"{LARGE} {flags}")
        rows[f"{name}, sublayers"] = row_of(f"{LARGE} {flags} {SUBLAYER}")
    return rows


def rows_of_vocabularies() -> dict[str, Row]:
    """6.7B at stage 3; with 50k entries, with 256k, and what shrinks the table's slot."""
    rows = {}
    for entries in VOCABULARIES:
        flags = f"{SMALL} --vocab-size {entries} {ONE}"
        rows[f"{entries:,} entries"] = row_of(flags)
        rows[f"{entries:,} entries, sublayers"] = row_of(f"{flags} {SUBLAYER}")
        rows[f"{entries:,} entries, row blocks"] = row_of(f"{flags} {ROWS}")
        rows[f"{entries:,} entries, row blocks, sublayers"] = row_of(f"{flags} {ROWS} {SUBLAYER}")
        rows[f"{entries:,} entries, untied"] = row_of(f"{flags} {UNTIED}")
        rows[f"{entries:,} entries, untied, row blocks"] = row_of(f"{flags} {UNTIED} {ROWS}")
    for ranks in (2, 4, 8):
        flags = f"{SMALL} --vocab-size {VOCABULARIES[-1]} --micro-batch-size {ranks}"
        rows[f"{VOCABULARIES[-1]:,} entries, T = {ranks}"] = row_of(
            f"{flags} --tensor-model-parallel-size {ranks}"
        )
    return rows


def table_of_175b(rows: dict[str, Row]) -> list[str]:
    """The rows as docs/internals/scaling.md has them."""
    lines = ["| run | arena, GiB | secondary shards, GiB | peak, GiB | peak, GB |", "| --- " * 5 + "|"]
    for name, row in rows.items():
        figures = [row[key] for key in ("arena_gib", "secondary_gib", "peak_gib", "peak_gb")]
        mark = "" if row["fits_an_h100"] else " does not fit"
        lines.append(f"| {name} | {' | '.join(map(str, figures))}{mark} |")
    return lines


def table_of_vocabularies(rows: dict[str, Row]) -> list[str]:
    """The same; each arena as a multiple of the first one, too."""
    first = next(iter(rows.values()))["arena_gib"]
    lines = [
        "| 6.7B on 2 × 8, stage 3 | arena, GiB | of the first | the loss, GiB | peak, GiB | sent, GB |",
        "| --- " * 6 + "|",
    ]
    for name, row in rows.items():
        arena = row["arena_gib"]
        figures = arena, f"{arena / first:.2f}", row["loss_gib"], row["peak_gib"], row["gb_per_node"]
        lines.append(f"| {name} | {' | '.join(map(str, figures))} |")
    return lines


def main() -> None:
    """Both models."""
    refuse_options(__doc__)
    large, small = rows_of_175b(), rows_of_vocabularies()
    write_result("unit_sizes", {"175b_on_128x8": large, "6.7b_on_2x8": small})
    print("\n".join(["", *table_of_175b(large), "", *table_of_vocabularies(small)]))


if __name__ == "__main__":
    main()
