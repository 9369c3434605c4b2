"""Pretrains a GPT, a rank for each process of torchrun or srun; `python pretrain_gpt.py …` is one on its own.

Exit status: 0 done, 1 an error, 2 a bad command line, 3 NaN, 75 stopped by a signal: docs/guide/faults.md.
"""

import os
import signal
import sys
from functools import partial

if __name__ == "__main__":  # the imports take a while: a scheduler's request waits for stop_signals
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    # torch's library would print a page of its own frames when the store goes, beside the line that says why.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from megatron_zpp.config.root import parse_command_line
from megatron_zpp.distributed.open_files import raise_limit
from megatron_zpp.distributed.process_group import barrier
from megatron_zpp.distributed.slurm import launcher_variables
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.reporting.console import tell, warn
from megatron_zpp.reporting.sinks import check_sinks
from megatron_zpp.supervision.errors import one_line_errors, said_by_each, said_once
from megatron_zpp.supervision.heartbeat import heartbeat
from megatron_zpp.supervision.joining import connect_ranks, join
from megatron_zpp.supervision.once_per_node import OncePerNode
from megatron_zpp.supervision.signals import stop_signals
from megatron_zpp.tokenizer.base import describe
from megatron_zpp.tokenizer.build import build_tokenizer
from megatron_zpp.train.device import prepare_device
from megatron_zpp.train.dry_run import dry_run, planned
from megatron_zpp.train.reading import open_data
from megatron_zpp.train.restore import check_start
from megatron_zpp.train.run import build_engine, train
from megatron_zpp.train.run_schedule import RunSchedule
from megatron_zpp.train.sampled_text import check_prompt
from megatron_zpp.train.save_lease import save_lease

PROG = "pretrain_gpt.py"


def main() -> None:
    """Checks all that can be checked alone; then takes devices, joins the ranks and trains; or plans."""
    debug = "--debug" in sys.argv
    raise_limit()
    with one_line_errors(PROG, Topology(), debug=debug, say=said_by_each):
        topology = Topology.from_environment(os.environ)
        per_node = OncePerNode.of(topology, launcher_variables(os.environ))
    with one_line_errors(PROG, Topology(), debug=debug, say=per_node.say):
        command_line = parse_command_line(sys.argv[1:], PROG, lambda plan: planned(plan, topology).world_size)
        config = command_line.config
        ranks = planned(config.plan, topology)
        schedule = RunSchedule.from_config(config, ranks.world_size)
        tokenizer = describe(build_tokenizer(config.tokenizer))
        check_prompt(config)
        splits = open_data(config, schedule, tokenizer, partial(tell, PROG))
        check_start(config, tokenizer)
        check_sinks(config.logging)
        if config.plan.dry_run:
            warn(PROG, topology.rank, command_line.notes)
            dry_run(config, tokenizer, schedule, ranks, speaks=topology.rank == 0)
            return
        device = prepare_device(config, topology)
        warn(PROG, topology.rank, command_line.notes)
    with one_line_errors(PROG, topology, debug=debug, say=per_node.about("meeting")):
        rendezvous = connect_ranks(config.distributed, topology, PROG)
    store = rendezvous.store
    timeout, saves = config.distributed.heartbeat_timeout, config.checkpoint.save is not None
    with (
        stop_signals(PROG, topology, per_node, saves=saves) as signals,
        one_line_errors(PROG, topology, debug=debug, say=said_once(store, topology, per_node)),
        heartbeat(store, topology, timeout, PROG, signals.told_to_stop) as activity,
    ):
        settings = config.shared_settings() | device.settings()
        with (
            join(config.distributed, topology, device.device, rendezvous, settings, activity) as lines,
            save_lease(config.checkpoint.save, topology, store, activity, partial(tell, PROG)) as lease,
        ):
            engine = build_engine(config, tokenizer, device, topology)
            ending = train(
                engine, splits, config, schedule, tokenizer, store, signals, activity, lines, lease
            )
            barrier(topology)  # when one rank leaves, a launcher may end others: logs are closed before that
            engine.close()
    ending.leave(PROG, topology.rank)


if __name__ == "__main__":
    main()
