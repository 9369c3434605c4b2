"""The runs that are disturbed: every way to shard, to save and to read data; small, for thousands of runs."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.faults.foreign_files import train_bpe
from megatron_zpp.data.indexed_writer import IndexedDatasetWriter

SHAPE = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 --lr 3e-3 "
    "--log-interval 1 --num-workers 0 --device cpu"
)
MOCK = "--mock-data --tokenizer-type NullTokenizer --vocab-size 255"
TEXT = "--data-path {data}/text.jsonl --split 90,10,0 --tokenizer-type NullTokenizer --vocab-size 255"
BPE = (
    "--data-path {data}/words.jsonl --split 90,10,0 --tokenizer-type GPT2BPETokenizer "
    "--vocab-file {data}/vocab.json --merge-file {data}/merges.txt"
)
TOKENS = "--data-path {data}/tokens --split 80,20,0 --tokenizer-type NullTokenizer --vocab-size 255"
CACHE = "--data-cache-path {run}/cache"
SHORT = "--train-iters 4 --global-batch-size 8 --save-interval 1"
RAMP = "--train-samples 28 --global-batch-size 8 --rampup-batch-size 4 4 12 --save-interval 1"
HPZ = "--zero-hpz-partition-size auto"
ZEROPP = f"--zero-quantized-weights --zero-quantized-gradients {HPZ}"
DELTA = (
    f"--zero-quantized-weights --zero-quantized-weights-format delta4 {HPZ} --zero-quantized-gradients "
    "--zero-quantized-gradients-format rotated4"
)
STAGE_3 = "--zero-stage 3 --bf16 --eval-iters 0"
TENSOR = "--tensor-model-parallel-size 2"


@dataclass(frozen=True)
class Setting:
    """A run of `world` ranks, `local` on a node. {data} and {run} in its flags are directories."""

    name: str
    world: int
    flags: str
    local: int | None = None

    def argv(self, data: Path, run: Path) -> list[str]:
        """The flags of a run that saves, resumes and caches below `run`."""
        places = f"--save {run}/checkpoints --load {run}/checkpoints --metrics-file {run}/metrics.jsonl"
        return f"{SHAPE} {self.flags.format(data=data, run=run)} {places}".split()


def _settings(world: int, flags: dict[str, str], local: int | None = None) -> tuple[Setting, ...]:
    """Settings by name, of as many ranks."""
    return tuple(Setting(name, world, text, local) for name, text in flags.items())


ALONE = _settings(  # one rank, which is quick enough for each call that it makes
    1,
    {
        "stage 0, fp32, one kept": f"{MOCK} {SHORT} --fp32 --eval-iters 0 --keep-last 1",
        "stage 0, fp32, all kept": f"{MOCK} {SHORT} --fp32 --eval-iters 1 --eval-interval 2",
        "stage 1, bf16, async": f"{MOCK} {SHORT} --zero-stage 1 --bf16 --async-save --keep-last 2 "
        "--keep-every 2 --eval-iters 0",
        "stage 2, fp16": f"{MOCK} {SHORT} --zero-stage 2 --fp16 --loss-scale-window 2 --keep-last 2 "
        "--eval-iters 0",
        "ZeRO++": f"{MOCK} {SHORT} {STAGE_3} --keep-last 1 {ZEROPP} --async-save",
        "ramp-up": f"{MOCK} {RAMP} --zero-stage 3 --fp32 --keep-last 2 --eval-iters 0",
        "text": f"{TEXT} {SHORT} {CACHE} --keep-last 1 --eval-iters 1 --eval-interval 2",
        "text, BPE": f"{BPE} {SHORT} {CACHE} --keep-last 1 --eval-iters 0 --bf16 --async-save",
        "tokens": f"{TOKENS} {SHORT} --keep-last 2 --eval-iters 1 --eval-interval 3 --verify-data",
        "tokens, Megatron's order": f"{TOKENS} {SHORT} {CACHE} --dataset-order megatron --keep-last 1 "
        "--eval-iters 1 --eval-interval 2",
        "sublayers": f"{MOCK} {SHORT} {STAGE_3} --zero-unit sublayer --keep-last 1 --async-save",
    },
)
TOGETHER = (
    *_settings(
        2,
        {
            "2 ranks, stage 0, fp16": f"{MOCK} {SHORT} --fp16 --keep-last 2 --eval-iters 0",
            "2 ranks, stage 1, async": f"{MOCK} {SHORT} --zero-stage 1 --bf16 --async-save --eval-iters 0",
            "2 ranks, stage 2": f"{MOCK} {SHORT} --zero-stage 2 --fp32 --keep-last 1 --eval-iters 1",
            "2 ranks, stage 3, async": f"{MOCK} {SHORT} {STAGE_3} --async-save --keep-last 2",
            "2 ranks, ZeRO++": f"{MOCK} {SHORT} {STAGE_3} {ZEROPP}",
            "2 tensor ranks": f"{MOCK} {SHORT} {TENSOR} --fp32 --keep-last 2 --eval-iters 0 --async-save",
            "2 ranks, ramp-up": f"{MOCK} {RAMP} --zero-stage 2 --bf16 --keep-last 2 --eval-iters 0",
            "2 ranks, text": f"{TEXT} {SHORT} {CACHE} --zero-stage 1 --fp32 --keep-last 1 --eval-iters 1",
            "2 ranks, Megatron's order": f"{TOKENS} {SHORT} {CACHE} --dataset-order megatron --zero-stage 3 "
            "--fp32 --keep-last 2 --eval-iters 1",
            "2 ranks, sublayers": f"{MOCK} {SHORT} {STAGE_3} --zero-unit sublayer --keep-last 2 --async-save",
            "2 ranks, 8-bit products": f"{MOCK} {SHORT} {STAGE_3} --fp8 --hidden-size 32 --kv-channels 16 "
            "--keep-last 2",
        },
    ),
    Setting(
        "2 nodes, ZeRO++ of differences", 2, f"{MOCK} {SHORT} {STAGE_3} --keep-last 2 {DELTA} --async-save", 1
    ),
    *_settings(
        4,
        {
            "2 nodes of 2, accumulation inside nodes": f"{MOCK} --train-iters 4 --global-batch-size 16 "
            f"--save-interval 1 {STAGE_3} {ZEROPP} --zero-gradient-partition-size auto",
            "2 × 2 ranks, tensor parallelism, stage 3": f"{MOCK} {SHORT} {TENSOR} {STAGE_3} --keep-last 1",
        },
        local=2,
    ),
)


def make_data(data: Path) -> None:
    """The data of all settings: token files, two texts and a tokenizer."""
    data.mkdir()
    documents: list[np.ndarray] = [np.arange(first, first + 60) % 255 for first in range(40)]
    with IndexedDatasetWriter(data / "tokens", np.uint16) as writer:
        for document in documents:
            writer.add_document(document)
    texts = [" ".join(map(str, document)) for document in documents]
    for name in ("text", "words"):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (data / f"{name}.jsonl").write_text(lines)
    train_bpe(data, texts)
