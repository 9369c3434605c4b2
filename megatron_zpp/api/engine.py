"""`ZeroEngine` as `megatron_zpp` offers it: around any module, with defaults, and with saving and loading."""

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_zpp.api.defaults import OwnValues, Units, take_values_of_rank_0
from megatron_zpp.api.old_call import accepts_old_call
from megatron_zpp.api.whole import Name, State, load_state, state_of
from megatron_zpp.checkpoint.directory import checkpoint_name
from megatron_zpp.checkpoint.file_worker import FileWorker
from megatron_zpp.checkpoint.load import load_checkpoint, saved_state
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.states import describe_state, shards_of
from megatron_zpp.checkpoint.together import load_newest
from megatron_zpp.checkpoint.write import SaveOptions, write_checkpoint
from megatron_zpp.config.engine import EngineConfig
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.distributed.process_group import select_device
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.mesh import Mesh
from megatron_zpp.ops.operations import Operations
from megatron_zpp.storage.checksums import OnProgress
from megatron_zpp.storage.location import Location, location
from megatron_zpp.zero import engine
from megatron_zpp.zero.build import Initialize
from megatron_zpp.zero.optimizer import UpdateRule

_TIMEOUT = timedelta(minutes=10)  # without progress of any rank
_NUMBERS = count()  # of operations of all engines, in the same order on all ranks


class ZeroEngine(engine.ZeroEngine):
    """A model of one's own, sharded over the ranks of a mesh as the config's ZeRO stage says.

    `mesh`: by default the launcher's, from the environment variables of torchrun or SLURM. `initialize`: by
    default parameters keep the values that the model has on rank 0, and those on the meta device get what
    `reset_parameters` of their modules draws with rank 0's `torch.initial_seed()`. `device`: by default this
    rank's GPU, or the CPU if there is none or the process group is gloo's; a GPU becomes the current device.
    `optimizer` is the arithmetic of another optimizer than AdamW. `operations`: by default the kernels, on a
    GPU and where the config quantises.

    Raises ValueError, in one line, for a model or settings that the ranks cannot train.
    """

    @accepts_old_call
    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh | None = None,
        config: EngineConfig | None = None,
        *,
        initialize: Initialize | None = None,
        device: torch.device | None = None,
        optimizer: UpdateRule | None = None,
        operations: Operations | None = None,
        timeout: timedelta | None = None,
        say: Callable[[str], None] = print,
        decoupled: Collection[str] = (),
        inside_nodes: Collection[str] = (),
    ) -> None:
        mesh = mesh or Topology.from_environment(os.environ).mesh()
        config = config or EngineConfig()
        _check_ranks(mesh)
        device = device or _device_of(mesh)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)
        names = _names_of(model)
        _check_values(model, given=initialize is not None)
        if initialize is None:
            initialize = OwnValues(model, take_values_of_rank_0(model, mesh, device))
        if operations is None and (config.zero.quantizes or device.type == "cuda"):
            from megatron_zpp.ops.library import load_operations

            quiet = mesh.rank % mesh.node_size != 0
            operations = load_operations(
                device.type, require_kernels=False, say=(lambda line: None) if quiet else say
            )
        super().__init__(
            model,
            mesh,
            config,
            initialize=initialize,
            device=device,
            units=Units(model),
            rule=optimizer,
            operations=operations,
            timeout=timeout,
            say=say,
            decoupled=decoupled,
            inside_nodes=inside_nodes,
        )
        owned = {name for unit in self.units for name in unit.names}
        self._names = {
            name: Name(next((each for each in tied if each in owned), name), shape)
            for name, (tied, shape) in names.items()
        }
        self._config, self._timeout, self._say = config, timeout or _TIMEOUT, say
        self._files = FileWorker()

    def state_dict(self) -> State:
        """Weights, buffers, and the optimizer's states as whole tensors on the CPU of rank 0.

        Every rank must call it; ranks other than 0 get an empty dictionary. Keys: see api/whole.py.
        """
        return state_of(self, self._names)

    def load_state_dict(self, state: Mapping[str, Any], *, optimizer: bool = True) -> None:
        """Load what `state_dict` returned on any mesh. Every rank must call it; rank 0's `state` is read.

        `optimizer=False` loads weights and buffers alone, from {"model": tensors by name}. Raises ValueError,
        which names what does not fit.
        """
        load_state(self, self._names, state, optimizer=optimizer)

    def save(self, directory: str | os.PathLike, *, extra: Any = None) -> Location:
        """Write all states to `directory`/iter_N, N the steps so far, and return its path.

        Every rank must call it, and writes its own shards; all see the same file system. A kill at any time
        leaves the checkpoint whole or absent. `extra` is a JSON value that `load` returns: where the data
        stand, the schedule, random numbers. Raises SaveFailed, an OSError.
        """
        state = describe_state(
            self, Progress(self.iteration), with_optimizer=True, config=asdict(self._config), tokenizer={}
        )
        path = location(os.fspath(directory)) / checkpoint_name(self.iteration)
        exchange = self._exchange("save")
        shards = shards_of(self, with_optimizer=True)
        path, _ = write_checkpoint(
            path, shards, state | {"extra": extra}, exchange, SaveOptions(files=self._files)
        )
        return path

    def load(
        self, directory: str | os.PathLike, *, iteration: int | None = None, optimizer: bool = True
    ) -> Any:
        """Load the newest whole checkpoint of `directory`, or that of `iteration`, saved on any mesh.

        Returns the `extra` that `save` got; None if the directory has no checkpoint. Every rank must call it.
        A damaged checkpoint is said and passed over for the one before. Raises ValueError if none is whole,
        or if one is of another model or optimizer. `optimizer=False` loads weights and buffers alone.
        """
        on_gpu = self.device.type == "cuda"

        def load(path: Location, on_progress: OnProgress) -> Any:
            with torch.cuda.device(self.device) if on_gpu else nullcontext():  # a thread begins with device 0
                load_checkpoint(path, self, None, with_optimizer=optimizer, on_progress=on_progress)
            return saved_state(path).get("extra")

        found = load_newest(os.fspath(directory), iteration, load, self._exchange, self._files, "load")
        if found is None:
            return None
        for path, problem in found.passed_over if self.mesh.rank == 0 else ():
            self._say(f" WARNING: {path} is skipped: {problem}")
        return found.loaded

    def _exchange(self, purpose: str) -> Exchange:
        if self.mesh.world_size == 1:
            store: dist.Store = dist.HashStore()
        else:
            store = dist.distributed_c10d._get_default_store()
        name = f"zero_engine/{next(_NUMBERS)}/{purpose}"
        return Exchange(store, self.topology, self._timeout, name)


def _check_ranks(mesh: Mesh) -> None:
    """Raise ValueError unless the process group is the mesh's, and its ranks read different samples."""
    shown = f"mesh of {mesh.world_size} ranks"
    if mesh.tensor_ranks * mesh.context_ranks > 1:
        raise ValueError(
            f"{shown}: ranks cannot share a model of one's own; give nodes and local_ranks alone"
        )
    if mesh.world_size > 1 and not dist.is_initialized():
        raise ValueError(
            f"{shown}: there is no process group; call torch.distributed.init_process_group first"
        )
    if not dist.is_initialized():
        return
    ours, theirs = (mesh.rank, mesh.world_size), (dist.get_rank(), dist.get_world_size())
    if ours != theirs:
        fix = "give mesh=Mesh(nodes=…, local_ranks=…, rank=torch.distributed.get_rank())"
        raise ValueError(
            f"{shown}, rank {ours[0]}: the process group has {theirs[1]}, this is {theirs[0]}; {fix}"
        )


def _device_of(mesh: Mesh) -> torch.device:
    """The default device of a rank."""
    if dist.is_initialized() and "nccl" not in dist.get_backend():
        return torch.device("cpu")
    return select_device("auto", Topology.of(mesh))


def _names_of(model: nn.Module) -> dict[str, tuple[list[str], tuple[int, ...]]]:
    """By name of a parameter in the model: all names that it has, and its shape."""
    tied: dict[int, list[str]] = {}
    named = list(model.named_parameters(remove_duplicate=False))
    for name, parameter in named:
        tied.setdefault(id(parameter), []).append(name)
    return {name: (tied[id(parameter)], tuple(parameter.shape)) for name, parameter in named}


def _check_values(model: nn.Module, *, given: bool) -> None:
    """Raise ValueError for values that the engine would replace, or train in another number format.

    `given`: whether the user fills all parameters.
    """
    first: tuple[str, torch.dtype] | None = None
    for name, parameter in model.named_parameters():
        if given and not parameter.is_meta:
            raise ValueError(
                f"{name}: is on {parameter.device}, and initialize would replace its values; build the model "
                'under torch.device("meta"), or omit initialize'
            )
        if parameter.dtype == torch.float64:
            raise ValueError(f"{name}: is torch.float64, and master weights are fp32; call model.float()")
        first = first or (name, parameter.dtype)
        if parameter.dtype != first[1] and parameter.is_floating_point():
            raise ValueError(
                f"{name}: is {parameter.dtype}, and {first[0]} is {first[1]}; all parameters are computed in "
                "PrecisionConfig's format, so give all the same dtype"
            )
