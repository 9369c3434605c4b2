"""Refuses models that an engine cannot train as they are, and ranks that are not there."""

from bisect import bisect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatron_zpp.api.defaults import has_forward
from megatron_zpp.api.whole import ROW_MOMENTS
from megatron_zpp.checkpoint.shard_file import DTYPES
from megatron_zpp.config.engine import EngineConfig
from megatron_zpp.config.optimizer import OptimizerConfig
from megatron_zpp.config.options import option_error
from megatron_zpp.config.words import did_you_mean
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.mesh import Axis, Mesh
from megatron_zpp.placement import Split
from megatron_zpp.zero.model_states import REFERENCE, WEIGHTS, is_residual
from megatron_zpp.zero.read_guard import Unreadable
from megatron_zpp.zero.reads import NamedUnits, distinct, inside, key_of, module_of


def check_kinds(model: Any, mesh: Any, config: Any) -> None:
    """Raise ValueError unless these are a model, a mesh and an EngineConfig."""
    for name, value, kind, fix in (
        ("model", model, nn.Module, "a torch.nn.Module"),
        ("mesh", mesh, Mesh, "a Mesh; name other arguments, as in config=EngineConfig(…)"),
        ("config", config, EngineConfig, "an EngineConfig, such as EngineConfig(zero=ZeroConfig(…))"),
    ):
        if not isinstance(value, kind):
            raise option_error(name, type(value).__name__, f"must be {fix}")


def check_ranks(mesh: Mesh) -> None:
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


def check_values(model: nn.Module, *, given: bool) -> None:
    """Raise ValueError for values that the engine would replace, or train without hooks or in other formats.

    `given`: whether the user fills all parameters.
    """
    first: tuple[str, torch.dtype] | None = None
    for name, parameter in model.named_parameters():
        if problem := _problem_of(parameter, given=given):
            raise ValueError(f"{name}: {problem}")
        first = first or (name, parameter.dtype)
        if parameter.dtype != first[1] and parameter.is_floating_point():
            fix = "all parameters are computed in PrecisionConfig's format, so give all the same dtype"
            raise ValueError(f"{name}: is {parameter.dtype}, and {first[0]} is {first[1]}; {fix}")
    _check_memory(model)


def _problem_of(parameter: nn.Parameter, *, given: bool) -> str | None:
    """Why the engine cannot take over a parameter, whatever the others are; None if it can."""
    if isinstance(parameter, Unreadable):
        return "is another engine's; build a model anew, and load that one's state_dict"
    if isinstance(parameter, nn.UninitializedParameter):
        return "has no shape yet; run one batch through the model first"
    if type(parameter) is not nn.Parameter:
        fix = "let the forward make the other one of a plain one"
        return f"is a {type(parameter).__name__}, and the engine trains a plain parameter in its place; {fix}"
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        fix = "let the forward register the hook on what it computes of the parameter"
        return f"has a hook, and the engine trains another parameter in its place; {fix}"
    if given and not parameter.is_meta:
        fix = 'build the model under torch.device("meta"), or omit initialize'
        return f"is on {parameter.device}, and initialize would replace its values; {fix}"
    if parameter.dtype == torch.float64:
        return "is torch.float64, and master weights are fp32; call model.float()"
    return None


def _check_memory(model: nn.Module) -> None:
    """Raise ValueError for what has memory of a parameter that it is not, whole or in part."""
    spans: list[tuple[int, int, str]] = []  # addresses of parameters, in order; none overlap
    kept = ((name, leaf) for name, leaf in _kept(model) if type(leaf) is Tensor)
    for name, tensor in (*model.named_parameters(), *model.named_buffers(), *kept):
        if tensor.layout is not torch.strided or not (start := tensor.data_ptr()):
            continue
        reach = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        # Where other elements may lie between those of a tensor, its first one stands for it.
        stop = start + tensor.itemsize * (reach if reach <= tensor.numel() else 1)
        at = bisect(spans, (start, stop, name))
        for its_start, its_stop, owner in spans[max(at - 1, 0) : at + 1]:
            if its_start < stop and start < its_stop:
                fix = "to tie parameters let both modules have the same one, or give a copy"
                raise ValueError(
                    f"{name}: has the memory of {owner}, and would not have it under the engine; {fix}"
                )
        if isinstance(tensor, nn.Parameter):
            spans.insert(at, (start, stop, name))


def check_model(
    model: nn.Module,
    zero: ZeroConfig,
    units: NamedUnits,
    *,
    ranks: int,
    decoupled: Collection[str],
    inside_nodes: Collection[str],
) -> None:
    """Raise ValueError unless `units` are what `zero` asks for, have all parameters, and have these names.

    What several units share has its name in the first of them.
    """
    cut = getattr(model, "cut_layers", False)
    if cut != zero.cuts_layers:
        fix = f"the model's units are {'' if cut else 'no '}sublayers; give GPT cut_layers={zero.cuts_layers}"
        raise option_error("--zero-unit", zero.zero_unit, fix)
    _check_parameters(model, units)
    _check_modules(model, ranks)
    first = distinct(units)
    parameters = [name for unit, part in first for name, _ in part.named_parameters(unit)]
    _check_known("decoupled", decoupled, parameters, "parameter of the model's units")
    _check_known("inside_nodes", inside_nodes, [unit for unit, _ in first], "unit of the model")


def check_matrices(
    units: NamedUnits,
    matrices: Mapping[str, tuple[int, ...]],
    optimizer: OptimizerConfig,
    *,
    decoupled: Collection[str],
) -> None:
    """Raise ValueError unless Muon has matrices, those of two-dimensional parameters that are trained.

    They have the first learning rate.
    """
    if not isinstance(matrices, Mapping):
        raise option_error("matrices", matrices, "must have the rows of the matrices by a parameter's name")
    parameters = dict(pair for unit, part in distinct(units) for pair in part.named_parameters(unit))
    _check_known("matrices", matrices, list(parameters), "parameter of the model's units")
    if (optimizer.optimizer == "muon") != bool(matrices):
        fix = "name the parameters that --optimizer muon trains, with the rows of each matrix in them"
        raise option_error("matrices", dict(matrices), fix if not matrices else "needs --optimizer muon")
    for name, rows in matrices.items():
        shape = tuple(parameters[name].shape)
        if len(shape) != 2 or 0 in shape:
            raise option_error("matrices", {name: rows}, f"has the shape {shape}, and is no matrix; omit it")
        if not isinstance(rows, Sequence) or min(rows, default=0) < 1 or sum(rows) != shape[0]:
            fix = f"must be rows that add up to those of {shape}, such as ({shape[0]},)"
            raise option_error("matrices", {name: rows}, fix)
        if not parameters[name].requires_grad:
            raise option_error("matrices", {name: rows}, "is frozen; omit it")
        if name in decoupled:
            raise option_error("decoupled", name, "Muon trains it, at the first learning rate; omit it")


def check_splits(units: NamedUnits, splits: Mapping[str, Split], mesh: Mesh, *, given: bool) -> None:
    """Raise ValueError unless `splits` are of parameters whose parts `mesh` has. `given`: `initialize` is."""
    parameters = dict(pair for unit, part in distinct(units) for pair in part.named_parameters(unit))
    _check_known("splits", splits, list(parameters), "parameter of the model's units")
    for name, split in splits.items():
        value = f"{name} {split}"
        if not (isinstance(split, Split) and isinstance(split.runs, tuple) and isinstance(split.axis, Axis)):
            fix = "must be a megatron_zpp.Split(dim, runs, axis), such as Split(0, (4096,), mesh.replicas)"
            raise option_error("splits", value, fix)
        if not given:
            raise option_error("splits", name, "the model has a part of it; give initialize for the whole")
        shape, ranks = tuple(parameters[name].shape), split.axis.size
        try:
            mesh.shards_beside(split.axis)
        except ValueError as error:
            fix = f"{error}; give mesh.replicas, mesh.node or a part of them"
            raise option_error("splits", value, fix) from None
        if not 0 <= split.dim < len(shape):
            raise option_error("splits", value, f"dim must be one of the {len(shape)} of {shape}")
        whole = shape[split.dim] * ranks
        if sum(split.runs) != whole or any(run < 1 or run % ranks for run in split.runs):
            fix = f"has the shape {shape} on each of {ranks} ranks, so runs must be ({whole},)"
            raise option_error("splits", value, f"{fix}, or multiples of {ranks} that add up to it")


def check_units(model: nn.Module, units: Sequence[Any]) -> None:
    """Raise ValueError unless `units` are pairs of a name and a module with parameters of `model`."""
    known = set(map(id, model.parameters()))
    for unit in units:
        match unit:
            case (str() as name, nn.Module() as module):
                for path, parameter in module.named_parameters(name):
                    if id(parameter) not in known:
                        raise ValueError(f"{path}: units() lists it, and it is no parameter of the model")
            case _:
                raise ValueError(
                    f"units(): must list pairs of a name and a module, not {type(unit).__name__}"
                )


def check_rule(rule: Any) -> None:
    """Raise ValueError unless `rule` has what an UpdateRule has, and states with names of their own."""
    shown = rule.__name__ if isinstance(rule, type) else type(rule).__name__
    for name in ("state_names", "accepts_16bit_gradients", "writes_gather_source", "scalars", "step"):
        if isinstance(rule, type) or not hasattr(rule, name):
            fix = f"must be an object with {name}: an UpdateRule, which changes a shard of the weights"
            raise option_error("optimizer", shown, fix)
    for name in rule.state_names:
        if name in (WEIGHTS, REFERENCE, ROW_MOMENTS) or is_residual(name):
            raise option_error("optimizer", name, "is the name of a state of the engine; give another")


def _check_parameters(model: nn.Module, units: NamedUnits) -> None:
    """Raise ValueError unless each parameter of `model` belongs to one of its `units`, and some are trained.

    Units with the same parameters are one unit. The engine replaces a parameter wherever its unit has it, so
    it would no longer be tied to one that another unit has.
    """
    owners: dict[int, tuple[tuple[int, ...], str]] = {}  # by parameter: the key of its unit, its first name
    places: set[tuple[int, str]] = set()  # modules and their keys that units have
    named: dict[str, int] = {}  # parameters
    for unit, parameters in units:
        module, key = module_of(parameters), key_of(parameters)
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{unit or 'the model'}: is a ScriptModule; list a plain module that has it inside"
            )
        if not has_forward(module):
            fix = "has no forward, so that nothing says when its weights are read; list its modules"
            raise ValueError(f"{unit}: {type(module).__name__} {fix}")
        for path, parameter in parameters.named_parameters(remove_duplicate=False):
            name = inside(unit, path)
            if parameter.is_complex():
                fix = "make it a real parameter, and use torch.view_as_complex(it)"
                raise ValueError(f"{name}: is complex; {fix}")
            if not parameter.is_floating_point():
                raise ValueError(f"{name}: is {parameter.dtype}; make it a buffer")
            if named.setdefault(name, id(parameter)) != id(parameter):
                raise ValueError(
                    f"{name}: two parameters have this name; units() must name modules otherwise"
                )
            first_key, first = owners.setdefault(id(parameter), (key, name))
            if first_key != key:
                fix = "must be parts of one unit, or units of their own with no other parameters"
                raise ValueError(f"{name}: is tied to {first}; modules that share a parameter {fix}")
            owner, _, leaf = path.rpartition(".")
            places.add((id(module.get_submodule(owner)), leaf))
    for path, owner_module in model.named_modules():
        for leaf, _ in owner_module.named_parameters(recurse=False, remove_duplicate=False):
            if (id(owner_module), leaf) not in places:
                name = inside(path, leaf)
                raise ValueError(f"{name}: belongs to no unit; units() must list a module that has it")
    if not any(parameter.requires_grad and parameter.numel() for parameter in model.parameters()):
        raise ValueError("the model has no parameter to train: none has elements and requires_grad=True")


def _check_modules(model: nn.Module, ranks: int) -> None:
    """Raise ValueError for modules that `ranks` would train otherwise than one process trains them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(f"{inside(path, 'weight')}: gradients are dense; build it with sparse=False")
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None and ranks > 1:
            fix = "would be other ones on each; scale what the forward looks up"
            raise ValueError(f"{inside(path, 'weight')}: rows that max_norm changes on {ranks} ranks {fix}")
        for key, buffer in module._buffers.items():
            kept = buffer is not None and key not in module._non_persistent_buffers_set
            if buffer is not None and buffer.layout is not torch.strided:
                fix = "build it in the forward, of buffers with its indices and values"
                raise ValueError(f"{inside(path, key)}: is {buffer.layout}, and buffers are dense; {fix}")
            if buffer is not None and kept and buffer.dtype not in DTYPES:
                fix = "no checkpoint could have it; register it with persistent=False"
                raise ValueError(f"{inside(path, key)}: is {buffer.dtype}, and {fix}, or as real numbers")
    for name, leaf in _kept(model):
        if id(leaf) in names:
            what = f"has the parameter {names[id(leaf)]}, which the engine replaces where it is"
            raise ValueError(f"{name}: {what} registered; keep its module or its name")


def _kept(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """What modules keep beside parameters, buffers and modules, by name; what lists have too."""
    of_torch = set(vars(nn.Module()))
    for path, module in model.named_modules():
        if isinstance(module, nn.RNNBase):  # which keeps its list as its parameters are
            continue
        for key in vars(module).keys() - of_torch:
            for leaf in tree_leaves(vars(module)[key]):
                yield inside(path, key), leaf


def _check_known(argument: str, names: Collection[str], known: Sequence[str], kind: str) -> None:
    if isinstance(names, str):
        raise option_error(argument, names, f'must be a collection of names: {{"{names}"}}')
    for name in names:
        if name not in known:
            fix = did_you_mean(name, known, 0.6) or f"there are {', '.join(known[:3])} …"
            raise option_error(argument, name, f"no {kind}; {fix}")
