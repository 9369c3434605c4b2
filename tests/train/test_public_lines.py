"""Command lines of public scripts: what they train here beside what their own programs' rules say.

The rules were read in the sources of Megatron-DeepSpeed (4efb479d), and each is written again here. Tokens of
warm-up and decay are rounded to samples.
"""

import json
import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_zpp.config.root import parse_command_line
from megatron_zpp.train.schedule.run_schedule import RunSchedule

DATA = " --data-path data --vocab-file vocab.json --merge-file merges.txt --data-impl mmap --split 949,50,1"


@dataclass(frozen=True)
class Script:
    """Excerpts of a script, the ranks of a run, and what its program makes of them."""

    line: str
    ranks: int
    tensor: int
    optimizer: tuple[float, ...]  # betas, epsilon, weight decay, clipping
    steps: dict[str, Any]  # for `their_steps`
    rate: dict[str, Any]  # for `their_rate`, in samples
    init: float
    scale: tuple[float | None, float, int] | None = None  # constant, first dynamic, window
    micro: int = 1  # of a rank here
    file: dict[str, Any] | None = None  # DeepSpeed's


def fp16(power: int, window: int = 500) -> dict[str, Any]:
    keys = {"enabled": True, "loss_scale": 0, "loss_scale_window": window, "hysteresis": 2}
    return {"fp16": keys | {"min_loss_scale": 1, "initial_scale_power": power}}


SCRIPTS = {
    "Megatron-DeepSpeed examples_deepspeed/MoE/ds_pretrain_gpt_6.7B_dense.sh": Script(
        line="--adam-beta1 0.9 --adam-beta2 0.95 --tensor-model-parallel-size 8 --moe-expert-parallel-size 1 "
        "--num-experts 1 --moe-loss-coeff 0.01 --moe-train-capacity-factor 1.0 --moe-min-capacity 4 "
        "--init-method-std 0.01 --lr-decay-tokens 260000000000 --lr-warmup-tokens 375000000 "
        "--micro-batch-size 4 --rampup-batch-size 32 32 4882812 --global-batch-size 1024 --num-layers 32 "
        "--hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 "
        "--train-tokens 300000000000 --train-samples 439453125 --lr 1.2e-4 --min-lr 1.2e-5 "
        "--lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 --fp16 --deepspeed",
        ranks=64,
        tensor=8,
        optimizer=(0.9, 0.95, 1e-8, 0.1, 1.0),
        steps={"samples": 439453125, "tokens": 300_000_000_000, "batch": 1024, "length": 2048}
        | {"ramp": (32, 32, 4882812)},
        rate={"peak": 1.2e-4, "floor": 1.2e-5, "warmup": 375e6 / 2048, "decay": 260e9 / 2048},
        init=0.01,
        scale=(None, 2.0**11, 500),
        micro=4,
        file={"train_batch_size": 1024, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0}
        | {"zero_optimization": {"stage": 0}, "curriculum_learning": {"enabled": False}, **fp16(11)},
    ),
    "bigscience train/tr4-1B3-rotary/tr4c-1B3-oscar-modeling-rotary.slurm": Script(
        line="--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 "
        "--max-position-embeddings 2048 --micro-batch-size 8 --global-batch-size 512 "
        "--rampup-batch-size 32 32 2_000_000 --train-samples 73_242_187 --loss-scale 12 --clip-grad 1.0 "
        "--fp16 --checkpoint-activations --position-embedding-type rotary --optimizer adam --adam-beta1 0.9 "
        "--adam-beta2 0.999 --adam-eps 1e-8 --lr 2e-4 --min-lr 1e-5 --lr-decay-style cosine "
        "--lr-decay-samples 73_242_187 --lr-warmup-samples 183_105 --weight-decay 1e-1 --zero-stage 1 "
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --deepspeed",
        ranks=64,
        tensor=4,
        optimizer=(0.9, 0.999, 1e-8, 0.1, 1.0),
        steps={"samples": 73_242_187, "batch": 512, "length": 2048, "ramp": (32, 32, 2_000_000)},
        rate={"peak": 2e-4, "floor": 1e-5, "warmup": 183_105, "decay": 73_242_187},
        init=0.02,
        scale=(None, 2.0**12, 500),
        micro=2,
        file={"train_batch_size": 512, "train_micro_batch_size_per_gpu": 8, "gradient_clipping": 1.0}
        | {"zero_optimization": {"stage": 1}, **fp16(12)},
    ),
    "Megatron-DeepSpeed examples_deepspeed/universal_checkpointing/megatron_gpt/run_bf16.sh": Script(
        line="--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --ds-sequence-parallel-size 1 "
        "--num-layers 4 --hidden-size 512 --num-attention-heads 32 --seq-length 512 --loss-scale 12 "
        "--max-position-embeddings 512 --micro-batch-size 2 --global-batch-size 16 --train-iters 100000 "
        "--lr 6.0e-3 --min-lr 6.0e-4 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 "
        "--adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --bf16 --checkpoint-activations "
        "--universal-checkpoint --deepspeed --zero-stage=1",
        ranks=8,
        tensor=2,
        optimizer=(0.9, 0.95, 1e-8, 0.1, 0.0),  # the file has no gradient_clipping
        steps={"iterations": 100_000, "batch": 16, "length": 512},
        rate={"peak": 6e-3, "floor": 6e-4, "warmup": 0, "decay": 1_600_000},
        init=0.006,
        micro=2,
        file={"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
        | {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    ),
    "bigscience experiments/gpt2-meg/meg_gpt2_base_n4.slurm": Script(
        line="--num-layers 40 --hidden-size 6144 --num-attention-heads 32 --seq-length 1024 "
        "--max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 4 --lr 0.00015 "
        "--lr-decay-style cosine --min-lr 1.0e-5 --train-iters 1000 --lr-decay-iters 800 "
        "--lr-warmup-fraction .01 --weight-decay 1e-2 --clip-grad 1.0 --fp16 --checkpoint-activations "
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4",
        ranks=16,
        tensor=4,
        optimizer=(0.9, 0.999, 1e-8, 0.01, 1.0),
        steps={"iterations": 1000, "batch": 4, "length": 1024},
        rate={"peak": 1.5e-4, "floor": 1e-5, "warmup": 32, "decay": 3200},
        init=0.02,
        scale=(None, 2.0**32, 1000),
    ),
}


def their_batch(consumed: int, batch: int, ramp: tuple[int, int, int] | None) -> int:
    """`RampupBatchsizeNumMicroBatches.update`."""
    if ramp is None or consumed > ramp[2]:
        return batch
    start, increment, samples = ramp
    return start + int(consumed / (samples / ((batch - start) // increment))) * increment


def their_steps(
    *,
    batch: int,
    length: int,
    iterations: int | None = None,
    samples: int = 0,
    tokens: float = math.inf,
    ramp: tuple[int, int, int] | None = None,
) -> tuple[int, int]:
    """(steps, samples): `update_train_iters`, and the condition of the loop in `train`."""
    if iterations is None:
        iterations = consumed = 0
        while ramp is not None and consumed <= ramp[2]:
            consumed += their_batch(consumed, batch, ramp)
            iterations += 1
        iterations += (samples - consumed) // batch
    step = consumed = 0
    while step < iterations and consumed * length < tokens:
        consumed += their_batch(consumed, batch, ramp)
        step += 1
    return step, consumed


def their_rate(consumed: int, *, peak: float, floor: float, warmup: float, decay: float) -> float:
    """`OptimizerParamScheduler.get_lr` with the style cosine."""
    if warmup > 0 and consumed <= warmup:
        return peak * consumed / warmup
    if consumed > decay:
        return floor
    done = (consumed - warmup) / (decay - warmup)
    return floor + 0.5 * (math.cos(math.pi * done) + 1.0) * (peak - floor)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_public_line_trains_what_its_own_program_would(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = SCRIPTS[name]
    argv = shlex.split(script.line + DATA)
    if script.file is not None:
        Path("ds.json").write_text(json.dumps(script.file))
        argv += ["--deepspeed_config", "ds.json"]
    config = parse_command_line(argv, ranks=lambda plan: script.ranks).config
    optimizer, training, precision = config.optimizer, config.training, config.precision
    betas, others = (optimizer.adam_beta1, optimizer.adam_beta2), (optimizer.adam_eps, optimizer.weight_decay)
    assert (*betas, *others, optimizer.clip_grad) == script.optimizer
    assert (config.model.init_method_std, training.micro_batch_size) == (script.init, script.micro)
    scale = (precision.loss_scale, precision.initial_loss_scale, precision.loss_scale_window)
    assert script.scale in ((scale if precision.fp16 else None), None)

    ranks = script.ranks // script.tensor
    length = config.model.seq_length
    schedule = RunSchedule.from_config(training, config.learning_rate, ranks, seq_length=length)
    steps, consumed = their_steps(**script.steps)
    assert (schedule.iterations, schedule.samples) == (steps, consumed)
    for place in (0.001, 0.01, 0.5, 0.9, 1.0):
        samples = int(consumed * place)
        assert schedule.batches.global_batch_size_at(samples) == their_batch(
            samples, script.steps["batch"], script.steps.get("ramp")
        )
        assert schedule.learning_rate(samples) == pytest.approx(
            their_rate(samples, **script.rate), rel=3e-6
        )  # half a sample of the shortest warm-up
    half = their_steps(**script.steps | {"tokens": consumed // 2 * length})
    resumed = schedule.resumed(schedule.start.__class__(iteration=half[0], consumed_samples=half[1]))
    assert resumed.iterations == steps
