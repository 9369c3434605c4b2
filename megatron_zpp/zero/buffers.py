"""Makes the buffers of a model real, and watches those that all ranks must have alike.

A persistent buffer is a part of the model: checkpoints have it, once, and every rank must hold the same. One
that a forward changes, such as the averages of a BatchNorm, would follow from each rank's own batches. A
buffer that is not persistent is scratch of one rank.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatron_zpp.mesh import Mesh
from megatron_zpp.zero.build import Initialize, fill


class Buffers:
    """The buffers of `model`, on `device`.

    Those on the meta device are filled by `initialize`, which rank 0 says, because their constructor may have
    computed other values; the others keep their values. Raises ValueError for a tensor on the meta device
    that is neither a parameter nor a buffer, and for one that is not filled.
    """

    def __init__(
        self,
        model: nn.Module,
        initialize: Initialize,
        device: torch.device,
        mesh: Mesh,
        say: Callable[[str], None],
    ) -> None:
        self._ranks, filled = mesh.world_size, []
        # Also those of which a buffer is None so far. A walk through all in each pass would take time.
        self._model = model
        self._modules = [(path, module) for path, module in model.named_modules() if module._buffers]
        made: dict[int, Tensor] = {}
        for name, module, key, buffer in _buffers_of(self._modules):
            real = made.get(id(buffer))
            if real is None:
                real = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
                if torch._debug_has_internal_overlap(real) == 1:  # expanded: a load could not write into it
                    real = real.clone(memory_format=torch.contiguous_format)
                if buffer.is_meta:
                    fill(initialize, name, real)
                    filled.append(name)
                made[id(buffer)] = real
            module._buffers[key] = real
        _refuse_meta_tensors(model)
        if filled and mesh.rank == 0:
            names = ", ".join(filled)
            say(f" buffers with the values of initialize, not of their module's constructor: {names}")

    def persistent(self, *, every_name: bool = False) -> dict[str, Tensor]:
        """The buffers that a checkpoint has, by name: the model's memory.

        `every_name`: also by the other names of a module that the model has twice.
        """
        modules = self._model.named_modules(remove_duplicate=False) if every_name else self._modules
        return {
            name: buffer
            for name, module, key, buffer in _buffers_of(modules)
            if key not in module._non_persistent_buffers_set
        }

    def versions(self) -> dict[str, tuple[Tensor, int]]:
        """The persistent buffers, and how often each was changed; none on one rank."""
        if self._ranks == 1:
            return {}
        return {name: (buffer, buffer._version) for name, buffer in self.persistent().items()}

    def check_unchanged(self, before: dict[str, tuple[Tensor, int]]) -> None:
        """Raise RuntimeError if a persistent buffer is not what it was when `versions` returned `before`."""
        for name, (buffer, version) in self.versions().items():
            old, expected = before.get(name, (None, 0))
            if buffer is not old or version != expected:
                raise RuntimeError(
                    f"{name}: a buffer that the forward changes, so that the {self._ranks} ranks would hold "
                    "different ones; train without it (BatchNorm: track_running_stats=False) or on one rank, "
                    "or register it with persistent=False if each rank may have its own"
                )


def _buffers_of(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Name, module, key in the module, and tensor of each buffer of modules with their paths."""
    for path, module in modules:
        for key, buffer in module._buffers.items():
            if buffer is not None:
                yield f"{path}.{key}" if path else key, module, key, buffer


def _refuse_meta_tensors(model: nn.Module) -> None:
    """Look into the attributes of modules that torch does not know as parameters, buffers and modules."""
    of_torch = set(vars(nn.Module()))
    for path, module in model.named_modules():
        for key in vars(module).keys() - of_torch:
            value = vars(module)[key]
            if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(value)):
                raise ValueError(
                    f"{path}.{key}".removeprefix(".")
                    + ": a tensor on the meta device that is neither a parameter nor a buffer; register it "
                    "with register_buffer, which initialize(name, tensor) fills"
                )
