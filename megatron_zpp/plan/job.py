"""What is planned: a model, its settings and the ranks that it would run on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from megatron_zpp.config.islands import IslandsConfig
from megatron_zpp.config.model import ModelConfig, RecomputeConfig
from megatron_zpp.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron_zpp.config.root import Config
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.tensor_group import TensorGroup
from megatron_zpp.mesh import Mesh
from megatron_zpp.model.build import build_model
from megatron_zpp.model.context.sharing import exchanges_heads
from megatron_zpp.model.flops import flops_per_token
from megatron_zpp.model.parallel.layers import splits_of
from megatron_zpp.model.recomputation import recomputed_units
from megatron_zpp.model.shape import trained_matrices
from megatron_zpp.placement import Layout
from megatron_zpp.zero.build import layouts_of
from megatron_zpp.zero.communication_plan import CommunicationPlan, plan_communication
from megatron_zpp.zero.reads import Reads, reads_of
from megatron_zpp.zero.tensor_parallel import ALONE, TensorShare
from megatron_zpp.zero.unit_plan import UnitPlan
from megatron_zpp.zero.whole_matrices import MuonShare, muon_share


@dataclass(frozen=True, kw_only=True)
class Job:
    """One optimizer step of `micro_batches` on `nodes` × `local` GPUs.

    Of these `tensor` share every layer, and `context` every sample, which exchange by `comm_type`.

    `units` are the modules of one tensor rank's part of the model that read units, on the meta device.
    Layouts, and all that ZeRO sends, are those of the data ranks. `compiled`: layers and loss are compiled,
    as by default. `async_save`: the run saves beside the training, with `save_optim` the optimizer's states
    too. `overlapped`: tensor ranks, if there are several, compute beside their exchanges. `may_offload`: no
    setting refuses the optimizer on the CPU. `copy_engines`: GPUs of a node use theirs, as is assumed before
    a run has tried. `batch_given`: a flag gives the global batch. `batch_multiple`: of which micro-batches of
    all data ranks are a divisor, if not of one step's samples alone. `may_resize`: micro-batches of another
    size leave the numerics alone.
    """

    model: ModelConfig
    vocab_size: int
    recompute: RecomputeConfig
    zero: ZeroConfig
    precision: PrecisionConfig
    nodes: int
    local: int
    micro_batch_size: int
    micro_batches: int
    units: Sequence[tuple[str, nn.Module]]
    compiled: bool = False
    async_save: bool = False
    save_optim: bool = True
    tensor: int = 1
    context: int = 1
    comm_type: str = "auto"
    overlapped: bool = False
    may_offload: bool = True
    copy_engines: bool = True
    device: str = "cuda"
    batch_given: bool = True
    batch_multiple: int | None = None
    may_resize: bool = True
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    islands: IslandsConfig = field(default_factory=IslandsConfig)

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh as rank 0 sees it."""
        return Mesh(
            nodes=self.nodes,
            local_ranks=self.local // (self.context * self.tensor),
            context_ranks=self.context,
            tensor_ranks=self.tensor,
        )

    @property
    def ranks(self) -> int:
        """Ranks of all nodes."""
        return self.nodes * self.local

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one data rank, and of these on one context rank."""
        return self.micro_batch_size * self.model.seq_length // self.context

    @property
    def rows(self) -> int:
        """Tokens whose hidden states a rank has between linear maps: 1 / `tensor` of `tokens`."""
        return self.tokens // self.tensor

    @property
    def samples_per_step(self) -> int:
        """Samples of all data ranks."""
        return self.micro_batch_size * self.micro_batches * self.mesh.data_ranks

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all data ranks."""
        return self.samples_per_step * self.model.seq_length

    @cached_property
    def exchanges_heads(self) -> bool:
        """Whether context ranks, if there are several, exchange heads, and not keys and values in a ring."""
        heads = self.model.num_attention_heads // self.tensor
        return exchanges_heads(self.comm_type, self.context, heads)

    @property
    def flops_per_token(self) -> float:
        """FLOPs of forward and backward, as PaLM counts them."""
        return flops_per_token(self.model, self.vocab_size)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the token embedding."""
        return self.model.embedding_rows(self.vocab_size)

    @property
    def entries(self) -> int:
        """Rows of the token embedding that one rank has."""
        return self.padded_vocab_size // self.tensor

    @property
    def dtype(self) -> torch.dtype:
        """The compute format on a GPU."""
        return getattr(torch, self.precision.compute_dtype(self.device))

    @cached_property
    def layouts(self) -> list[Layout]:
        """The layouts of the units, in forward order."""
        splits, matrices = splits_of(self.units), trained_matrices(self.model, self.optimizer)
        return layouts_of(self.units, self.mesh, self.block, splits, self.coded, matrices=matrices)

    @cached_property
    def muon(self) -> list[MuonShare]:
        """What Muon has and does on each rank of node 0; nothing without Muon."""
        if not any(layout.hull(of_matrices=True) for layout in self.layouts):
            return []
        units, steps = self.communication.units, self.optimizer.muon_num_ns_steps
        ranks = self.mesh.ranks(*self.mesh.inside_node)
        return [muon_share(units, self.mesh.at(rank), steps) for rank in ranks]

    @property
    def row_moments_sent(self) -> int:
        """Bytes of NorMuon's moments of rows that a rank sends to others of its node."""
        if self.optimizer.muon_row_scaling_beta2 is None:
            return 0
        return 4 * self.muon[0].rows // self.mesh.node_size * (self.mesh.node_size - 1)

    @property
    def block(self) -> int:
        """Elements of the largest block that no two parameters share."""
        share = ALONE if self.tensor == 1 else TensorShare(UnconnectedGroup(self.tensor))
        return max(self.zero.largest_block, share.block)

    @property
    def coded(self) -> set[str]:
        """The parameters that are held as 8-bit codes: the weights of the layers' linear maps."""
        if not self.precision.fp8_param_gather:
            return set()
        return {
            f"{unit}.{path}.weight"
            for unit, module in self.units
            for path, part in module.named_modules()
            if unit.startswith("layers.") and isinstance(part, nn.Linear)
        }

    @property
    def layer_layouts(self) -> list[Layout]:
        """The layouts of the units of one layer."""
        return self.layouts[1 : 3 if self.zero.cuts_layers else 2]

    @cached_property
    def reads(self) -> Reads:
        """How passes read the units."""
        layers, cut = self.model.num_layers, self.zero.cuts_layers
        recomputed = recomputed_units(layers, self.recompute, cut_layers=cut)
        return replace(self.plain_reads, recomputed=tuple(recomputed))

    @property
    def chunks(self) -> tuple[range, ...]:
        """Units that are recomputed together. One by itself is read once in its backward anyway."""
        return tuple(each for each in self.reads.recomputed if len(each) > 1)

    @cached_property
    def plain_reads(self) -> Reads:
        """The same without recomputation."""
        return reads_of(self.units)

    @cached_property
    def replicated(self) -> list[int]:
        """Elements of each unit that all tensor ranks have whole; none where ranks share no layer."""
        if self.tensor == 1:
            return [0] * len(self.layouts)
        return [
            sum(each.numel for each in layout.placements if each.split is None) for layout in self.layouts
        ]

    @cached_property
    def communication(self) -> CommunicationPlan:
        """The engine's plan on rank 0."""
        return plan_communication(
            self.zero,
            self.mesh,
            self.layouts,
            compute_dtype=self.dtype,
            reduce_in_bf16=self.precision.grad_reduce_in_bf16,
            copy_engines=self.copy_engines,
            reads=self.reads,
        )

    @cached_property
    def node_communication(self) -> list[CommunicationPlan]:
        """The engine's plans on the data ranks of node 0, by their first tensor ranks.

        The other tensor ranks, and the ranks of other nodes, send and hold the same. Routes, slots and reads
        are those of rank 0 on all ranks.
        """
        meshes = [self.mesh.at(rank) for rank in self.mesh.ranks(self.mesh.replicas)]
        plan = self.communication
        return [
            replace(plan, mesh=mesh, units=tuple(replace(each, mesh=mesh) for each in plan.units))
            for mesh in meshes
        ]

    @cached_property
    def kinds(self) -> list[int]:
        """For each unit, the first one whose weights travel alike."""
        first: dict[UnitPlan, int] = {}
        return [first.setdefault(weights, unit) for unit, weights in enumerate(self.communication.units)]

    def varied(self, **changes: Any) -> "Job":
        """The job with other settings. What does not depend on them is computed for both at once.

        Jobs of equal `chunks` send and hold the same, so they share a plan, whose `reads` are those of one.
        """
        other = replace(self, **changes)
        if "units" not in changes:
            vars(other).update(plain_reads=self.plain_reads)
        names = (*changes, "block", "chunks")
        changed = {name for name in names if getattr(self, name) != getattr(other, name)}
        same = [name for name, settings in _DEPENDS.items() if not settings & changed]
        vars(other).update({name: getattr(self, name) for name in same})
        return other

    @cached_property
    def owned(self) -> int:
        """Elements that the optimizer of a rank changes."""
        return sum(len(weights.owned) for weights in self.communication.units)

    @property
    def sums_gradients(self) -> bool:
        """Whether the optimizer takes fp32 sums, and not the gradients of the backward directly."""
        accepts_16bit = self.communication.weight_codes is None and not self.zero.zero_offload_optimizer
        return self.communication.sums_gradients(self.micro_batches, accepts_16bit=accepts_16bit)

    @property
    def reduced(self) -> UnitPlan:
        """The plan of a trained unit; the gradients of all others travel alike."""
        return self.communication.trained[0]

    @property
    def reduces_as_made(self) -> bool:
        """Whether gradients are reduced during the backward, before any sum over micro-batches."""
        every = self.reduced.every_micro_batch
        return self.sums_gradients and (every or self.micro_batches == 1)

    @property
    def returns_squared_norms(self) -> bool:
        """Whether reductions compute the squares for the norm, which then needs no further pass."""
        return self.sums_gradients and not self.reduced.quantizes_gradients


_PARTS = {"nodes", "local", "context", "tensor", "units", "block", "precision"}  # on which layouts depend
_ROUTES = {*_PARTS, "zero", "chunks", "copy_engines", "device"}
_DEPENDS = {  # what is computed once, and the settings that change it
    "mesh": {"nodes", "local", "context", "tensor"},
    "layouts": _PARTS,
    "replicated": _PARTS,
    "plain_reads": {"units"},
    "communication": _ROUTES,
    "node_communication": _ROUTES,
    "kinds": _ROUTES,
    "owned": _ROUTES,
    "muon": {*_ROUTES, "optimizer"},
}


class UnconnectedGroup(TensorGroup):
    """One of `size` ranks, without a communicator: models can be built for it, but not run."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self.ranks, self.size, self.rank = tuple(range(size)), size, rank


def units_of(
    model: ModelConfig, vocab_size: int, tensor: int = 1, zero: ZeroConfig | None = None
) -> list[tuple[str, nn.Module]]:
    """The modules of one tensor rank's part of a model that read units, on the meta device.

    `zero` says whether layers are cut; by default they are whole.
    """
    group, zero = UnconnectedGroup(tensor) if tensor > 1 else None, zero or ZeroConfig()
    with torch.device("meta"):
        return build_model(model, vocab_size, cut_layers=zero.cuts_layers, group=group).units()


def job_of(config: Config, vocab_size: int, mesh: Mesh, device: str = "cuda") -> Job:
    """The values that a plan of a run on the ranks of `mesh` is made from."""
    training = config.training
    batch = training.global_batch_size or training.micro_batch_size * mesh.data_ranks
    return Job(
        model=config.model,
        vocab_size=vocab_size,
        recompute=config.recompute,
        zero=config.zero,
        precision=config.precision,
        nodes=mesh.nodes,
        local=mesh.node_size,
        micro_batch_size=training.micro_batch_size,
        micro_batches=batch // (training.micro_batch_size * mesh.data_ranks),
        units=units_of(config.model, vocab_size, mesh.tensor_ranks, config.zero),
        tensor=mesh.tensor_ranks,
        context=mesh.context_ranks,
        comm_type=config.distributed.cp_comm_type,
        compiled=device == "cuda" and compiles_on_gpus(config),
        async_save=config.checkpoint.async_save,
        save_optim=config.checkpoint.save_optim,
        overlapped=not config.precision.fp8,
        may_offload=config.optimizer.fused_backend != "apex"
        and config.optimizer.optimizer == "adam"
        and not config.optimizer.splits_weights
        and not config.optimizer.optimizer_in_backward,
        copy_engines=device == "cuda",
        device=device,
        batch_given=training.global_batch_size is not None,
        batch_multiple=math.gcd(batch, *(training.rampup_batch_size or ())[:2]),
        may_resize=config.may_resize,
        optimizer=config.optimizer,
        islands=config.islands,
    )


def compiles_on_gpus(config: Config) -> bool:
    """Whether the layers of a run on GPUs are compiled."""
    return config.compilation.wanted("cuda", apex=config.optimizer.fused_backend == "apex")
