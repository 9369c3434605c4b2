"""Runs of one rank inside the process of the test, without a process group or a launcher."""

import torch.distributed as dist

from megatron_zpp.config.root import parse_args
from megatron_zpp.tokenizer import build_tokenizer, describe
from megatron_zpp.train.activity import Activity
from megatron_zpp.train.device import prepare_device
from megatron_zpp.train.reading import open_data
from megatron_zpp.train.run import Ending, build_engine, train
from megatron_zpp.train.run_schedule import RunSchedule
from megatron_zpp.train.signals import StopSignals
from megatron_zpp.zero.topology import Topology


def train_here(argv: list[str], activity: Activity | None = None) -> Ending:
    """Trains on the CPU, with the samples read by this process; the log goes to stdout."""
    config, topology = parse_args([*argv, "--device", "cpu", "--num-workers", "0"]), Topology()
    schedule = RunSchedule.from_config(config, 1)
    tokenizer = describe(build_tokenizer(config.tokenizer))
    splits = open_data(config, schedule, tokenizer, print)
    engine = build_engine(config, tokenizer, prepare_device(config, topology), topology)
    activity = activity or Activity()
    ending = train(engine, splits, config, schedule, tokenizer, dist.HashStore(), StopSignals(), activity, [])
    engine.close()
    return ending
