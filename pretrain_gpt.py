"""Pretrains a GPT: `torchrun pretrain_gpt.py …`, or `python pretrain_gpt.py …` for one process.

Exit status: 0 done, 1 an error said in one line, 2 a bad command line, 3 stopped by --max-nan-iterations,
75 stopped by a signal after saving (start it again to go on), 130 interrupted. See docs/faults.md.
"""

import os
import sys

from megatron_zpp.config.root import parse_args
from megatron_zpp.data.open import open_splits
from megatron_zpp.tokenizer.base import describe
from megatron_zpp.tokenizer.build import build_tokenizer
from megatron_zpp.train.device import prepare_device
from megatron_zpp.train.errors import one_line_errors
from megatron_zpp.train.heartbeat import heartbeat
from megatron_zpp.train.restore import check_start
from megatron_zpp.train.run import build_engine, train
from megatron_zpp.train.run_schedule import RunSchedule
from megatron_zpp.train.signals import stop_signals
from megatron_zpp.train.sinks import check_sinks
from megatron_zpp.zero.agreement import check_agreement
from megatron_zpp.zero.process_group import process_group
from megatron_zpp.zero.topology import Topology

PROG = "pretrain_gpt.py"


def main() -> None:
    """Checks everything that can be checked alone; then takes devices, joins the ranks and trains."""
    debug = "--debug" in sys.argv
    with one_line_errors(PROG, Topology(), debug=debug, every_rank=False):
        topology = Topology.from_environment(os.environ)
    with one_line_errors(PROG, topology, debug=debug, every_rank=False):
        config = parse_args(sys.argv[1:], PROG)
        schedule = RunSchedule.from_config(config, topology.world_size)
        tokenizer = describe(build_tokenizer(config.tokenizer))
        splits = open_splits(
            config.data,
            seq_length=config.model.seq_length,
            vocab_size=tokenizer["vocab_size"],
            seed=config.training.seed,
            tokenizer_description=tokenizer,
            needed=config.needed_splits(),
        )
        schedule.check_data(splits.train)
        check_start(config.checkpoint)
        check_sinks(config.logging)
        device = prepare_device(config, topology)

    told = one_line_errors(PROG, topology, debug=debug, every_rank=True)
    with told, process_group(config.distributed, topology, device.device) as store:
        check_agreement(config.shared_settings() | device.settings(), topology, device.device)
        watch = heartbeat(store, topology, config.distributed.heartbeat_timeout, PROG)
        with stop_signals(PROG, topology) as signals, watch as activity:
            engine = build_engine(config, tokenizer, device, topology)
            ending = train(engine, splits, config, schedule, tokenizer, store, signals, activity)
            engine.close()
    ending.leave(PROG, topology.rank)


if __name__ == "__main__":
    main()
