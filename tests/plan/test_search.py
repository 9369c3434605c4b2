"""The search finds what brute force finds, keeps batch and numerics, and never advises what is refused."""

import dataclasses
import itertools
import re
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plan_rows import h100
from benchmarks.plan_tensor import fitted_h100, zero_3
from megatron_zpp.config.model import ModelConfig, RecomputeConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.config.options import UsageError
from megatron_zpp.config.plan import PlanConfig
from megatron_zpp.config.root import parse_args
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.exchange.route import check_routes
from megatron_zpp.mesh import Mesh
from megatron_zpp.plan.changes import changed_flags
from megatron_zpp.plan.hardware import GPUS, USABLE, Machine, machine
from megatron_zpp.plan.job import Job, units_of
from megatron_zpp.plan.memory import memory_of
from megatron_zpp.plan.search import WORTH, Found, fastest, plan_of, search
from megatron_zpp.plan.space import FULL, OFF, SELECTIVE, Space, bases
from megatron_zpp.plan.step_time import step_time
from megatron_zpp.plan.traffic import traffic_of
from megatron_zpp.train.auto import resolved
from tests.plan.jobs import FOUR_BITS, HPZ, NO_DROPOUT, QGZ, QWZ, job_of, printed
from tests.plan.jobs import FULL as FULL_FLAGS
from tests.plan.test_memory import IN_BACKWARD, SPLIT
from tests.support import nightly, pretrain, refusal, trained

H100 = GPUS["h100"].memory
STAGE_3 = {"zero_stage": 3}
FP8 = PrecisionConfig(bf16=True, fp8=True)


def rates(link: float = 100) -> Machine:
    return machine(PlanConfig(dry_run=True, plan_link_gbit=str(link)), "bfloat16")


def preset(name: str, nodes: int, local: int, batch: int, zero: Any = None, **more: Any) -> Job:
    """A run with micro-batches of one sample."""
    model = ModelConfig(model_preset=name, **NO_DROPOUT, **more.pop("model", {}))
    count = batch * more.get("tensor", 1) // (nodes * local)
    job = job_of(model, 50257, zero=zero or STAGE_3, nodes=nodes, local=local, micro_batches=count, **more)
    return dataclasses.replace(job, compiled=True, overlapped=True)


def found(job: Job, link: float = 100, gibibytes: float = H100) -> Found:
    """What is found, in which every plan fits, has the batch, and no format that the run has not."""
    result = search(job, rates(link), gibibytes)
    for plan in (result.best, result.second, result.rounded):
        if plan is not None:
            assert memory_of(dataclasses.replace(plan.job)).fits(gibibytes)
            assert plan.job.samples_per_step == job.samples_per_step
            check_routes(plan.job.zero, plan.job.mesh)
    for plan in filter(None, (result.best, result.second)):
        zero, given = plan.job.zero, job.zero
        assert zero.zero_quantized_weights in (False, given.zero_quantized_weights)
        assert zero.zero_quantized_gradients in (False, given.zero_quantized_gradients)
        assert plan.job.precision == job.precision
    return result


SMALL = ModelConfig(num_layers=3, hidden_size=512, num_attention_heads=4, seq_length=512, **NO_DROPOUT)


def every_setting(job: Job) -> list[Job]:
    """All settings with whole layers in units, found without the search."""
    jobs = []
    layers = range(1, job.model.num_layers)
    blocks = [
        RecomputeConfig(recompute_granularity="full", recompute_method="block", recompute_num_layers=count)
        for count in layers
    ]
    for tensor, stage, hpz, group in itertools.product((1, 2, 4), range(4), ("1", "auto"), ("off", "auto")):
        try:
            groups = {"zero_hpz_partition_size": hpz, "zero_gradient_partition_size": group}
            zero = ZeroConfig(zero_stage=stage, **groups)
        except ValueError:
            continue
        units = units_of(job.model, job.vocab_size, tensor)
        ranks = job.ranks // tensor
        for size, recompute in itertools.product((1, 2, 4, 8, 16), (OFF, SELECTIVE, FULL, *blocks)):
            if job.samples_per_step % (size * ranks) == 0:
                count = job.samples_per_step // (size * ranks)
                other = dataclasses.replace(job, tensor=tensor, zero=zero, units=units, recompute=recompute)
                jobs.append(dataclasses.replace(other, micro_batch_size=size, micro_batches=count))
    return jobs


@pytest.mark.parametrize(("link", "given"), [(1, {}), nightly(400, FULL_FLAGS)])
def test_brute_force_finds_nothing_better(link: float, given: dict[str, Any]) -> None:
    """On 2 × 4 GPUs, of memory for everything, for some settings, and for few."""
    job = job_of(SMALL, 1000, zero=STAGE_3, recompute=given, nodes=2, local=4, micro_batches=4)
    gpu, everything = rates(link), every_setting(job)
    timed = [(step_time(each, gpu, traffic_of(each)).seconds, memory_of(each)) for each in everything]
    peaks = sorted(memory.peak for _, memory in timed)
    for peak in (peaks[-1], peaks[len(peaks) // 2], peaks[len(peaks) // 8], peaks[0]):
        room = peak / 0.92 / 2**30 * (1 + 1e-9)
        best = found(job, link, room).best
        fastest_of_all = min(seconds for seconds, memory in timed if memory.fits(room))
        assert best.seconds <= fastest_of_all * (1 + WORTH) * (1 + 1e-9)
        assert best.seconds >= fastest_of_all * (1 - 1e-9)


def test_larger_micro_batches_are_proposed() -> None:
    """6.7B on 4 × 8 at 100 Gbit/s: 97.8 s with one sample, of which 90 wait for links."""
    job = preset("6.7b", 4, 8, 1024)
    result = found(job)
    assert result.run.seconds == pytest.approx(97.8, rel=0.01)
    assert result.best.seconds < 7.7
    assert result.best.job.micro_batch_size >= 4
    assert result.second is not None
    assert result.rounded.seconds < result.best.seconds


@pytest.mark.nightly
def test_175b_on_1024_gpus_takes_seconds_to_plan() -> None:
    start = time.process_time()
    best = found(preset("175b", 128, 8, 2048), 400).best
    assert time.process_time() - start < 10
    assert best.seconds < 20


def test_what_costs_time_is_taken_where_nothing_fits_without_it() -> None:
    """The states of 13B are 96 GiB for each of two GPUs, of which AdamW's are 72."""
    best = found(preset("13b", 1, 2, 16)).best
    assert best.job.zero.zero_offload_optimizer
    enough = found(preset("13b", 1, 8, 16, {"zero_stage": 3, "zero_offload_optimizer": True})).best
    assert not enough.job.zero.zero_offload_optimizer
    nothing = found(preset("175b", 1, 2, 16))
    assert nothing.best is None
    assert nothing.least.memory.peak < nothing.run.memory.peak


def test_sublayers_are_taken_where_nothing_fits_without_them() -> None:
    """Between the least memory of whole layers in units, and that of sublayers."""
    job = preset("1.3b", 8, 1, 16, recompute=FULL_FLAGS)
    whole, cut = (memory_of(base).peak for base in itertools.islice(bases(job), 2))
    room = (whole + cut) / 2 / 2**30 / USABLE
    best = found(job, gibibytes=room).best
    assert best.job.zero.cuts_layers
    assert not best.job.zero.zero_offload_optimizer


@pytest.mark.nightly
def test_tensor_ranks_are_taken_where_they_pay_alone() -> None:
    """Not on the two H100s where ZeRO-3 was measured to be as fast as two tensor ranks."""
    for gpu in (h100(), fitted_h100(zero_3().alone)):
        best = search(zero_3().job, gpu, H100).best
        assert best.job.tensor == 1
    long = found(preset("175b", 16, 8, 128, model={"seq_length": 65536}), 400).best
    assert long.job.tensor == 8
    few = found(preset("13b", 16, 8, 32, tensor=4), 400).best  # fewer samples than ranks
    assert few.job.tensor in (4, 8)


def test_nothing_changes_where_a_run_is_as_fast_as_any() -> None:
    job = preset("1.3b", 1, 1, 32, {"zero_stage": 0})
    best = search(job, rates(), H100).best
    again = search(best.job, rates(), H100)
    assert not changed_flags(best.job, again.best.job)


@pytest.mark.parametrize("zero", [STAGE_3 | QWZ | HPZ | QGZ, FOUR_BITS])
def test_formats_of_a_run_are_its_own_or_none(zero: dict[str, Any]) -> None:
    best = found(preset("1.3b", 2, 4, 64, zero, model={"num_layers": 6}), 10).best
    assert best.job.zero.zero_quantized_weights_format == ZeroConfig(**zero).zero_quantized_weights_format


def test_micro_batches_stay_where_their_size_changes_the_numerics() -> None:
    job = dataclasses.replace(
        preset("1.3b", 2, 4, 64, precision=FP8, model={"num_layers": 6}), may_resize=False
    )
    best = found(job).best
    assert best.job.micro_batch_size == job.micro_batch_size


def test_units_that_step_in_the_backward_take_one_micro_batch() -> None:
    """Which has all samples of a step; 13B then trains on one card, which has no room for its gradients."""
    job = dataclasses.replace(preset("13b", 1, 1, 2, optimizer=IN_BACKWARD), may_offload=False)
    best = found(job).best
    assert (best.job.micro_batch_size, best.job.micro_batches) == (2, 1)
    assert found(dataclasses.replace(job, optimizer=SPLIT)).best is None


def test_a_space_of_the_stage_or_of_the_size_alone_leaves_the_rest() -> None:
    job = preset("1.3b", 2, 4, 64)
    stage = fastest(job, rates(), H100, Space(micro_batch=False, others=False))
    size = fastest(job, rates(), H100, Space(stage=False, others=False))
    assert stage.job == dataclasses.replace(job, zero=stage.job.zero)
    assert size.job.zero == job.zero
    assert size.job.micro_batch_size > 1
    assert fastest(job, rates(), 1, Space(others=False)) is None


PLAN = (
    "--dry-run --model-preset 1.3b --num-layers 6 --plan-nodes 4 --plan-gpus-per-node 8 --plan-link-gbit 50 "
    "--global-batch-size 128 --lr 1e-4"
)
RECOMPUTED = "--recompute-granularity full --recompute-method uniform"
EVERYTHING = (
    "--zero-stage 3 --zero-quantized-weights --zero-hpz-partition-size auto --zero-quantized-gradients"
)
DELTAS = f"{EVERYTHING} --zero-quantized-weights-format delta4 --zero-quantized-gradients-format rotated4"
LONG = (
    "--seq-length 65536 --max-position-embeddings 65536 --position-embedding-type rope --hidden-dropout 0 "
    "--attention-dropout 0 --zero-stage 3 --micro-batch-size 1"
)
COMMANDS = [
    f"{PLAN} --zero-stage 3 --zero-prefetch-units 1 --grad-reduce-in-bf16",
    f"{PLAN} {DELTAS} {RECOMPUTED} --recompute-num-layers 2 --zero-unit sublayer",
    f"{PLAN} --zero-stage 1 --tensor-model-parallel-size 8 --micro-batch-size 2",
    f"{PLAN} --zero-stage 3 --fp8 --fp8-recipe delayed --fp8-param-gather --fp8-output-layer",
    f"{PLAN} --micro-batch-size 4 --recompute-activations --zero-gradient-partition-size 4 --zero-stage 2",
    f"{PLAN} --plan-nodes 1 --zero-offload-optimizer --zero-unit sublayer",
    PLAN.replace("--global-batch-size 128", "--micro-batch-size 4"),
    f"{PLAN} --plan-nodes 1 --plan-gpus-per-node 4 {LONG} --context-parallel-size 4 --cp-comm-type p2p",
    f"{PLAN} --plan-nodes 1 --plan-gpus-per-node 2 {LONG} --mlp-chunks-for-training 4 {RECOMPUTED}",
]


def advised(said: str) -> list[str]:
    """What follows the names of all advised settings, up to their figures."""
    found = re.findall(r"^(?:best|second|with 8 and 4 bits): (.*?): [\d.,]+ \S+ per step", said, re.M)
    return [flags for flags in found if flags != "as given"]


def as_given(run: Job, gpu: Machine, gibibytes: float) -> Found:
    plan = plan_of(run, gpu)
    return Found(plan, plan, plan)


def applied(argv: list[str], flags: str) -> list[str]:
    """The command line with the flags to give, and without those to omit."""
    given, _, omitted = flags.partition("without ")
    for flag in omitted.split():
        start = argv.index(flag)
        end = next((i for i in range(start + 1, len(argv)) if argv[i].startswith("--")), len(argv))
        argv = argv[:start] + argv[end:]
    return [*argv, *given.split()]


@pytest.mark.parametrize("command", [*COMMANDS[:1], *map(nightly, COMMANDS[1:3]), *COMMANDS[3:]])
def test_every_advised_command_line_is_accepted_and_is_planned_as_it_was_promised(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = printed(*command.split())
    assert said.count("\nbest: ") == 1
    monkeypatch.setattr("megatron_zpp.plan.report.search", as_given)  # nothing but the line itself is planned
    for flags in advised(said):
        again = printed(*applied(command.split(), flags))
        figures = re.search(rf": {re.escape(flags)}: ([^;\n]*)", said)
        assert figures
        promised, unit = figures[1].split(" per step")[0].split()
        in_all = next(line for line in again.splitlines() if line.startswith("  in all "))
        assert f" {promised} {unit}" in in_all


TINY = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 100 --num-layers 2 --hidden-size 64 "
    "--num-attention-heads 4 --seq-length 32 --train-iters 2 --lr 1e-3 --global-batch-size 8 --eval-iters 0"
).split()


def test_groups_that_other_tensor_ranks_cannot_have_are_not_tried() -> None:
    line = "--micro-batch-size 1 --zero-stage 3 --tensor-model-parallel-size 2 --zero-hpz-partition-size 2"
    assert "this run" in printed(*TINY, *line.split(), *"--dry-run --plan-gpus-per-node 4".split())


def test_the_best_line_of_a_tiny_model_runs() -> None:
    given = [*TINY, "--micro-batch-size", "1", "--zero-stage", "3"]
    flags = advised(printed(*given, *"--dry-run --plan-gpus-per-node 2".split()))[0]
    out = trained(*applied(given, flags), processes=2)
    assert " first step, iteration 1: loss " in out


def test_a_run_takes_the_stage_and_the_micro_batches_that_its_own_ranks_allow(tmp_path: Path) -> None:
    """And plans again when it resumes on others."""
    auto = [*TINY, "--zero-stage", "auto", "--micro-batch-size", "auto", "--save", str(tmp_path)]
    done = pretrain(*auto, processes=2)
    assert done.returncode == 0, done.stderr
    (line,) = re.findall(r"auto: --zero-stage [1-3] .*--micro-batch-size 4: planned .*", done.stderr)
    assert " for each rank on CPUs" in line
    resumed = pretrain(*auto, "--load", str(tmp_path), "--train-iters", "4")
    assert resumed.returncode == 0, resumed.stderr
    assert "auto: --zero-stage 0 --micro-batch-size 8: planned " in resumed.stderr


def test_a_run_that_no_stage_lets_fit_names_flags_that_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node of 1 GiB for each rank: one sample of this model keeps 3 without recomputation."""
    monkeypatch.setattr("megatron_zpp.train.auto.cpu_ranks", lambda ranks, link: (1.0, rates()))
    large = "--num-layers 24 --hidden-size 512 --num-attention-heads 8 --seq-length 4096".split()
    config = parse_args([*TINY, *large, *"--micro-batch-size auto --zero-stage auto --device cpu".split()])
    with pytest.raises(ValueError, match="auto: nothing fits 1 GiB for each rank on CPUs; give --zero-stage"):
        resolved(config, 101, Mesh(local_ranks=8))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--micro-batch-size auto", "--global-batch-size (not given): give it with --micro-batch-size auto"),
        (
            "--micro-batch-size auto --global-batch-size 8 --fp8",
            "--micro-batch-size auto: would change the scales",
        ),
        (
            "--micro-batch-size auto --global-batch-size 8 --eod-mask-loss",
            "--micro-batch-size auto: would change the loss",
        ),
        (
            "--micro-batch-size 1 --plan-link-gbit 9",
            "--plan-link-gbit 9: needs --dry-run, --zero-stage auto or",
        ),
        (
            "--micro-batch-size 1 --zero-stage auto --plan-link-gbit ib",
            "--plan-link-gbit ib: must be a number",
        ),
        ("--micro-batch-size some", "--micro-batch-size some: must be a whole number or auto"),
    ],
)
def test_auto_is_refused_where_it_would_change_the_numerics_or_lacks_the_batch(argv: str, said: str) -> None:
    tiny = TINY[: TINY.index("--global-batch-size")]
    assert said in refusal(parse_args, [*tiny, *argv.split()], error=UsageError)


@pytest.mark.parametrize(
    "zero", [{"zero_stage": 2}, STAGE_3 | HPZ, FOUR_BITS, STAGE_3 | {"zero_unit": "sublayer"}]
)
def test_jobs_that_share_what_is_computed_are_planned_like_others(zero: dict[str, Any]) -> None:
    grid: dict[str, Any] = {"zero": zero, "nodes": 2, "local": 4, "tensor": 2}
    job = job_of(SMALL, 1000, micro_batches=5, **grid)
    assert memory_of(job).peak > 0  # its plan is computed, and then shared
    for count in (1, 5):
        varied = job.varied(recompute=FULL, micro_batches=count)
        other = job_of(SMALL, 1000, recompute=FULL_FLAGS, micro_batches=count, **grid)
        assert traffic_of(varied) == traffic_of(other)
        assert memory_of(varied) == memory_of(other)
