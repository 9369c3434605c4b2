"""`ZeroEngine` as `megatron_zpp` offers it: around any module, with defaults, and with saving and loading."""

import functools
import os
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from datetime import timedelta
from itertools import count
from types import MappingProxyType
from typing import Any, ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_zpp.api import checks, passes
from megatron_zpp.api.defaults import layer_matrices, own_values, take_values_of_rank_0, units_of
from megatron_zpp.api.whole import State, load_state, names_of, state_of
from megatron_zpp.checkpoint.directory import checkpoint_name, remove_old
from megatron_zpp.checkpoint.file_worker import FileWorker
from megatron_zpp.checkpoint.load import load_checkpoint, saved_state
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.states import describe_state, shards_of
from megatron_zpp.checkpoint.together import load_newest, read_back
from megatron_zpp.checkpoint.write import write_checkpoint
from megatron_zpp.config.engine import EngineConfig
from megatron_zpp.config.options import option_error
from megatron_zpp.config.words import counted
from megatron_zpp.distributed.exchange import Exchange
from megatron_zpp.distributed.process_group import select_device
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.mesh import Mesh
from megatron_zpp.model.gpt import GPT
from megatron_zpp.ops.operations import Operations
from megatron_zpp.placement import Split
from megatron_zpp.storage.checksums import OnProgress
from megatron_zpp.storage.location import Location, location
from megatron_zpp.zero import engine
from megatron_zpp.zero.build import Initialize
from megatron_zpp.zero.optimizer import UpdateRule
from megatron_zpp.zero.reads import without_inner
from megatron_zpp.zero.tensor_parallel import TensorShare

_TIMEOUT = timedelta(minutes=10)  # without progress of any rank
Parameters = ParamSpec("Parameters")
_NUMBERS = count()  # of operations of all engines, in the same order on all ranks


def _accepts_old_call(construct: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Let a constructor of (model, mesh, config, initialize=…) take (model, initialize, zero=…, …) too.

    That was the call in version 0.1, which works for one minor version more.
    """

    @functools.wraps(construct)
    def either(*arguments: Any, **settings: Any) -> None:
        if "zero" in settings:
            warnings.warn(
                "ZeroEngine(model, initialize, zero=…, topology=…, …) ends with the next minor version; "
                "call ZeroEngine(model, mesh, EngineConfig(zero=…, …), initialize=…)",
                DeprecationWarning,
                stacklevel=2,
            )
            engine, model, *rest = arguments
            settings["initialize"] = rest[0] if rest else settings["initialize"]
            parts = {name: settings.pop(name) for name in ("zero", "optimizer", "precision")}
            topology: Topology = settings.pop("topology")
            arguments = (engine, model, topology.mesh(), EngineConfig(**parts))
        construct(*arguments, **settings)

    return either


def _current(device: torch.device | None, mesh: Mesh) -> torch.device:
    """The device of a rank, or the one that it has by default; a GPU becomes the current device."""
    if device is None:
        on_cpu = dist.is_initialized() and "nccl" not in dist.get_backend()
        device = torch.device("cpu") if on_cpu else select_device("auto", Topology.of(mesh))
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def _kernels(
    config: EngineConfig, mesh: Mesh, device: torch.device, say: Callable[[str], None]
) -> Operations | None:
    """The kernels, if device or config have a use for them; one rank of each node says what it builds."""
    if not (config.zero.quantizes or config.optimizer.compact or device.type == "cuda"):
        return None
    from megatron_zpp.ops.library import load_operations

    quiet = mesh.rank % mesh.node_size != 0
    return load_operations(device.type, require_kernels=False, say=(lambda line: None) if quiet else say)


class ZeroEngine(engine.ZeroEngine):
    """A model of one's own, sharded over the ranks of a mesh as the config's ZeRO stage says.

    `mesh`: by default the launcher's, from the environment variables of torchrun or SLURM. `initialize`: by
    default parameters keep the values that the model has on rank 0, and those on the meta device get what
    `reset_parameters` of their modules draws with rank 0's `torch.initial_seed()`. `device`: by default this
    rank's GPU, or the CPU if there is none or the process group is gloo's; a GPU becomes the current device.
    `optimizer` is the arithmetic of another optimizer than AdamW. `operations`: by default the kernels, on a
    GPU and where the config quantises. `matrices`: by default, with Muon, the weights of linear maps in the
    modules of the longest ModuleList, each whole but for a GPT's; a line says which others AdamW trains.
    `splits`: parameters of which the model has this rank's part, by name. `initialize` fills the whole ones,
    and what ranks exchange to compute with them is the model's.

    Raises ValueError, in one line, for a model or settings that the ranks cannot train.
    """

    @_accepts_old_call
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
        matrices: Mapping[str, tuple[int, ...]] | None = None,
        inside_nodes: Collection[str] = (),
        splits: Mapping[str, Split] = MappingProxyType({}),
    ) -> None:
        mesh = mesh or Topology.from_environment(os.environ).mesh()
        config = config or EngineConfig()
        checks.check_kinds(model, mesh, config)
        checks.check_ranks(mesh)
        passes.check_default_dtype()
        device = _current(device, mesh)
        checks.check_values(model, given=initialize is not None)
        units = units_of(model)
        checks.check_units(model, units)
        if optimizer is not None:
            checks.check_rule(optimizer)
        listed = without_inner(units)
        checks.check_model(
            model,
            config.zero,
            listed,
            ranks=mesh.world_size,
            decoupled=decoupled,
            inside_nodes=inside_nodes,
        )
        checks.check_splits(listed, splits, mesh, given=initialize is not None)
        if matrices is None and config.optimizer.optimizer == "muon":
            matrices, others = layer_matrices(model, listed, config.optimizer, splits)
            if mesh.rank == 0:
                trains = f"Muon trains {counted(len(matrices), 'matrix', 'matrices')}"
                say(f" {trains}, and AdamW {', '.join(others) or 'no others'}")
        matrices = {} if matrices is None else matrices
        checks.check_matrices(listed, matrices, config.optimizer, decoupled=decoupled)
        names = names_of(model, listed)
        if initialize is None:
            initialize = own_values(model, names, take_values_of_rank_0(model, mesh, device))
        if operations is None:
            operations = _kernels(config, mesh, device, say)
        super().__init__(
            model,
            mesh,
            config,
            initialize=initialize,
            device=device,
            units=units,
            share=TensorShare(splits=splits),
            rule=optimizer,
            operations=operations,
            timeout=timeout,
            say=say,
            decoupled=decoupled,
            rate_factors=model.rate_factors() if isinstance(model, GPT) else {},
            matrices=matrices,
            inside_nodes=inside_nodes,
        )
        modules, plain = model.named_modules() if mesh.rank == 0 else (), nn.Module.get_extra_state
        if unsaved := [name for name, module in modules if type(module).get_extra_state is not plain]:
            say(f" states of get_extra_state that no checkpoint has: {', '.join(unsaved)}")
        shapes = {each.name: each.shape for unit in self.units for each in unit.layout.placements}
        self._names = {
            name: each._replace(shape=shapes.get(each.own, each.shape)) for name, each in names.items()
        }
        self._known = frozenset(name for name, _ in model.named_parameters(remove_duplicate=False))
        self._config, self._timeout, self._say = config, timeout or _TIMEOUT, say
        self._files, self._unit_order = FileWorker(), passes.UnitOrder()
        self._order = passes.MicroBatchOrder()
        self._steps = 0  # that this engine has taken

    def accumulate(
        self, batch: engine.Batch, *, index: int = 0, micro_batches: int = 1, weight: float | None = None
    ) -> Tensor:
        """See zero/engine.py. Raises ValueError for a micro-batch, batch or loss that no step can count."""
        self._check_open("accumulate")
        self._order.check(index, micro_batches, weight, unfinished=self._gradients.unfinished)
        passes.check_default_dtype()
        loss = super().accumulate(batch, index=index, micro_batches=micro_batches, weight=weight)
        passes.check_parameters(self.units)
        self._order.count()
        return loss

    def step(self, learning_rate: float, decoupled_rate: float | None = None) -> engine.StepResult:
        """See zero/engine.py. Raises ValueError unless all micro-batches of the step are there.

        Raises RuntimeError if ranks have made gradients of units in different orders. On a GPU a later step
        does, once it is known; the step itself is skipped everywhere.
        """
        self._check_open("step")
        self._order.check_whole()
        passes.check_parameters(self.units)
        passes.check_same_parameters(self.model, self._known, self.units)
        if self._steps & (self._steps - 1) == 0:  # ever more rarely: a forward may begin late to change one
            passes.check_equal_buffers(self.buffers.persistent(), self.mesh.world_size)
        self._unit_order.check()
        result = super().step(learning_rate, decoupled_rate)
        self._steps += 1
        self._order = passes.MicroBatchOrder()
        self._unit_order.note(self._sums.in_order)
        if self.device.type == "cpu":
            self._unit_order.check()
        return result

    def _loss(self, batch: engine.Batch) -> Tensor:
        passes.check_batch(batch)
        passes.check_parameters(self.units)
        loss = super()._loss(batch)
        passes.check_loss(loss)
        return loss

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

    def save(
        self, directory: str | os.PathLike, *, extra: Any = None, keep_last: int | None = None
    ) -> Location:
        """Write all states to `directory`/iter_N, N the steps so far, and return its path.

        Every rank must call it, and writes its own shards; all see the same file system. A kill at any time
        leaves the checkpoint whole or absent. `extra` is a JSON value that `load` returns: where the data
        stand, the schedule, random numbers. With `keep_last` the checkpoint is read back, and then all but so
        many are removed, unless it is damaged. Raises SaveFailed, an OSError.
        """
        if keep_last is not None and keep_last < 1:
            raise option_error("keep_last", keep_last, "must be at least 1")
        state = describe_state(
            self, Progress(self.iteration), with_optimizer=True, config=asdict(self._config), tokenizer={}
        )
        path = location(os.fspath(directory)) / checkpoint_name(self.iteration)
        shards, exchange = shards_of(self, with_optimizer=True), self._exchange("save")
        path, digest = write_checkpoint(path, shards, state | {"extra": extra}, exchange, self._files)
        if keep_last is not None:
            read_back(path, digest, self._exchange("read-back"), self._files)
            if self.mesh.rank == 0:
                remove_old(path.parent, keep_last, None, newest=path)
        return path

    def load(
        self, directory: str | os.PathLike, *, iteration: int | None = None, optimizer: bool = True
    ) -> Any:
        """Load the newest whole checkpoint of `directory`, or that of `iteration`, saved on any mesh.

        Returns the `extra` that `save` got; None if the directory has no checkpoint. Every rank must call it.
        A damaged checkpoint is said and passed over for the one before. Raises ValueError if none is whole,
        or if one is of another model or optimizer. `optimizer=False` loads weights and buffers alone.
        """

        def load(path: Location, on_progress: OnProgress) -> Any:
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
        hint = "; every rank must call save and load"
        return Exchange(store, self.topology, self._timeout, name, hint=hint)
