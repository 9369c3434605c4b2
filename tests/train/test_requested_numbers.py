"""Flags of Megatron-LM that change what a run logs or computes, in whole runs."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_zpp.config.options import UsageError
from megatron_zpp.config.root import parse_args, parse_command_line
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.train.resume.checkpoint_arguments import read_arguments
from megatron_zpp.train.setup.determinism import check_compiler, fix_order_of_sums
from megatron_zpp.train.setup.device import prepare_device
from tests.config.command_line import MINIMAL
from tests.support import logged, recorded, refusal, run, trained
from tests.train.conftest import BYTES, TINY
from tests.train.in_process import EOD, SMALLEST, beginning_of, of, train_here

PER_TOKEN = ["--calculate-per-token-loss"]
PLAIN = "--attention-dropout 0 --hidden-dropout 0 --global-batch-size 8 --train-iters 3".split()


def per_token_loss(flags: list[str], first: int, count: int, split: str) -> float:
    """The loss of the initial weights over all tokens of samples whose input ends no document."""
    model, splits = beginning_of([*flags, *PLAIN])
    rows = torch.from_numpy(getattr(splits, split).batch(np.arange(first, first + count)).astype(np.int64))
    with torch.no_grad():
        logits = model(rows[:, :-1])[..., : EOD + 1]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    return losses[rows[:, :-1].flatten() != EOD].mean().item()


def test_per_token_loss_is_the_mean_over_all_tokens(tmp_path: Path, flags: list[str]) -> None:
    """The gradient as well, with the flag alone: Megatron-LM's is a mean of means without it."""
    train, valid = (per_token_loss(flags, 0, count, split) for count, split in ((8, "train"), (16, "valid")))
    found = []
    for size, processes, more in ((1, 1, PER_TOKEN), (2, 2, PER_TOKEN), (1, 1, []), (4, 1, [])):
        masked = ["--eod-mask-loss", *PLAIN, *more, "--micro-batch-size", str(size)]
        file = tmp_path / f"{size}{len(more)}"
        found.append(of(recorded(file, *flags, *masked, processes=processes)[0], "grad_norm"))
        assert logged(file)[0] == pytest.approx(train, rel=1e-5)
        assert logged(file, "valid_loss")[0] == pytest.approx(valid, rel=1e-5)
    alone, sharded, ones, fours = found
    assert sharded == pytest.approx(alone, rel=1e-5)
    assert ones[0] != pytest.approx(fours[0], rel=1e-4)


def test_the_decoupled_rate_follows_the_schedule(tmp_path: Path, flags: list[str]) -> None:
    rates = "--lr 1e-3 --min-lr 1e-4 --decoupled-lr 4e-3 --decoupled-min-lr 2e-3 --lr-decay-iters 4".split()
    found, said = recorded(tmp_path / "m", *flags, *PLAIN, *rates)
    assert of(found, "learning_rate") == pytest.approx([1e-3, 7.75e-4, 5.5e-4])
    assert of(found, "decoupled_learning_rate") == pytest.approx([4e-3, 3.5e-3, 3e-3])
    assert "| learning rate: 1.000000E-03 | decoupled learning rate: 4.000000E-03 |" in said


def test_deterministic_mode_holds_in_every_thread_of_a_run(flags: list[str]) -> None:
    """Also in those of autograd, in which graphs may be compiled."""
    argv = [*flags, *"--train-iters 1 --device cpu --num-workers 0 --sample-prompt 7".split()]
    done = run(
        "-c",
        "import os, sys, threading\n"
        f"sys.argv = {['pretrain_gpt.py', *argv, '--deterministic-mode']}\n"
        "import pretrain_gpt, torch\n"
        "pretrain_gpt.main()\n"
        "def say():\n"
        "    from torch._inductor import config\n"
        "    print(torch.are_deterministic_algorithms_enabled(), getattr(config, 'deterministic', True))\n"
        "thread = threading.Thread(target=say)\n"
        "thread.start()\n"
        "thread.join()\n"
        "say()\n"
        "print(torch.utils.deterministic.fill_uninitialized_memory)\n"
        "print(os.environ['CUBLAS_WORKSPACE_CONFIG'], os.environ['NCCL_NVLS_ENABLE'])\n",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-4:] == ["True True", "True True", "False", ":4096:8 0"]


@pytest.mark.parametrize(
    ("name", "right"), [("CUBLAS_WORKSPACE_CONFIG", ":4096:8"), ("NCCL_NVLS_ENABLE", "0")]
)
def test_deterministic_mode_refuses_variables_that_contradict_it(name: str, right: str) -> None:
    said = refusal(fix_order_of_sums, {name: "1"})
    assert said == f"{name}=1: contradicts --deterministic-mode; unset it, or use {right}"
    assert not torch.are_deterministic_algorithms_enabled()


def test_deterministic_mode_refuses_a_compiler_that_times_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    training = parse_args([*MINIMAL, "--deterministic-mode"]).training
    if hasattr(config, "deterministic"):
        check_compiler(training, layers=True, attention=True)
    monkeypatch.setattr("torch._inductor.config", SimpleNamespace())
    check_compiler(training, layers=False, attention=False)
    said = refusal(check_compiler, training, layers=True, attention=False)
    assert said.startswith("--deterministic-mode (given): the compiler of torch 2.")
    assert said.endswith("; use --no-compile, or torch 2.10 or later")
    said = refusal(check_compiler, training, layers=False, attention=True)
    assert said.endswith("; use --attention-backend math and --no-compile, or torch 2.10 or later")


def test_required_kernels_are_used_where_nothing_else_needs_them() -> None:
    config = parse_args(
        ["--mock-data", *BYTES, *TINY, "--train-iters", "3", "--require-kernels", "--device", "cpu"]
    )
    operations = prepare_device(config, Topology()).operations
    assert operations.compiled


def test_arguments_come_from_the_checkpoint(
    tmp_path: Path, corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shape = [*TINY, *SMALLEST, "--swiglu", "--position-embedding-type", "rope", "--lr-decay-style", "cosine"]
    saved = ["--train-iters", "2", "--save", "run", "--weight-decay", "0.1"]
    train_here(["--data-path", corpus, *BYTES, *shape, *saved])
    rest = ["--data-path", corpus, "--micro-batch-size", "1", "--train-iters", "4", "--eval-iters", "0"]
    rest += ["--load", "run", "--lr", "1e-3", "--seq-length", "32", "--device", "cpu", "--num-workers", "0"]
    from_checkpoint = ["--use-checkpoint-args", "--use-checkpoint-opt-param-scheduler"]
    parsed = parse_command_line([*rest, *from_checkpoint], saved=read_arguments)
    assert parsed.config.optimizer.weight_decay == 0.1, "also in place of the default"
    replaced = ["--num-layers", "7", "--weight-decay", "0.2"]
    parsed = parse_command_line([*rest, *from_checkpoint, *replaced], saved=read_arguments)
    assert parsed.notes == (
        "--use-checkpoint-args: --num-layers 1 of run/iter_0000002 replaces 7",
        "--use-checkpoint-opt-param-scheduler: --lr 0.003 of run/iter_0000002 replaces 0.001",
        "--use-checkpoint-opt-param-scheduler: --weight-decay 0.1 of run/iter_0000002 replaces 0.2",
    )
    config = parsed.config
    assert (config.model.num_layers, config.model.swiglu, config.model.rotary_base) == (1, True, 10_000)
    assert config.tokenizer.vocab_size == 256
    assert config.optimizer.weight_decay == 0.1
    assert (config.learning_rate.lr_decay_style, config.learning_rate.lr_decay_iters) == ("cosine", 2)
    by_samples = ["--train-samples" if word == "--train-iters" else word for word in rest]
    said = refusal(
        parse_command_line, [*by_samples, *from_checkpoint], saved=read_arguments, error=UsageError
    )
    assert said.endswith("(--lr-decay-iters is of --use-checkpoint-opt-param-scheduler run/iter_0000002)")
    rest[rest.index("run")] = str(tmp_path / "run")
    assert "resuming at iteration 2" in trained(*rest, *from_checkpoint, "--log-interval", "1")


def test_an_empty_directory_leaves_the_flags(tmp_path: Path) -> None:
    argv = ["--mock-data", *BYTES, *TINY, "--train-iters", "3", "--use-checkpoint-args"]
    parsed = parse_command_line(
        [*argv, "--load", str(tmp_path), "--save", str(tmp_path)], saved=read_arguments
    )
    (note,) = parsed.notes
    assert note.startswith(f"--use-checkpoint-args: there is no checkpoint in {tmp_path} yet")
    assert parsed.config.model.num_layers == 2
