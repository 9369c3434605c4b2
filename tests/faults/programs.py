"""What the other programs refuse: evaluate, import_checkpoint, plot and report."""

import json
from functools import partial

import torch

from tests.faults.cases import Case, Harm, both, cut, fifo, flip, locked, put
from tests.faults.files import WRITABLE
from tests.faults.tools import importing

NEWEST = "checkpoints/iter_0000002"
RECORD = json.dumps({"iteration": 1, "lm_loss": 5.0, "consumed_samples": 4}) + "\n"

evaluate = partial(Case, program="evaluate")
plot = partial(Case, program="plot")
report = partial(Case, program="report")


EVALUATE = [
    evaluate("", "are required: --load", status=2, without="--load"),
    evaluate("--load checkpoints/iter_0000001", ": is a checkpoint; give --load checkpoints --ckpt-step 1"),
    evaluate("--load file", "--load file: … Not a directory; name"),
    evaluate("--valid-data gone.txt", "--valid-data gone.txt: no such file … check the path"),
    evaluate("--task reading", "--task reading: must be perplexity or lambada", status=2),
    evaluate("--seq-length 1000", "--seq-length 1000: … 32"),
    evaluate("--output file/x.json", f"--output file: Not a directory; {WRITABLE}"),
    evaluate("", "text.txt: is a FIFO, not a regular file", harm=fifo("text.txt")),
    evaluate("", "text.txt: … check", harm=locked("text.txt")),
    evaluate("", "damaged between bytes 0 and", harm=flip(f"{NEWEST}/rank_00000.safetensors", -4)),
    evaluate("", "damaged", harm=flip(f"{NEWEST}/state.json", 30)),
]


def torch_file(name: str, value: object) -> Harm:
    """A checkpoint's file as torch.save writes it."""

    def harm(site):
        (site / name).parent.mkdir(parents=True)
        torch.save(value, site / name)  # noqa: TID251 - the format that is read

    return harm


RANK = "old/iter_0000007/mp_rank_00/model_optim_rng.pt"
OLD = "old new --tokenizer-type NullTokenizer --vocab-size 89"
IMPORT = [
    importing("", "are required: SOURCE, CHECKPOINT_DIR", status=2),
    importing("hf new --from megatron", "--from megatron: hf is a checkpoint of transformers"),
    importing(OLD, "has no model", harm=torch_file(RANK, {"args": {}})),
    importing(OLD, "do not say num_layers", harm=torch_file(RANK, {"model": {}, "checkpoint_version": 3.0})),
    importing(OLD, "not a whole file of torch.save", harm=both(torch_file(RANK, {}), cut(RANK, -9))),
    importing(OLD, RANK, harm=both(torch_file(RANK, {}), fifo(RANK))),
    importing(OLD, "Permission denied", harm=both(torch_file(RANK, {}), locked(RANK))),
    importing(f"{OLD} --ckpt-step 9", "--ckpt-step 9", harm=torch_file(RANK, {})),
    importing(f"{OLD} --from deepspeed", "--from deepspeed", harm=torch_file(RANK, {})),
]

PLOT = [
    plot("", "are required: RUNS", status=2, without="text.txt"),
    plot("gone.jsonl", "gone.jsonl", without="text.txt"),
    plot("--output x.jpeg", "--output x.jpeg", status=2),
    plot("--labels a b", "--labels a b: must be 1, one for each run", status=2),
    plot("", "text.txt:1: not a line of a metrics file"),
    plot("", "is a FIFO", harm=fifo("text.txt")),
    plot("", "text.txt", harm=put("text.txt", "")),
    plot("--output file/x.png", f"--output file: Not a directory; {WRITABLE}", harm=put("text.txt", RECORD)),
]
REPORT = [
    report("", "text.txt:1: not a line of a metrics file"),
    report(
        "--output file/x.html", f"--output file: Not a directory; {WRITABLE}", harm=put("text.txt", RECORD)
    ),
    report("--checkpoint gone", "--checkpoint gone", harm=put("text.txt", RECORD)),
    report("--ckpt-step 3", "--ckpt-step 3: needs --checkpoint", status=2),
    report("", "text.txt", harm=locked("text.txt")),
]


PROGRAMS = [*EVALUATE, *IMPORT, *PLOT, *REPORT]
