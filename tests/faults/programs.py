"""What the other programs refuse: evaluate, import_checkpoint, plot, report, and settings in YAML."""

import json

import torch

from tests.faults.cases import Case, Harm, both, cut, directory, fifo, flip, link, locked, loop, put
from tests.faults.cases import refused as bad
from tests.faults.files import READ_ONLY, WRITABLE

NEWEST = "checkpoints/iter_0000002"
RECORD = json.dumps({"iteration": 1, "lm_loss": 5.0, "consumed_samples": 4}) + "\n"


def evaluate(argv: str, said: str, **more: object) -> Case:
    """megatron_zpp.commands.evaluate."""
    return Case(argv, said, program="evaluate", **more)


def importing(argv: str, said: str, **more: object) -> Case:
    """megatron_zpp.commands.import_checkpoint."""
    return Case(argv, said, program="import", **more)


def plot(argv: str, said: str, **more: object) -> Case:
    """megatron_zpp.commands.plot."""
    return Case(argv, said, program="plot", **more)


def report(argv: str, said: str, **more: object) -> Case:
    """megatron_zpp.commands.report."""
    return Case(argv, said, program="report", **more)


EVALUATE = [
    evaluate("", "are required: --load", status=2, without="--load"),
    evaluate("", "are required: --valid-data", status=2, without="--valid-data"),
    evaluate("--load gone", "--load gone: holds no checkpoint; name"),
    evaluate(
        "--load checkpoints/iter_0000001",
        "--load checkpoints/iter_0000001: is a checkpoint; give --load checkpoints --ckpt-step 1",
    ),
    evaluate("--load file", "--load file: … Not a directory; name"),
    evaluate("--ckpt-step 9", "--ckpt-step 9: not in checkpoints; iterations there: 1, 2"),
    evaluate("--valid-data gone.txt", "--valid-data gone.txt: no such file … check the path"),
    evaluate("--task reading", "--task: invalid choice: 'reading' … 'lambada'", status=2),
    evaluate("--seq-length 0", "--seq-length 0: must be at least 1", status=2),
    evaluate("--seq-length 1000", "--seq-length 1000: … 32"),
    evaluate("--stride 0", "--stride 0: must be at least 1", status=2),
    evaluate("--micro-batch-size 0", "--micro-batch-size 0: must be at least 1", status=2),
    evaluate("--bf16 --fp16", "--bf16", status=2),
    evaluate("--output file/x.json", f"--output file: Not a directory; {WRITABLE}"),
    evaluate("--output ro/x.json", f"--output ro: Permission denied; {WRITABLE}", harm=READ_ONLY),
    evaluate("", "text.txt: is a FIFO, not a regular file", harm=fifo("text.txt")),
    evaluate("", "text.txt: … check", harm=locked("text.txt")),
    evaluate("", "damaged between bytes 0 and", harm=flip(f"{NEWEST}/rank_00000.safetensors", -4)),
    evaluate("", "damaged", harm=flip(f"{NEWEST}/state.json", 30)),
    evaluate("--device tpu", "--device: invalid choice: 'tpu' … 'cpu'", status=2),
    evaluate("--json-key=", "--json-key '': must not be empty", status=2),
]


def torch_file(name: str, value: object) -> Harm:
    """A checkpoint's file as torch.save writes it."""

    def harm(site):
        (site / name).parent.mkdir(parents=True)
        torch.save(value, site / name)  # noqa: TID251 - the format that is read

    return harm


RANK = "old/iter_0000007/mp_rank_00/model_optim_rng.pt"
OLD = "old --output new --tokenizer-type NullTokenizer --vocab-size 89"
IMPORT = [
    importing("", "are required: DIRECTORY, --output", status=2),
    importing("directory", "are required: --output", status=2),
    importing("gone --output new", "gone"),
    importing("file --output new", "file"),
    importing("directory --output new", "directory"),
    importing("checkpoints --output new", "checkpoints"),
    importing("hf --output new", "hf"),
    importing(OLD, "has no model", harm=torch_file(RANK, {"args": {}})),
    importing(OLD, "checkpoint_version 1.0", harm=torch_file(RANK, {"model": {}, "checkpoint_version": 1.0})),
    importing(OLD, "do not say num_layers", harm=torch_file(RANK, {"model": {}, "checkpoint_version": 3.0})),
    importing(OLD, "not a whole file of torch.save", harm=both(torch_file(RANK, {}), cut(RANK, -9))),
    importing(OLD, "not a whole file of torch.save", harm=both(torch_file(RANK, {}), put(RANK, ""))),
    importing(OLD, RANK, harm=both(torch_file(RANK, {}), fifo(RANK))),
    importing(OLD, "Permission denied", harm=both(torch_file(RANK, {}), locked(RANK))),
    importing(f"{OLD} --ckpt-step 9", "--ckpt-step 9", harm=torch_file(RANK, {})),
    importing(f"{OLD} --from deepspeed", "--from deepspeed", harm=torch_file(RANK, {})),
    importing(f"{OLD} --from nemo", "--from: invalid choice: 'nemo'", status=2),
    importing(
        f"{OLD} --make-vocab-size-divisible-by 0", "--make-vocab-size-divisible-by 0: must be", status=2
    ),
]

PLOT = [
    plot("", "are required: RUNS", status=2, without="text.txt"),
    plot("gone.jsonl", "gone.jsonl", without="text.txt"),
    plot("--output x.jpeg", "--output x.jpeg", status=2),
    plot("--x years", "--x: invalid choice: 'years' … 'iteration'", status=2),
    plot("--smoothing 1", "--smoothing 1.0: must be below 1", status=2),
    plot("--labels a b", "--labels a b: must be 1, one for each run", status=2),
    plot("", "text.txt:1: not a line of a metrics file"),
    plot("", "is a FIFO", harm=fifo("text.txt")),
    plot("", "text.txt", harm=put("text.txt", "")),
    plot("--metric colour", "colour", harm=put("text.txt", RECORD)),
    plot("--output file/x.png", f"--output file: Not a directory; {WRITABLE}", harm=put("text.txt", RECORD)),
]
REPORT = [
    report("", "are required: METRICS", status=2, without="text.txt"),
    report("", "text.txt:1: not a line of a metrics file"),
    report(
        "--output file/x.html", f"--output file: Not a directory; {WRITABLE}", harm=put("text.txt", RECORD)
    ),
    report("--checkpoint gone", "--checkpoint gone", harm=put("text.txt", RECORD)),
    report("--ckpt-step 3", "--ckpt-step 3: needs --checkpoint", status=2),
    report("--smoothing 2", "--smoothing 2.0", status=2),
    report("", "text.txt", harm=locked("text.txt")),
]


def settings(text: str | bytes, said: str, status: int = 2) -> Case:
    """A run with this YAML file of settings."""
    return Case("--config run.yaml", f"--config run.yaml: {said}", status=status, harm=put("run.yaml", text))


SETTINGS = [
    bad("--config gone.yaml", "--config gone.yaml: cannot be read (No such file"),
    bad("--config directory", "--config directory: cannot be read (is a directory); name"),
    bad("--config=", "--config '': must not be empty"),
    bad("--config file", "--config file: cannot be read (Permission denied)", harm=locked("file")),
    bad("--config run.yaml", "run.yaml: cannot be read (is a FIFO, not", harm=fifo("run.yaml")),
    bad("--config run.yaml", "run.yaml: cannot be read (Too many levels", harm=loop("run.yaml")),
    bad("--config run.yaml", "cannot be read (is a character device", harm=link("run.yaml", "/dev/zero")),
    bad("--config run.yaml", "cannot be read (is a directory)", harm=directory("run.yaml")),
    settings("seed: [1\n", "line 2: not YAML"),
    settings("\tseed: 1\n", "line 1: not YAML"),
    settings(b"seed: \xff\n", "is not UTF-8 text"),
    settings("[" * 50_000, "is nested too deeply"),
    settings("5\n", "line 1: must hold lines of NAME: VALUE"),
    settings("- seed\n", "line 1: must hold lines of NAME: VALUE"),
    settings("seeed: 1\n", "line 1: seeed: is not a setting; did you mean seed?"),
    settings("model: 5\n", "line 1: model: is a section"),
    settings("model:\n  seed: 1\n", "line 2: seed: belongs to training, not to model"),
    settings("seed: 1\nseed: 2\n", "line 2: seed: is there twice; remove one of them"),
    settings("seed: one\n", "line 1: seed"),
    settings("seed: 1.5\n", "line 1: seed"),
    settings("seed: -1\n", "line 1"),
    settings("bf16: maybe\n", "line 1: bf16"),
    settings("weight_decay: .nan\n", "line 1"),
    settings("seed: !!python/object:os.system {}\n", "line 1"),
    settings("seed: &a 1\nlr: *b\n", "line 2"),
]

PROGRAMS = [*EVALUATE, *IMPORT, *PLOT, *REPORT, *SETTINGS]
