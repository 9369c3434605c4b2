"""Old flags of pretrain_gpt.py, and files of DeepSpeed's, that cannot be obeyed."""

from tests.faults.cases import Case, directory, locked, put
from tests.faults.cases import refused as bad
from tests.faults.command_lines import FULL

OLD_FLAGS = [
    bad("--batch-size 8", "--batch-size 8: contradicts --micro-batch-size 4; make them equal or omit one"),
    bad("--batch-size many", "--batch-size: invalid int value: 'many'"),
    bad(
        "--layernorm-epsilon 0", "--norm-epsilon 0.0: must be above 0 (--norm-epsilon is --layernorm-epsilon)"
    ),
    bad(
        "--model-parallel-size 2",
        "--tensor-model-parallel-size 2: must divide the 1 rank of a node; possible: 1",
    ),
    bad(
        "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 2: only 1 is … use --zero-stage 3"
    ),
    bad("--optimizer sgd", "--optimizer sgd: only adam is possible: … omit it"),
    bad("--remote-device nvme", "--remote-device nvme: only none is possible: … --zero-stage 3"),
    bad("--checkpoint-in-cpu", "--recompute-offload (given): needs … is --checkpoint-in-cpu)"),
    bad("--checkpoint-activations --recompute-activations", f"{FULL}: contradicts --recompute-activations"),
    bad("--use-distributed-optimizer --zero-stage 0", "(given): contradicts --zero-stage 0; omit one"),
    bad("--rotary-interleaved", "--rotary-interleaved (given): not here: … convert weights"),
    bad("--train-tokens 1", "--train-tokens 1: must be a sample of --seq-length tokens"),
    Case("--cpu-optimizer", "--zero-offload-optimizer (given): … omit it", status=2),
]

DS = "--deepspeed_config ds.json"


def deepspeed(text: str, said: str, argv: str = "") -> Case:
    """A file of DeepSpeed's with this text."""
    return bad(f"{DS} {argv}", f"{DS}: {said}", harm=put("ds.json", text))


DEEPSPEED = [
    bad(
        "--deepspeed_config gone.json", "--deepspeed_config gone.json: cannot be read (No such … name a JSON"
    ),
    bad("--deepspeed_config=", "--deepspeed_config '': must not be empty"),
    bad(DS, f"{DS}: cannot be read (is a directory)", harm=directory("ds.json")),
    bad(
        "--deepspeed_config file", "--deepspeed_config file: cannot be read (Permission", harm=locked("file")
    ),
    deepspeed("", "line 1 column 1: not JSON"),
    deepspeed('{"bf16": {},\n# comment\n}', "line 2 column 1: not JSON … no comments"),
    deepspeed('{"bf16": {}, "bf16": {}}', 'the key "bf16" appears twice … remove one'),
    deepspeed("[" * 100_000, "is nested too deeply; name a JSON"),
    deepspeed("[1]", "must hold a JSON object"),
    deepspeed('{"gradient_clipping": NaN}', "gradient_clipping nan: must be a finite number"),
    deepspeed(
        '{"zero_optimization": {"stag": 3}}', "zero_optimization.stag: … did you mean zero_optimization.st"
    ),
    deepspeed('{"zero_optimization": {"stage": "3"}}', 'zero_optimization.stage "3": must be a whole number'),
    deepspeed(
        '{"zero_optimization": {"stage": 3}}', "… stage 3: contradicts --zero-stage 2; make", "--zero-stage 2"
    ),
    deepspeed('{"optimizer": {"type": "Lamb"}}', 'optimizer.type "Lamb": must be AdamW'),
    deepspeed('{"scheduler": {"type": "WarmupLR"}}', "scheduler … not here: … --lr-warmup-iters"),
    deepspeed('{"sparse_attention": {"mode": "fixed"}}', "sparse_attention … not here: … omit it"),
    deepspeed('{"amp": {"enabled": true}}', "amp.enabled true: not here: use --bf16 or --fp16"),
    deepspeed(
        '{"train_batch_size": 8, "gradient_accumulation_steps": 3}',
        "train_batch_size 8: must be 12, … change one of them",
    ),
    bad(
        DS,
        f"--zero-stage 7: must be at most 3 (--zero-stage is {DS}: zero_optimization.stage)",
        harm=put("ds.json", '{"zero_optimization": {"stage": 7}}'),
    ),
    bad(
        DS,
        "--global-batch-size 6: … --micro-batch-size 4 × 1 … such as 4 or 8",
        harm=put("ds.json", '{"train_batch_size": 6}'),
    ),
]

OLD_NAMES = [*OLD_FLAGS, *DEEPSPEED]
