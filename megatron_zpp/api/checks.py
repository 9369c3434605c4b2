"""Refuses models that an engine cannot train as they are, and ranks that are not there."""

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from megatron_zpp.api.defaults import has_forward
from megatron_zpp.config.optimizer import OptimizerConfig
from megatron_zpp.config.options import option_error
from megatron_zpp.config.words import did_you_mean
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.mesh import Mesh
from megatron_zpp.zero.reads import NamedUnits, distinct, inside, key_of, module_of


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


def check_model(
    model: nn.Module,
    zero: ZeroConfig,
    units: NamedUnits,
    *,
    decoupled: Collection[str],
    inside_nodes: Collection[str],
) -> None:
    """Raise ValueError unless `units` are what `zero` asks for, have all parameters, and have these names.

    What several units share has its name in the first of them.
    """
    _check_unit(zero, model)
    _check_parameters(model, units)
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
    parameters = dict(pair for unit, part in distinct(units) for pair in part.named_parameters(unit))
    _check_known("matrices", matrices, list(parameters), "parameter of the model's units")
    if (optimizer.optimizer == "muon") != bool(matrices):
        fix = "name the parameters that --optimizer muon trains, with the rows of each matrix in them"
        raise option_error("matrices", dict(matrices), fix if not matrices else "needs --optimizer muon")
    for name, rows in matrices.items():
        shape = tuple(parameters[name].shape)
        if len(shape) != 2 or min(rows, default=0) < 1 or sum(rows) != shape[0]:
            raise option_error("matrices", {name: rows}, f"must be rows that add up to those of {shape}")
        if not parameters[name].requires_grad:
            raise option_error("matrices", {name: rows}, "is frozen; omit it")
        if name in decoupled:
            raise option_error("decoupled", name, "Muon trains it, at the first learning rate; omit it")


def _check_unit(zero: ZeroConfig, model: nn.Module) -> None:
    """Raise ValueError if the units of `model` are not those of --zero-unit."""
    cut = getattr(model, "cut_layers", False)
    if cut != zero.cuts_layers:
        units = "sublayers" if cut else "no sublayers"
        raise option_error(
            "--zero-unit",
            zero.zero_unit,
            f"the model's units are {units}; give GPT cut_layers={zero.cuts_layers}",
        )


def _check_parameters(model: nn.Module, units: NamedUnits) -> None:
    """Raise ValueError unless each parameter of `model` belongs to one of its `units`, and some are trained.

    Units with the same parameters are one unit. The engine replaces a parameter wherever its unit has it, so
    it would no longer be tied to one that another unit has.
    """
    owners: dict[int, tuple[tuple[int, ...], str]] = {}  # by parameter: the key of its unit, its first name
    places: set[tuple[int, str]] = set()  # modules and their keys that units have
    for unit, parameters in units:
        module, key = module_of(parameters), key_of(parameters)
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
            first_key, first = owners.setdefault(id(parameter), (key, name))
            if first_key != key:
                raise ValueError(
                    f"{name}: is tied to {first}; modules that share a parameter must be parts of one unit, "
                    "or units of their own with no other parameters"
                )
            owner, _, leaf = path.rpartition(".")
            places.add((id(module.get_submodule(owner)), leaf))
    for path, owner_module in model.named_modules():
        for leaf, _ in owner_module.named_parameters(recurse=False, remove_duplicate=False):
            if (id(owner_module), leaf) not in places:
                name = inside(path, leaf)
                raise ValueError(f"{name}: belongs to no unit; units() must list a module that has it")
    if not any(parameter.requires_grad and parameter.numel() for parameter in model.parameters()):
        raise ValueError("the model has no parameter to train: none has elements and requires_grad=True")


def _check_known(argument: str, names: Collection[str], known: Sequence[str], kind: str) -> None:
    for name in names:
        if name not in known:
            fix = did_you_mean(name, known, 0.6) or f"there are {', '.join(known[:3])} …"
            raise option_error(argument, name, f"no {kind}; {fix}")
