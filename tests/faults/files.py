"""Files of pretrain_gpt.py that are missing, damaged, unreadable, foreign or in the way."""

import shutil
from pathlib import Path

from megatron_zpp.checkpoint.manifest import write_manifest
from megatron_zpp.storage.checksums import checksums_of
from tests.faults.cases import (
    Case,
    Harm,
    both,
    cut,
    directory,
    fifo,
    flip,
    link,
    locked,
    loop,
    put,
    refused,
    remove,
)
from tests.faults.site import of_another_tokenizer

OURS = "--data-path text: text"
PLAIN = "--data-path plain"
ANEW = "preprocess it again"
DEEP = "[" * 100_000

DATA = [
    Case(
        "--data-path gone",
        ": gone.idx does not exist; give the prefix of a .bin/.idx pair, a .jsonl … hf:NAME",
    ),
    Case(
        "--data-path owner/gone", "owner/gone.idx does not exist; give the prefix … parquet' or hf:owner/gone"
    ),
    Case("--data-path tex", "--data-path tex: tex.idx does not exist; did you mean text? Or give"),
    Case("--data-path text.txt", ": is not a tokenised data set; text must be JSON lines … build_corpus"),
    Case("--data-path gone.jsonl", "--data-path gone.jsonl: gone.jsonl: No such file or directory; name"),
    Case("--data-path x.jsonl", "--data-path x.jsonl: the file is empty", harm=put("x.jsonl", "")),
    Case(
        "--data-path x.jsonl", "x.jsonl: is a directory; name", harm=lambda site: (site / "x.jsonl").mkdir()
    ),
    Case("--data-path file/text", "--data-path file/text: … Not a directory; name"),
    Case("", f"{OURS}.bin: no such file … {ANEW}", harm=remove("text.bin")),
    Case("", f"{OURS}.idx: no such file … {ANEW}", harm=remove("text.idx")),
    Case("", f"{OURS}.idx: the file is empty … {ANEW}", harm=put("text.idx", "")),
    Case("", f"{OURS}.bin: the file is empty … {ANEW}", harm=put("text.bin", "")),
    Case("", f"{OURS}.idx: is a directory; name", harm=directory("text.idx")),
    Case("", f"{OURS}.idx: is a FIFO, not a regular file; name", harm=fifo("text.idx")),
    Case("", f"{OURS}.bin: is a character device, not", harm=link("text.bin", "/dev/zero")),
    Case("", f"{OURS}.checksums.json: is a FIFO, not a regular", harm=fifo("text.checksums.json")),
    Case("--data-path x.jsonl", "x.jsonl: is a FIFO, not a regular file; name", harm=fifo("x.jsonl")),
    Case("", f"{OURS}.idx: Too many levels of symbolic links; name", harm=loop("text.idx")),
    Case("", f"{OURS}.idx: Permission denied; name", harm=locked("text.idx")),
    Case("", f"{OURS}.bin: Permission denied; name", harm=locked("text.bin")),
    Case("", f"{OURS}.bin: truncated at byte 9999 … {ANEW}", harm=cut("text.bin", -1)),
    Case(
        "--verify-data", "text.bin: damaged between bytes 0 and 10000 … preprocess", harm=flip("text.bin", 7)
    ),
    Case(f"{PLAIN} --verify-data", "--verify-data (given): plain.checksums.json is missing; preprocess"),
    Case(PLAIN, f"{PLAIN}: plain.idx: truncated at byte 1041 … {ANEW}", harm=cut("plain.idx", -1)),
    Case(f"{PLAIN} --vocab-size 90", "plain.bin: byte … outside the vocabulary of 91; use the tokenizer"),
    Case("--vocab-size 90", "text.tokenizer.json: … vocab_size 257 … vocab_size 91 … use the tokenizer"),
    Case("", "text.tokenizer.json: … 301 … --tokenizer-type NullTokenizer … 257", harm=of_another_tokenizer),
    Case("", "text.tokenizer.json: not JSON … preprocess", harm=put("text.tokenizer.json", "{")),
    Case("", "text.tokenizer.json: Permission denied … preprocess", harm=locked("text.tokenizer.json")),
    refused("--global-batch-size 6", "--global-batch-size 6: … --micro-batch-size 4 × 1 … such as 4 or 8"),
    Case("--global-batch-size 4000", "--global-batch-size 4000: the train split has 125 samples; give more"),
    refused("--train-samples 3", ": must hold one global batch of 4", without="--train-iters"),
    refused(
        "--global-batch-size 8 --rampup-batch-size 8 4 100 --train-samples 100",
        "--rampup-batch-size 8 4 100: START must be below --global-batch-size 8",
        without="--train-iters",
    ),
]


def tokenizer(argv: str, said: str, harm: Harm | None = None) -> Case:
    """One that reads files, for data of any."""
    return Case(f"{argv} {PLAIN}", said, harm=harm, without="--tokenizer-type --vocab-size")


def sentencepiece(said: str, harm: Harm | None = None, model: str = "t.model") -> Case:
    """The SentencePiece model at `model`."""
    argv = f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {model}"
    return tokenizer(argv, f"--tokenizer-model {model}: {said} … give a SentencePiece .model", harm)


def gpt2(said: str, harm: Harm) -> Case:
    """GPT-2's files."""
    return tokenizer(
        "--tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt", said, harm
    )


def hugging_face(said: str, harm: Harm | None = None, model: str = "tokenizer.json") -> Case:
    """The tokenizer.json at `model`."""
    return tokenizer(f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {model}", said, harm)


VOCAB, MERGES, CONFIG = "--vocab-file vocab.json: ", "--merge-file merges.txt: ", "tokenizer_config.json"
TOKENIZERS = [
    sentencepiece("cannot be read (No such file or directory)", model="gone"),
    sentencepiece("is not a SentencePiece model", cut("t.model", 100)),
    sentencepiece("cannot be read (Permission denied)", locked("t.model")),
    gpt2(f"{VOCAB}cannot be read (No such file … give GPT-2's vocab.json", remove("vocab.json")),
    gpt2(f"{VOCAB}is not JSON; give GPT-2's vocab.json", put("vocab.json", DEEP)),
    gpt2(f"{MERGES}cannot be read (No such file … give GPT-2's merges.txt", remove("merges.txt")),
    hugging_face("--tokenizer-model gone: cannot be read … give a tokenizer.json", model="gone"),
    hugging_face("is a FIFO, not a regular file; give a tokenizer.json", fifo("tokenizer.json")),
]

LOAD = "--load checkpoints"
ARGUMENTS = "give {}, or --use-checkpoint-args"
NEWEST = "checkpoints/iter_0000002"
SHARDS, STATE, MANIFEST, MARKER = "rank_00000.safetensors", "state.json", "manifest.json", "COMMITTED"
SIDECAR = f"{SHARDS}.sha256"


def alone(harm: Harm) -> Harm:
    """Changes the newest checkpoint, which is the only one."""
    return both(lambda site: shutil.rmtree(site / "checkpoints/iter_0000001"), harm)


def none_whole(said: str, harm: Harm) -> Case:
    """No checkpoint of --load is whole."""
    return Case(LOAD, f"{LOAD}: none … is whole: {NEWEST}/{said} … omit --load", harm=alone(harm))


def unreadable(name: str) -> Case:
    """A file that may not be read says nothing about its checkpoint, so no older one takes its place."""
    said = f"rank 0 on … {NEWEST}/{name}: Permission denied; let the user of the run read it"
    return Case(LOAD, f"{LOAD}: {said}", harm=locked(f"{NEWEST}/{name}"))


def crafted(name: str, text: str) -> Harm:
    """A wrong file of the newest checkpoint, with right checksums."""

    def harm(site: Path) -> None:
        (site / NEWEST / name).write_text(text)
        write_manifest(site / NEWEST, {name: checksums_of(site / NEWEST / name) for name in (STATE, SHARDS)})

    return harm


CHECKPOINTS = [
    Case("--load gone", "--load gone: holds no checkpoint; only a --load equal to --save"),
    Case("--load directory", "--load directory: holds no checkpoint; only a --load equal to --save"),
    Case("--load file", "--load file: file: Not a directory; name a directory"),
    Case(
        "--load directory --save directory --exit-on-missing-checkpoint",
        "--load directory: holds no checkpoint, and --exit-on-missing-checkpoint is given",
    ),
    Case(f"--load {NEWEST}", f"--load {NEWEST}: is a checkpoint; give --load checkpoints --ckpt-step 2"),
    Case(
        f"--save {NEWEST} --ckpt-step 2 --load {NEWEST}",
        ": is a checkpoint; give --load checkpoints --ckpt-step 2",
    ),
    Case(f"{LOAD} --ckpt-step 7", "--ckpt-step 7: not in checkpoints; iterations there: 1, 2"),
    Case(
        f"{LOAD} --save ./checkpoints --ckpt-step 1",
        "--ckpt-step 1: iter_0000002 in --save ./checkpoints is newer … move it away, or give another --save",
    ),
    *(
        Case(
            f"{flags} --save ./checkpoints",
            "--save ./checkpoints: the run starts at iteration 0, and the next start would load iter_0000002 "
            f"there; give --load ./checkpoints{without} to resume from it, or another --save",
        )
        for flags, without in (("", ""), (f"{LOAD} --finetune", " without --finetune"))
    ),
    Case(f"{LOAD} --hidden-size 32", f": the model of {NEWEST} has 16; {ARGUMENTS.format(16)}"),
    Case(f"{LOAD} --seq-length 16", f"--max-position-embeddings 16: the … has 32; {ARGUMENTS.format(32)}"),
    Case(f"{LOAD} {PLAIN} --vocab-size 300", f"{NEWEST}: … 257 … 301 … give the tokenizer flags"),
    Case(LOAD, f"{LOAD}: … Permission denied; name a directory", harm=locked("checkpoints")),
    Case(LOAD, f"{LOAD}: … no {MARKER}: … remove it", harm=alone(remove(f"{NEWEST}/{MARKER}"))),
    none_whole(f"{MANIFEST}: … {MARKER} was written for", flip(f"{NEWEST}/{MANIFEST}", 50)),
    none_whole(f"{MANIFEST}: is a FIFO, not a regular file", fifo(f"{NEWEST}/{MANIFEST}")),
    none_whole(f"{SHARDS}: is a FIFO", fifo(f"{NEWEST}/{SHARDS}")),
    none_whole(f"{STATE}: not the state of a run", crafted(STATE, DEEP)),
    none_whole(f"{SHARDS}: damaged between bytes 0 and", flip(f"{NEWEST}/{SHARDS}", -5)),
    unreadable(SHARDS),
    unreadable(SIDECAR),
    Case(
        LOAD,
        f"{LOAD}: none … is whole: {NEWEST}/{STATE}: damaged",
        harm=both(flip(f"{NEWEST}/{STATE}", 5), flip(f"checkpoints/iter_0000001/{SHARDS}", -9)),
    ),
    Case(
        f"{LOAD} --save checkpoints",
        "--save checkpoints: its latest_checkpointed_iteration.txt is a directory; remove that",
        harm=directory("checkpoints/latest_checkpointed_iteration.txt"),
    ),
]

HF = "--load hf:hf"
HF_WEIGHTS = "hf/model.safetensors"


def gpt2_of(flags: str, said: str, **more: object) -> Case:
    """A model that is not the one of --load hf:hf."""
    return Case(f"{HF} {flags}", said, **more)


HUGGINGFACE = [
    Case("--load hf:gone", "--load hf:gone: is no directory; name one"),
    gpt2_of("--num-layers 3", f"--num-layers 3: the model of {HF} has n_layer 2; omit it", status=2),
    gpt2_of("--data-path plain --vocab-size 300", f"{HF}: has vocab_size 257, but … has 301 entries; give"),
    Case(HF, "hf/config.json: cannot be read (No such", harm=remove("hf/config.json")),
    Case(HF, f"{HF}: model.safetensors: is a FIFO, not a regular file; download", harm=fifo(HF_WEIGHTS)),
]

READ_ONLY = both(directory("ro"), locked("ro", 0o500))
WRITABLE = "name a writable directory"
LOCAL = "is a URL; give a path of this machine"
PLACES = [
    Case("--save file", f"--save file: Not a directory; {WRITABLE}"),
    Case("--save ro", f"--save ro: Permission denied; {WRITABLE}", harm=READ_ONLY),
    Case("--metrics-file directory", "--metrics-file directory: is a directory; name a file"),
    Case("--metrics-file file", "--metrics-file file: cannot be written; check", harm=locked("file", 0o400)),
    Case("--save new/er --tensorboard-dir file", f"--tensorboard-dir file: Not a directory; {WRITABLE}"),
    Case("--wandb-project p --wandb-save-dir file", f": Not a directory; {WRITABLE}"),
    Case("--profile", f"--profile profile: Not a directory; {WRITABLE}", harm=put("profile", "")),
    Case("--wandb-project p --wandb-save-dir s3://b/wandb", f": {LOCAL}", status=2),
]

FILES = [*DATA, *TOKENIZERS, *CHECKPOINTS, *HUGGINGFACE, *PLACES]
