"""DeepSpeed's JSON file: each key compared with today's flag, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_zpp.config.legacy.deepspeed_keys import KEYS, Idle, Off, Only, Refused
from megatron_zpp.config.options import UsageError
from megatron_zpp.config.root import CommandLine, parse_args, parse_command_line
from tests.config.command_line import MINIMAL, without
from tests.support import refusal

BASELINE = parse_args(MINIMAL)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """ds.json in the current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "ds.json"


def parse(file: Path, content: Any, *extra: str, argv: list[str] = MINIMAL, ranks: int = 1) -> CommandLine:
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return parse_command_line([*argv, "--deepspeed_config", file.name, *extra], ranks=lambda plan: ranks)


def nested(key: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} for "a.b"."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


def check_refusal(said: str, file: Path, content: Any, *extra: str) -> None:
    """It is one line, and has the parts of `said` between `…` in this order."""
    message, place = refusal(parse, file, content, *extra, error=UsageError), 0
    assert len(message) < 300
    for part in said.split("…"):
        place = message.index(part.strip(), place)


FP16 = "--fp16 --initial-loss-scale 65536"  # as under DeepSpeed

# What today's flags would be, written from DeepSpeed's reference.
OBEYED = [
    ({"train_batch_size": 8}, "--global-batch-size 8"),
    ({"train_micro_batch_size_per_gpu": 2}, "--micro-batch-size 2"),
    ({"gradient_accumulation_steps": 3}, "--global-batch-size 6"),
    ({"gradient_accumulation_steps": 3.0}, "--global-batch-size 6"),
    ({"steps_per_print": 7}, "--log-interval 7"),
    ({"gradient_clipping": 0.5}, "--clip-grad 0.5"),
    ({"communication_data_type": "bf16"}, "--grad-reduce-in-bf16"),
    ({"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}, "--lr 1e-3"),
    ({"optimizer": {"type": "AdamW", "params": {"betas": [0.8, 0.95]}}}, "--adam-beta1 .8 --adam-beta2 .95"),
    ({"optimizer": {"params": {"eps": 1e-6, "weight_decay": 1}}}, "--adam-eps 1e-6 --weight-decay 1"),
    ({"fp16": {"enabled": True}}, FP16),
    ({"fp16": {"enabled": True, "loss_scale": 128}}, f"{FP16} --loss-scale 128"),
    ({"fp16": {"enabled": True, "hysteresis": 3}}, f"{FP16} --hysteresis 3"),
    ({"fp16": {"enabled": True, "min_loss_scale": 4}}, f"{FP16} --min-loss-scale 4"),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": False}}, "--bf16"),
    ({"bf16": {"enabled": False}}, "--fp32"),
    (zero(stage=2), "--zero-stage 2"),
    (zero(stage=1.0, zero_quantized_weights=True), "--zero-stage 1 --zero-quantized-weights"),
    (zero(stage=3, zero_quantized_gradients=True), "--zero-stage 3 --zero-quantized-gradients"),
    (zero(stage=3, zero_quantized_weights=False, zero_quantized_gradients=False), "--zero-stage 3"),
    (zero(stage=3, zero_hpz_partition_size=16), "--zero-stage 3 --zero-hpz-partition-size 16"),
    (zero(stage=3, zero_hpz_partition_size=0), "--zero-stage 3"),
    (zero(stage=2, offload_optimizer={"device": "cpu"}), "--zero-stage 2 --zero-offload-optimizer"),
    (zero(stage=2, offload_optimizer={"device": "none"}), "--zero-stage 2"),
    (zero(stage=2, cpu_offload=True), "--zero-stage 2 --zero-offload-optimizer"),
    (
        {"tensorboard": {"enabled": True, "output_path": "out", "job_name": "gpt"}},
        "--tensorboard-dir out/gpt",
    ),
    ({"tensorboard": {"enabled": True}}, "--tensorboard-dir DeepSpeedJobName"),
    ({"wandb": {"enabled": True, "project": "p", "team": "t"}}, "--wandb-project p --wandb-entity t"),
    ({"wandb": {"enabled": True}}, "--wandb-project deepspeed"),
    ({"wandb": {"project": "p", "team": "t"}}, ""),
    ({}, ""),
]


@pytest.mark.parametrize(("content", "today"), OBEYED, ids=[json.dumps(content) for content, _ in OBEYED])
def test_a_key_says_what_todays_flag_says(file: Path, content: dict[str, Any], today: str) -> None:
    assert parse(file, content).config == parse_args([*MINIMAL, *today.split()])


def test_recomputation_may_be_offloaded(file: Path) -> None:
    full = "--recompute-granularity full --recompute-method uniform".split()
    block = {"activation_checkpointing": {"cpu_checkpointing": True}}
    assert parse(file, block, *full).config == parse_args([*MINIMAL, *full, "--recompute-offload"])


def test_keys_that_cannot_matter_are_listed_once(file: Path) -> None:
    keys, content = [key for key, rule in KEYS.items() if isinstance(rule, Idle)], dict[str, Any]()
    for key in keys:
        inner = content
        *blocks, name = key.split(".")
        for block in blocks:
            inner = inner.setdefault(block, {})
        inner[name] = 1e8
    parsed = parse(file, content)
    assert parsed.config == BASELINE
    (note,) = parsed.notes
    start, _, named = note.partition(": no effect here: ")
    assert start == "--deepspeed_config ds.json"
    assert sorted(named.split(", ")) == sorted(keys)


@pytest.mark.parametrize("key", [key for key, rule in KEYS.items() if isinstance(rule, Only)])
def test_a_key_with_one_possible_value_takes_only_that_value(file: Path, key: str) -> None:
    rule, on = KEYS[key], {"fp16": {"enabled": True}} if key.startswith("fp16") else {}
    on = {"bf16": {"enabled": True}} if key.startswith("bf16") else on

    def content(value: Any) -> dict[str, Any]:
        made = nested(key, value)
        for block, inner in on.items():
            made[block].update(inner)
        return made

    typed = (FP16 if block == "fp16" else f"--{block}" for block in on)
    baseline = parse_args([*MINIMAL, *" ".join(typed).split()])
    for value in (*rule.values, None, "auto"):
        assert parse(file, content(value)) == CommandLine(baseline, ())
    for value in ("other", 12345, not rule.values[0] if isinstance(rule.values[0], bool) else True):
        refused = refusal(parse, file, content(value), error=UsageError)
        assert refused == f"--deepspeed_config ds.json: {key} {json.dumps(value)}: {rule.otherwise}"


@pytest.mark.parametrize("key", [key for key, rule in KEYS.items() if isinstance(rule, Off)])
def test_a_block_that_must_stay_off_is_refused_when_enabled(file: Path, key: str) -> None:
    for block in ({}, {"enabled": False, "more": 1}, {"enabled": "auto"}, {"enabled": None}, None):
        assert parse(file, nested(key, block)) == CommandLine(BASELINE, ())
    rule = KEYS[key]
    refused = refusal(parse, file, nested(key, {"enabled": True}), error=UsageError)
    assert refused == f"--deepspeed_config ds.json: {key}.enabled true: {rule.otherwise}"
    with pytest.raises(UsageError, match=rf"ds\.json: {key} 3: must be an object"):
        parse(file, nested(key, 3))


@pytest.mark.parametrize("key", [key for key, rule in KEYS.items() if type(rule) is Refused])
def test_a_key_that_would_change_the_result_is_refused(file: Path, key: str) -> None:
    assert parse(file, nested(key, None)) == CommandLine(BASELINE, ())
    with pytest.raises(UsageError, match=rf'^--deepspeed_config ds\.json: {key} \{{"a": 1\}}: '):
        parse(file, nested(key, {"a": 1}))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (zero(stag=3), "zero_optimization.stag: is not a known key …; did you mean zero_optimization.stage?"),
        ({"fp16.enabled": True}, "fp16.enabled: is not a known key"),
        ({"é\n": 3}, '"\\u00e9\\n": is not a known key'),
        (
            zero(stage=4),
            "--zero-stage 4: must be at most 3 (--zero-stage is --deepspeed_config ds.json: …stage)",
        ),
        (zero(stage="3"), 'zero_optimization.stage "3": must be a whole number'),
        (zero(stage=2.5), "zero_optimization.stage 2.5: must be a whole number"),
        (zero(stage=True), "zero_optimization.stage true: must be a whole number"),
        (
            zero(stage=3, zero_quantized_weights=1),
            "zero_optimization.zero_quantized_weights 1: must be true or",
        ),
        (zero(stage=3, zero_hpz_partition_size=-1), "zero_hpz_partition_size -1: must be a number of ranks"),
        (zero(offload_optimizer={"device": "nvme"}), 'offload_optimizer.device "nvme": must be cpu or none'),
        ({"zero_optimization": True}, "zero_optimization true: must be an object"),
        ({"train_batch_size": 0}, "train_batch_size 0: must be 1 or more"),
        (
            {"gradient_clipping": -1},
            "--clip-grad -1.0: must be at least 0 (--clip-grad is …gradient_clipping)",
        ),
        ({"communication_data_type": "int8"}, 'communication_data_type "int8": must be fp32 or bf16'),
        ({"optimizer": {"type": "Lamb"}}, 'optimizer.type "Lamb": must be AdamW'),
        ({"optimizer": {"type": "Muon"}}, 'optimizer.type "Muon": must be AdamW …Muon is --optimizer muon'),
        ({"optimizer": {"params": {"momentum": 0.95}}}, "params.momentum 0.95: … --muon-momentum"),
        ({"optimizer": {"params": {"betas": [0.9]}}}, "betas [0.9]: must be a list of two numbers"),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 200}},
            "initial_scale_power 200: must be a power of",
        ),
        ({"scheduler": {"type": "WarmupLR"}}, 'scheduler {"type": "WarmupLR"}: …--lr-decay-style'),
        (zero(zeropp_loco_param={"err_beta": 0.8}), "zeropp_loco_param … not supported: error feedback"),
    ],
    ids=str,
)
def test_a_value_that_cannot_be_obeyed(file: Path, content: dict[str, Any], said: str) -> None:
    check_refusal(said, file, content)


@pytest.mark.parametrize(
    ("content", "flags", "said"),
    [
        (zero(stage=3), "--zero-stage 2", "zero_optimization.stage 3: contradicts --zero-stage 2"),
        ({"fp16": {"enabled": False}}, "--fp16", "fp16.enabled false: contradicts --fp16;"),
        ({"optimizer": {"type": "Adam"}}, "--optimizer muon", 'type "Adam": contradicts --optimizer muon;'),
        ({"gradient_clipping": "1"}, "--deepspeed --clip-grad 1", 'gradient_clipping "1": must be a number'),
        (
            zero(stage=3, zero_quantized_weights=False),
            "--zero-quantized-weights",
            "zero_quantized_weights false: contradicts --zero-quantized-weights;",
        ),
        (
            zero(stage=2, cpu_offload=True, offload_optimizer={"device": "none"}),
            "",
            'offload_optimizer.device "none": contradicts --deepspeed_config ds.json: …cpu_offload',
        ),
        (
            {"train_micro_batch_size_per_gpu": 4},
            "--batch-size 2",
            "train_micro_batch_size_per_gpu 4: contradicts --micro-batch-size 2",
        ),
    ],
)
def test_a_key_that_contradicts_the_command_line_is_refused(
    file: Path, content: Any, flags: str, said: str
) -> None:
    check_refusal(said, file, content, *flags.split())


@pytest.mark.parametrize(
    ("content", "flags", "today", "notes"),
    [
        (
            {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500}},
            "--fp16 --loss-scale 12 --hysteresis 2",
            "--fp16 --initial-loss-scale 4096 --loss-scale-window 500",
            ["--loss-scale 12: no effect, as under DeepSpeed: ds.json has a dynamic loss scale"],
        ),
        (
            {"fp16": {"enabled": True, "loss_scale": 8}},
            "--hysteresis 4",
            f"{FP16} --loss-scale 8",
            ["--hysteresis 4: no effect, as under DeepSpeed: ds.json has a constant loss scale"],
        ),
        ({"gradient_clipping": 1.0}, "--deepspeed --clip-grad 1.0", "--clip-grad 1", []),
        ({}, "--clip-grad 1.0", "--clip-grad 1", []),
        (
            {},
            "--deepspeed --clip-grad 1.0",
            "--clip-grad 0",
            ["--clip-grad 1: no effect, as under DeepSpeed: ds.json clips no gradient"],
        ),
        (
            {"gradient_clipping": 0.5},
            "--deepspeed --clip-grad 1.0",
            "--clip-grad 0.5",
            ["--clip-grad 1: no effect, as under DeepSpeed: ds.json has gradient_clipping 0.5"],
        ),
        (
            {"gradient_clipping": 1, "bf16": {"enabled": True}, "fp16": {"enabled": False, "loss_scale": 0}},
            "--deepspeed --fp16",
            "--bf16",
            [
                "--fp16: no effect, as under DeepSpeed: ds.json has bf16",
                "--deepspeed_config ds.json: no effect here: fp16.loss_scale",
            ],
        ),
        (
            {
                "gradient_accumulation_steps": 4,
                "data_efficiency": {"enabled": True, "seed": 1, "data_routing": {"enabled": False}},
            },
            "--pipeline-model-parallel-size 2",
            "--global-batch-size 32",  # 2 samples × 4 × the 4 data ranks of the file's program
            ["--deepspeed_config ds.json: no effect here: data_efficiency.enabled, data_efficiency.seed"],
        ),
    ],
    ids=range(8),
)
def test_what_the_file_decides_under_deepspeed(
    file: Path, content: dict[str, Any], flags: str, today: str, notes: list[str]
) -> None:
    parsed = parse(file, content, *flags.split(), ranks=8)
    assert parsed.config == parse_args([*MINIMAL, *today.split()])
    assert [note for note in parsed.notes if not note.startswith("no effect here: --deepspeed:")] == notes


def test_refused_keys_are_said_together_with_refused_flags(file: Path) -> None:
    content = {"curriculum_learning": {"enabled": True}} | zero(offload_param={"device": "cpu"})
    with pytest.raises(UsageError) as refused:
        parse(file, content, "--eval-only", "--train-idx-path", "a")
    assert str(refused.value).splitlines() == [
        "--eval-only: use megatron-zpp evaluate",
        "--train-idx-path a, --deepspeed_config ds.json: curriculum_learning.enabled true: not supported: "
        "curriculum learning",
        '--deepspeed_config ds.json: zero_optimization.offload_param.device "cpu": not supported: parameters '
        "in CPU memory or on disks",
    ]


def test_a_key_that_agrees_with_the_command_line_is_accepted(file: Path) -> None:
    content = {"gradient_clipping": 1, "bf16": {"enabled": False}} | zero(stage=3, zero_hpz_partition_size=4)
    flags = "--clip-grad 1.0 --fp16 --zero-stage 3 --zero-hpz-partition-size 4".split()
    assert parse(file, content, *flags).config == parse_args([*MINIMAL, *flags])


def test_auto_and_null_leave_the_setting_to_the_command_line(file: Path) -> None:
    flags = "--zero-stage 3 --fp16 --clip-grad 0.5".split()
    for word in ("auto", None):
        content = {
            "train_batch_size": word,
            "train_micro_batch_size_per_gpu": word,
            "gradient_accumulation_steps": word,
            "gradient_clipping": word,
            "fp16": {"enabled": word, "loss_scale": word, "initial_scale_power": 16},
            "optimizer": {"type": "AdamW", "params": {"lr": word, "betas": word, "weight_decay": word}},
            "zero_optimization": {"stage": word, "zero_quantized_weights": word},
        }
        expected = parse_args([*MINIMAL, *flags, "--initial-loss-scale", "65536"])
        assert parse(file, content, *flags) == CommandLine(expected, ())


BATCHES = [  # (train_batch_size, micro, accumulation, ranks), flags -> (global, micro) or the refusal
    ((32, 4, 2, 4), "", (32, 4)),
    ((32, None, 2, 4), "", (32, 4)),
    ((None, 4, 2, 4), "", (32, 4)),
    ((32, None, None, 4), "", (32, 8)),
    ((None, None, 2, 4), "--micro-batch-size 4", (32, 4)),
    ((None, None, 2, 4), "--global-batch-size 32", (32, 4)),
    ((None, None, 2, 4), "--global-batch-size 32 --micro-batch-size 4", (32, 4)),
    ((32, None, None, 4), "--micro-batch-size 2", (32, 2)),
    ((64, 4, 2, 4), "", "train_batch_size 64: must be 32, train_micro_batch_size_per_gpu 4 × "),
    (
        (30, None, 2, 4),
        "",
        "train_batch_size 30: must be a multiple of gradient_accumulation_steps 2 × 4 data ranks",
    ),
    (
        (None, None, 2, 4),
        "--global-batch-size 9 --micro-batch-size 4",
        "--global-batch-size 9: must be 32, --mic",
    ),
    ((None, None, 0, 4), "--micro-batch-size 4", "gradient_accumulation_steps 0: must be 1 or more"),
    ((None, None, 2, 4), "", "--micro-batch-size (not given)"),
    (
        (32, None, 2, 16),
        "--tensor-model-parallel-size 2 --context-parallel-size 2 --attention-dropout 0",
        (32, 4),
    ),
    ((32, None, 2, 4), "--tensor-model-parallel-size 0", "--tensor-model-parallel-size 0: must be at least"),
]


@pytest.mark.parametrize(("sizes", "flags", "expected"), BATCHES)
def test_two_sizes_of_a_batch_determine_the_third_and_all_three_must_agree(
    file: Path, sizes: tuple, flags: str, expected: tuple | str
) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    content = {key: size for key, size in zip(keys, sizes, strict=False) if size is not None}
    argv = [*without("--micro-batch-size"), *flags.split()]
    if isinstance(expected, str):
        assert expected in refusal(parse, file, content, argv=argv, ranks=sizes[-1], error=UsageError)
    else:
        training = parse(file, content, argv=argv, ranks=sizes[-1]).config.training
        assert (training.global_batch_size, training.micro_batch_size) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1 column 1: not JSON"),
        ('{"fp16": {"enabled": true}, // half\n}', "line 1 column 29: not JSON (…); JSON has no comments"),
        ('{\n  "gradient_clipping": 1.0,\n}', "line 3 column 1: not JSON (…"),
        ("[1, 2]", "must hold a JSON object"),
        ('{"a": 1, "a": 2}', 'the key "a" appears twice in one object'),
        ('{"gradient_clipping": NaN}', "gradient_clipping nan: must be a finite number"),
        ('{"aio": {"block_size": [1, -Infinity]}}', "block_size -inf: must be a finite number"),
        ('{"gradient_clipping": ' + "9" * 5000 + "}", "gradient_clipping inf: must be a finite number"),
        ("[" * 100_000, "is nested too deeply"),
        ('{"aio": "' + "x" * (1 << 20) + '"}', "cannot be read (is longer than 1,048,576 bytes)"),
    ],
    ids=range(10),
)
def test_a_file_that_is_not_a_json_object_is_refused(file: Path, text: str, said: str) -> None:
    check_refusal(f"--deepspeed_config ds.json: …{said}", file, text)


def test_a_file_that_cannot_be_read_is_refused(file: Path) -> None:
    file.write_bytes(b'{"a": "\xff"}')
    for name, said in (
        ("gone.json", "cannot be read (No such file or directory); name"),
        (".", "cannot be read (is a directory); name"),
        ("a\0b", "embedded null byte"),
        ("ds.json", "byte 7: not UTF-8; name"),
    ):
        refused = refusal(parse_args, [*MINIMAL, "--deepspeed_config", name], error=UsageError)
        assert refused.startswith("--deepspeed_config ")
        assert said in refused


def test_a_byte_order_mark_is_ignored(file: Path) -> None:
    assert parse(file, '\ufeff{"gradient_clipping": 2}').config.optimizer.clip_grad == 2.0
