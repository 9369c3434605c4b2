"""The console scripts of an installed package, `megatron-zpp-pretrain` and so on: see pyproject.toml.

Each imports its program only when it is called, because torch takes a second to import.
"""

import os
import signal
from collections.abc import Callable
from importlib import import_module

from megatron_zpp.commands.interrupts import end_on_interrupt
from megatron_zpp.config.command_line import check_packages, run_tool


def before_torch() -> None:
    """What a rank of a run does before it imports torch."""
    check_packages("pretrain_gpt.py", "torch", "numpy")
    # The imports take a while: a scheduler's signal waits for stop_signals.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    # Without this, torch prints a page of its own stack frames when the store goes, after our error line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def pretrain() -> None:
    """megatron-zpp-pretrain"""
    end_on_interrupt()
    before_torch()
    import_module("megatron_zpp.commands.pretrain").main()


def evaluate() -> None:
    """megatron-zpp-evaluate"""
    end_on_interrupt()
    import_module("megatron_zpp.commands.evaluate").main()  # reports errors of several ranks itself


def torchrun() -> None:
    """megatron-zpp-torchrun"""
    import_module("megatron_zpp.commands.torchrun").main()


def build_kernels() -> None:
    """megatron-zpp-build-kernels"""
    run_tool("megatron_zpp.ops.build", import_module("megatron_zpp.ops.build").main)


def _tool(name: str) -> Callable[[], None]:
    """Return the script that runs commands/NAME.py."""

    def script() -> None:
        end_on_interrupt()
        program = import_module(f"megatron_zpp.commands.{name}")
        run_tool(program.PROG, program.main)

    return script


preprocess = _tool("preprocess_data")
build_corpus = _tool("build_corpus")
train_tokenizer = _tool("train_tokenizer")
sample = _tool("sample")
plot = _tool("plot")
report = _tool("report")
huggingface = _tool("huggingface")
import_checkpoint = _tool("import_checkpoint")
