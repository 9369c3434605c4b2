"""The outer weights of an island, and the arithmetic of an outer step.

DiLoCo (2311.08105): every island sends the outer weights less its own. The mean of what the members of an
outer step sent is the gradient of an outer SGD with Nesterov's momentum. All islands compute the step by
themselves, from the same bytes and in the same order, each operation rounded by itself, so that their outer
weights have the same bits, whatever their meshes.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import compress, groupby
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.config.islands import IslandsConfig
from megatron_zpp.config.root import Config
from megatron_zpp.exchange.codecs import clear
from megatron_zpp.islands.frames import Frame, Wanted, chunks_of, from_text, sends, to_text
from megatron_zpp.ops.formats import LloydMaxFormat
from megatron_zpp.ops.operations import Operations
from megatron_zpp.ops.signs import Signs
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.held_states import OUTER, OUTER_SENT, OUTER_WEIGHTS, WEIGHTS

BLOCK = 256  # elements of a code's block
_SEED = 0x0DD5EED  # of the signs of rotated frames, which all islands know


class Codec:
    """What a frame's numbers travel as: themselves, bf16, or rotated codes whose losses are sent later."""

    def __init__(self, format: str, operations: Operations | None, device: torch.device) -> None:
        self._dtype = torch.bfloat16 if format == "bf16" else torch.float32
        self._format = LloydMaxFormat(int(format[-1]), BLOCK) if format.startswith("rotated") else None
        self._operations = operations
        self._one = torch.ones((), device=device)  # residuals are not scaled

    def encode(self, values: Tensor, lost: Tensor | None, step: int) -> Tensor:
        """The bytes of `values` (n,) fp32, and in `lost` (n,) bf16 what they lose of it and of the sum."""
        if self._format is None:
            return values.to(self._dtype).view(torch.uint8)
        assert lost is not None
        assert self._operations is not None
        size = self._format.message_bytes(len(values))
        message = torch.empty(1, size, dtype=torch.uint8, device=values.device)
        signs = Signs(_SEED, 0, step)
        self._operations.quantize_rotated(
            values, message, self._format, signs, lost=lost[None], divisor=self._one
        )
        return message[0]

    def decode(self, message: Tensor, numel: int, step: int) -> Tensor:
        """The numbers (n,) fp32 of bytes. Raises ValueError if there are others than `numel` has."""
        expected = numel * self._dtype.itemsize
        if self._format is not None:
            expected = self._format.message_bytes(numel)
        if len(message) != expected:
            raise ValueError(f"an island sent {len(message)} bytes for {numel} elements, not {expected}")
        if self._format is None:
            return message.view(self._dtype).float()
        assert self._operations is not None
        values = torch.empty(numel, device=message.device)
        self._operations.sum_rotated(message[None], values, self._format, Signs(_SEED, 0, step))
        return values


class OuterState:
    """This rank's shards of the outer weights, of their momentum, and of what codes have lost.

    They are where the master weights are, and the engine's checkpoints have them. All ranks make the same
    calls.
    """

    def __init__(self, engine: ZeroEngine, config: IslandsConfig, operations: Operations | None) -> None:
        self._engine, self._config = engine, config
        trained = [unit for unit in engine.units if not unit.frozen]
        weights = self._own_weights()
        self._weights = [shard.clone() for shard in weights]
        self._device = self._weights[0].device
        self._codec = Codec(config.outer_format, operations, self._device)
        self._momentum = [torch.zeros_like(shard) for shard in weights]
        engine.states.keep(OUTER_WEIGHTS, self._weights)
        engine.states.keep(f"{OUTER}momentum", self._momentum)
        self._residuals: list[Tensor] = []
        if config.outer_format.startswith("rotated"):  # error feedback, 1901.09847
            self._residuals = [torch.zeros_like(shard, dtype=torch.bfloat16) for shard in weights]
            engine.states.keep(f"{OUTER}residuals", self._residuals)
        self._sent: list[Tensor] = []  # the weights of the newest exchange, if it travels during steps
        if config.outer_overlap:
            self._sent = [torch.zeros_like(shard) for shard in weights]
            engine.states.keep(OUTER_SENT, self._sent)
        mesh = engine.mesh
        self._chunks = [chunk for unit in trained for chunk in chunks_of(unit.number, unit.layout, mesh)]
        self._sending = [unit.number for unit in trained if sends(unit.layout, mesh)]
        self._sends = [chunk.unit in self._sending for chunk in self._chunks]
        placements = (each for unit in trained for each in unit.layout.placements)
        self._counted = {each.name for each in placements if each.split or not mesh.tensor_rank}  # once
        self._gaps = {unit.number: unit.layout.gaps_in(unit.layout.shard(mesh)) for unit in trained}
        self.layout = to_text([chunk.frame for chunk in compress(self._chunks, self._sends)])
        self._all = to_text([chunk.frame for chunk in self._chunks])
        self.wanted = Wanted(self._chunks)
        self._rounded: list[Tensor] = []  # the residuals after the newest exchange
        self._encoded: list[tuple[str, int, Tensor]] = []  # and its frames, of all chunks
        self._rooms: dict[int, Tensor] = {}  # pinned memory for each frame, and as -1 for the checksum
        self._copies = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def _checksum(self) -> Tensor:
        """The sum () int64 of the bits of the outer weights, which modulo 2^32 is the same for any mesh."""
        total = torch.zeros((), dtype=torch.int64, device=self._device)
        for unit in self._sending:
            total += self._weights[unit].view(torch.int32).sum(dtype=torch.int32)
        for unit, elements, frame in compress(self._chunks, self._sends):
            bits = self._weights[unit][elements].view(torch.int32)
            for name, at, shape, here, _ in frame.parts:
                if name not in self._counted:  # another tensor rank counts it
                    box = tuple(slice(side.start, side.stop) for side in here)
                    total -= _array(bits, at, shape)[box].sum(dtype=torch.int32)
        return self._engine.sum_over_ranks(total.to(self._engine.device))

    def begin(self) -> None:
        """Begin a run: the outer weights are the weights, and nothing has moved."""
        for outer, weights in zip(self._weights, self._own_weights(), strict=True):
            outer.copy_(weights)
        for shard in (*self._momentum, *self._residuals):
            shard.zero_()

    @torch.no_grad()
    def leave(self, step: int, *, again: bool = False) -> tuple[list[Tensor], Callable[[], int]]:
        """What this rank sends at an outer step: a frame (bytes,) uint8 on the CPU of each that `layout` has.

        They may be read, from any thread and until the next `leave`, once a call of the other thing has
        returned the checksum of the outer weights, which is the same for any mesh. `again`: of the weights
        that were sent before, after a resumed run has loaded them.
        """
        weights, checksum = self._own_weights(), self._to_host(-1, self._checksum())
        if self._sent and not again:
            for sent, own in zip(self._sent, weights, strict=True):
                sent.copy_(own)
        weights = self._sent or weights
        self._rounded = [residual.clone() for residual in self._residuals]
        self._encoded, frames = [], []
        for number, (unit, elements, _) in enumerate(self._chunks):
            moved = self._weights[unit][elements] - weights[unit][elements]
            lost = self._rounded[unit][elements] if self._rounded else None
            message = self._codec.encode(moved, lost, step)
            frames.append(self._to_host(number, message))
            # Codes are small enough to stay on a GPU until they are decoded
            self._encoded.append((self._all, number, message if self._rounded else frames[-1]))
        for unit, lost in enumerate(self._rounded):
            clear(lost, self._gaps.get(unit, ()))
        done = self._copies.record_event() if self._copies else None

        def ready() -> int:
            if done:
                with torch.cuda.device(self._device):  # not the first one, which a thread begins with
                    done.synchronize()
            return int(checksum) % (1 << 32)

        return list(compress(frames, self._sends)), ready

    def _to_host(self, number: int, values: Tensor) -> Tensor:
        """What is copied to pinned memory on the stream of copies; without a GPU the values themselves."""
        if not self._copies:
            return values.cpu()
        if number not in self._rooms:
            self._rooms[number] = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._copies.wait_stream(torch.cuda.current_stream())
        values.record_stream(self._copies)
        with torch.cuda.stream(self._copies):
            return self._rooms[number].copy_(values, non_blocking=True)

    def room(self, size: int) -> Any:
        """Memory for a frame of so many bytes that another thread receives: pinned where it goes to a GPU."""
        if self._device.type == "cpu":
            return bytearray(size)
        with torch.cuda.device(self._device):
            return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()

    @torch.no_grad()
    def arrive(self, step: int, members: Sequence[str], received: Mapping[str, Any], island: str) -> None:
        """Take the outer step `step`, of which this island is a member, and move the weights by it.

        `received` has the frames of the other members. The weights may have moved on since `leave`.
        """
        found = {island: self._encoded} | dict(received)
        self.replay(step, members, found)
        for residual, rounded in zip(self._residuals, self._rounded, strict=True):
            residual.copy_(rounded)
        for outer, own, sent in zip(self._weights, self._own_weights(), self._sent, strict=False):
            torch.sub(own, sent, out=sent).add_(outer)
        self._engine.states.replace_weights(self._sent or self._weights)
        self._encoded, self._rounded = [], []

    @torch.no_grad()
    def step_alone(self) -> None:
        """Take an outer step of what the weights have moved by, without other islands (SNOO, 2510.15830)."""
        for outer, momentum, own in zip(self._weights, self._momentum, self._own_weights(), strict=True):
            self._move(outer, momentum, outer - own)
        self._engine.states.replace_weights(self._weights)

    def give_up(self) -> None:
        """Take the outer weights, and forget what this island has moved by since."""
        self._engine.states.replace_weights(self._weights)
        for residual in self._residuals:
            residual.zero_()
        self._encoded, self._rounded = [], []

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Have the outer weights in place of this island's in the block, for an evaluation."""
        weights, states = self._engine.weights, self._engine.states
        own = [shard.clone() for shard in self._own_weights()]
        references = [] if weights.formats is None else [each.clone() for each in weights.own_references()]
        states.replace_weights(self._weights)
        try:
            yield
        finally:
            states.replace_weights(own)
            for index, reference in enumerate(references):
                if self._engine.units[index].message is not None:
                    self._engine.units[index].own_kept.copy_(reference)
                    weights.reference_replaced(index)

    def _own_weights(self) -> list[Tensor]:
        """This rank's shard of each unit; of frozen ones nothing."""
        shards = self._engine.states.shards(WEIGHTS)
        return [
            shard[:0] if unit.frozen else shard
            for unit, shard in zip(self._engine.units, shards, strict=True)
        ]

    @torch.no_grad()
    def replay(self, step: int, members: Sequence[str], received: Mapping[str, Any]) -> None:
        """Take an outer step of the outer weights alone.

        `received` has description, number and bytes of the frames of each member.
        """
        sources = [
            _Source(received[member], self._codec, self.wanted, step, self._copies) for member in members
        ]
        # By a number of the host CUDA divides with a rounded reciprocal: other bits than on a CPU
        count = torch.tensor(float(len(sources)), device=self._device)
        numbered = enumerate(self._chunks)
        for unit, chunks in groupby(numbered, key=lambda each: each[1].unit):
            gradient = torch.empty_like(self._weights[unit])
            for number, (_, elements, frame) in chunks:
                values = (source.values(number, frame, self._device) for source in sources)
                torch.div(reduce(torch.add, values), count, out=gradient[elements])
            clear(gradient, self._gaps[unit])
            self._move(self._weights[unit], self._momentum[unit], gradient)

    def _move(self, outer: Tensor, momentum: Tensor, gradient: Tensor) -> None:
        """A step of SGD with Nesterov's momentum, in place."""
        momentum.mul_(self._config.outer_momentum).add_(gradient)
        gradient.add_(momentum * self._config.outer_momentum).mul_(self._config.outer_lr)
        outer.sub_(gradient)


def outer_state(engine: ZeroEngine, config: Config) -> OuterState:
    """The outer state of a run, which its checkpoint may fill."""
    operations = None
    if config.islands.outer_format.startswith("rotated"):
        from megatron_zpp.ops.library import load_operations

        required = config.distributed.require_kernels
        operations = load_operations(engine.device.type, require_kernels=required, say=lambda line: None)
    return OuterState(engine, config.islands, operations)


class _Source:
    """What one member sent, by this rank's chunks."""

    def __init__(
        self,
        frames: Sequence[tuple[str, int, Any]],
        codec: Codec,
        wanted: Wanted,
        step: int,
        copies: torch.cuda.Stream | None = None,
    ) -> None:
        """Frames go to a GPU on the stream `copies`, each while the one before is decoded."""
        self._codec, self._wanted, self._step, self._copies = codec, wanted, step, copies
        self._frames = [(from_text(text)[number], data) for text, number, data in frames]
        self._same = {wanted.same.get(frame): at for at, (frame, _) in enumerate(self._frames)}
        self._decoded: tuple[int, Tensor] = -1, torch.empty(0)  # the newest, which several chunks may need
        self._next: tuple[int, Tensor] = -1, torch.empty(0)  # the message of the frame after it

    def values(self, number: int, frame: Frame, device: torch.device) -> Tensor:
        """The numbers (n,) fp32 of a chunk; NaN where the member has sent none, so that nobody misses it."""
        if number in self._same:
            return self._decode(self._same[number])
        found = torch.full((frame.numel,), torch.nan, device=device)
        for gap in _gaps(frame):
            found[gap] = 0.0
        for at, (other, _) in enumerate(self._frames):
            moves = self._wanted.moves(other).get(number, ())
            values = self._decode(at) if moves else found
            for move in moves:
                array = _array(values, move.source.at, move.source.shape)
                _array(found, move.target.at, move.target.shape)[move.target_box] = array[move.source_box]
        return found

    def _decode(self, at: int) -> Tensor:
        if self._decoded[0] != at:
            message = self._next[1] if self._next[0] == at else self._sent(at)
            if self._copies and message is not self._frames[at][1]:
                torch.cuda.current_stream().wait_stream(self._copies)
                message.record_stream(torch.cuda.current_stream())
                if at + 1 < len(self._frames):
                    self._next = at + 1, self._sent(at + 1)
            self._decoded = at, self._codec.decode(message, self._frames[at][0].numel, self._step)
        return self._decoded[1]

    def _sent(self, at: int) -> Tensor:
        """The bytes of a frame, where they are decoded; they may be on their way."""
        data = self._frames[at][1]
        message = data if isinstance(data, Tensor) else torch.frombuffer(data, dtype=torch.uint8)
        if not self._copies or message.is_cuda:
            return message
        with torch.cuda.stream(self._copies):
            return message.to(self._copies.device, non_blocking=True)


def _array(flat: Tensor, at: int, shape: tuple[int, ...]) -> Tensor:
    return flat[at : at + math.prod(shape)].view(shape)


def _gaps(frame: Frame) -> Iterator[slice]:
    """The elements of a frame that no parameter has."""
    used = sorted({(part.at, part.at + math.prod(part.shape)) for part in frame.parts})
    stop = 0
    for first, last in used:
        yield slice(stop, first)
        stop = last
    yield slice(stop, frame.numel)
