"""`megatron-zpp COMMAND`, also as `python -m megatron_zpp COMMAND`, and the console scripts that it replaces.

A program is imported only when it is called, because torch takes a second to import.
"""

import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

from megatron_zpp.config.command_line import check_packages, end_with_usage_error, program_name, run_tool
from megatron_zpp.config.words import did_you_mean
from megatron_zpp.version import __version__


@dataclass(frozen=True)
class Command:
    """A command: the module whose `main` it is, and what it does."""

    module: str
    does: str
    of_ranks: bool = False  # runs on several ranks, and so reports errors itself


COMMANDS: Mapping[str, Command] = {
    "train": Command("commands.pretrain", "pretrain a model, on one rank or more", of_ranks=True),
    "plan": Command("commands.pretrain", "predict memory, traffic and time: train --dry-run", of_ranks=True),
    "sample": Command("commands.sample", "generate text"),
    "evaluate": Command("commands.evaluate", "measure perplexity, or LAMBADA's accuracy", of_ranks=True),
    "lm-eval": Command("commands.harness", "run tasks of lm-evaluation-harness"),
    "corpus": Command("commands.build_corpus", "collect text as JSON lines"),
    "tokenizer": Command("commands.train_tokenizer", "train a SentencePiece tokenizer"),
    "preprocess": Command("commands.preprocess_data", "tokenise JSON lines into .bin and .idx files"),
    "plot": Command("commands.plot", "draw the curves of runs"),
    "report": Command("commands.report", "write the report of a run, an HTML page"),
    "import": Command("commands.import_checkpoint", "make a checkpoint from a model of another program"),
    "export": Command("commands.export_checkpoint", "write a checkpoint for transformers, or push it"),
    "islands": Command("commands.islands", "run the hub through which islands exchange weights"),
    "torchrun": Command("commands.torchrun", "start the ranks of one node of a SLURM step", of_ranks=True),
    "build-kernels": Command("ops.build", "compile the kernels; otherwise the first run does"),
}
_RENAMED = {  # commands that were console scripts megatron-zpp-NAME; these go with version 0.3
    "pretrain": "train",
    "build-corpus": "corpus",
    "train-tokenizer": "tokenizer",
    "import-checkpoint": "import",
    "huggingface": "",  # its first argument is the command
}
_LIKELY = 0.6  # similarity of a typing error


def main() -> None:
    """Run the command that the first argument names."""
    program = program_name()
    command, *argv = sys.argv[1:] or [""]
    if command in ("-h", "--help"):
        run_tool(lambda: _write(_help(program)))
    elif command == "--version":
        run_tool(lambda: _write(f"megatron_zpp {__version__}"))
    elif command not in COMMANDS:
        said = f"unknown command {command}" if command else "no command"
        meant = did_you_mean(command, COMMANDS, _LIKELY)
        end_with_usage_error(program, f"{said}{meant and '; '}{meant} (--help lists all commands)")
    else:
        sys.argv = [f"{program} {command}", *argv]
        run(command)


def run(command: str) -> None:
    """Run a command with the arguments and the name in sys.argv."""
    program = COMMANDS[command]
    if command == "plan":
        sys.argv.insert(1, "--dry-run")
    if program.module == "commands.pretrain":
        before_torch()
    program_main = run_tool(lambda: import_module(f"megatron_zpp.{program.module}").main)
    if program.of_ranks:
        program_main()
    else:
        run_tool(program_main)


def renamed() -> None:
    """Run an old console script, which says its new name."""
    old = program_name()
    name = old.removeprefix("megatron-zpp-")
    command = _RENAMED.get(name, name)
    if not command:
        command = sys.argv.pop(1) if sys.argv[1:2] in (["import"], ["export"]) else ""
    local_rank = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
    if local_rank == "0":  # one rank of a node says it
        sys.stderr.write(f"{old}: warning: is deprecated; use megatron-zpp {command or 'import or export'}\n")
    if not command:
        end_with_usage_error(old, "no action: must be import or export")
    if name == "import-checkpoint":
        sys.argv = _with_target_last(sys.argv)
    run(command)


def before_torch() -> None:
    """What a rank of a run does before it imports torch: answer --help, for one."""
    program = program_name()
    if {"-h", "--help"} & set(sys.argv):
        from megatron_zpp.config.root import parse_command_line

        run_tool(lambda: parse_command_line(sys.argv[1:], program))
    check_packages(program, "torch", "numpy")
    # The imports take a while: a scheduler's signal waits for stop_signals.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    # Without this, torch prints a page of its own stack frames when the store goes, after our error line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _help(program: str) -> str:
    width = max(map(len, COMMANDS))
    commands = [f"  {name:<{width}}  {command.does}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            f"usage: {program} COMMAND [flags]",
            "",
            "Pretraining of GPT and Llama-like models with a built-in ZeRO++ layer.",
            "",
            *commands,
            "",
            f"{program} COMMAND --help lists the flags of a command, {program} --version the version.",
        ]
    )


def _write(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _with_target_last(argv: list[str]) -> list[str]:
    """Return `argv` with the value of --output as the last argument, where `import` expects it."""
    kept, targets = [], []
    words = iter(argv)
    for word in words:
        flag, given, value = word.partition("=")
        if flag == "--output":
            targets = [value if given else next(words, "")]
        else:
            kept.append(word)
    return [*kept, *targets]
