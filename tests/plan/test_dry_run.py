"""--dry-run: what it prints, what it refuses, and that it leaves nothing behind."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.common import RESULTS
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.options import UsageError
from megatron_zpp.config.root import parse_args, parse_command_line
from megatron_zpp.config.shapes.presets import vocabulary_of
from megatron_zpp.config.words import decimal_bytes, duration
from megatron_zpp.distributed.topology import Topology, planned
from megatron_zpp.model.flops import parameter_count
from megatron_zpp.train.dry_run import at_fitting_stage
from megatron_zpp.train.inputs import check_inputs
from tests.config.command_line import MINIMAL, without
from tests.plan.jobs import printed
from tests.support import pretrain, refusal

PLAN = "--dry-run --mock-data --tokenizer-type NullTokenizer --vocab-size 50257 --lr 1e-4 --train-iters 9"
FEW = "--dry-run --model-preset 13b --plan-nodes 4 --plan-gpus-per-node 8 --plan-link-gbit 25"


def test_a_plan_says_what_it_assumes() -> None:
    unknown = "--fp8 --attention-backend local --reset-attention-mask".split()
    said = printed(*MINIMAL, "--dry-run", *unknown)
    assert said.startswith("plan for 1 × 1 H100, bfloat16 with 8-bit products, ZeRO stage 0\n")
    for assumed in (
        " of its peak (measured: ",
        "\n  layers' products of --fp8 take 1.25 of bf16's time, as on an H200; memory as bf16's, or less\n",
        "no scores; --attention-backend local keeps them",
        "attention over whole samples, also with --reset-attention-mask\n",
        "dense, 64 × 32 numbers, and layers compute whole attention: --attention-backend local knows",
    ):
        assert assumed in said
    alibi = "--position-embedding-type alibi".split()
    kept = (
        f"keeps no scores; {' '.join(alibi)}, because FlexAttention needs --attention-dropout 0, keeps them"
    )
    assert kept in printed(*MINIMAL, "--dry-run", *alibi)
    assert "keeps no scores" not in printed(*MINIMAL, "--dry-run", *alibi, "--attention-dropout", "0")


def test_few_flags_make_a_plan_and_all_that_are_missing_are_said_at_once() -> None:
    """Neither tokenizer nor data, length, learning rate and micro-batches."""
    said = printed(*FEW.split(), "--global-batch-size", "512")
    assert "\nbest: --" in said
    assert said.startswith("plan for 4 × 8 H100, bfloat16, ZeRO stage 0\n")
    assert said.count("\n") <= 45
    for part in (
        "\nwith 8 and 4 bits: --",
        "\nthis run: ",
        "GPT of 12,8",
        "vocabulary 50257 padded to 50304",
        "GiB of each GPU",
        "inter_node_bytes",
        "a step takes",
        "tokens per day",
        "\nextrapolated from one and two H100s and H200s, without latencies: 4 nodes, 8 GPUs per node",
        "\nnever tried: ",
    ):
        assert part in said
    codes = "--num-layers 4 --zero-stage 3 --zero-quantized-weights --zero-quantized-gradients".split()
    assert "\nsecond: --" in printed(*FEW.split(), "--global-batch-size", "512", *codes)
    notes = parse_command_line([*FEW.split(), "--global-batch-size", "512"]).notes
    assert notes == ("not given, planned with: --micro-batch-size 1, a vocabulary of 50,257",)
    said = refusal(printed, "--dry-run", "--plan-nodes", "4", error=UsageError)
    needed = "--model-preset NAME (or --num-layers, --hidden-size, --num-attention-heads, --seq-length)"
    assert f"give {needed}, --global-batch-size N, --plan-link-gbit; " in said
    assert "dgx-h100 (3200), dgx-a100 (1600)" in said


def test_a_ramp_of_the_batch_makes_steps_and_not_tokens() -> None:
    ramp = "--dry-run --global-batch-size 8 --rampup-batch-size 2 2 9000000 --train-samples 10000000".split()
    assert "; 2,875,000 steps = 0.320 B tokens\n" in printed(*without("--train-iters"), *ramp)


def test_a_run_that_does_not_fit_and_one_that_is_best_are_told_so() -> None:
    """13B on 128 H100s: stage 1 does not fit."""
    argv = f"{PLAN} --model-preset 13b --plan-nodes 16 --plan-gpus-per-node 8 --plan-link-gbit 100"
    said = printed(*argv.split(), *"--zero-stage 1 --micro-batch-size 2 --global-batch-size 512".split())
    assert "\nthis run: does NOT fit: " in said
    assert ", of 72.68 GiB (79 less 8% for CUDA and NCCL); would take " in said
    best = f"{PLAN} --model-preset 1.3b --plan-gpus-per-node 2 --micro-batch-size 8 --global-batch-size 16"
    said = printed(*best.split(), "--zero-stage", "3")
    assert "\nbest: as given: " in said
    assert "\nthis run fits: " in said
    assert "\nlongest sample: " in said
    assert "  this run\n" in said  # one column


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.00045, "0.45 ms"),
        (0.35, "350 ms"),
        (0.99991, "1 s"),
        (24.66, "24.7 s"),
        (97.8, "97.8 s"),
        (750, "12.5 min"),
        (7600, "2.11 h"),
        (85 * 86400, "85 days"),
        (40 * 365.3 * 86400, "40 years"),
    ],
)
def test_times_have_the_unit_that_a_person_reads(seconds: float, said: str) -> None:
    assert duration(seconds) == said


@pytest.mark.parametrize(
    ("number", "said"),
    [(12, "12 bytes"), (999_600, "1 MB"), (7.61e9, "7.61 GB"), (600.9e9, "601 GB"), (1.22e12, "1.22 TB")],
)
def test_bytes_have_three_digits_and_no_exponent(number: float, said: str) -> None:
    assert decimal_bytes(number) == said


PUBLISHED = {  # as counted in the published weights, without the text's part of images; GPT-3's in its paper
    "gpt3-175b": 174_604_259_328,
    "llama2-7b": 6_738_415_616,
    "llama3.1-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_248_023_552,
    "smollm2-135m": 134_515_008,
    "smollm2-1.7b": 1_711_376_384,
    "llama3.1-70b": 70_553_706_496,
    "mistral-small-24b": 23_572_403_200,
    "qwen3-0.6b": 751_632_384 - 151_936 * 1024,  # there the tied table counts twice
    "qwen3-1.7b": 2_031_739_904 - 151_936 * 2048,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "smollm3-3b": 3_075_098_624,
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936,
    "olmo3-7b": 7_298_011_136,
    "olmo3-32b": 32_233_522_176,
    "granite3.3-2b": 2_533_539_840,
    "granite3.3-8b": 8_170_864_640,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_099_328 + 64 * 2560,  # with the rows of the tokens of images
    "gemma3-12b": 11_765_788_416 + 64 * 3840,
    "gemma3-27b": 27_009_002_240 + 64 * 5376,
    "phi3-mini": 3_821_079_552,
    "phi4-mini": 3_836_021_760,
    "glm4-9b": 9_400_279_040,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "starcoder2-15b": 15_957_889_024,
}


@pytest.mark.parametrize(("preset", "parameters"), PUBLISHED.items())
def test_presets_have_as_many_parameters_as_is_published(preset: str, parameters: int) -> None:
    model = ModelConfig(model_preset=preset, make_vocab_size_divisible_by=1)
    assert parameter_count(model, vocabulary_of(preset)) == parameters


@pytest.mark.parametrize(
    ("preset", "nodes", "given", "stage"),
    [("125m", 1, 0, 0), ("125m", 1, 2, 2), ("13b", 16, 0, 2), ("13b", 16, 3, 3), ("175b", 1, 1, None)],
)
def test_ranks_of_a_pipeline_take_the_lowest_stage_that_fits(
    preset: str, nodes: int, given: int, stage: int | None
) -> None:
    preset = "gpt2-125m" if preset == "125m" else preset
    argv = f"{PLAN} --model-preset {preset} --micro-batch-size 2 --plan-nodes {nodes} --plan-gpus-per-node 8"
    argv += " --plan-link-gbit 100"
    config = parse_args([*argv.split(), "--global-batch-size", "512", "--zero-stage", str(given)])
    mesh = planned(config.plan, Topology()).mesh()
    inputs = check_inputs(config, mesh, print)
    if stage is None:
        with pytest.raises(UsageError, match=r"^--pipeline-model-parallel-size 4: its ranks .* of 79 GiB"):
            at_fitting_stage(inputs, mesh, 4)
        return
    chosen, (note,) = at_fitting_stage(inputs, mesh, 4)
    assert chosen.config == replace(config, zero=replace(config.zero, zero_stage=stage))
    assert note.startswith(
        f"--pipeline-model-parallel-size 4: {nodes * 8} data ranks with whole layers at --zero-stage {stage}"
    )


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--plan-nodes 2", "--plan-nodes 2: needs --dry-run"),
        (
            "--dry-run --plan-nodes 2",
            "--dry-run: give --plan-link-gbit; --plan-link-gbit: ",
        ),
        ("--plan-gpu h100", "--plan-gpu h100: needs --dry-run"),
        ("--dry-run --plan-nodes 0", "--plan-nodes 0: must be at least 1"),
        ("--dry-run --device cpu", "--dry-run (given): plans for GPUs"),
        ("--dry-run --plan-nodes 3 --plan-link-gbit 9 --global-batch-size 8", "--global-batch-size 8: "),
        (
            "--dry-run --plan-nodes 2 --plan-gpus-per-node 4 --plan-link-gbit 9 --zero-stage 3 "
            "--zero-hpz-partition-size 3",
            "nodes of 4 data ranks; give 1, 2, 4 or auto",
        ),
        (
            "--dry-run --plan-gpus-per-node 8 --zero-stage 1 --zero-quantized-weights "
            "--zero-quantized-weights-format delta4",
            "needs 2 or more nodes",
        ),
        (
            "--dry-run --optimizer-in-backward --global-batch-size 8",
            "--optimizer-in-backward (given): needs 1 rank and a --global-batch-size of 1 micro-batch; this "
            "run has 1 rank and 4 micro-batches",
        ),
    ],
)
def test_what_these_ranks_cannot_obey_is_a_usage_error(argv: str, said: str) -> None:
    assert said in refusal(printed, *MINIMAL, *argv.split(), error=UsageError)


def test_a_plan_of_packed_samples_asks_for_their_documents() -> None:
    with pytest.raises(UsageError, match=r"--data-path PATH \(or omit --dataset-packing\)"):
        printed(*MINIMAL[1:], "--dry-run", "--dataset-packing", "best-fit")


def test_a_plan_of_a_schedule_asks_for_the_length_of_the_run() -> None:
    rest = [*without("--train-iters"), "--dry-run"]
    said = refusal(printed, *rest, *"--lr-warmup-iters 9 --lr-decay-samples 20".split(), error=UsageError)
    assert said == "--dry-run: give --train-samples N (or omit --lr-warmup-iters, --lr-decay-samples)"
    said = refusal(printed, *rest, "--lr-warmup-iters", "9", error=UsageError)
    assert said == "--dry-run: give --train-iters N (or omit --lr-warmup-iters)"
    assert printed(*rest, *"--lr-warmup-iters 9 --lr-decay-iters 20".split())


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--plan-gpu v100", "--plan-gpu v100: does not compute in bfloat16; add --fp16"),
        ("--finetune --load nowhere", "--load nowhere"),
        ("--save /proc/nowhere", "--save /proc/nowhere"),
        ("--fp8 --plan-gpu a100", "--fp8 (given): needs a GPU of compute capability 8.9; this one has 8.0"),
        ("--attention-backend flash3", "--attention-backend flash3: has no dropout"),
        (
            "--attention-backend flash --window-size 3,0",
            "--attention-backend flash: with --window-size it needs --attention-dropout 0, or use auto",
        ),
        ("--data-path no/such", "--data-path no/such"),
    ],
)
def test_the_plan_refuses_what_the_run_would_refuse(argv: str, said: str) -> None:
    small = MINIMAL[1:] if "--data-path" in argv else MINIMAL  # without mock data
    with pytest.raises((ValueError, OSError), match=re.escape(said)) as refused:
        printed(*small, "--dry-run", *argv.split())
    assert not isinstance(refused.value, UsageError)


def test_ranks_of_a_launcher_are_the_plan_one_of_them_prints_and_nothing_is_left(tmp_path: Path) -> None:
    """Output directories are checked and not changed."""
    places = ("--save", str(tmp_path / "save"), "--metrics-file", str(tmp_path / "metrics.jsonl"))
    done = pretrain(*MINIMAL, "--dry-run", *places, processes=2)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []
    assert done.stdout.count("plan for 1 × 2 H100") == 1
    done = pretrain(*MINIMAL, *"--dry-run --plan-gpu v100".split())
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1


FP8 = "--plan-gpu h200 --zero-stage 0 --bf16 --seq-length 1024".split()
CODES = "--fp8 --fp8-recipe delayed --fp8-param-gather".split()
OUTPUT = "--fp8-output-layer"


def milliseconds(model: str, micro_batch: str, *flags: str) -> float:
    """What a step is planned to take on one H200."""
    said = printed(*PLAN.split(), *FP8, "--model-preset", model, "--micro-batch-size", micro_batch, *flags)
    assert ("the output layer's products take 0.60 of bf16's time" in said) == (OUTPUT in flags)
    found = re.search(r"\n  tokens/s +([\d,]+)", said)
    assert found, said
    return 1000 * 1024 * int(micro_batch) / float(found[1].replace(",", ""))


def measured(result: str, shape: str, *runs: str) -> list[float]:
    """The milliseconds of a step of the runs in a result."""
    figures = json.loads((RESULTS / f"throughput_fp8_{result}.json").read_text())["figures"][shape]
    return [figures[run]["milliseconds"] for run in runs]


@pytest.mark.parametrize("shape", ["1.3b:16", "6.7b:8"])
def test_a_planned_step_with_codes_is_as_much_faster_as_a_real_one(shape: str) -> None:
    """Within 4%: the three shapes share two numbers, and repeated runs vary by 1%."""
    model, micro_batch = shape.split(":")
    plain, codes = measured(model, shape, "stage 0", "stage 0, fp8 codes")
    planned = [milliseconds(model, micro_batch, *flags) for flags in ([], CODES)]
    assert planned[1] / planned[0] == pytest.approx(codes / plain, rel=0.04)


def test_a_planned_output_layer_of_8_bit_products_saves_as_much_as_a_real_one() -> None:
    """As a share of bf16's step, within 10%: intervals of a run differ by 0.5 ms, and it saves 6.7."""
    runs = "stage 0", "stage 0, fp8 codes", "stage 0, fp8 codes and output"
    bf16, without, with_it = measured("1.3b_h100", "1.3b:16", *runs)
    plans = [milliseconds("1.3b", "16", *flags) for flags in ([], CODES, [*CODES, OUTPUT])]
    assert (plans[1] - plans[2]) / plans[0] == pytest.approx((without - with_it) / bf16, rel=0.1)


ISLAND = "--islands-at hub:1 --island a --island-names a b c --island-secret none".split()


def test_a_plan_names_the_interval_that_hides_an_exchange_and_counts_outer_states() -> None:
    """What it names is the smallest, by the time that it says this run would wait."""
    argv = "--dry-run --model-preset 1.3b --plan-gpus-per-node 8 --micro-batch-size 8 --global-batch-size 64"
    job = [*argv.split(), *ISLAND, "--outer-format", "rotated4"]

    def planned_at(*flags: str) -> str:
        return printed(*job, "--plan-island-mbit", "1000", *flags)

    said = planned_at()
    assert "3 islands: each sends 667 MB and receives 1.33 GB (rotated4: 0.5078 bytes per parameter)" in said
    assert "outer states                                              1.53" in said  # 10 bytes, of 8 ranks
    assert "give --plan-island-mbit" in printed(*job)
    assert re.search(r"outer states +1\.22 ", printed(*argv.split(), "--outer-alone"))  # 8 bytes
    (hidden, overlap, alone), waits = map(int, re.findall(r"-(?:interval|overlap) (\d+)", said)[:3]), []
    assert hidden == overlap + 1
    for interval, under_way in ((overlap + 1, overlap), (overlap, overlap - 1), (alone, 0), (alone - 1, 0)):
        flags = ("--outer-interval", str(interval), "--outer-overlap", str(under_way))
        waits.append(float(re.search(r"waits for (\S+)%", planned_at(*flags))[1]))
    assert waits[0] == 0 < waits[1]
    assert waits[2] <= 10 <= waits[3]
    with pytest.raises(UsageError, match=r"^--plan-island-mbit 9\.0: needs --islands-at$"):
        printed(*argv.split(), "--plan-island-mbit", "9")
