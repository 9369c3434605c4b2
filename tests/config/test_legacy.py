"""Old flags of Megatron-LM and Megatron-DeepSpeed: each against today's, and published command lines."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_zpp.config.legacy.old_flags import RENAMED
from megatron_zpp.config.legacy.reasons import reason_of
from megatron_zpp.config.options import UsageError
from megatron_zpp.config.root import CommandLine, parse_args, parse_command_line
from tests.config.command_line import MINIMAL, without
from tests.support import refusal

BASELINE = parse_args(MINIMAL)
FULL = "--recompute-granularity full --recompute-method uniform"
ROPE = "--position-embedding-type rope"
OLD = [  # what was typed, and what says the same today
    ("--batch-size 2", "--micro-batch-size 2"),
    ("--warmup 0.1", "--lr-warmup-fraction 0.1"),
    ("--layernorm-epsilon 1e-6", "--norm-epsilon 1e-6"),
    ("--encoder-seq-length 32", "--seq-length 32"),
    ("--checkpoint-activations", FULL),
    ("--activations-checkpoint-method uniform", FULL),
    ("--activations-checkpoint-method block", "--recompute-granularity full --recompute-method block"),
    (f"{FULL} --checkpoint-num-layers 2", f"{FULL} --recompute-num-layers 2"),
    (f"{FULL} --activations-checkpoint-num-layers 2", f"{FULL} --recompute-num-layers 2"),
    ("--recompute-method block --checkpoint-granularity full", "--recompute-method block " + FULL[:28]),
    ("--recompute-granularity full --checkpoint-method uniform", FULL),
    (f"{FULL} --checkpoint-in-cpu", f"{FULL} --recompute-offload"),
    ("--cpu-optimizer", "--zero-offload-optimizer"),
    ("--optimizer-cpu-offload", "--zero-offload-optimizer"),
    ("--model-parallel-size 1", "--tensor-model-parallel-size 1"),
    (
        "--attention-dropout 0 --ds-sequence-parallel-size 2",
        "--attention-dropout 0 --context-parallel-size 2",
    ),
    ("--use-distributed-optimizer", "--zero-stage 1"),
    ("--load a --use-checkpoint-lr-scheduler", "--load a --use-checkpoint-opt-param-scheduler"),
    ("--load a --use-checkpoint-opt_param-scheduler", "--load a --use-checkpoint-opt-param-scheduler"),
    ("--use-rotary-position-embeddings", "--position-embedding-type rope"),
    ("--num-key-value-heads 2", "--group-query-attention --num-query-groups 2"),
    (f"{ROPE} --rotary-position-embeddings-theta 5", f"{ROPE} --rotary-base 5"),
    ("--bf16 --fp8-hybrid", "--bf16 --fp8"),
    ("--wandb-project p --wandb_run_name r", "--wandb-project p --wandb-exp-name r"),
    ("--wandb-project p --wandb_team t", "--wandb-project p --wandb-entity t"),
    ("--zero-stage 3 --use-distributed-optimizer", "--zero-stage 3"),
    ("--data-parallel-sharding-strategy no_shard", ""),
    ("--data-parallel-sharding-strategy optim", "--zero-stage 1"),
    ("--data-parallel-sharding-strategy optim_grads", "--zero-stage 2"),
    ("--data-parallel-sharding-strategy optim_grads_params", "--zero-stage 3"),
    ("--use-torch-fsdp2", "--zero-stage 3"),
    ("--save a --save-retain-interval 50", "--save a --keep-last 1 --keep-every 50"),
    ("--bf16 --fp8-format hybrid", "--bf16 --fp8"),
    ("--no-pad-vocab-size", "--make-vocab-size-divisible-by 1"),
    ("--encoder-num-layers 2", ""),
    ("--optimizer muon --muon-use-nesterov", "--optimizer muon --muon-nesterov"),
]


LENGTHS = {"--lr-decay-tokens": 1600, "--lr-warmup-tokens": 64}  # samples have 32


def parse(line: str) -> CommandLine:
    return parse_command_line([*MINIMAL, *line.split()])


@pytest.mark.parametrize(("old", "today"), OLD)
def test_an_old_name_says_what_todays_says_with_one_note(old: str, today: str) -> None:
    parsed = parse(old)
    assert parsed.config == parse_args([*MINIMAL, *today.split()])
    (note,) = parsed.notes
    (name,) = [word for word in old.split() if word in {flag.name for flag in RENAMED}]
    assert note.startswith(f"translated: {name} is --")
    for flag in [word for word in today.split() if word.startswith("--") and word not in old]:
        assert flag in note


def test_an_old_name_satisfies_a_required_flag() -> None:
    argv = [*without("--micro-batch-size"), "--batch-size", "2"]
    assert parse_args(argv) == parse_args(MINIMAL)


def test_lengths_in_tokens_are_divided_by_the_length_of_a_sample() -> None:
    argv = [*without("--train-iters"), "--train-samples", "100"]
    typed = [word for name, tokens in LENGTHS.items() for word in (name, str(tokens))]
    today = "--lr-decay-samples 50 --lr-warmup-samples 2".split()
    parsed = parse_command_line([*argv, *typed])
    assert parsed.config == parse_args([*argv, *today])
    said = "; ".join(f"{name} is {name[:-6]}samples, / --seq-length" for name in LENGTHS)
    assert parsed.notes == (f"translated: {said}",)
    for line, said in (
        ("--lr-decay-tokens 15", "--lr-decay-tokens 15: must be a sample of --seq-length tokens, or more"),
        ("--lr-decay-tokens 64 --lr-decay-samples 3", "--lr-decay-tokens 64: contradicts"),
    ):
        with pytest.raises(UsageError, match=said):
            parse_args([*argv, *line.split()])


def test_all_that_is_refused_is_said_at_once() -> None:
    """Omitting one flag after the other would make a dense model of this one, without a word."""
    with pytest.raises(UsageError) as refused:
        parse(
            "--num-experts 8 --moe-router-topk=2 --batch-size 2 --moe-grouped-gemm --mtp-num-layers 1 "
            "--position-embedding-type relative --fsdp-double-buffer --optimizer sgd --of-no-program 3"
        )
    assert str(refused.value).splitlines() == [
        "--moe-router-topk 2, --moe-grouped-gemm, --num-experts 8: not supported: mixture of experts",
        "--mtp-num-layers 1: not supported: prediction of several tokens",
        "--position-embedding-type relative: not supported: relative positions",
        "--optimizer sgd: not supported: optimizers other than AdamW and Muon",
        "unrecognized argument --of-no-program 3 (--help all lists every flag)",
        "translated: --batch-size is --micro-batch-size",
        f"no effect here: --fsdp-double-buffer: {reason_of('--fsdp-double-buffer').text}",
    ]


def test_refused_flags_and_values_are_said_at_once() -> None:
    line = (
        "--lr -1 --zero-stage 7 --seq-length x --batch-size two --optimizer sgd --bf16 --fp16 "
        "--num-experts 8 --of-no-program 3 --window-size 3,1 --zero-quantized-weights --muon-nesterov"
    )
    with pytest.raises(UsageError) as refused:
        parse_args([*without("--micro-batch-size"), *line.split()])
    assert str(refused.value).splitlines() == [
        "--optimizer sgd: not supported: optimizers other than AdamW and Muon",
        "--num-experts 8: not supported: mixture of experts",
        "unrecognized argument --of-no-program 3 (--help all lists every flag)",
        "--seq-length x: must be a whole number",
        "--lr -1.0: must be above 0",
        "--zero-stage 7: must be at most 3",
        "--batch-size two: must be a whole number",
        "--fp16 (given): contradicts --bf16; give one",
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--hidden-size x --num-attention-heads 3", "--hidden-size x: must be a whole number"),
        ("--no-load-lr-state", "--no-load-lr-state: not supported: a schedule that restarts"),
        ("--tokenizer-type TikTokenizer", "--tokenizer-type TikTokenizer: not supported: tiktoken"),
        ("--zero-stage 7 --zero-quantized-weights", "--zero-stage 7: must be at most 3"),
        ("--activations-checkpoint-method all", "--activations-checkpoint-method all: must be uniform or"),
        ("--dry-run --plan-nodes 2 --plan-link-gbit=", "--plan-link-gbit '': must not be empty"),
    ],
)
def test_a_refused_value_makes_no_other_one_wrong(line: str, said: str) -> None:
    refused = refusal(parse, line, error=UsageError)
    assert refused.startswith(said)


def test_flags_of_experts_are_without_effect_in_a_dense_model() -> None:
    parsed = parse("--num-experts 1 --moe-loss-coeff 0.01 --topk 1 --moe-min-capacity 4")
    assert parsed.config == BASELINE
    assert parsed.notes == (
        "no effect here: --moe-loss-coeff, --topk, --moe-min-capacity: the model has no experts",
    )


@pytest.mark.parametrize(
    "line",
    ["--record-memory-history", "--profile-of-the-future 3", "--log-x-to-tensorboard", "--timing-y a b"],
)
def test_a_diagnostic_stops_no_run(line: str) -> None:
    parsed = parse(line)
    assert parsed.config == BASELINE
    assert parsed.notes[0].startswith(f"no effect here: {line.split()[0]}: only reports")


def test_values_of_other_programs() -> None:
    argv = [*without("--tokenizer-type", "--vocab-size"), "--tokenizer-type"]
    parsed = parse_command_line([*argv, *"PretrainedFromHF --tokenizer-name-or-path x".split()])
    assert parsed.config == parse_args([*argv, *"HuggingFaceTokenizer --tokenizer-model x".split()])
    parsed = parse("--position-embedding-type=rotary --normalization rmsnorm --pad-vocab-size-to 128")
    today = f"{ROPE} --normalization RMSNorm --padded-vocab-size 128"
    assert parsed.config == parse_args([*MINIMAL, *today.split()])
    assert parsed.notes == (
        "translated: --position-embedding-type rotary is rope; --pad-vocab-size-to is --padded-vocab-size",
    )


def test_a_loss_scale_beside_bf16_has_no_effect() -> None:
    parsed = parse("--bf16 --loss-scale 12")
    assert parsed.config == parse_args([*MINIMAL, "--bf16"])
    assert parsed.notes == ("--loss-scale 12: no effect: the run computes in bf16",)
    flags = "--initial-loss-scale 65536.0", "--min-loss-scale 2.0", "--loss-scale-window 9", "--hysteresis 4"
    assert parse(" ".join(flags)).notes == tuple(f"{each}: no effect: there is no --fp16" for each in flags)
    assert parse(f"--fp16 {' '.join(flags)}").notes == parse("--bf16 --hysteresis 2").notes == ()


def test_a_trace_of_nothing_does_not_stop_a_run() -> None:
    reason = "no effect: there is no --profile"
    notes = (f"--profile-step-start 50: {reason}", f"--profile-ranks 7: {reason}")
    assert parse("--profile-step-start 50 --profile-ranks 7").notes == notes
    notes = ("--profile-step-end 12: no effect: no step is from 12 to before 12",)
    assert parse("--profile --profile-step-start 12").notes == notes


RAMP = "--train-samples 1000 --rampup-batch-size 32 32 200 --global-batch-size"


@pytest.mark.parametrize(
    ("stages", "ranks", "micro", "batch", "kept"),
    [
        (2, 8, 2, "--train-iters 10 --global-batch-size 16", 2),
        (2, 8, 4, "--train-iters 10 --global-batch-size 16", 2),
        (4, 16, 8, f"{RAMP} 512", 2),  # 16 ranks of 2 samples divide START 32 too
        (2, 8, 6, "--train-iters 10 --global-batch-size 72", 3),
        (2, 8, 4, "--train-iters 10", 2),  # the default batch is that of 4 ranks
        (4, 64, 8, f"{RAMP} 512", None),
    ],
)
def test_ranks_of_a_pipeline_are_data_ranks_of_the_same_batch(
    stages: int, ranks: int, micro: int, batch: str, kept: int | None
) -> None:
    argv = [*without("--micro-batch-size", "--train-iters"), *batch.split(), "--micro-batch-size"]
    line = [*argv, str(micro), "--pipeline-model-parallel-size", str(stages)]
    if kept is None:
        said = "64 of them do not divide the batch of 512, 32, 32 samples; start fewer ranks"
        with pytest.raises(UsageError, match=said):
            parse_command_line(line, ranks=lambda plan: ranks)
        return
    parsed = parse_command_line(line, ranks=lambda plan: ranks)
    default = "--global-batch-size 16".split() * ("--global-batch-size" not in argv)
    assert parsed.config == parse_args([*argv, str(kept), *default])
    assert parsed.pipeline_stages == stages
    assert len(parsed.notes) == (kept != micro)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "--batch-size 4",
            "--batch-size 4: contradicts --micro-batch-size 2; make them equal or omit one",
        ),
        ("--batch-size two", "--batch-size two: must be a whole number"),
        (
            "--layernorm-epsilon 0",
            "--norm-epsilon 0.0: must be above 0 (--norm-epsilon is --layernorm-epsilon)",
        ),
        ("--checkpoint-activations --recompute-method block", "contradicts --recompute-method block"),
        (
            "--checkpoint-activations --recompute-activations",
            "(--recompute-granularity is --checkpoint-activ",
        ),
        (
            "--activations-checkpoint-method all",
            "--activations-checkpoint-method all: must be uniform or block",
        ),
        (
            "--checkpoint-in-cpu",
            "needs --recompute-granularity full (--recompute-offload is --checkpoint-in-cpu)",
        ),
        (
            "--checkpoint-num-layers 2",
            "needs --recompute-granularity full (--recompute-num-layers is --checkp",
        ),
        ("--use-distributed-optimizer --zero-stage 0", "(given): contradicts --zero-stage 0; omit one"),
        ("--deepspeed yes", "unrecognized argument yes"),
        ("--batch-siz 2", "unrecognized argument --batch-siz 2; did you mean --batch-size?"),
    ],
)
def test_a_value_that_cannot_be_obeyed(line: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse(line)
    assert said in str(refused.value)


def test_help_names_old_flags_briefly(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--help", "all"])
    text = capsys.readouterr().out
    last = text.index("These old flags")
    for flag in RENAMED:
        assert flag.name in text[last:]
        assert f"  {flag.name}" not in text[:last]


# The ZeRO++ tutorial's, as printed.
TUTORIAL = (
    "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --num-layers 40 --hidden-size 6144 "
    "--seq-length 512 --num-attention-heads 32 --batch-size 1 --zero-stage 3 "
    "--deepspeed_config ds_zeropp_config.json --deepspeed-activation-checkpointing --fp16 "
    "--checkpoint-activations"
)
TUTORIAL_FILE = {
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 10000000,
        "reduce_scatter": True,
        "zero_quantized_weights": True,
        "zero_hpz_partition_size": 16,
        "zero_quantized_gradients": True,
        "contiguous_gradients": True,
        "overlap_comm": True,
    }
}
ADDED = "--mock-data --tokenizer-type NullTokenizer --vocab-size 100 --train-iters 10 --lr 1e-3"


@pytest.mark.parametrize("flag", ["--deepspeed_config", "--deepspeed-config"])
def test_the_tutorials_command_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds_zeropp_config.json").write_text(json.dumps(TUTORIAL_FILE))
    line = TUTORIAL.replace("--deepspeed_config", flag)
    parsed = parse_command_line(f"--deepspeed {line} {ADDED}".split(), ranks=lambda plan: 16)
    today = (
        "--num-layers 40 --hidden-size 6144 --seq-length 512 --num-attention-heads 32 --micro-batch-size 1 "
        f"--fp16 {FULL} --zero-stage 3 --zero-quantized-weights --zero-hpz-partition-size 16 "
        "--zero-quantized-gradients --clip-grad 0"
    )
    assert parsed.config == parse_args(f"{today} {ADDED}".split())
    assert [note.split(":")[0] for note in parsed.notes] == [
        "translated",
        "no effect here",
        "as under DeepSpeed",
        "--deepspeed_config ds_zeropp_config.json",
    ]
    assert parsed.notes[-1].endswith(
        "no effect here: zero_optimization.contiguous_gradients, zero_optimization.overlap_comm, "
        "zero_optimization.reduce_bucket_size, zero_optimization.reduce_scatter"
    )


def test_as_many_heads_of_keys_as_of_queries_are_the_usual_attention() -> None:
    model = parse_args([*MINIMAL, "--num-key-value-heads", "4"]).model
    assert replace(model, group_query_attention=False) == parse_args(MINIMAL).model
