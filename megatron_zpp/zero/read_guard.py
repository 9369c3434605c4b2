"""Makes every read of a parameter whose unit is not gathered an error that names it.

A slot holds one unit at a time, and other units have views of the same memory. Two mechanisms see a read of
numbers that are another unit's. Neither costs the device anything; the host writes some dictionary entries
and version counters when a unit becomes readable, and when it ceases to be.

    read by      while the unit is not gathered
    modules      the module has an `Unreadable` in place of the parameter, on which every operation raises
    a backward   autograd compares the version that a parameter had when an operation saved it with the
                 present one, and raises where they differ: an unreadable parameter has a version of its own

The second one also sees an operation that ran while the unit was gathered, and whose backward comes when it
is not. It does not see parameters that Python code keeps and reads without gradients.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_FIRST_VERSION = 1 << 30  # of unreadable parameters: higher than any that operations count up to
_VERSION = re.compile(r"is at version (\d+); expected version (\d+)")
_ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad", "itemsize", "nbytes"),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "grad_fn"),
)
_METHODS = (
    *("size", "dim", "numel", "nelement", "element_size", "stride", "is_contiguous", "get_device"),
    *("is_floating_point", "is_complex", "new_zeros", "new_empty", "new_ones", "new_full", "__hash__"),
)
_FUNCTIONS = ("is_floating_point", "is_complex", "numel", "zeros_like", "ones_like", "empty_like")
# What does not read the elements.
_ALLOWED = {
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
    *(getattr(Tensor, name) for name in _METHODS),
    *(getattr(torch, name) for name in _FUNCTIONS),
}
_FREEZING = {Tensor.requires_grad_, Tensor.requires_grad.__set__}  # type: ignore[attr-defined]


class Unreadable(Tensor):
    """Stands for a parameter in its module while its unit is not gathered: of its shape, without memory."""

    _is_param = True  # torch counts it among the module's parameters
    _parameter_name: str
    _unit: str

    @staticmethod
    def like(parameter: nn.Parameter, name: str, unit: str) -> "Unreadable":
        """What stands for `parameter`. It holds NaN, for code that does not ask `__torch_function__`."""
        empty = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
        made = Tensor._make_subclass(Unreadable, empty.expand(parameter.shape), parameter.requires_grad)
        vars(made).update(vars(parameter))
        made._parameter_name, made._unit = name, unit
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run what does not read elements. Raises RuntimeError for everything else."""
        if func in _ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        (read, *_) = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Unreadable))
        if func in _FREEZING:
            raise frozen_late(read._parameter_name)
        raise stale_read(read._parameter_name, read._unit)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        """The name and shape, for print(model) and debuggers."""
        return f"{self._parameter_name} {tuple(self.shape)}, not gathered"


class ReadGuard:
    """Lets modules read the parameters of one unit only while it is gathered."""

    def __init__(self, unit: str, first: int) -> None:
        """`first`: how many parameters the units before have, which numbers those of this one."""
        self._unit, self._first = unit, first
        self._names: list[str] = []
        # Of each place of a parameter in a module: the module's dictionary, the key, both values, an address.
        self._places: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter, Any, int]] = []
        self._parameters: tuple[nn.Parameter, ...] = ()
        self._versions: tuple[int, ...] = ()

    def put(self, module: nn.Module, key: str, parameter: nn.Parameter, name: str) -> None:
        """Make `parameter` a parameter of `module`, and guard it there."""
        setattr(module, key, parameter)
        unreadable = Unreadable.like(parameter, name, self._unit)
        self._places.append((module._parameters, key, parameter, unreadable, parameter.data_ptr()))
        if not any(parameter is other for other in self._parameters):
            self._versions += (_FIRST_VERSION + self._first + len(self._names),)
            self._parameters += (parameter,)
            self._names.append(name)

    def set_readable(self, readable: bool) -> None:
        """Let modules read the parameters from now on, or no more. Raises RuntimeError as `check_held`."""
        self.check_held()
        for parameters, key, parameter, unreadable, _ in self._places:
            parameters[key] = parameter if readable else unreadable
        versions = (0,) * len(self._versions) if readable else self._versions
        torch._C._autograd._unsafe_set_version_counter(self._parameters, versions)

    def check_held(self) -> None:
        """Raise RuntimeError if a module has something else in a parameter's place, or that other memory."""
        for parameters, key, parameter, unreadable, address in self._places:
            found = parameters[key] if key in parameters else None  # noqa: SIM401 - a ScriptModule has no get
            if (found is not parameter and found is not unreadable) or parameter.data_ptr() != address:
                raise RuntimeError(
                    f"{unreadable._parameter_name}: the model has another tensor in its place since the "
                    "engine was built, or other memory, which the engine does not train; change a model "
                    "before, and its weights by the engine's load_state_dict"
                )

    def check_unwritten(self) -> None:
        """Raise RuntimeError if an operation has changed a parameter in place while it was readable."""
        for parameter, name, unreadable in zip(self._parameters, self._names, self._versions, strict=True):
            if parameter._version not in (0, unreadable):
                raise RuntimeError(
                    f"{name}: is changed in place, and its memory holds a copy of the weights, which the "
                    "next step replaces; call the engine's load_state_dict, or compute with a changed copy"
                )

    def check_output(self, tensor: Tensor) -> None:
        """Raise RuntimeError if a tensor that a unit's module returns has the memory of its parameters."""
        if tensor.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return  # it has no address
        start = tensor.data_ptr()
        for parameter, name in zip(self._parameters, self._names, strict=True):
            if 0 <= start - parameter.data_ptr() < parameter.nbytes and parameter.is_contiguous():
                raise RuntimeError(
                    f"{name}: is returned by the forward of its unit {self._unit}, and would change when "
                    "another unit is gathered; return a copy (.clone()), or what is computed from it"
                )

    def of_backward(self, error: RuntimeError) -> RuntimeError | None:
        """The error that names the parameter of this unit that a backward read; None if it read none."""
        found = _VERSION.search(str(error))
        for version in map(int, found.groups()) if found else ():
            if version in self._versions:
                return stale_read(self._names[self._versions.index(version)], self._unit)
        return None

    def __len__(self) -> int:
        return len(self._names)


def stale_read(name: str, unit: str) -> RuntimeError:
    """The error of a read of a parameter whose unit is not gathered."""
    return RuntimeError(
        f"{name}: is read while its unit {unit} is not gathered, so that it does not hold its weights; only "
        f"the forward of {unit} may read it: call that module, or list a module in units() whose forward has "
        "all uses"
    )


def frozen_late(name: str) -> RuntimeError:
    """The error of a parameter that is frozen or unfrozen when its engine has been built."""
    return RuntimeError(
        f"{name}: requires_grad cannot change once the engine is built; build another model and engine "
        "with it, and load the state_dict of this one"
    )


def tensors_in(output: Any) -> Iterator[Tensor]:
    """The tensors of what a module returns: of sequences, mappings and dataclasses too."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, list | tuple | set):
        for value in output:
            yield from tensors_in(value)
    elif is_dataclass(output) and not isinstance(output, type):
        for field in fields(output):
            yield from tensors_in(getattr(output, field.name))
