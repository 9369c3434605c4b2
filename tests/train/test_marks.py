"""What a run says of itself to those who watch it."""

from pathlib import Path

import torch.distributed as dist

from megatron_zpp.config.root import parse_args
from megatron_zpp.tokenizer import build_tokenizer, describe
from megatron_zpp.train.activity import Activity
from megatron_zpp.train.device import prepare_device
from megatron_zpp.train.reading import open_data
from megatron_zpp.train.run import build_engine, train
from megatron_zpp.train.run_schedule import RunSchedule
from megatron_zpp.train.signals import StopSignals
from megatron_zpp.zero.topology import Topology


class Heard(Activity):
    """Every mark that was made, by its words: whether it may take as long as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.patient: dict[str, bool] = {}

    def now(self, text: str, *, patient: bool = False, limit: float | None = None) -> None:
        super().now(text, patient=patient, limit=limit)
        self.patient[text] = patient


def marks_of(argv: list[str]) -> dict[str, bool]:
    config, topology, heard = parse_args(argv), Topology(), Heard()
    schedule = RunSchedule.from_config(config, 1)
    tokenizer = describe(build_tokenizer(config.tokenizer))
    splits = open_data(config, schedule, tokenizer, print)
    engine = build_engine(config, tokenizer, prepare_device(config, topology), topology)
    train(engine, splits, config, schedule, tokenizer, dist.HashStore(), StopSignals(), heard, [])
    engine.close()
    return heard.patient


def test_the_first_evaluation_of_a_run_that_goes_on_may_build_its_kernels(
    flags: list[str], tmp_path: Path
) -> None:
    """A compiler's graph without gradients is made then, behind steps that were quick."""
    saved = ["--save", str(tmp_path), "--load", str(tmp_path), "--num-workers", "0", "--eval-iters", "8"]
    run = [*flags, *saved, "--device", "cpu", "--train-iters", "4", "--eval-interval", "2"]
    marks_of([*run, "--exit-interval", "1"])
    marks = marks_of(run)
    assert not marks["step 3, micro-batch 1 of 1"]
    assert marks["evaluation of valid at iteration 2, round 1 of 8"]
    assert not marks["evaluation of valid at iteration 2, round 2 of 8"]
    assert not marks["evaluation of valid at iteration 4, round 1 of 8"]
