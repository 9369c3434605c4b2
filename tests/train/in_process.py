"""Runs of one rank inside the process of the test, without a process group or a launcher."""

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_zpp.config.root import parse_args
from megatron_zpp.data.open import Splits
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.model.gpt import GPT
from megatron_zpp.storage.lease import Lease
from megatron_zpp.supervision.activity import Activity
from megatron_zpp.supervision.signals import StopSignals
from megatron_zpp.train.inputs import check_inputs
from megatron_zpp.train.loop import train
from megatron_zpp.train.run import build_run
from megatron_zpp.train.setup.build_engine import build_engine
from megatron_zpp.train.setup.device import prepare_device
from megatron_zpp.train.setup.ranks import Ranks
from megatron_zpp.train.steps.stopping import Ending
from tests.support import records_of
from tests.train.conftest import BYTES, TINY

EOD = 256
SMALLEST = "--num-layers 1 --hidden-size 16 --num-attention-heads 1 --micro-batch-size 1".split()
SMALLEST += ["--eval-iters", "0"]


def train_here(argv: list[str], activity: Activity | None = None, lease: Lease | None = None) -> Ending:
    """Trains on the CPU, with the samples read by this process; the log goes to stdout."""
    config, topology = parse_args([*argv, "--device", "cpu", "--num-workers", "0"]), Topology()
    inputs = check_inputs(config, topology.mesh(), print)
    engine = build_engine(config, inputs.tokenizer["vocab_size"], prepare_device(config, topology), topology)
    ranks = Ranks(
        topology=topology,
        store=dist.HashStore(),
        signals=StopSignals(),
        activity=activity or Activity(),
        lease=lease,
    )
    ending = train(build_run(inputs, engine, ranks))
    engine.close()
    return ending


class Resumed:
    """A run of a model of one layer; each call resumes from where the previous call ended."""

    def __init__(self, corpus: str, directory: Path) -> None:
        self.save, self._metrics = directory / "checkpoints", directory / "metrics.jsonl"
        self._flags = ["--data-path", corpus, "--split", "100,0,0", *BYTES, *TINY, *SMALLEST]
        self._flags += ["--save", str(self.save), "--load", str(self.save)]
        self._flags += ["--metrics-file", str(self._metrics)]

    def __call__(self, *flags: str) -> list[dict[str, Any]]:
        """Continue the training; return the records of all steps so far."""
        train_here([*self._flags, *flags])
        return records_of(self._metrics)

    def newest(self) -> dict[str, Any]:
        """The progress in the newest checkpoint."""
        name = (self.save / "latest_checkpointed_iteration.txt").read_text().strip()
        state = self.save / f"iter_{int(name):07d}" / "state.json"
        return json.loads(state.read_text())["progress"]


def beginning_of(argv: list[str]) -> tuple[GPT, Splits]:
    """The model of a run on BYTES with its initial weights, and its data."""
    config = parse_args(argv)
    model = GPT(config.model, EOD + 1).initialize(config.training.seed).eval()
    return model, check_inputs(config, Topology().mesh(), print).splits


def of(records: list[dict[str, Any]], name: str) -> list[Any]:
    """One number of each record."""
    return [record[name] for record in records]
