"""torch.compile of the layers: one graph for all of them, made once a run."""

import os
from collections.abc import Callable, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.config.compilation import CompilationConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.model.attention import FlashAttention3
from megatron_zpp.model.gpt import GPT, PLAIN_BLOCK, BlockKernels, Layer, transformer_block
from megatron_zpp.model.kv_cache import LayerCache
from megatron_zpp.model.loss import LossKernels
from megatron_zpp.model.masks import Causal, InsideDocuments, Mask
from megatron_zpp.model.rotary import Rotation
from megatron_zpp.native.cache import cache_directory
from megatron_zpp.storage.files import check_writable

_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


def check_cache(config: CompilationConfig) -> None:
    """Raises ValueError for a --compile-cache-dir where nothing can be kept: a step would be late for it."""
    if config.compile_cache_dir is not None:
        check_writable("--compile-cache-dir", config.compile_cache_dir)


def prepare_compiler(
    config: CompilationConfig, topology: Topology, environ: MutableMapping[str, str]
) -> None:
    """Says by torch's variables, before it reads them, where kernels are kept and who makes them.

    Torch's own place is one in /tmp that any user may have made before: what is in it is run. The ranks of a
    node share its processors.
    """
    if config.compile_cache_dir is not None:
        environ[_CACHE] = os.path.abspath(config.compile_cache_dir)
    elif _CACHE not in environ:
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
) -> None:
    """Lets a graph compute every layer of `model` for micro-batches of `shape` (B, T); `say` hears of more.

    On GPUs (`on_gpu`) parts of it, and what the loss does beside its products, are kernels of ours; elsewhere
    the latter becomes another graph.
    The graph is inside the hooks of a layer, so that its parameters are gathered before it runs. Other inputs
    take the same block without a graph: a text that grows, a cache, or a mask of another kind than that of
    batches (`masked`: inside documents). A layer raises RuntimeError when no graph can be made.
    """
    from torch._dynamo.exc import TorchDynamoException  # seconds, which a run that compiles nothing has not

    maker = _Backend(backend, say)
    whole = not isinstance(model.parts.attention, FlashAttention3)
    first = model.layers[0]
    assert isinstance(first, Layer)
    kernels, passes = _kernels(first) if on_gpu else (PLAIN_BLOCK, None)
    kind = InsideDocuments if masked else Causal

    def block(layer: Layer, x: Tensor, mask: Mask, rotation: Rotation) -> Tensor:
        return transformer_block(layer, x, mask, rotation, kernels=kernels)

    compiled = torch.compile(block, backend=maker, fullgraph=whole, dynamic=False)

    def run(layer: Layer, x: Tensor, mask: Mask, rotation: Rotation, cache: LayerCache | None) -> Tensor:
        if x.shape[:2] != shape or type(mask) is not kind or cache is not None:
            return transformer_block(layer, x, mask, rotation, cache)
        try:
            out = compiled(layer, x, mask, rotation)
        except TorchDynamoException as error:
            cause = getattr(error, "inner_exception", error)
            said = f"{type(cause).__name__}: {cause}".strip().splitlines()[0]
            raise RuntimeError(f"torch.compile failed, and --no-compile does without it: {said}") from error
        maker.finished.add(torch.is_grad_enabled())
        return out

    for layer in model.layers:
        layer.compute = run  # type: ignore[assignment]  # torch's stubs: an attribute is a tensor or module
    model.head.compile_loss(partial(torch.compile, backend=backend, fullgraph=True, dynamic=False), passes)


def _kernels(layer: Layer) -> tuple[BlockKernels, LossKernels]:
    """Triton kernels for layers like `layer`, and for what the loss does beside its products."""
    from megatron_zpp.model.fused import blocks, loss  # import Triton, which only torch for GPUs brings

    return blocks.FusedKernels(layer), loss.PASSES


class _Backend:
    """Torch's compiler, and a word when it is called again for what a layer has already run through.

    Layers run with gradients and without, and need graphs for each.
    """

    def __init__(self, name: str, say: Callable[[str], None]) -> None:
        self._name, self._say = name, say
        self.finished: set[bool] = set()  # whether gradients were wanted, once a layer is through

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        from torch._dynamo import lookup_backend

        if torch.is_grad_enabled() in self.finished:
            why = "TORCH_LOGS=recompiles says why"
            self._say(
                f"warning: torch.compile makes a layer's kernels once more, which takes its time; {why}"
            )
        return lookup_backend(self._name)(graph, inputs)
