"""What an engine asks of a model that does not say it: its units, and its initial values."""

import hashlib
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_zpp.api.whole import Name, from_rank_0
from megatron_zpp.config.optimizer import OptimizerConfig
from megatron_zpp.mesh import Mesh
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.shape import trained_matrices
from megatron_zpp.zero.build import Initialize
from megatron_zpp.zero.reads import NamedUnits, distinct, inside, key_of


def units_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The names and modules of a model's units, in forward order.

    They are what its own `units()` returns, where it has that. Otherwise units are the modules of the longest
    ModuleList, and of others as long; the modules beside it; and around them the model itself, with the
    parameters that only its own forward can read.
    """
    if callable(listed := getattr(model, "units", None)):
        return list(listed())
    layers = {id(each) for each in _longest(model)}
    found = list(_walk("", model, layers))
    owners: dict[int, set[tuple[int, ...]]] = {}  # by parameter: the modules that have it
    for _, module in found:
        for parameter in module.parameters():
            owners.setdefault(id(parameter), set()).add(key_of(module))
    inner = {id(part) for _, module in found for part in module.modules()}
    for module in model.modules():
        for parameter in () if id(module) in inner else module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(())
    alone = [
        (name, module)
        for name, module in found
        if all(len(owners[id(parameter)]) == 1 for parameter in module.parameters())
    ]
    covered = {id(part) for _, module in alone for part in module.modules()}
    rest = (module for module in model.modules() if id(module) not in covered)
    around = any(next(module.parameters(recurse=False), None) is not None for module in rest)
    return [("", model), *alone] if around else alone


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called; lists of modules cannot. A compiled one has a forward of its own."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def layer_matrices(
    model: nn.Module, units: NamedUnits, optimizer: OptimizerConfig, splits: Collection[str] = ()
) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """What Muon trains by default, by its name in `units` with its rows; names of other trained weights.

    The weights of nn.Linear in the layers, the modules of the longest ModuleLists: each is one matrix, unless
    `optimizer` splits a GPT's. None is a weight that is computed from others, or that another kind of module
    or one outside of the layers has, or of which ranks have parts: `splits`.
    """
    rows = trained_matrices(model.config, optimizer) if isinstance(model, GPT) else {}
    layers = {id(part) for modules in _longest(model) for part in modules.modules()}
    linear, elsewhere = set[int](), set[int]()
    for part in model.modules():
        is_linear = isinstance(part, nn.Linear) and id(part) in layers
        for key, parameter in part.named_parameters(recurse=False):
            (linear if is_linear and key == "weight" else elsewhere).add(id(parameter))
    weights = {
        name: weight
        for unit, parameters in distinct(units)
        for name, weight in parameters.named_parameters(unit)
        if weight.requires_grad and weight.dim() > 1 and weight.numel()
    }
    matrices = {
        name: rows.get(name, (weight.shape[0],))
        for name, weight in weights.items()
        if id(weight) in linear - elsewhere and name not in splits
    }
    return matrices, [name for name in weights if name not in matrices]


def _longest(model: nn.Module) -> list[nn.Module]:
    """The ModuleLists, of those outside of any other, that are as long as the longest."""
    found: list[nn.ModuleList] = []
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and id(module) not in seen:
            found.append(module)
            seen |= {id(each) for each in module.modules()}
    return [each for each in found if len(each) == max(map(len, found))]


def _walk(path: str, module: nn.Module, layers: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules with parameters and a forward that have none of `layers` inside."""
    for name, child in module.named_children():
        place = inside(path, name)
        if next(child.parameters(), None) is None:
            continue
        if not has_forward(child) or any(id(each) in layers for each in child.modules()):
            yield from _walk(place, child, layers)
        else:
            yield place, child


def own_values(model: nn.Module, names: Mapping[str, Name], seed: int) -> Initialize:
    """What fills parameters and buffers, in place, with what the model has: `initialize` of an engine.

    `names` has the parameters' names in their units. A tensor that is on the meta device, without values,
    gets those of its module's `reset_parameters`. They follow from `seed` and the module's path alone. What
    is returned raises ValueError, which names the tensor, if nothing says its values.
    """
    paths = {each.own: each.path for each in reversed(list(names.values()))}
    values: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    values |= dict(model.named_buffers(remove_duplicate=False))
    modules = dict(model.named_modules(remove_duplicate=False))

    @lru_cache(maxsize=1)  # tensors of one module come one after another
    def filled(path: str, device: torch.device) -> dict[str, Tensor]:
        return _reset(modules[path], path, values, seed, device)

    def fill(name: str, tensor: Tensor) -> None:
        value = values[paths.get(name, name)]
        if value.is_meta:
            path, _, key = paths.get(name, name).rpartition(".")
            kind = type(modules[path])
            if not hasattr(kind, "reset_parameters"):
                raise _without_values(name, f"{kind.__name__} has no reset_parameters for")
            if key not in (made := filled(path, tensor.device)):
                raise _without_values(name, f"reset_parameters of {kind.__name__} leaves")
            value = made[key]
        tensor.copy_(value.detach())

    return fill


def _reset(
    module: nn.Module, path: str, values: Mapping[str, Tensor], seed: int, device: torch.device
) -> dict[str, Tensor]:
    """What `reset_parameters` fills of a module's own tensors on the meta device, by key."""
    copy: Any = object.__new__(type(module))
    copy.__dict__.update(module.__dict__)
    made: dict[str, Tensor] = {}
    for kept in ("_parameters", "_buffers"):
        own = dict(getattr(module, kept))
        for key in own:
            value = values.get(inside(path, key))
            if value is not None and value.is_meta:
                empty = torch.zeros(value.shape, dtype=value.dtype, device=device)
                own[key] = made[key] = nn.Parameter(empty, False) if kept == "_parameters" else empty
        copy.__dict__[kept] = own
    versions = {key: tensor._version for key, tensor in made.items()}
    digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()[:8]
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(int.from_bytes(digest, "big") >> 1)
        copy.reset_parameters()
    return {key: tensor for key, tensor in made.items() if tensor._version != versions[key]}


def _without_values(name: str, why: str) -> ValueError:
    fix = "build the model, or this tensor, with values, or give initialize"
    return ValueError(f"{name}: is on the meta device, and {why} it; {fix}")


def take_values_of_rank_0(model: nn.Module, mesh: Mesh, device: torch.device) -> int:
    """Give all ranks rank 0's values of what has some, and return its seed. Every rank must call it.

    Ranks may have drawn with seeds of their own, and would then train different models. Raises ValueError if
    some ranks have values where others have none.
    """
    seeds = [torch.initial_seed()]
    if mesh.world_size == 1:
        return seeds[0]
    dist.broadcast_object_list(seeds, device=device)
    named = (*model.named_parameters(), *model.named_buffers())
    real = [(name, tensor) for name, tensor in named if not tensor.is_meta and tensor.numel()]
    found: list[list[str]] = [[] for _ in range(mesh.world_size)]
    dist.all_gather_object(found, [name for name, _ in real])
    if odd := next((set(names) ^ set(found[0]) for names in found if names != found[0]), None):
        raise ValueError(f"{min(odd)}: has values on some ranks and is on the meta device on others")
    for _, tensor in real:
        sent = from_rank_0(tensor.detach(), mesh, device)
        if torch._debug_has_internal_overlap(tensor) == 1:  # expanded
            tensor.data = sent.to(tensor.device)
        else:
            tensor.detach().copy_(sent)
    return seeds[0]
