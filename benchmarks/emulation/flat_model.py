"""A GPT whose parameters are views of one flat buffer, sorted by kind: codecs run over ranges of it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.emulation.rungs import ATTENTION, KINDS, MLP, SMALL, TABLES
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.mesh import Mesh
from megatron_zpp.model.attention import DotProduct
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.shape import layer_shape
from megatron_zpp.zero.build import in_order, layouts_of


@dataclass(frozen=True)
class _Place:
    """Where a parameter lies: here, and in the flat buffer of its unit in the engine."""

    name: str
    module: nn.Module
    path: str
    unit: int
    in_unit: int
    start: int
    numel: int
    shape: torch.Size


@dataclass(frozen=True)
class UnitRun:
    """Elements that lie next to each other here and in the flat buffer of a unit of the engine."""

    here: slice  # from the start of the range that was asked for
    unit: int
    first: int  # the number of the first element in the unit


class FlatModel:
    """The model and its flat buffers, each of `numel` elements.

    compute     the weights that forward and backward use, which the parameters view
    gradient    where a backward leaves its gradients, in the format of the compute
    master      fp32 weights
    gaps        whether an element belongs to no parameter

    Every parameter begins at a multiple of `alignment`, as in the engine, so blocks hold the same elements as
    there, whatever the number of ranks; the order of the parameters is another. `kinds` are the ranges.
    """

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        *,
        alignment: int,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        attention: DotProduct,
    ) -> None:
        """Initial weights are those of `seed`, drawn on the CPU whatever the device."""
        with torch.device("meta"):
            self.model = GPT(config, vocab_size, attention=attention)
        places, self.kinds, self.numel = _placed(self.model, alignment)
        self.decayed = self.kinds[SMALL].start
        self.compute = torch.zeros(self.numel, dtype=dtype, device=device)
        self.gradient = torch.zeros_like(self.compute)
        self.master = torch.zeros(self.numel, device=device)
        self.gaps = torch.ones(self.numel, dtype=torch.bool, device=device)
        self._places, self.units, self._qkv = places, len(self.model.units()), layer_shape(config).qkv.runs
        for place in places:
            here = slice(place.start, place.start + place.numel)
            parameter = nn.Parameter(self.compute[here].view(place.shape))
            parameter.grad = self.gradient[here].view(place.shape)
            setattr(place.module, place.path, parameter)
            self.gaps[here] = False
            drawn = torch.empty(place.shape)
            self.model.initialize_parameter(place.name, drawn, seed)
            self.master[here].view(place.shape).copy_(drawn)

    @property
    def numels(self) -> dict[str, int]:
        """Parameters by kind, gaps not counted."""
        return {kind: int((~self.gaps[here]).sum()) for kind, here in self.kinds.items()}

    def backward(self, tokens: Tensor) -> Tensor:
        """Make `gradient` that of (B, T + 1) tokens; returns their mean loss ()."""
        self.gradient.zero_()
        loss: Tensor = self.model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        return loss.detach()

    def runs_of(self, here: slice) -> list[UnitRun]:
        """The parts of a range that begins and ends where parameters do."""
        inside = [place for place in self._places if here.start <= place.start < here.stop]
        stops = [place.start for place in inside[1:]] + [here.stop]
        runs: list[UnitRun] = []
        for place, stop in zip(inside, stops, strict=True):
            start, stop = place.start - here.start, stop - here.start
            if runs:
                last = runs[-1]
                follows = last.first + last.here.stop - last.here.start == place.in_unit
                if last.unit == place.unit and follows:
                    runs[-1] = UnitRun(slice(last.here.start, stop), last.unit, last.first)
                    continue
            runs.append(UnitRun(slice(start, stop), place.unit, place.in_unit))
        return runs

    def matrices(self, *, split_qkv: bool) -> dict[tuple[int, int], list[slice]]:
        """Where the matrices of layers lie, by shape; with `split_qkv` queries, keys and values apart."""
        found: dict[tuple[int, int], list[slice]] = {}
        for place in self._places:
            if place.start < self.kinds[TABLES].start:
                rows, columns = place.shape
                start = place.start
                for run in self._qkv if split_qkv and place.name.endswith(".qkv.weight") else (rows,):
                    found.setdefault((run, columns), []).append(slice(start, start + run * columns))
                    start += run * columns
        return found

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """The parts of a flat buffer by parameter."""
        return {
            place.name: flat[place.start : place.start + place.numel].view(place.shape)
            for place in self._places
        }


class Graphed:
    """A function of tokens as a CUDA graph: processes that share a GPU take turns on whole graphs."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self._function, self._graph = function, torch.cuda.CUDAGraph()
        self._input: Tensor | None = None

    def replay(self, tokens: Tensor) -> Tensor:
        """The result, which the next call overwrites. All tokens have the shape of the first ones."""
        if self._input is None:
            self._input = tokens.clone()
            self._capture(self._input)
        self._input.copy_(tokens)
        self._graph.replay()
        return self._output

    def _capture(self, tokens: Tensor) -> None:
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            for _ in range(3):  # libraries allocate what they need
                self._function(tokens)
        here.wait_stream(aside)
        with torch.cuda.graph(self._graph):
            self._output = self._function(tokens)


def _placed(model: GPT, alignment: int) -> tuple[list[_Place], dict[str, slice], int]:
    """Where the parameters lie, the ranges of the kinds, and the elements of a flat buffer."""
    units = model.units()
    layouts = layouts_of(units, Mesh(), alignment)
    found: dict[str, list[tuple[str, nn.Module, int, int]]] = {kind: [] for kind in KINDS}
    for index, ((unit, module), layout) in enumerate(zip(units, layouts, strict=True)):
        for (path, _), offset in zip(in_order(module), layout.offsets, strict=True):
            name = f"{unit}.{path}"
            found[_kind(name, model.get_parameter(name))].append((name, module, index, offset))
    places, kinds, start = [], {}, 0
    for kind in KINDS:
        begin = start
        for name, _, index, offset in found[kind]:
            parameter = model.get_parameter(name)
            owner, _, leaf = name.rpartition(".")
            numel = parameter.numel()
            module = model.get_submodule(owner)
            places.append(_Place(name, module, leaf, index, offset, start, numel, parameter.shape))
            start += -(-numel // alignment) * alignment
        kinds[kind] = slice(begin, start)
    return places, kinds, start


def _kind(name: str, parameter: nn.Parameter) -> str:
    if parameter.dim() < 2:
        return SMALL
    if not name.startswith("layers."):
        return TABLES
    return ATTENTION if ".attention." in name else MLP
