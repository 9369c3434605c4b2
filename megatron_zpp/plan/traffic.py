"""Bytes that a step sends, by link: what the ledgers of all ranks together will count, to the byte."""

from dataclasses import dataclass

from megatron_zpp.plan.gathers import Gathered, walk
from megatron_zpp.plan.job import Job
from megatron_zpp.zero.flat_layout import FlatLayout
from megatron_zpp.zero.theory import AllReduceAlgorithm, chunk_numel, reduction_sends


@dataclass(frozen=True)
class Sent:
    """Bytes of all ranks together: to ranks of the same node, and to ranks of other nodes."""

    intra: int = 0
    inter: int = 0

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(self.intra + other.intra, self.inter + other.inter)

    def __mul__(self, times: int) -> "Sent":
        return Sent(self.intra * times, self.inter * times)


@dataclass(frozen=True)
class Pass:
    """What runs beside a forward or a backward that a step repeats `times` times."""

    forward: bool
    times: int
    gathered: Sent
    reduced: Sent
    alone: Sent  # of `reduced`: the last unit's, with no compute left to run behind
    decoded: int  # elements that each rank decodes from qwZ's codes
    summed: int  # elements of gradients that each rank takes out of the backward

    @property
    def sent(self) -> Sent:
        """In one of them."""
        return self.gathered + self.reduced


def traffic_of(job: Job) -> list[Pass]:
    """The passes of one optimizer step in the midst of a run."""
    passes = []
    walked = walk(job)
    last = walked[-1].micro_batch
    for one in walked:
        reduces = not one.forward and (job.zero.zero_stage >= 2 or one.micro_batch == last)
        decoded = sum(size * count for size, count in one.gathered.world.items())
        if job.secondary_codes:
            decoded += sum(size * count for size, count in one.gathered.secondary.items())
        passes.append(
            Pass(
                forward=one.forward,
                times=one.times,
                gathered=_gathers(job, one.gathered),
                reduced=sum((reduction(job, layout) for layout in job.layouts), Sent())
                if reduces
                else Sent(),
                alone=reduction(job, job.layouts[0]) if reduces else Sent(),
                decoded=decoded if job.weight_format else 0,
                summed=0 if one.forward else sum(layout.numel for layout in job.layouts),
            )
        )
    return passes


def total(passes: list[Pass]) -> Sent:
    """Of the whole step: `intra_node_bytes` and `inter_node_bytes` of metrics.jsonl."""
    return sum((one.sent * one.times for one in passes), Sent())


def reduction(job: Job, layout: FlatLayout) -> Sent:
    """One reduction of a unit's gradients."""
    ranks, local, nodes = job.ranks, job.local, job.nodes
    if job.zero.zero_stage == 0:
        if job.all_reduce_algorithm is AllReduceAlgorithm.LOCAL_SUM:
            return _exchange(job, layout.numel * job.sent_bytes)
        there_and_back = job.sent_bytes + job.reduce_bytes
        return _ring(job, ranks, (ranks - 1) * layout.shard_numel * there_and_back)
    quant_format = job.gradient_format
    if quant_format is None:
        sizes = {"reduce_bytes": job.reduce_bytes, "sum_bytes": job.sum_bytes, "sent_bytes": job.sent_bytes}
        return Sent(*reduction_sends(layout, nodes, **sizes)) * ranks
    sent = Sent()
    size = chunk_numel(layout.shard_numel, job.two_hops, quant_format.block)
    for start in range(0, layout.shard_numel, size):
        chunk = min(size, layout.shard_numel - start)
        if job.two_hops:
            inside = ranks * (local - 1) * quant_format.message_bytes(nodes * chunk)
            sent += Sent(inside, ranks * (nodes - 1) * quant_format.message_bytes(chunk))
        else:
            sent += _exchange(job, quant_format.message_bytes(chunk))
    return sent


def _gathers(job: Job, gathered: Gathered) -> Sent:
    sent = Sent()
    for numel, count in gathered.world.items():
        sent += _ring(job, job.ranks, (job.ranks - 1) * _message(job, numel)) * count
    group = job.secondary_ranks
    for numel, count in gathered.secondary.items():
        part = numel // group * job.dtype.itemsize
        if job.secondary_codes:
            part = job.ranks // group * _message(job, numel)
        sent += _ring(job, group, (group - 1) * part) * count
    return sent


def _message(job: Job, numel: int) -> int:
    """Bytes of one rank's shard of a unit as it is gathered."""
    shard, quant_format = numel // job.ranks, job.weight_format
    return shard * job.dtype.itemsize if quant_format is None else quant_format.message_bytes(shard)


def _ring(job: Job, group: int, nbytes: int) -> Sent:
    """Every rank sends to the next of its `group` of consecutive ranks; each node has one that leaves it."""
    leaving = job.ranks // job.local if group > job.local else 0
    return Sent((job.ranks - leaving) * nbytes, leaving * nbytes)


def _exchange(job: Job, nbytes: int) -> Sent:
    """Every rank sends so many bytes to each other one."""
    inside, outside = job.local - 1, job.ranks - job.local
    return Sent(job.ranks * inside * nbytes, job.ranks * outside * nbytes)
