"""The ZeRO++ tutorial's command, with a smaller model, against the same run by today's flags."""

import json
from pathlib import Path

from tests.config.test_legacy import FULL, TUTORIAL, TUTORIAL_FILE
from tests.support import pretrain
from tests.train.conftest import BYTES
from tests.train.test_pretrain import metrics, succeeded

RANKS = 2
SMALL = {"--num-layers": "2", "--hidden-size": "64", "--seq-length": "32", "--num-attention-heads": "4"}


def test_the_tutorials_command_trains_as_todays_does(corpus: str, tmp_path: Path) -> None:
    """Two ranks of one node, fp16, ZeRO++ with an hpZ group of both: the same losses to the last bit."""
    content = json.loads(json.dumps(TUTORIAL_FILE))
    content["zero_optimization"]["zero_hpz_partition_size"] = RANKS
    (tmp_path / "ds_zeropp_config.json").write_text(json.dumps(content))
    command = TUTORIAL.replace("ds_zeropp_config.json", str(tmp_path / "ds_zeropp_config.json")).split()
    for flag, value in SMALL.items():
        command[command.index(flag) + 1] = value
    today = [word for pair in SMALL.items() for word in pair]
    today += f"--micro-batch-size 1 --fp16 {FULL} --zero-stage 3 --zero-quantized-weights".split()
    today += f"--zero-hpz-partition-size {RANKS} --zero-quantized-gradients".split()
    added = ["--data-path", corpus, *BYTES, "--train-iters", "6", "--lr", "3e-3", "--eval-iters", "0"]
    added += ["--log-interval", "1", "--initial-loss-scale", "1024", "--device", "cpu"]
    losses, warnings = [], []
    for name, flags in (("tutorial", command), ("today", today)):
        path = tmp_path / f"{name}.jsonl"
        done = pretrain(*flags, *added, "--metrics-file", str(path), processes=RANKS)
        assert "hpZ 2 + qgZ int4" in succeeded(done)
        losses.append(metrics(path) + metrics(path, "grad_norm"))
        warnings.append([line for line in done.stderr.splitlines() if "warning" in line])
    assert len(losses[0]) == 12
    assert losses[0] == losses[1]
    assert losses[0][5] < losses[0][0]
    assert warnings[1] == []
    starts = (
        "--batch-size: --deepspeed-activation-checkpointing: --checkpoint-activations: --deepspeed_config"
    )
    for line, start in zip(warnings[0], starts.split(), strict=True):
        assert line.startswith(f"pretrain_gpt.py: warning: {start} ")
