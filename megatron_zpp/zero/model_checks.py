"""Refuses models that an engine cannot train as they are."""

import difflib
from collections.abc import Collection, Sequence

from torch import nn

from megatron_zpp.config.options import option_error
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.zero.reads import distinct, key_of


def check_unit(zero: ZeroConfig, model: nn.Module) -> None:
    """Raise ValueError if the units of `model` are not those of --zero-unit and --zero-table-rows."""
    cut = getattr(model, "cut_layers", False)
    if cut != zero.cuts_layers:
        units = "sublayers" if cut else "no sublayers"
        raise option_error(
            "--zero-unit",
            zero.zero_unit,
            f"the model's units are {units}; give GPT cut_layers={zero.cuts_layers}",
        )
    rows = getattr(model, "table_rows", None)
    if rows != zero.zero_table_rows:
        raise option_error(
            "--zero-table-rows",
            zero.zero_table_rows,
            f"the model's tables have units of {rows or 'all'} rows; "
            f"build it with table_rows={zero.zero_table_rows}",
        )


def check_parameters(model: nn.Module, units: Sequence[tuple[str, nn.Module]]) -> None:
    """Raise ValueError unless each parameter of `model` belongs to one of its `units`, and some are trained.

    Parameters are real numbers on the meta device, where they have no values that the engine would replace.
    Units with the same parameters are one unit. The engine replaces a parameter where a unit has it, so the
    parameter would no longer be tied to one of another unit, or of another module of the same unit.
    """
    # By parameter: the key of its unit, the name of that, and its own first name there.
    owners: dict[int, tuple[tuple[int, ...], str, str]] = {}
    of_units: set[int] = set()
    for unit, module in units:
        if type(module).forward is nn.Module.forward:
            fix = "has no forward, so that nothing says when its weights are read; list its modules"
            raise ValueError(f"{unit}: {type(module).__name__} {fix}")
        key, inside = key_of(module), set()
        for path, owner in module.named_modules(prefix=unit):
            of_units.add(id(owner))
            for name, parameter in _own_parameters(path, owner):
                _check_parameter(name, parameter)
                first_key, first_unit, first = owners.setdefault(id(parameter), (key, unit, name))
                if first_key != key and first == name:
                    raise ValueError(
                        f"{name}: is in two units, {first_unit} and {unit}; list a module or modules of it"
                    )
                if first_key != key or id(parameter) in inside:
                    raise ValueError(
                        f"{name}: is tied to {first}; modules that share a parameter must be units of their "
                        "own, with no other parameters"
                    )
                inside.add(id(parameter))
    for path, owner in model.named_modules():
        if id(owner) not in of_units:
            for name, _ in _own_parameters(path, owner):
                raise ValueError(f"{name}: belongs to no unit; units() must list a module that has it")
    if not any(parameter.requires_grad and parameter.numel() for parameter in model.parameters()):
        raise ValueError("the model has no parameter to train: none has elements and requires_grad=True")


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if not parameter.is_meta:
        raise ValueError(
            f"{name}: is on {parameter.device}, and initialize would replace its values; build the model "
            'under torch.device("meta"), and let initialize copy the values'
        )
    if parameter.is_complex():
        raise ValueError(f"{name}: is complex; make it a real parameter, and use torch.view_as_complex(it)")
    if not parameter.is_floating_point():
        raise ValueError(f"{name}: is {parameter.dtype}; make it a buffer")


def check_names(
    decoupled: Collection[str], inside_nodes: Collection[str], units: Sequence[tuple[str, nn.Module]]
) -> None:
    """Raise ValueError unless these are all names of parameters of `units`, and of units.

    What several units share has its name in the first of them.
    """
    first = distinct(units)
    parameters = [name for unit, module in first for name, _ in module.named_parameters(unit)]
    _check_known("decoupled", decoupled, parameters, "parameter of the model's units")
    _check_known("inside_nodes", inside_nodes, [unit for unit, _ in first], "unit of the model")


def _check_known(argument: str, names: Collection[str], known: Sequence[str], kind: str) -> None:
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            fix = f"did you mean {close[0]}?" if close else f"there are {', '.join(known[:3])} …"
            raise option_error(argument, name, f"no {kind}; {fix}")


def _own_parameters(path: str, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters of the module at `path` without those of its modules, with all their names."""
    return list(module.named_parameters(path, recurse=False, remove_duplicate=False))
