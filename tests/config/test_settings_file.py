"""--config: what a file may hold, what flags do to it, and the file that repeats a run."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.config.options import UsageError
from megatron_zpp.config.root import parse_args, parse_command_line
from megatron_zpp.config.shapes.presets import PRESETS
from tests.config.command_line import MINIMAL, without
from tests.support import refusal

TEXT = """
# a comment
num-layers: 2
hidden_size: 64          # with either sign
model: {num_attention_heads: 4, seq_length: 32}
data:
  mock_data: true
tokenizer:
  tokenizer_type: NullTokenizer
  vocab_size: 100
training:
  micro_batch_size: 2
  train_iters: 10
learning_rate:
  lr: 1e-3
optimizer:
  weight_decay: null
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", "/home/of/me")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parse_file(text: str, *flags: str):
    Path("run.yaml").write_text(text)
    return parse_args(["--config", "run.yaml", *flags])


def test_a_file_says_what_flags_say() -> None:
    assert parse_file(TEXT) == parse_args(MINIMAL)


@pytest.mark.parametrize(
    ("line", "flags"),
    [
        ("lr_decay_style: WSD\nlr_wsd_decay_iters: 3", "--lr-decay-style WSD --lr-wsd-decay-iters 3"),
        ("save_optim: false\nsave: a", "--no-save-optim --save a"),
        ("compile: false", "--no-compile"),
        ("adam_beta2: .95\nadam_eps: 1.e-6", "--adam-beta2 .95 --adam-eps 1e-6"),
        ("profile: true\nprofile_ranks: [0, 3]", "--profile --profile-ranks 0 3"),
        ("profile: TRUE\nprofile_ranks: 3", "--profile --profile-ranks 3"),
        ("save: 007", "--save 007"),
        ("save: ~/x", "--save /home/of/me/x"),
        ('load: "$HOME/x"', "--load ~/x"),
        ('load: "${HOME}/x"', "--load=~/x"),
        ("", ""),
    ],
)
def test_values_are_read_by_the_type_of_their_setting(line: str, flags: str) -> None:
    assert parse_file(line, *MINIMAL) == parse_args([*MINIMAL, *flags.split()])


@pytest.mark.parametrize(
    ("flags", "replaced"),
    [
        ("--lr 2e-3", ()),
        ("--train-samples 100", ("--train-iters",)),
        ("--fp16 --micro-batch-size 3", ("--bf16",)),
        ("--train-data-path a --valid-data-path b", ("--mock-data",)),
        ("--batch-size 5", ("--micro-batch-size",)),
        ("--checkpoint-activations", ()),
        ("--use-distributed-optimizer", ()),
    ],
)
def test_flags_win_old_ones_too(flags: str, replaced: tuple[str, ...]) -> None:
    argv = [*MINIMAL, "--zero-stage", "2", "--bf16"]
    for flag in replaced:
        start = argv.index(flag)
        del argv[start : start + (1 if flag in ("--mock-data", "--bf16") else 2)]
    found = parse_file(f"{TEXT}precision:\n  bf16: true\nzero_stage: 2\n", *flags.split())
    assert found == parse_args([*argv, *flags.split()])


def test_deepspeeds_file_counts_the_settings() -> None:
    Path("ds.json").write_text('{"gradient_accumulation_steps": 4}')
    assert parse_file(TEXT, "--deepspeed_config", "ds.json").training.global_batch_size == 8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nnum_layer: 2", "line 1: a: is not a setting; --help lists all"),
        ("num_layer: 2", "line 1: num_layer: is not a setting; did you mean num_layers? --help"),
        ("optimizer:\n  lr: 2", "line 2: lr: belongs to learning_rate, not to optimizer"),
        ("model: 3", "line 1: model: is a section; indent its settings below it"),
        ("lr: 1\nlearning_rate:\n  lr: 1", "line 3: lr: is there twice; remove one of them"),
        ("num_layers: two", "line 1: num_layers: 'two' must be a whole number"),
        ("lr: fast", "line 1: lr: 'fast' must be a number"),
        ("\nbf16: maybe", "line 2: bf16: 'maybe' must be true or false"),
        ("normalization: Norm", "line 1: normalization: 'Norm' must be one of LayerNorm, RMSNorm"),
        ("num_layers: [1]", "line 1: num_layers: must be a single value"),
        ("data_path: [a, [b]]", "line 1: data_path: must be a single value"),
        ("rampup_batch_size: [1, 2]", "line 1: rampup_batch_size: must be a list of 3 values"),
        ("lr: 1\n  num_layers: 3", "line 2: not YAML (mapping values are not allowed here)"),
        ("- lr", "line 1: must hold lines of NAME: VALUE"),
        ("? [a, b]\n: 1", "line 1: ?: is not a setting"),
        ("a: " + "[" * 1500, "nested too deeply"),
        ("model: {rope_low_freq_factor: 2.0}", "line 1: rope_low_freq_factor 2.0: not supported: scaling"),
        ("num_layers: 0", "--num-layers 0: must be at least 1 (--num-layers is --config run.yaml: line 1)"),
    ],
)
def test_a_file_that_cannot_be_obeyed(text: str, said: str) -> None:
    error = refusal(parse_file, text, *without("--num-layers"), error=UsageError)
    assert said in error
    assert "run.yaml" in error


@pytest.mark.parametrize("path", ["gone.yaml", ".", "bytes.yaml"])
def test_a_file_that_cannot_be_read(path: str) -> None:
    Path("bytes.yaml").write_bytes(b"\xff")
    with pytest.raises(UsageError, match=rf"--config {path}: .*; name a YAML file of settings"):
        parse_args(["--config", path])


ROPE = "--position-embedding-type rope"
FULL = "--recompute-granularity full --recompute-method uniform"


@pytest.mark.parametrize(
    ("before", "beside"),
    [
        ("", "--hidden-size 128"),
        ("", "--swiglu"),
        ("--group-query-attention --num-query-groups 4", "--num-query-groups 2"),
        ("", "--seq-length 64"),
        ("", ROPE),
        (ROPE, "--position-embedding-type none"),
        ("--normalization RMSNorm", "--norm-epsilon 1e-6"),
        ("--zero-stage 2", "--zero-stage 3"),
    ],
)
def test_flags_beside_the_file_of_a_run_change_what_follows_from_them(before: str, beside: str) -> None:
    written = parse_args([*MINIMAL, *before.split()]).to_yaml([])
    assert parse_file(written, *beside.split()) == parse_args([*MINIMAL, *before.split(), *beside.split()])


@pytest.mark.parametrize("flags", [f"{ROPE} --use-rope-scaling", FULL, "--recompute-activations"])
def test_values_that_follow_from_others_are_not_written(flags: str) -> None:
    config = parse_args([*MINIMAL, *flags.split()])
    given = {flag.strip("-").replace("-", "_") for flag in [*MINIMAL, *flags.split()] if flag[:2] == "--"}
    written = yaml.safe_load(config.to_yaml([]))
    assert {name for part in written.values() for name in part} == given


@pytest.mark.parametrize(
    ("before", "beside"), [(FULL, "--recompute-activations"), ("--recompute-activations", FULL)]
)
def test_recomputation_beside_the_file_replaces_that_of_the_file(before: str, beside: str) -> None:
    written = parse_args([*MINIMAL, *before.split()]).to_yaml([])
    assert parse_file(written, *beside.split()) == parse_args([*MINIMAL, *beside.split()])


@pytest.mark.parametrize(("directory", "written"), [("saved/iter_0000005", False), ("mine", True)])
def test_a_tokenizer_inside_a_checkpoint_is_not_written(directory: str, written: bool) -> None:
    """--keep-last may have removed it when the file is used; --use-checkpoint-args finds another."""
    flags = f"--vocab-file {directory}/vocab.json --merge-file {directory}/merges.txt"
    config = parse_args(
        [
            *without("--tokenizer-type", "--vocab-size"),
            *flags.split(),
            "--load",
            "saved",
            "--use-checkpoint-args",
        ]
    )
    assert ("tokenizer" in yaml.safe_load(config.to_yaml([]))) == written


WITHOUT_SHAPE = without("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length")


@pytest.mark.parametrize("preset", ["345m", "llama3.1-8b", "qwen3-0.6b"])
def test_a_preset_beside_the_file_of_a_run_trains_that_preset(preset: str) -> None:
    for shape in (["--model-preset", "llama3.2-1b"], MINIMAL):
        written = parse_args([*WITHOUT_SHAPE, *shape]).to_yaml([])
        wanted = parse_args([*WITHOUT_SHAPE, "--model-preset", preset])
        assert parse_file(written, "--model-preset", preset) == wanted


def test_a_preset_beside_the_file_replaces_its_preset_and_its_shape() -> None:
    text = f"{TEXT}swiglu: true\nmodel_preset: llama3.2-1b\nhidden_dropout: 0.2\n"
    Path("run.yaml").write_text(text)
    flags = "--config run.yaml --model-preset gpt2-125m --num-layers 3"
    parsed = parse_command_line(flags.split())
    shape = "--model-preset gpt2-125m --num-layers 3 --hidden-dropout 0.2"
    assert parsed.config == parse_args([*WITHOUT_SHAPE, *shape.split()])
    replaced = "hidden_size, num_attention_heads, seq_length, swiglu"
    assert parsed.notes == (f"--model-preset gpt2-125m: replaces {replaced} of run.yaml",)


def test_settings_of_retired_flags_have_no_effect_but_a_note() -> None:
    retired = "precision:\n  bf16: true\n  fp8_products: measured\ngemm-algorithms: measured\n"
    retired += "rope_low_freq_factor: 1\n"
    retired += "memory_snapshots:\n  buddy_snapshots: 5\n"  # a part of which nothing is left
    assert parse_file(retired, *MINIMAL) == parse_args([*MINIMAL, "--bf16"])
    assert parse_command_line(["--config", "run.yaml", *MINIMAL]).notes == (
        "--config run.yaml: line 3: fp8_products: no effect here: --fp8 always computes the matmuls of "
        "layers on 8-bit floats",
        "--config run.yaml: line 4: gemm_algorithms: no effect here: torch always chooses the algorithms of "
        "matmuls",
        "--config run.yaml: line 5: rope_low_freq_factor: no effect here: --use-rope-scaling always has this "
        "value",
        "--config run.yaml: line 7: buddy_snapshots: no effect here: states are copied to --save alone",
    )


def test_a_retired_value_is_refused_with_the_one_to_use() -> None:
    text = "zero:\n  zero_quantized_weights: true\n  zero_quantized_weights_format: delta3\n"
    with pytest.raises(
        UsageError, match=r"line 3: zero_quantized_weights_format: delta3 is retired; use delta4$"
    ):
        parse_file(text, *MINIMAL)


def test_an_unknown_preset_beside_the_file_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^--model-preset gpt5: is neither a file nor a preset"):
        parse_file(TEXT, "--model-preset", "gpt5")


SHAPE = "--tokenizer-type NullTokenizer --vocab-size 9 --seq-length 16 --micro-batch-size 2 --lr 1e-4"
WHOLE = [
    " ".join(MINIMAL),
    f"{SHAPE} --model-preset 345m --mock-data --train-iters 5 --min-lr 1e-5 --max-position-embeddings 16",
    *(
        f"{SHAPE} --model-preset {preset} --mock-data --train-iters 5 {positions}"
        for preset in PRESETS
        for positions in ("", "--position-embedding-type none")
    ),
    f"{SHAPE} --model-preset llama3.1-8b --data-path .7 a .3 b --train-samples 999 --global-batch-size 8 "
    "--rampup-batch-size 4 2 100 --bf16 --zero-stage 3 --zero-quantized-weights --split 9,1 --save x "
    "--load x --keep-last 2 --no-save-optim --no-load-optim",
    f"{SHAPE} --num-layers 1 --hidden-size 8 --num-attention-heads 1 --mock-data --train-iters 5 "
    "--lr-decay-style WSD --lr-wsd-decay-iters 2 --recompute-activations --no-compile --swiglu "
    "--position-embedding-type rope --use-rope-scaling --fp16 --initial-loss-scale 65536 --profile",
]


@pytest.mark.parametrize("line", WHOLE)
def test_the_written_file_gives_the_same_settings(line: str) -> None:
    config = parse_args(line.split())
    text = config.to_yaml(["a comment"])
    assert parse_file(text) == config
    assert parse_command_line(["--config", "run.yaml"]).notes == ()
    loaded = yaml.safe_load(text)  # as other programs read it
    assert loaded["learning_rate"]["lr"] == config.learning_rate.lr
    assert text.startswith("# a comment\n")


@pytest.mark.parametrize(
    "name",
    ["a: b", '"x"', "back\\slash", "naïve 東京 😀", "tab\tnew\nline", "\x7f\u2028\ufeff\udcff", "null"],
)
def test_any_text_survives(name: str) -> None:
    config = parse_args([*MINIMAL, "--save", name])
    assert parse_file(config.to_yaml([])) == config


WORDS = st.sampled_from(
    ["model", "lr", "num_layers", "bf16", ":", ": ", "\n", "  ", "- ", "[", "]", "{", "}", "&a", "*a"]
)


@settings(max_examples=30)
@given(st.one_of(st.text(max_size=60), st.lists(WORDS, max_size=20).map("".join)))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    Path("any.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    said = ""
    try:
        parse_args([*MINIMAL, "--config", "any.yaml"])
    except UsageError as refused:
        said = str(refused)
    assert "\n" not in said
