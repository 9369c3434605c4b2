"""What becomes of 47 public launch scripts, run as they are up to pretrain_gpt.py --dry-run.

DIRECTORY has a checkout of each repository, at the commit below. Each script runs in bash, in a copy, with
stubs in place of launchers and of commands that need a cluster or the network. What it hands to
pretrain_gpt.py is planned as it is, but that data, tokenizers and checkpoints become small files made here,
and that the plan is for the ranks of the script.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

from benchmarks.common import RESULTS, program_parser, save_result
from megatron_zpp.commands import pretrain
from megatron_zpp.data.indexed_writer import IndexedDatasetWriter

REPOSITORIES = {
    "bigscience": "bigscience-workshop/bigscience 9e64ede",
    "Megatron-DeepSpeed": "deepspeedai/Megatron-DeepSpeed 4efb479d",
    "Megatron-LM": "NVIDIA/Megatron-LM d98e8a64",
}
SCRIPTS = Path(__file__).with_suffix(".txt")  # a line each: repository/path, nodes x GPUs, arguments
_NOTHING = ("true", "wget", "curl", "mkdir", "rm", "git", "module", "clear")
_STUBS = {
    **dict.fromkeys(_NOTHING, "exit 0"),
    "ssh": "exit 1",
    "nvidia-smi": 'for ((i = 0; i < GPUS; i++)); do echo "GPU"; done',
    "ds_ssh": 'for ((i = 0; i < NODES * GPUS + 2; i++)); do echo "GPU"; done',
    "scontrol": "echo localhost",
    **dict.fromkeys(
        ("srun", "uv"), 'while [[ $# -gt 0 && $1 != bash && $1 != python ]]; do shift; done; exec "$@"'
    ),
    **dict.fromkeys(("python", "python3", "torchrun", "deepspeed"), 'exec "$RECORD" "$@"'),
}
_RECORD = """#!{python}
import json, os, sys
words = sys.argv[1:]
for place, word in enumerate(words):
    if word.endswith(("pretrain_gpt.py", "pretrain_gpt2.py", "finetune_llama.py")):
        found = [os.path.basename(word), words[place + 1:], os.getcwd()]
        json.dump(found, open(os.environ["RECORDED"], "w"))
        break
"""
_PRELUDE = """
cd() { [[ ! -d $1 ]] || builtin cd "$1"; }
source() { [[ ! -f $1 ]] || builtin source "$@"; }
"""
_LONG = ("translated: ", "no effect here: ", "--deepspeed_config ds.json: no effect here: ")
_TOKENS, _DOCUMENTS = 10_000_000, 2000  # of the data: more than a global batch of any script
_ENTRIES = 50257  # of GPT-2's vocabulary


def recorded(script: Path, root: Path, nodes: int, gpus: int, arguments: Sequence[str]) -> list[Any]:
    """Return the program that a script starts, its words, and the directory where it does so."""
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        stubs, result = work / "stubs", work / "recorded.json"
        stubs.mkdir()
        for name, body in _STUBS.items():
            (stubs / name).write_text(f"#!/bin/bash\n{body}\n")
        (stubs / "record").write_text(_RECORD.format(python=sys.executable))
        for stub in stubs.iterdir():
            stub.chmod(0o755)
        (work / "prelude.sh").write_text(_PRELUDE)
        text = re.sub(r"<[Ss]pecify[^>]*>", "given", script.read_text())
        script.write_text(re.sub(r"""&>>?\s*[^\s"]+""", "", text))
        environment = {
            "PATH": f"{stubs}:/usr/bin:/bin",
            "HOME": directory,
            "HOSTNAME": "localhost",
            "BASH_ENV": f"{work}/prelude.sh",
            "RECORD": f"{stubs}/record",
            "RECORDED": f"{result}",
            "NODES": f"{nodes}",
            "GPUS": f"{gpus}",
            **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), f"{nodes}"),
            **dict.fromkeys(("SLURM_JOBID", "SLURM_JOB_ID"), "1"),
            "SLURM_PROCID": "0",
            "SLURM_JOB_NODELIST": "localhost",
            **{f"six_ALL_CCFR{place}": directory for place in ("WORK", "SCRATCH", "STORE")},
        }
        said = ""
        for place in (script.parent, root):
            for name in ("tmp", "dataset"):
                (place / name).mkdir(exist_ok=True)
            command = ["/bin/bash", str(script), *arguments]
            ran = subprocess.run(
                command, cwd=place, env=environment, capture_output=True, text=True, timeout=60
            )
            if result.exists():
                return json.loads(result.read_text())
            said += ran.stdout + ran.stderr
    raise RuntimeError(f"{script} starts no program: {said[-2000:]}")


def placeholders(words: Sequence[str], files: Path) -> Iterator[str]:
    """Yield the words with small files in place of data, tokenizers and checkpoints."""
    paths = {
        "--vocab-file": "vocab.json",
        "--merge-file": "merges.txt",
        "--tokenizer-model": "tokenizer.model",
        "--tokenizer-name-or-path": "tokenizer.json",
        "--save": "checkpoints",
        "--load": "checkpoints",
        "--tensorboard-dir": "tensorboard",
        "--data-cache-path": "cache",
    }
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word
            yield word
        elif name in paths:
            yield str(files / paths[name])
        elif name == "--data-path" and not word.replace(".", "").isdecimal():
            yield str(files / "data")
        else:
            yield word


def make_files(files: Path) -> None:
    """Write tokens, and tokenizers that read without a network."""
    from sentencepiece import SentencePieceTrainer
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    with IndexedDatasetWriter(files / "data", np.dtype("uint16")) as writer:
        for _ in range(_DOCUMENTS):
            writer.add_document(np.zeros(_TOKENS // _DOCUMENTS, dtype=np.uint16))
    alphabet = [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]
    entries = [chr(code) for code in alphabet]
    entries += [f"word{number}" for number in range(_ENTRIES - 1 - len(entries))] + ["<|endoftext|>"]
    (files / "vocab.json").write_text(json.dumps({entry: place for place, entry in enumerate(entries)}))
    (files / "merges.txt").write_text("#version: 0.2\n")
    text = files / "text"
    text.write_text("\n".join(f"a line of text, number {number}" for number in range(1000)))
    SentencePieceTrainer.train(
        input=str(text), model_prefix=str(files / "tokenizer"), vocab_size=60, minloglevel=2
    )
    tokenizer = Tokenizer(WordLevel({"</s>": 0, "a": 1}, unk_token="a"))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(files / "tokenizer.json"))


def outcome(words: Sequence[str], directory: str, nodes: int, gpus: int) -> tuple[int, str]:
    """Return the status and the output of pretrain_gpt.py --dry-run, run in a fork of this process."""
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            os.chdir(directory)
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
            ranks = ["--plan-nodes", str(nodes), "--plan-gpus-per-node", str(gpus), "--plan-link-gbit", "100"]
            sys.argv = ["pretrain_gpt.py", *words, "--dry-run", *ranks]
            status = 1
            with suppress(BaseException):
                pretrain.main()
                status = 0
            sys.stdout.flush()
            os._exit(status)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read()


def fate(line: str, repositories: Path, files: Path) -> str:
    """What becomes of one script: "plans" or "refused", and what it is told."""
    path, ranks, *arguments = line.split()
    nodes, gpus = map(int, ranks.split("x"))
    root = repositories / path.split("/")[0]
    program, words, directory = recorded(repositories / path, root, nodes, gpus, arguments)
    if program == "finetune_llama.py":
        return "refused: another program, for instruction tuning"
    status, said = outcome([*placeholders(words, files)], directory, nodes, gpus)
    said = re.sub(rf"{tempfile.gettempdir()}/\S*/", "", said)
    lines = re.sub(r"[^\s=]*(ds_[^\s:]*|deepspeed)\.json\b", "ds.json", said).splitlines()
    if status == 0:
        lines = [line.partition("warning: ")[2] for line in lines]
    told = [line.partition("error: ")[2] or line for line in lines]
    short = [line for line in told if line and not line.startswith(_LONG)]
    return ": ".join(filter(None, ("refused" if status else "plans", "; ".join(short))))


def main() -> None:
    """Write the outcome of every script to results/."""
    parser = program_parser(__doc__)
    parser.add_argument("repositories", type=Path, metavar="DIRECTORY", help=", ".join(REPOSITORIES.values()))
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        files, copies = Path(directory) / "files", Path(directory) / "repositories"
        files.mkdir()
        make_files(files)
        for name in REPOSITORIES:
            copytree(arguments.repositories / name, copies / name, symlinks=True)
        fates = {line.split()[0]: fate(line, copies, files) for line in SCRIPTS.read_text().splitlines()}
    figures = {
        "repositories": list(REPOSITORIES.values()),
        "plan": sum(each.startswith("plans") for each in fates.values()),
        "of": len(fates),
        "scripts": fates,
    }
    print(f"{figures['plan']} of {figures['of']} plan")
    print(f"written to {save_result('public_scripts', figures, arguments.results)}")


if __name__ == "__main__":
    main()
