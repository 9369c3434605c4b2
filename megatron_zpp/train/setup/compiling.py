"""torch.compile of the layers: one graph for all of them, or one per window, compiled once per run.

Layers in halves have graphs for each of them: the parameters of the second half are gathered while the first
one computes (--zero-unit sublayer), or one graph computes each of its chunks but a smaller last one.
"""

import os
from collections.abc import Callable, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_zpp.distributed.topology import Topology
from megatron_zpp.model.chunks import chunk_shape
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.layer import Half, KVCache, Layer
from megatron_zpp.model.masks import Mask
from megatron_zpp.model.matmuls import PLAIN_MATMULS, Matmuls
from megatron_zpp.model.rotary import Rotation
from megatron_zpp.native.cache import cache_directory

_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


def prepare_compiler(topology: Topology, environ: MutableMapping[str, str]) -> None:
    """Set torch's variables for the cache of kernels and the compiling processes, before torch reads them.

    Torch's default cache is in /tmp, where any user may have created it before, and what it contains is
    executed. The ranks of a node share its processors.
    """
    if _CACHE not in environ:
        environ[_CACHE] = str(cache_directory(environ) / "torch_compile")
    environ.setdefault("TRITON_CACHE_DIR", str(Path(environ[_CACHE]) / "triton"))
    processors = len(os.sched_getaffinity(0))
    environ.setdefault(_THREADS, str(max(1, min(8, processors // topology.local_world_size))))


def compile_parts(
    model: GPT,
    shape: tuple[int, int],
    say: Callable[[str], None],
    backend: str = "inductor",
    *,
    masked: bool = False,
    on_gpu: bool = False,
    matmuls: Matmuls = PLAIN_MATMULS,
    ready: Callable[[], bool] = lambda: True,
) -> None:
    """Let one graph compute every layer of `model`, or every half, for micro-batches of `shape` (B, T).

    `say` gets a line if torch compiles a second graph. On GPUs (`on_gpu`) some operations of the layers, and
    all of the loss but its matrix products, are Triton kernels. Elsewhere these operations of the loss become
    another graph. The kernels are those for `matmuls`, by which the layers were made.
    A graph is inside the hooks of a unit, so that the parameters are gathered before it runs. Other inputs
    go through the same block without a graph: a text that grows, a cache, or a mask of another kind than that
    of batches (`masked`: inside documents). So do all inputs until the layers are `ready`: 8-bit products may
    lack scales in a run's first step. A layer raises RuntimeError if torch cannot compile it.
    """
    whole = not model.attention.splits_graphs
    passes = matmuls.fuse(model) if on_gpu else None
    hidden = model.hidden_shape(*shape)
    graph = partial(_graph, backend=backend, say=say, ready=ready)
    first = model.layers[0]
    run = Half.run if first.in_halves else Layer.run

    def is_usual(x: Tensor, mask: Mask, rotation: Rotation, cache: KVCache | None) -> bool:
        return x.shape == hidden and mask.documents == masked and cache is None

    # Layers with the same window and positions have one graph.
    kinds = list(zip(model.windows, model.config.layers_with_rope, strict=True))
    runs = {kind: graph(run, is_usual, whole) for kind in set(kinds)}
    rows = hidden if first.mlp_chunks == 1 else chunk_shape(hidden, first.mlp_chunks)
    run_mlp = graph(Half.run, lambda x: x.shape == rows, True)
    for layer, kind in zip(model.layers, kinds, strict=True):
        if layer.in_halves:
            attention, mlp = layer.halves
            attention.compute, mlp.compute = runs[kind], run_mlp
        else:
            layer.compute = runs[kind]
    model.head.compile_loss(partial(torch.compile, backend=backend, fullgraph=True, dynamic=False), passes)


def _graph(
    plain: Callable[..., Tensor],
    is_usual: Callable[..., bool],
    whole: bool,
    *,
    backend: str,
    say: Callable[[str], None],
    ready: Callable[[], bool],
) -> Callable[..., Tensor]:
    """What computes a unit: a graph of `plain` for inputs that are usual, else `plain` itself.

    It takes the unit's module and its inputs. `whole`: nothing of it may be outside of the graph. `ready` as
    in `compile_parts`; until then a step with gradients recomputes the unit, so that it takes no more memory
    than a graph. What ranks exchange for that is not in the metrics.
    """
    from torch._dynamo.exc import TorchDynamoException  # takes seconds: only runs that compile import it

    finished: set[bool] = set()  # with gradients, without them: those with which a unit has run

    def make(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        if torch.is_grad_enabled() in finished:  # it needs one graph with gradients, and one without
            why = "TORCH_LOGS=recompiles says why"
            say(f"warning: torch.compile compiles a layer again, which takes a while; {why}")
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    compiled = torch.compile(plain, backend=make, fullgraph=whole, dynamic=False)

    def run(module: nn.Module, x: Tensor, *others: Any) -> Tensor:
        usual, known = is_usual(x, *others), ready()
        if usual and not known and torch.is_grad_enabled():
            return checkpoint(plain, module, x, *others, use_reentrant=False)
        if not usual or not known:
            return plain(module, x, *others)
        ends = others[0].bounds if others and others[0].documents else None
        if isinstance(ends, Tensor) and ends.dim() == 1:
            torch._dynamo.maybe_mark_dynamic(ends, 0)  # one graph for few documents in a batch and for many
        try:
            out = compiled(module, x, *others[:2])  # mask and rotation, where there are any
        except TorchDynamoException as error:
            cause = getattr(error, "inner_exception", error)
            said = f"{type(cause).__name__}: {cause}".strip().splitlines()[0]
            raise RuntimeError(f"torch.compile failed; --no-compile trains without it: {said}") from error
        finished.add(torch.is_grad_enabled())
        return out

    return run
