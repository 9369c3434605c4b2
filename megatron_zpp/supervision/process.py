"""This process among the ranks of its job, and how its errors are reported before and after they connect."""

import os
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from megatron_zpp.config.options import usage_errors
from megatron_zpp.config.run import DistributedConfig
from megatron_zpp.distributed.job_store import VARIABLE as SECRET
from megatron_zpp.distributed.open_files import raise_limit
from megatron_zpp.distributed.rank_addresses import Rendezvous
from megatron_zpp.distributed.rendezvous import rendezvous
from megatron_zpp.distributed.slurm import launcher_variables
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.supervision.errors import end_at_once, line_of, one_line_errors
from megatron_zpp.supervision.once_per_node import Say, once_per_node


@dataclass(frozen=True, kw_only=True)
class Process:
    """One rank of the program `prog`."""

    prog: str
    topology: Topology
    per_node: Say

    @classmethod
    def start(cls, prog: str) -> "Process":
        """Read the launcher's variables and raise the limit on open files.

        Ends the process with an error line if the variables are wrong.
        """
        raise_limit()
        with one_line_errors(prog, Topology()), usage_errors():
            topology = Topology.from_environment(os.environ)
            per_node = once_per_node(topology, launcher_variables(os.environ))
        return cls(prog=prog, topology=topology, per_node=per_node)

    def local_errors(self) -> AbstractContextManager[None]:
        """For checks before the ranks connect: each node reports an error once, without a rank."""
        return one_line_errors(self.prog, Topology(), say=self.per_node)

    def shared_errors(self) -> AbstractContextManager[None]:
        """For everything after the ranks connect: each node reports an error once, with a rank."""
        return one_line_errors(self.prog, self.topology, say=self.per_node)

    def connect(self, config: DistributedConfig) -> Rendezvous:
        """Connect to the store that the launcher names and wait for all ranks; stderr says which are missing.

        Ends the process with an error line if that fails, and from then on if another rank was killed.
        """
        prog, topology = self.prog, self.topology
        variables = dict(launcher_variables(os.environ))
        os.environ.pop(SECRET, None)  # workers of data loaders and programs such as that of W&B need none
        if topology.world_size == 1:
            return Rendezvous.of_one_rank()

        def say(line: str) -> None:
            if topology.local_rank == 0:
                sys.stderr.write(f"{line_of(prog, topology, line)}\n")

        with one_line_errors(prog, topology, say=lambda _, line: self.per_node("meeting", line)):
            return rendezvous(
                topology, variables, config.timeout, say=say, ended=partial(end_at_once, prog, topology)
            )
