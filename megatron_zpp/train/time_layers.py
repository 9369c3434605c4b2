"""Times a layer of a run on a GPU, with 16-bit and with 8-bit products.

Shapes: B batch, T tokens, D hidden size.
"""

import gc
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor, nn

from megatron_zpp.config.root import Config
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.model.attention import mask_of
from megatron_zpp.model.fp8_weights import WeightCodes
from megatron_zpp.model.gpt import GPT
from megatron_zpp.train.build_engine import build_model
from megatron_zpp.train.device import Device
from megatron_zpp.train.layer_times import LayerTimes

_ROUNDS, _PASSES = 9, 3  # each round passes so often through the layer in one format, then in the other
_WARM_SECONDS = 0.3  # of passes before the first is timed: clocks rise under load, then fall with its heat
_FLUSHED_BYTES = 256 * 2**20  # several times the L2 cache, from which layers of a step do not read
_VOCABULARY = 128  # of the rest of the model, which takes no memory


class TimedLayer:
    """The first layer of a run's model, built and compiled as in the run, in memory of its own.

    It has the model's initial weights. If weights are held as codes, it has codes and no other weights.
    """

    def __init__(self, config: Config, device: Device, topology: Topology) -> None:
        model, self._scaling, codes = build_model(config, _VOCABULARY, device, topology)
        self.layer, place = model.layers[0], device.device
        dtype = getattr(torch, config.precision.compute_dtype(place.type))
        _fill(model, codes, dtype, place)
        batch, tokens = config.training.micro_batch_size, config.model.seq_length
        generator = torch.Generator(place).manual_seed(0)
        shape = (batch, tokens, config.model.hidden_size)
        self._x, self._gradient = (  # of zeros products would take less power, and so less time
            torch.randn(shape, dtype=dtype, device=place, generator=generator) for _ in range(2)
        )
        self._x.requires_grad_()
        documents = None
        if config.data.reset_attention_mask:
            documents = torch.arange(
                0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=place
            )  # one per row
        self._mask = mask_of(model.parts.attention, self._x.detach(), model.windows[0], documents)
        self._rotation = model.rotation(torch.arange(tokens, device=place)[None])
        if self._scaling is not None:  # the first step of a run, before which no scales are known
            self._scaling.begin_step()
            self.forward_backward()
            self._scaling.end_step(self._scaling.maxima(), torch.zeros((), device=place))

    def forward_backward(self) -> dict[str, Tensor]:
        """Pass through the layer and back; return the gradients of the input, as "", and of the weights."""
        self.layer(self._x, self._mask, self._rotation).backward(self._gradient)
        found = {}
        for name, tensor in (("", self._x), *self.layer.named_parameters()):
            assert tensor.grad is not None
            found[name], tensor.grad = tensor.grad, None
        return found


def time_layers(
    config: Config, device: Device, topology: Topology, progress: Callable[[], None]
) -> LayerTimes:
    """Time a layer of a run with --fp8, whose memory is free again afterwards; needs a GPU.

    `progress` is called between parts of the work.
    """
    with torch.cuda.device(device.device):
        times = _timed(config, device, topology, progress)
        if device.compiles:
            torch._dynamo.reset()  # its graphs have references to the layers
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return times


def _timed(config: Config, device: Device, topology: Topology, progress: Callable[[], None]) -> LayerTimes:
    layers, flushed = [], torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device=device.device)
    for precision in (config.precision.with_16bit_products(), config.precision):
        layers.append(TimedLayer(replace(config, precision=precision), device, topology))
        _seconds(layers[-1], flushed)  # compiles
        progress()
    warm = 0.0
    while warm < _WARM_SECONDS:
        warm += sum(sum(_seconds(layer, flushed)) for layer in layers)
    spent: list[list[float]] = [[], []]
    for _ in range(_ROUNDS):
        for layer, seconds in zip(layers, spent, strict=True):
            seconds += _seconds(layer, flushed)
        progress()
    return LayerTimes(*map(median, spent))


def _seconds(layer: TimedLayer, flushed: Tensor) -> list[float]:
    """The seconds of some passes, each from when the GPU begins it; waits for the GPU."""
    events = []
    for _ in range(_PASSES):
        flushed.zero_()
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        layer.forward_backward()
        pair[1].record()
        events.append(pair)
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1000 for begin, end in events]


def _fill(model: GPT, codes: WeightCodes | None, dtype: torch.dtype, device: torch.device) -> None:
    """Give the first layer's parameters, which are on the meta device, memory and initial values."""
    layer, held = model.layers[0], () if codes is None else codes.names
    shapes = {f"layers.0.{path}": (path, each.shape) for path, each in layer.named_parameters()}

    def initial(name: str) -> Tensor:
        numbers = torch.empty(shapes[name][1], device=device)
        model.initialize_parameter(name, numbers, seed=0)
        return numbers

    if codes is not None:
        for name in shapes.keys() & held:
            codes.measure(name, initial(name))
        codes.start(codes.maxima())
    for name, (path, shape) in shapes.items():
        if codes is not None and name in held:
            room = torch.empty(shape, dtype=torch.uint8, device=device)
            codes.encode(name, initial(name).flatten(), room.view(-1))
            codes.attach(name, room)
            value = torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)  # as in zero/build.py
        else:
            value = initial(name).to(dtype)
        owner, _, leaf = path.rpartition(".")
        setattr(layer.get_submodule(owner), leaf, nn.Parameter(value))
