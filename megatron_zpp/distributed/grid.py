"""The ranks of a job as data ranks × tensor ranks: arithmetic on the topology."""

from dataclasses import dataclass
from functools import cached_property

from megatron_zpp.config.options import option_error
from megatron_zpp.config.shapes.tensor_parallel import FLAG, divisors, listed
from megatron_zpp.config.words import counted
from megatron_zpp.distributed.topology import Topology


@dataclass(frozen=True)
class Grid:
    """One rank of a job in which groups of `tensor` ranks share every layer.

    Tensor ranks are innermost: the job's ranks t · T to t · T + T - 1 are one tensor group, inside a node,
    because they exchange activations in every layer. Each group is one data rank.
    """

    job: Topology = Topology()
    tensor: int = 1

    def __post_init__(self) -> None:
        """Raise ValueError if a tensor group would cross nodes."""
        local = self.job.local_world_size
        if local % self.tensor:
            possible = listed(divisors(local))
            raise option_error(
                FLAG, self.tensor, f"must divide the {counted(local, 'rank')} of a node; possible: {possible}"
            )

    @property
    def tensor_rank(self) -> int:
        """This rank's place in its tensor group."""
        return self.job.rank % self.tensor

    @property
    def tensor_ranks(self) -> range:
        """The ranks of the job in this rank's tensor group."""
        first = self.job.rank - self.tensor_rank
        return range(first, first + self.tensor)

    @cached_property
    def data(self) -> Topology:
        """The data ranks that ZeRO and the data see: those of the job with this rank's tensor rank."""
        job = self.job
        return Topology(
            job.rank // self.tensor,
            job.world_size // self.tensor,
            job.local_rank // self.tensor,
            job.local_world_size // self.tensor,
            stride=self.tensor,
            first_job_rank=self.tensor_rank,
        )
