"""The console scripts of an installed package, `megatron-zpp-pretrain` and so on: see pyproject.toml.

Each imports its program only when it is called, because torch takes a second to import.
"""

import os
import signal
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


def preprocess() -> None:
    """megatron-zpp-preprocess"""
    _run("preprocess_data")


def build_corpus() -> None:
    """megatron-zpp-build-corpus"""
    _run("build_corpus")


def train_tokenizer() -> None:
    """megatron-zpp-train-tokenizer"""
    _run("train_tokenizer")


def evaluate() -> None:
    """megatron-zpp-evaluate"""
    end_on_interrupt()
    import_module("megatron_zpp.commands.evaluate").main()  # reports errors of several ranks itself


def sample() -> None:
    """megatron-zpp-sample"""
    _run("sample")


def plot() -> None:
    """megatron-zpp-plot"""
    _run("plot")


def report() -> None:
    """megatron-zpp-report"""
    _run("report")


def huggingface() -> None:
    """megatron-zpp-huggingface"""
    _run("huggingface")


def import_checkpoint() -> None:
    """megatron-zpp-import-checkpoint"""
    _run("import_checkpoint")


def torchrun() -> None:
    """megatron-zpp-torchrun"""
    import_module("megatron_zpp.commands.torchrun").main()


def build_kernels() -> None:
    """megatron-zpp-build-kernels"""
    run_tool("megatron_zpp.ops.build", import_module("megatron_zpp.ops.build").main)


def _run(name: str) -> None:
    end_on_interrupt()
    program = import_module(f"megatron_zpp.commands.{name}")
    run_tool(program.PROG, program.main)
