"""Pretrains a GPT, the table of contents of a run: one rank per process of a launcher, or a single rank.

Exit status: 0 done, 1 an error, 2 a bad command line, 3 NaN, 75 stopped by a signal: docs/guide/faults.md.
"""

import sys
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_zpp.config.command_line import program_name
from megatron_zpp.config.options import usage_errors
from megatron_zpp.config.root import parse_command_line
from megatron_zpp.config.sources.checkpoint_arguments import CheckpointArguments
from megatron_zpp.config.tokenizer import TokenizerConfig
from megatron_zpp.distributed.topology import planned
from megatron_zpp.mesh import Mesh
from megatron_zpp.reporting.console import tell, warn
from megatron_zpp.reporting.full_disk import drop_lines_when_full
from megatron_zpp.supervision.process import Process
from megatron_zpp.train.inputs import RunInputs, check_inputs
from megatron_zpp.train.loop import train
from megatron_zpp.train.run import build_run
from megatron_zpp.train.setup.build_engine import build_engine
from megatron_zpp.train.setup.device import prepare_device
from megatron_zpp.train.setup.ranks import joined_ranks
from megatron_zpp.version import untested_torch

if TYPE_CHECKING:
    from megatron_zpp.config.sources.huggingface import HuggingFaceModel


def main() -> None:
    """Check what one process can check alone; then plan, or take devices, join the ranks and train."""
    prog = program_name()
    drop_lines_when_full(prog)
    process = Process.start(prog)
    topology = process.topology
    with process.local_errors():
        command_line = parse_command_line(
            sys.argv[1:],
            prog,
            lambda plan: planned(plan, topology).world_size,
            _saved_arguments,
            lambda plan: planned(plan, topology).local_world_size,
            _huggingface_model,
        )
        config, notes = command_line.config, [*command_line.notes, *untested_torch(torch.__version__)]
        with usage_errors():
            distributed = config.distributed
            mesh = planned(config.plan, topology).mesh(
                distributed.tensor_model_parallel_size, distributed.context_parallel_size
            )
        inputs = check_inputs(config, mesh, partial(tell, prog))
        config = inputs.config
        if config.plan.dry_run:
            inputs, chosen = _at_fitting_stage(inputs, mesh, command_line.pipeline_stages)
            warn(prog, topology.rank, [*notes, *chosen])
            from megatron_zpp.train.dry_run import dry_run

            dry_run(inputs, mesh, speaks=topology.rank == 0)
            return
        device = prepare_device(config, topology)
        inputs, chosen = _at_fitting_stage(inputs, mesh, command_line.pipeline_stages)
        config = inputs.config
        notes += chosen
        notes += config.precision.speed_notes(config.model.hidden_size)
        warn(prog, topology.rank, notes)
    with joined_ranks(process, config, device) as joined:
        engine = build_engine(config, inputs.tokenizer["vocab_size"], device, topology)
        ending = train(build_run(inputs, engine, joined))
        if topology.world_size > 1:  # a launcher may end the others once the first rank leaves: close logs
            dist.barrier()
        joined.signals.finish()
        engine.close()
    ending.leave(prog, topology.rank)


def _at_fitting_stage(inputs: RunInputs, mesh: Mesh, stages: int) -> tuple[RunInputs, list[str]]:
    """The inputs where ranks of another program's pipeline of `stages` are data ranks, and a note."""
    if stages == 1:
        return inputs, []
    from megatron_zpp.train.dry_run import at_fitting_stage

    return at_fitting_stage(inputs, mesh, stages)


def _saved_arguments(load: str, iteration: int | None) -> CheckpointArguments | None:
    """What --use-checkpoint-args takes; only a run with that flag needs it before it has a device."""
    from megatron_zpp.train.resume.checkpoint_arguments import read_arguments

    return read_arguments(load, iteration)


def _huggingface_model(load: str, tokenizer: TokenizerConfig | None) -> "HuggingFaceModel":
    """What --load hf: gives: the model's shape, and its tokenizer unless flags give one."""
    from megatron_zpp.checkpoint.huggingface.importing import read_settings

    return read_settings(load, tokenizer)
