"""Every flag of Megatron-LM and Megatron-DeepSpeed has the fate that its row says; their scripts run."""

import shlex
from pathlib import Path

import pytest

from docs.site.megatron_flags import MARKER, MEGATRON_FLAGS, PAGE, current_flags, fate, table
from megatron_zpp.config.legacy.old_flags import OLD_FLAGS, ONLY, RETIRED
from megatron_zpp.config.legacy.reasons import BY_NAME, EXPERTS, NO_TABLE, reason_of
from megatron_zpp.config.options import UsageError
from megatron_zpp.config.root import parse_args, parse_command_line
from tests.config.command_line import MINIMAL, without
from tests.support import ROOT, refusal

BASELINE, CURRENT = parse_args(MINIMAL), current_flags()
OLD = {flag.name: flag for flag in OLD_FLAGS}
VALUES = {int: ["3"], float: ["0.5"], str: ["word"], None: []}
MEGATRON_DEEPSPEED = Path(__file__).with_name("megatron_deepspeed_flags.txt").read_text().split()
NAMES = {*MEGATRON_FLAGS, *MEGATRON_DEEPSPEED, *(flag.name for flag in (*ONLY, *RETIRED))}
NAMES |= {name for name in BY_NAME if "*" not in name}


def test_every_flag_has_a_row() -> None:
    assert len(table().splitlines()) - 2 == len(MEGATRON_FLAGS) == len(set(MEGATRON_FLAGS)) > 850
    assert len(MEGATRON_DEEPSPEED) == len(set(MEGATRON_DEEPSPEED)) > 300
    assert (ROOT / "docs" / PAGE).read_text().count(MARKER) == 1


@pytest.mark.parametrize("name", sorted(name for name in NAMES if fate(name, CURRENT)[0] != "obeyed"))
def test_a_flag_that_is_not_obeyed_has_the_fate_of_its_row(name: str) -> None:
    status, note = fate(name, CURRENT)
    if status == "no effect":
        values = VALUES[OLD[name].takes] if name in OLD else ["3"] * reason_of(name).takes_values
        parsed = parse_command_line([*MINIMAL, name, *values])
        assert (parsed.config, parsed.notes) == (BASELINE, (f"no effect here: {name}: {note}",))
    elif status == "one value":
        flag = OLD[name]
        for value in flag.allowed:
            parsed = parse_command_line([*MINIMAL, name, str(value)])
            said = f"no effect here: {name}: {flag.why}"
            assert (parsed.config, parsed.notes) == (BASELINE, (said,) if flag.why else ())
        value = "7" if flag.takes is not str else "word"
        refused = refusal(parse_command_line, [*MINIMAL, name, value], error=UsageError)
        assert refused == f"{name} {flag.takes(value)}: {flag.otherwise}"
    else:
        values = ([], ["1"], ["a", "b"])[len(name) % 3]
        experts = "--num-experts 8" if note == EXPERTS else ""
        argv = [*MINIMAL, name, *values, *experts.split()]
        words = [" ".join([name, *values]), *[experts] * bool(experts)]
        assert refusal(parse_command_line, argv, error=UsageError) == f"{', '.join(words)}: {note}"


def test_a_value_that_a_flag_does_not_have() -> None:
    with pytest.raises(UsageError, match=r"--fp8-format e4m3: must be hybrid$"):
        parse_args([*MINIMAL, "--fp8-format", "e4m3"])
    with pytest.raises(UsageError, match=r"--use-distributed-optimizer .given.: contradicts --data-parallel"):
        parse_args(
            [*MINIMAL, *"--data-parallel-sharding-strategy no_shard --use-distributed-optimizer".split()]
        )


def test_a_window_of_the_loss_scale_may_be_written_as_a_float() -> None:
    """Megatron-LM's parser takes one. It counts steps, so nothing else than a whole number can be meant."""
    whole = parse_args([*MINIMAL, "--fp16", "--loss-scale-window", "500.0"])
    assert whole == parse_args([*MINIMAL, "--fp16", "--loss-scale-window", "500"])
    assert whole.to_json()["precision"]["loss_scale_window"] == 500
    with pytest.raises(UsageError, match=r"^--loss-scale-window 500.5: must be a whole number of steps$"):
        parse_args([*MINIMAL, "--fp16", "--loss-scale-window", "500.5"])


FILES = (
    "HuggingFaceTokenizer --tokenizer-model x",
    "GPT2BPETokenizer --vocab-file x --merge-file y",
    "Llama2Tokenizer --tokenizer-model x",
)


@pytest.mark.parametrize("kind", FILES)
def test_a_tokenizer_with_files_has_its_own_size(kind: str) -> None:
    argv = [*without("--tokenizer-type", "--vocab-size"), "--tokenizer-type", *kind.split()]
    parsed = parse_command_line([*argv, "--vocab-size", "128256"])
    assert parsed.config == parse_args(argv)
    (note,) = parsed.notes
    assert note.startswith("--vocab-size 128256: no effect: ")
    with pytest.raises(UsageError, match=r"^--vocab-size 128256: .*--no-pad-vocab-size; use --padded-voc"):
        parse_args([*argv, "--vocab-size", "128256", "--no-pad-vocab-size"])


def test_the_type_may_follow_from_the_files_beside_a_size() -> None:
    argv = [*without("--tokenizer-type"), "--vocab-file", "x", "--merge-file", "y"]
    assert parse_args(argv).tokenizer.tokenizer_type == "GPT2BPETokenizer"


@pytest.mark.parametrize("rope", ["--use-rotary-position-embeddings", "--position-embedding-type rope"])
def test_rope_has_no_table_of_positions_to_omit(rope: str) -> None:
    """As in published Llama scripts."""
    parsed = parse_command_line([*MINIMAL, "--no-position-embedding", *rope.split()])
    assert parsed.config.model.position_embedding_type == "rope"
    note = parsed.notes[-1]
    assert note.startswith("no effect here: --no-position-embedding: with --position-embedding-type rope")


def test_a_table_of_positions_is_not_omitted_by_that_flag_alone() -> None:
    for kind in ("learned_absolute", "none"):
        with pytest.raises(UsageError, match=f"^--no-position-embedding: {NO_TABLE}$"):
            parse_args([*MINIMAL, "--no-position-embedding", "--position-embedding-type", kind])


@pytest.mark.parametrize("name", ["--mamba-of-the-future", "--rl-x=3"])
def test_new_flags_of_a_missing_feature_are_refused_too(name: str) -> None:
    with pytest.raises(UsageError, match="not supported: "):
        parse_args([*MINIMAL, name])


# A command line of Megatron-LM's examples. Names of files are replaced, and so are the sizes of tensor and
# pipeline parallelism.
LLAMA3_8B_FSDP = """
    --use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192
    --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 1000000
    --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --normalization RMSNorm
    --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p
    --untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1
    --global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748
    --lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4
    --decoupled-min-lr 4.5e-5 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1
    --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --cross-entropy-loss-fusion
    --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1 --exit-duration-in-mins 235
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --fp8-format hybrid
    --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather
    --tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel --mock-data
    --tokenizer-type NullTokenizer --vocab-size 128256 --data-cache-path cache --tiktoken-pattern v2
    --split "'99,1,0'" --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1
    --log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput --profile
    --profile-step-start 4 --profile-step-end 6 --ckpt-format fsdp_dtensor
    --distributed-timeout-minutes 60 --save ckpt --load ckpt --tensorboard-dir tb
    --no-check-for-nan-in-loss-and-grad --use-megatron-fsdp --use-nccl-ub --init-model-with-meta-device
    --data-parallel-sharding-strategy optim_grads_params --no-gradient-accumulation-fusion
    --fsdp-double-buffer --fsdp-manual-registration --logging-level 20
"""


def test_a_script_of_megatron_runs_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parsed = parse_command_line(shlex.split(LLAMA3_8B_FSDP))
    assert len({note.split(":")[0] for note in parsed.notes}) == len(parsed.notes)
    for flag in {word for word in shlex.split(LLAMA3_8B_FSDP) if word.startswith("--")}:
        assert flag in CURRENT or flag in " ".join(parsed.notes), flag
    assert parsed.config.zero.zero_stage == 3
    assert parsed.config.precision.fp8
    assert parsed.config.learning_rate.decoupled_lr == 5e-4


def test_unlikely_names_are_not_suggested() -> None:
    """tests/faults has a likely one."""
    for typed in ("--output-path", "--log-everything", "--num-heads"):
        assert "did you mean" not in refusal(parse_args, [*MINIMAL, typed, "3"], error=UsageError)
