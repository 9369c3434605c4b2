"""The states of an engine that a checkpoint saves and loads."""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.exchange.sums import sum_over_ranks
from megatron_zpp.mesh import Axis, Mesh
from megatron_zpp.placement import Placement, overlap, within
from megatron_zpp.zero.held_states import MOMENTUM, OUTER, OUTER_SENT, OUTER_WEIGHTS, WEIGHTS, HeldStates
from megatron_zpp.zero.optimizer import Optimizer
from megatron_zpp.zero.sharded_unit import Residuals, Unit
from megatron_zpp.zero.weights import Weights

REFERENCE = "reference"  # as checkpoints name it
SENT_RESIDUAL, SUM_RESIDUAL = "residual_of_node_", "residual_of_sums"  # see Residuals; the first of each node
CORRECTIONS, SCALES = "_corrections", "_scales"  # at the end of a name; see `name_beside`


def name_beside(kind: str) -> str:
    """What checkpoints call the bytes beside one of `kinds` that is not fp32."""
    return kind + (CORRECTIONS if kind == WEIGHTS else SCALES)


def residual_of(node: int) -> str:
    """What checkpoints call the residuals of what the ranks of a node have sent."""
    return f"{SENT_RESIDUAL}{node}"


def is_residual(kind: str) -> bool:
    """Whether one of `kinds` is what codes have lost of gradients."""
    return kind == SUM_RESIDUAL or kind.startswith(SENT_RESIDUAL)


def may_lack(kind: str) -> bool:
    """Whether a checkpoint with optimizer states may be without one of `kinds`: AdamW's has no momentum."""
    return kind in (REFERENCE, MOMENTUM) or is_residual(kind) or kind.startswith(OUTER)


@cache
def owners_of(kind: str, mesh: Mesh, axes: tuple[Axis, ...]) -> Sequence[int]:
    """The ranks along the axes of a layout, which have the equal parts of one of `kinds`, in their order.

    Nodes have the residuals of what they sent by themselves; what ranks of other nodes have lies between.
    """
    ranks = mesh.ranks(*axes)
    if kind.startswith(SENT_RESIDUAL):
        return ranks[int(kind.removeprefix(SENT_RESIDUAL)) :: mesh.nodes]
    return ranks


def sources_of(kind: str, present: Collection[str], saved: Collection[str]) -> list[str]:
    """The saved kinds whose sum is one of the `present` kinds; none if there is nothing of it.

    With as many nodes as saved a residual is the same one. Otherwise the sums over nodes take all that is
    owed. The outer weights of what was no island are its weights.
    """
    if kind in (OUTER_WEIGHTS, OUTER_SENT) and kind not in saved:
        return [WEIGHTS]
    if not is_residual(kind):
        return [kind] if kind in saved else []
    of_nodes, theirs = (
        [each for each in kinds if each.startswith(SENT_RESIDUAL)] for kinds in (present, saved)
    )
    if len(of_nodes) == len(theirs):
        return [kind]
    return [each for each in saved if is_residual(each)] if kind == SUM_RESIDUAL else []


def _named(values: dict[str, Tensor], placement: Placement) -> Tensor:
    return values[placement.name]


class ModelStates:
    """Weights, optimizer states and the references of weight differences: this rank's shard of each unit."""

    def __init__(self, units: list[Unit], weights: Weights, optimizer: Optimizer, mesh: Mesh) -> None:
        self._units, self._weights, self._optimizer, self._mesh = units, weights, optimizer, mesh
        self._beside: dict[str, list[Tensor]] = {}  # see `keep`

    def keep(self, kind: str, shards: list[Tensor]) -> None:
        """Save and load one more of `kinds` from now on: of each unit, this rank's `shard_elements`."""
        self._beside[kind] = shards

    @property
    def kinds(self) -> tuple[str, ...]:
        """What a checkpoint saves per unit: weights, optimizer states, the reference of differences."""
        kinds = [WEIGHTS, *self._optimizer.state_names]
        kinds += [REFERENCE] if self._weights.formats is not None else []
        if any(unit.residuals for unit in self._units):
            kinds += [*map(residual_of, range(self._mesh.nodes)), SUM_RESIDUAL]
        return (*kinds, *self._beside)

    def matrices(self) -> list[str]:
        """The parameters that Muon trains, sorted."""
        placements = (each for unit in self._units for each in unit.layout.placements)
        return sorted({each.name for each in placements if each.matrices})

    def left_by_muon(self, trained: Sequence[str]) -> str | None:
        """Why a state in which Muon `trained` these cannot be loaded: AdamW would lack moments of one."""
        placements = (each for unit in self._units if not unit.frozen for each in unit.layout.placements)
        left = sorted({*trained} & {each.name for each in placements if not each.matrices})
        fix = "Muon must train it (matrices=), or the state be loaded with optimizer=False"
        return f"{left[0]}: the state is Muon's, and has no moments of it; {fix}" if left else None

    def elements(self, kind: str) -> list[range]:
        """The elements of each unit that have one of `kinds`, on any rank."""
        return [whole for whole, _, _ in self._ranges(kind)]

    def shard_elements(self, kind: str) -> list[range]:
        """Those of `elements` that are in this rank's shard of each unit.

        At stage 0, where every rank has the whole, that is the shard that it would have at other stages.
        """
        return [shard for _, shard, _ in self._ranges(kind)]

    def _ranges(self, kind: str) -> Iterator[tuple[range, range, range]]:
        """Of each unit: its `elements`, its `shard_elements`, and those that this rank has.

        Frozen units have no optimizer states, and Muon has others for matrices than for the rest.
        """
        sent = kind.startswith(SENT_RESIDUAL)
        for unit in self._units:
            absent = sent and self._mesh.rank not in owners_of(kind, self._mesh, unit.layout.axes)
            whole = range(unit.layout.numel)
            if (is_residual(kind) and not unit.residuals) or (kind in self._beside and unit.frozen):
                whole = range(0)
            elif kind not in (WEIGHTS, REFERENCE, *self._beside) and not is_residual(kind):
                whole = range(0) if unit.frozen else self._optimizer.elements(unit, kind)
            shard, here = overlap(unit.plan.shard, whole), overlap(unit.owned, whole)
            if kind == SUM_RESIDUAL or kind in self._beside:
                here = shard
            elif sent:
                shard = here = range(0) if absent else here
            yield whole, shard, here

    def shards(self, kind: str) -> list[Tensor]:
        """This rank's part fp32 of one of `kinds` for each unit: of `shard_elements`.

        Not a copy, unless the states are held in another form.
        """
        return [held.decoded() for held in self._held_shards(kind)]

    def saved(self, kind: str) -> dict[str, list[Tensor]]:
        """`shards` as this rank holds them, by the names of checkpoints: not copies, in fp32 or another form.

        Beside the numbers a form may have scales of blocks, or corrections of weights: `name_beside`.
        """
        shards = self._held_shards(kind)
        saved = {kind: [held.values for held in shards]}
        if any(held.beside is not None for held in shards):
            none = torch.empty(0, dtype=torch.uint8)
            saved[name_beside(kind)] = [none if held.beside is None else held.beside for held in shards]
        return saved

    def forms(self) -> dict[str, str]:
        """The dtypes of `kinds` that are not held in fp32, as torch calls them, by kind."""
        held = {kind: {str(each.values.dtype) for each in self._held(kind)} for kind in self.kinds}
        return {
            kind: dtype.removeprefix("torch.")
            for kind, dtypes in held.items()
            for dtype in sorted(dtypes - {"torch.float32"})
        }

    def _held_shards(self, kind: str) -> list[HeldStates]:
        """What this rank holds of `shard_elements` of each unit."""
        parts = zip(self._held(kind), self._ranges(kind), strict=True)
        return [held.part(within(shard, here)) for held, (_, shard, here) in parts]

    def fill(self, kind: str, fill: Callable[[int, range, Tensor], object]) -> None:
        """Load one of `kinds`: `fill(unit, elements, target)` writes a part of a unit's buffer to `target`.

        That (len(elements),) is on the CPU: the memory of the states, where they are there, or memory that
        all parts share. A load would take most of its time to map fresh memory, and to copy from it.
        Elements behind the last parameter are not written: they are zero and stay zero.
        """
        shared = torch.empty(0)
        for index, (unit, held, flat) in enumerate(self._replaced(kind)):
            pieces = list(unit.layout.pieces_in(held)) if held else []
            if not held or not pieces:
                continue
            elements = range(held.start, pieces[-1].at.stop)
            part = flat[: len(elements)]
            if part.device.type == "cpu":
                fill(index, elements, part)
                continue
            if len(shared) < len(elements):
                shared = torch.empty(len(elements))
            fill(index, elements, shared[: len(elements)])
            part.copy_(shared[: len(elements)])

    def load_whole(self, kind: str, whole: Callable[[Placement], Tensor]) -> None:
        """Load one of `kinds` from whole parameters, of any device.

        `whole` is asked for all parameters with such states, in the same order on all ranks.
        """
        for unit, elements, flat in self._replaced(kind):
            if elements is not None:
                values = {placement.name: whole(placement) for placement in unit.layout.placements}
                unit.fill(flat, elements, partial(_named, values))

    def replace_weights(self, shards: Sequence[Tensor]) -> None:
        """Replace the weights between two steps: `shards` are fp32, of `shard_elements`. All ranks call it.

        Those of frozen units are not looked at.
        """
        parts = zip(self._units, self._ranges(WEIGHTS), self._held(WEIGHTS), shards, strict=True)
        for index, (unit, (_, shard, here), held, new) in enumerate(parts):
            if unit.frozen:
                continue
            self._weights.prefetcher.wait_for_gather_of(index)  # which reads the gather source
            self._weights.wait_for_brought(index)  # it reads what is replaced of split weights
            whole = new
            if shard != here:  # every rank has the whole
                sent = new.to(unit.full.device)
                found = [torch.empty_like(sent) for _ in range(self._mesh.world_size)]
                dist.all_gather(found, sent)
                whole = torch.cat([found[rank] for rank in self._mesh.ranks(*unit.layout.axes)])
            if held.is_plain:
                held.values.copy_(whole)
            else:
                held.replace(whole)
            self._weights.replaced(index)

    def _replaced(self, kind: str) -> Iterator[tuple[Unit, range | None, Tensor]]:
        """Each unit, the elements that this rank has and their buffer, to be written before the next one.

        None: no rank has some of the unit.
        """
        parts = zip(self._units, self._ranges(kind), self._held(kind), strict=True)
        for index, (unit, (whole, _, here), held) in enumerate(parts):
            self._weights.prefetcher.wait_for_gather_of(index)  # which reads the gather source
            elements = here if whole else None
            if held.is_plain:
                yield unit, elements, held.values
            else:
                flat = torch.zeros(len(held.values), device=held.values.device)
                yield unit, elements, flat
                self._weights.wait_for_brought(index)  # it reads what is replaced of split weights
                held.replace(flat)
            if kind == WEIGHTS:
                self._weights.replaced(index)
            elif kind == REFERENCE:
                self._weights.reference_replaced(index)

    def row_moments(self) -> dict[str, Tensor]:
        """NorMuon's moments of the rows (rows,) fp32 of each parameter that has some; on every rank."""
        return {name: torch.cat(list(parts)) for name, parts in self._optimizer.row_moments.items()}

    def load_row_moments(self, read: Callable[[str, Tensor], None]) -> None:
        """The inverse of `row_moments`; `read` fills those of a parameter, which are zero and on the CPU."""
        for name, parts in self._optimizer.row_moments.items():
            whole = torch.zeros(sum(map(len, parts)))
            read(name, whole)
            for part, values in zip(parts, whole.split([len(part) for part in parts]), strict=True):
                part.copy_(values)

    @property
    def optimizer_steps(self) -> int:
        """Steps that the optimizer has taken; skipped ones do not count."""
        return int(self._optimizer.steps.item())

    def load_optimizer_steps(self, steps: int) -> None:
        self._optimizer.steps.fill_(steps)

    def difference_formats(self) -> dict[str, Any] | None:
        """What decides the formats of weight differences in the next two steps, as JSON; None without these.

        Every rank must call it. It waits for the device.
        """
        formats = self._weights.formats
        return None if formats is None else formats.state(sum_over_ranks(formats.measured, self._mesh))

    def load_difference_formats(self, state: dict[str, Any] | None) -> None:
        """The inverse of `difference_formats`; without a state, what a new run begins with."""
        if self._weights.formats is not None:
            self._weights.formats.load_state(state, first_rank=self._mesh.rank == 0)

    def _held(self, kind: str) -> list[HeldStates]:
        if kind == WEIGHTS:
            return [unit.weights for unit in self._units]
        if kind == REFERENCE:
            return [HeldStates(kind, reference) for reference in self._weights.own_references()]
        if is_residual(kind):
            nothing = torch.empty(0, dtype=torch.bfloat16)
            tensors = [unit.residuals or Residuals(nothing, nothing) for unit in self._units]
            if kind == SUM_RESIDUAL:
                return [HeldStates(kind, each.returned) for each in tensors]
            here = self._mesh.rank in owners_of(kind, self._mesh, self._mesh.shards)
            return [HeldStates(kind, each.sent if here else nothing) for each in tensors]
        if kind in self._beside:
            return [HeldStates(kind, shard) for shard in self._beside[kind]]
        states, none = iter(self._optimizer.states), HeldStates(kind, torch.empty(0))
        return [none if unit.frozen else next(states).get(kind, none) for unit in self._units]
