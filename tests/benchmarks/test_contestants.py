"""Contestants do the same work: from the same weights and tokens their losses are those of plain PyTorch."""

import argparse
import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.contest.contestants import OURS, contestants, default_names
from benchmarks.contest.protocol import (
    ADAMW,
    SEED,
    Rank,
    learning_rate,
    plain_adamw,
    plain_model,
    set_learning_rate,
)
from megatron_zpp.model.gpt import GPT
from tests.support import program

SHAPE = {"preset": None, "num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16}
SHAPE |= {"vocab_size": 128, "micro_batch_size": 2, "micro_batches": 2, "dtype": "fp32"}
SHAPE |= {"warmup": 12, "steps": 4, "lr": 1e-4, "lr_warmup_iters": 50}
NODES = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # each rank is a node


def reported(name: str, directory: Path) -> dict[str, Any]:
    """What two nodes of one rank report of a contestant."""
    contestant = contestants(2, 1, SHAPE["micro_batches"])[name]
    flags = [(f"--{key.replace('_', '-')}", str(value)) for key, value in SHAPE.items() if value is not None]
    report = directory / f"{name}.json"
    argv = [*contestant.arguments, "--no-compile", "--report", report, *chain.from_iterable(flags)]
    done = program(contestant.module, *argv, processes=2, **NODES)
    assert done.returncode == 0, done.stderr
    return json.loads(report.read_text())


@pytest.fixture(scope="module")
def plain_losses() -> list[float]:
    """Of one process that trains on the tokens of both ranks, without anything of the contestants' step."""
    options = argparse.Namespace(**SHAPE)
    rank = Rank(options, 0, 1, torch.device("cpu"))
    model = plain_model(rank.config, options.vocab_size, rank.device)
    adamw = plain_adamw(model, on_gpu=False)
    shape = (options.micro_batches * options.micro_batch_size, options.seq_length + 1)
    draws = [torch.Generator().manual_seed(rank) for rank in range(2)]
    tokens = torch.cat([torch.randint(options.vocab_size, shape, generator=draw) for draw in draws])
    losses = []
    for step in range(options.warmup + options.steps):
        set_learning_rate(adamw, learning_rate(options, step))
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), ADAMW.clip_grad)
        adamw.step()
        adamw.zero_grad()
        losses.append(loss.item())
    return losses


def test_the_peers_llama_is_ours() -> None:
    shape = {**SHAPE, "preset": "mistral-7b", "hidden_size": 64, "num_attention_heads": 16}
    rank = Rank(argparse.Namespace(**shape), 0, 1, torch.device("cpu"))
    ours = GPT(rank.config, shape["vocab_size"]).initialize(SEED)
    tokens = torch.randint(shape["vocab_size"], (2, shape["seq_length"] + 1))
    plain = plain_model(rank.config, shape["vocab_size"], rank.device)
    torch.testing.assert_close(*(model(tokens[:, :-1], tokens[:, 1:]) for model in (plain, ours)))


FSDP2 = [name for name in contestants(2, 1, 2) if name.startswith("fsdp2_fp32") and "muon" not in name]


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["stage_3", *FSDP2, "deepspeed_zero3", "deepspeed_zero3_keep"])
def test_losses_are_those_of_plain_pytorch(name: str, plain_losses: list[float], tmp_path: Path) -> None:
    """To fp32's rounding: the last digit that a report has."""
    if absent := contestants(2, 1, 2)[name].absent():
        pytest.skip(absent)
    report = reported(name, tmp_path)
    assert report["losses"] == pytest.approx(plain_losses, abs=2e-5)
    assert report["losses"] == sorted(report["losses"], reverse=True)
    assert len(report["step_ms"]) == SHAPE["steps"]
    assert report["loopback_bytes_per_step"] > 0


@pytest.mark.nightly
def test_muon_does_what_that_of_fsdp2_does(tmp_path: Path) -> None:
    ours, theirs = (reported(name, tmp_path)["losses"] for name in ("muon", "fsdp2_fp32_muon"))
    assert ours == pytest.approx(theirs, abs=2e-5)
    assert ours == sorted(ours, reverse=True)


def test_every_grid_has_its_peers_at_their_best() -> None:
    """Resharding is off on nodes of one rank and inside the node elsewhere."""

    def reshard(nodes: int, ranks: int, name: str) -> str:
        arguments = contestants(nodes, ranks, 1)[name].arguments
        return arguments[arguments.index("--reshard") + 1]

    assert reshard(2, 1, "fsdp2_bf16") == "false"
    assert reshard(2, 1, "fsdp2_bf16_hsdp") == "false"
    assert reshard(2, 2, "fsdp2_fp32") == "2"
    assert "fsdp2_bf16_once" in contestants(2, 1, 8)
    assert "deepspeed_zeropp" not in contestants(2, 1, 1)
    assert contestants(2, 4, 1)["deepspeed_zeropp"].arguments[-2:] == ("--hpz", "4")
    for grid in ((1, 2, 1), (2, 1, 8), (2, 2, 1)):
        assert set(default_names(*grid)) <= set(contestants(*grid))
    assert set(OURS) < set(contestants(2, 1, 1))
