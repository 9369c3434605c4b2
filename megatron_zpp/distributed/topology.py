"""The ranks of a job and of its nodes, as the launcher's variables say."""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_zpp.config.options import option_error
from megatron_zpp.config.plan import PlanConfig
from megatron_zpp.config.shapes.tensor_parallel import CONTEXT_FLAG, FLAG, listed
from megatron_zpp.config.words import counted, divisors
from megatron_zpp.distributed.slurm import TORCHRUN_VARIABLES, launcher_variables
from megatron_zpp.mesh import Mesh


@dataclass(frozen=True)
class Topology:
    """What the launcher says of one rank. A node is the `local_world_size` ranks that share a fast link."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    def __post_init__(self) -> None:
        for name, part, whole in (
            ("RANK", self.rank, self.world_size),
            ("LOCAL_RANK", self.local_rank, self.local_world_size),
        ):
            if whole < 1 or not 0 <= part < whole:
                size = name.replace("RANK", "WORLD_SIZE")
                raise ValueError(f"{name} {part}: must be at least 0 and below {size}, which is {whole}")
        if self.world_size % self.local_world_size:
            raise ValueError(
                f"WORLD_SIZE {self.world_size}: must be a multiple of LOCAL_WORLD_SIZE "
                f"{self.local_world_size}; start the same number of ranks on every node"
            )

    @property
    def nodes(self) -> int:
        return self.world_size // self.local_world_size

    def mesh(self, tensor_ranks: int = 1, context_ranks: int = 1) -> Mesh:
        """The mesh of the job, in which groups of `tensor_ranks` share every layer.

        Of such groups, `context_ranks` share every sample. Launchers number ranks node by node. Ranks that
        share are inside a node, because they exchange activations in every layer. Raises ValueError if they
        would cross nodes.
        """
        local = self.local_world_size
        for flag, ranks in ((FLAG, tensor_ranks), (CONTEXT_FLAG, context_ranks)):
            if local % ranks:
                shared = f" / {FLAG} {tensor_ranks}" if flag == CONTEXT_FLAG and tensor_ranks > 1 else ""
                possible = listed(divisors(local))
                fix = f"must divide the {counted(local, 'rank')} of a node{shared}; possible: {possible}"
                raise option_error(flag, ranks, fix)
            local //= ranks
        return Mesh(
            nodes=self.nodes,
            local_ranks=local,
            context_ranks=context_ranks,
            tensor_ranks=tensor_ranks,
            rank=self.rank,
        )

    @classmethod
    def of(cls, mesh: Mesh) -> "Topology":
        """What the launcher says of the rank of a mesh."""
        return cls(mesh.rank, mesh.world_size, mesh.rank % mesh.node_size, mesh.node_size)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Topology":
        """Read torchrun's variables, or those of a SLURM task; without any, return a single rank.

        Raises ValueError if some are missing or not numbers, if several ranks have no address for the
        rendezvous, or if SLURM's tasks are not numbered node by node.
        """
        environment = launcher_variables(environment)
        given = {name: environment[name] for name in TORCHRUN_VARIABLES if name in environment}
        if not given:
            return cls()
        values = []
        for name in TORCHRUN_VARIABLES:
            if name not in given:
                raise ValueError(
                    f"{name} (not set): needed with {', '.join(given)}; start with torchrun, or set all of "
                    f"{', '.join(TORCHRUN_VARIABLES)}"
                )
            if not _is_number(given[name]):
                raise ValueError(f"{name} {given[name]!r}: must be a whole number")
            values.append(int(given[name]))
        topology = cls(*values)
        if topology.world_size > 1:
            _check_rendezvous_endpoint(environment)
        return topology


def _check_rendezvous_endpoint(environment: Mapping[str, str]) -> None:
    """Raise ValueError unless the launcher has set a valid address and port of the rendezvous."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environment.get(name):
            raise ValueError(f"{name} (not set): start with torchrun, or set it to rank 0's on every rank")
    port = environment["MASTER_PORT"]
    if not _is_number(port) or not 0 < int(port) < 2**16:
        raise ValueError(f"MASTER_PORT {port!r}: must be a whole number from 1 to 65535")


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) < 10


def planned(plan: PlanConfig, started: Topology) -> Topology:
    """The ranks to check and plan for: those started, unless a dry run names others."""
    if not plan.dry_run:
        return started
    local = plan.plan_gpus_per_node or started.local_world_size
    return Topology(world_size=(plan.plan_nodes or started.nodes) * local, local_world_size=local)
