"""--dry-run as a user types it: what it prints, what it refuses, and that it leaves nothing behind."""

from pathlib import Path
from subprocess import CompletedProcess

import pytest

from benchmarks.plan_published import ROWS, fitted_share, planned_mfu
from megatron_zpp.plan.hardware import GPUS
from tests.support import pretrain

SMALL = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 100 --num-layers 2 --hidden-size 64 "
    "--num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --train-iters 10 --lr 1e-3"
).split()
PLAN = "--dry-run --mock-data --tokenizer-type NullTokenizer --vocab-size 50257 --lr 1e-4 --train-iters 9"
LARGE = (
    "--dry-run --model-preset 175b --mock-data --tokenizer-type NullTokenizer --vocab-size 50257 --lr 1e-4 "
    "--micro-batch-size 1 --global-batch-size 1024 --train-iters 1000 --plan-nodes 64 --plan-gpus-per-node 8 "
    "--recompute-granularity full --recompute-method uniform"
).split()


def refused(done: CompletedProcess[str], status: int, *said: str) -> None:
    assert done.returncode == status, done.stderr
    assert not done.stdout
    (line,) = done.stderr.splitlines()
    for part in said:
        assert part in line


@pytest.mark.nightly
def test_a_run_of_any_size_is_planned_and_nothing_is_left(tmp_path: Path) -> None:
    """175B on 512 GPUs, planned on this machine; output directories are checked and not changed."""
    places = ("--save", tmp_path / "save", "--metrics-file", tmp_path / "metrics.jsonl")
    everything = "--zero-stage 3 --zero-quantized-weights --zero-hpz-partition-size auto".split()
    done = pretrain(*LARGE, *everything, "--zero-quantized-gradients", *map(str, places))
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert list(tmp_path.iterdir()) == []
    lines = done.stdout.splitlines()
    assert len(lines) <= 64
    assert max(map(len, lines)) <= 120
    assert lines[0] == "plan for 64 × 8 H100, bfloat16, ZeRO stage 3 + qwZ int8 + hpZ auto + qgZ int4"
    for said in (
        "GPT of 174,6",
        "GiB of each GPU",
        "inter_node_bytes",
        "a step takes",
        "tokens per day",
        "  take --zero-",
    ):
        assert said in done.stdout


def test_a_plan_says_what_it_assumes() -> None:
    unknown = "--fp8 --attention-backend local --reset-attention-mask".split()
    done = pretrain(*SMALL, "--dry-run", *unknown)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("plan for 1 × 1 H100, bfloat16 with 8-bit products, ZeRO stage 0\n")
    assert (
        "\n  layers' products of --fp8 take 1.27 of bf16's time, as on an H200; memory as bf16's, or less\n"
        in done.stdout
    )
    assert "no scores; --attention-backend local keeps them" in done.stdout
    assert "attention over whole samples, also with --reset-attention-mask\n" in done.stdout
    mask = (
        "dense, 64 × 32 numbers, and layers compute whole attention: --attention-backend local knows no other"
    )
    assert mask in done.stdout


@pytest.mark.nightly
def test_a_run_that_does_not_fit_is_reported_with_settings_that_would_fit() -> None:
    done = pretrain(*LARGE, "--zero-stage", "1")
    assert done.returncode == 0, done.stderr
    assert "does NOT fit" in done.stdout
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("    --zero-stage 3 "))
    assert line.endswith(" fits")
    assert ", of 72.68 (79 less 8% for CUDA, NCCL and fragmentation)\n" in done.stdout


def test_the_stages_of_the_table_that_do_not_fit_are_marked_and_those_that_fit_are_offered() -> None:
    """13B on 128 H100s: stage 1 does not fit and stage 2 does."""
    argv = f"{PLAN} --model-preset 13b --plan-nodes 16 --plan-gpus-per-node 8 --zero-stage 1".split()
    done = pretrain(*argv, "--micro-batch-size", "2", "--global-batch-size", "512")
    (peak,) = (line.split() for line in done.stdout.splitlines() if line.startswith("  peak (!"))
    assert [value.endswith("!") for value in peak[-4:]] == [True, True, False, False]
    offered = [line.split() for line in done.stdout.splitlines() if line.startswith("    --zero-stage ")]
    assert [(line[1], line[2], line[-1]) for line in offered] == [
        ("2", peak[-2], "fits"),
        ("3", peak[-1], "fits"),
    ]
    assert "\n  backward  " in done.stdout
    assert "recomputation " not in done.stdout  # none was asked for


def test_no_option_is_recommended_where_none_pays() -> None:
    argv = f"{PLAN} --model-preset 1.3b --plan-gpus-per-node 2 --micro-batch-size 8 --zero-stage 3".split()
    done = pretrain(*argv)
    assert done.returncode == 0, done.stderr
    assert "× as fast as none" not in done.stdout
    assert "  take none of them: no set of them that fits shortens the step by more than 1%\n" in done.stdout


@pytest.mark.nightly
def test_the_share_of_an_h100s_peak_is_the_one_fitted_to_published_runs() -> None:
    assert GPUS["h100"].compute_share == fitted_share()
    assert max(abs(row.mfu / planned_mfu(row) - 1) for row in ROWS) < 0.08
    done = pretrain(*SMALL, "--dry-run")
    assert (
        "0.47 of its peak; --plan-compute-share sets another share\n    fitted to LLM Foundry" in done.stdout
    )
    done = pretrain(*SMALL, *"--dry-run --plan-compute-share 0.5".split())
    assert "0.5 of its peak, as --plan-compute-share says\n  " in done.stdout
    assert "LLM Foundry" not in done.stdout


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--dry-run --plan-gpu b200", "--plan-gpu: invalid choice: 'b200'"),
        ("--plan-nodes 2", "--plan-nodes 2: needs --dry-run"),
        ("--plan-gpu h100", "--plan-gpu h100: needs --dry-run"),
        ("--plan-link-gbit 100", "--plan-link-gbit 100.0: needs --dry-run"),
        ("--plan-compute-share 0.5", "--plan-compute-share 0.5: needs --dry-run"),
        ("--dry-run --plan-nodes 0", "--plan-nodes 0: must be at least 1"),
        ("--dry-run --plan-link-gbit 0", "--plan-link-gbit 0.0: must be above 0"),
        ("--dry-run --plan-compute-share 1.5", "--plan-compute-share 1.5: must be at most 1"),
        ("--dry-run --device cpu", "--dry-run (given): plans for GPUs"),
    ],
)
def test_bad_command_lines_are_refused(argv: str, said: str) -> None:
    refused(pretrain(*SMALL, *argv.split()), 2, said)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--plan-nodes 3 --global-batch-size 8", "--global-batch-size 8: "),
        (
            "--plan-nodes 2 --plan-gpus-per-node 4 --zero-stage 3 --zero-hpz-partition-size 3",
            "nodes of 4 data ranks; give 1, 2, 4 or auto",
        ),
        (
            "--plan-gpus-per-node 8 --zero-stage 1 --zero-quantized-weights "
            "--zero-quantized-weights-format delta4",
            "needs 2 or more nodes",
        ),
    ],
)
def test_the_plan_refuses_what_these_ranks_cannot_obey(argv: str, said: str) -> None:
    refused(pretrain(*SMALL, "--dry-run", *argv.split()), 2, said)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--plan-gpu v100", "--plan-gpu v100: does not compute in bfloat16; add --fp16"),
        ("--finetune --load nowhere", "--load nowhere"),
        ("--save /proc/nowhere", "--save /proc/nowhere"),
        ("--zero-offload-optimizer --fused-backend apex", "--fused-backend apex"),
        ("--fp8 --plan-gpu a100", "--fp8 (given): needs a GPU of compute capability 8.9; this one has 8.0"),
        ("--attention-backend flash3", "--attention-backend flash3: has no dropout"),
        (
            "--attention-backend flash --window-size 3,0",
            "--attention-backend flash: with --window-size it needs --attention-dropout 0, or use auto",
        ),
    ],
)
def test_the_plan_refuses_what_the_run_would_refuse(argv: str, said: str) -> None:
    refused(pretrain(*SMALL, "--dry-run", *argv.split()), 1, said)


def test_data_is_checked_as_the_run_would() -> None:
    without_mock = ["--data-path", "no/such", *SMALL[1:]]
    refused(pretrain(*without_mock, "--dry-run", "--plan-nodes", "2"), 1, "--data-path no/such")


def test_ranks_of_a_launcher_are_the_plan_and_one_of_them_prints() -> None:
    done = pretrain(*SMALL, "--dry-run", processes=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("plan for 1 × 2 H100") == 1
