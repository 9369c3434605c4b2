"""Compiled layers: the numbers of plain ones, one graph for all, at every stage and in whole runs."""

import os
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch._dynamo import register_backend

from megatron_zpp.config.compilation import CompilationConfig, resolve_compilation
from megatron_zpp.config.model import ModelConfig, RecomputeConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.model.attention import DotProduct
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.masks import Mask
from megatron_zpp.train.setup.compiling import compile_parts, prepare_compiler
from tests.model.variants import LLAMA, MODELS, NO_DROPOUT, WINDOWS
from tests.support import GROUPED_FLASH, logged, nightly, pretrain, refusal
from tests.zero.engines import engine_of
from tests.zero.ranks import on_ranks

BATCH, LENGTH, VOCABULARY = 2, 32, 100
SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": LENGTH}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}
RECOMPUTED = {"stored": {}, "full": FULL, "selective": {"recompute_granularity": "selective"}}
IN_CHUNKS = {"mlp_chunks_for_training": 2}
RECOMPUTED |= {"MLPs": IN_CHUNKS, "MLPs, full": FULL | IN_CHUNKS}


def three_steps(
    topology: Topology,
    *,
    backend: str | None,
    stage: int = 0,
    recompute: str = "stored",
    unit: Literal["layer", "sublayer"] = "layer",
    **changes: Any,
) -> tuple[list[float], list[str]]:
    """Losses of steps and evaluations, with generation in between; and the messages about further graphs."""
    torch._dynamo.reset()
    config = ModelConfig(**SHAPE | changes, hidden_dropout=0.1, attention_dropout=0.1)
    zero = ZeroConfig(zero_stage=stage, zero_unit=unit)
    recomputed = RecomputeConfig(**RECOMPUTED[recompute])
    engine = engine_of(config, VOCABULARY, zero=zero, recompute=recomputed, topology=topology)
    said: list[str] = []
    if backend is not None:
        compile_parts(engine.model, (BATCH, LENGTH), said.append, backend)
    draw, losses = torch.Generator().manual_seed(7), []
    for step in range(3):
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=draw)
        torch.manual_seed(step)
        losses.append(engine.accumulate(tokens, index=0, micro_batches=1).item())
        engine.step(1e-2)
        losses.append(engine.evaluate(tokens).item())
        engine.next_token_logits(tokens[:1, : 5 + step])
    engine.close()
    return losses, said


def test_one_graph_for_all_layers_and_each_way_to_run_them() -> None:
    """One with gradients and one without; recomputation and shards, on two ranks, change no bit.

    Torch's own kernels run the graphs here, since making others takes a while.
    """
    plain, _ = three_steps(Topology(), backend=None)
    assert three_steps(Topology(), backend="aot_eager") == (plain, [])
    sharded = partial(three_steps, backend="aot_eager", stage=3, recompute="full")
    assert on_ranks(2, sharded) == [(plain, [])] * 2  # both have the same batch


HALVES = {"stage": 3, "unit": "sublayer"}


@pytest.mark.parametrize(
    ("plain", "compiled"),
    [
        nightly(LLAMA, [{"recompute": "selective"}], id="llama"),
        pytest.param({"recompute": "MLPs"}, [{}, HALVES | {"recompute": "MLPs, full"}], id="chunks"),
        pytest.param({}, [HALVES | {"recompute": "full"}], id="halves"),
        nightly(LLAMA | WINDOWS, [HALVES | {"recompute": "full"}], id="halves with windows"),
    ],
)
def test_one_graph_for_each_kind_of_part(plain: dict[str, Any], compiled: list[dict[str, Any]]) -> None:
    """All chunks of MLPs, which draw what they drew without a graph; first halves, two with windows."""
    losses, _ = three_steps(Topology(), backend=None, **plain)
    for changes in compiled:
        assert three_steps(Topology(), backend="aot_eager", **plain | changes) == (losses, [])


def test_a_text_without_documents_beside_batches_with_them() -> None:
    """A text of --sample-prompt may have the shape of a batch and is not worth a graph."""
    said: list[str] = []
    torch._dynamo.reset()
    config = ModelConfig(num_layers=1, hidden_size=32, num_attention_heads=4, seq_length=LENGTH)
    model = GPT(config, VOCABULARY)
    compile_parts(model, (BATCH, LENGTH), said.append, "aot_eager", masked=True)
    x, hidden = torch.zeros(BATCH, LENGTH, 32), torch.zeros(BATCH, 1, LENGTH, LENGTH)
    with torch.no_grad():
        model.layers[0](x, Mask(documents=True, bounds=hidden))
        model.layers[0](x)
        assert said == []
        model.double().layers[0](x.double(), Mask(documents=True, bounds=hidden.double()))
    assert len(said) == 1
    assert "again" in said[0]  # a further graph


class ReadsEnds(DotProduct):
    """A kernel that takes documents as their ends, as flash attention does."""

    def bounds(self, x: Tensor, window: int | None, ends: Tensor | None) -> Tensor | None:
        return ends

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Mask, **more: Any) -> Tensor:
        return super().__call__(q, k, v, dropout, DotProduct().mask(q, None, mask.bounds), **more)


@pytest.mark.parametrize("kernel", [DotProduct("math"), ReadsEnds()], ids=["dense", "ends"])
@pytest.mark.parametrize(("model", "recompute"), [("gpt2", "full"), ("llama", "selective")])
def test_documents_in_compiled_layers(recompute: str, model: str, kernel: DotProduct) -> None:
    """Masks are arguments of one graph, which gives the gradients of plain layers for any documents."""
    if model == "llama" and not GROUPED_FLASH:
        pytest.skip("this torch's attention for CPUs adds the scores of queries in groups in another order")
    config = ModelConfig(**SHAPE, **NO_DROPOUT, **MODELS[model])
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    found, said = [], []
    for compiled in (False, True):
        torch._dynamo.reset()
        gpt = GPT(config, VOCABULARY, RecomputeConfig(**RECOMPUTED[recompute]), kernel).initialize(3)
        if compiled:
            compile_parts(gpt, (BATCH, LENGTH), said.append, "aot_eager", masked=True)
        for ends in ((0, 5, 32, 64, 64), (0, 32, 40, 41, 64), (0, 32, *range(33, 64), 64)):
            gpt(tokens, tokens, documents=torch.tensor(ends, dtype=torch.int32)).backward()
            with torch.no_grad():
                gpt(tokens, tokens, documents=torch.tensor(ends, dtype=torch.int32))
        found.append(torch.cat([parameter.grad.flatten() for parameter in gpt.parameters()]))
    assert torch.equal(*found)
    assert said == []


@pytest.mark.nightly
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_run_with_compiled_layers(flags: list[str], tmp_path: Path, recomputes: bool) -> None:
    """The run says so, evaluates like a run without them, and resumes from its checkpoint to the same bits.

    Also if it is told to recompute from there on: kernels that the compiler made repeat their dropout.
    """

    def run(name: str, *extra: str) -> tuple[list[float], list[float]]:
        """Losses of its steps and of its evaluations."""
        out = tmp_path / f"{name}.jsonl"
        argv = [*flags, *extra, "--train-iters", "4", "--metrics-file", str(out)]
        done = pretrain(*argv, timeout=280, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "kernels"))
        assert done.returncode == 0, done.stderr[-2000:]
        assert ("compiled layers" in done.stdout) == ("--compile" in extra)
        assert "warning: torch.compile" not in done.stderr
        return logged(out), logged(out, "valid_loss")

    steps, evaluations = run("whole", "--compile", "--save", str(tmp_path / "run"), "--save-interval", "2")
    assert any(Path(tmp_path / "kernels").rglob("*.so"))
    _, plain = run("plain")
    assert evaluations[0] == pytest.approx(plain[0], rel=1e-6)  # fp32 sums in another order
    recomputed = ["--recompute-granularity", "full", "--recompute-method", "uniform"] if recomputes else []
    resumed, after = run(
        "resumed", "--compile", *recomputed, "--load", str(tmp_path / "run"), "--ckpt-step", "2"
    )
    assert (resumed, after[-1]) == (steps[2:], evaluations[-1])


def test_a_compiler_that_fails_is_one_line() -> None:
    """As Triton's does where Python's headers are missing."""

    @register_backend(name="megatron_zpp_broken")
    def broken(graph: torch.fx.GraphModule, inputs: list[Any]) -> None:
        raise OSError("no Python.h\nand more")

    model = GPT(ModelConfig(num_layers=1, hidden_size=32, num_attention_heads=4, seq_length=8), VOCABULARY)
    compile_parts(model, (1, 8), print, "megatron_zpp_broken")
    said = refusal(model, torch.zeros((1, 8), dtype=torch.long), error=RuntimeError)
    assert said == "torch.compile failed; --no-compile trains without it: OSError: no Python.h"


def resolved(device: str, *, path: str = "", apex: bool = False, **settings: Any) -> tuple[bool, str | None]:
    return resolve_compilation(CompilationConfig(**settings), device, {"PATH": path}, apex=apex)


def test_what_is_compiled_where(tmp_path: Path) -> None:
    """On GPUs by default, if there is a compiler."""
    (tmp_path / "gcc").touch(mode=0o755)
    (tmp_path / "g++").touch(mode=0o755)
    here = str(tmp_path)
    assert resolved("cpu", path=here) == (False, None)
    assert resolved("cpu", path=here, compile=True) == (True, None)
    assert resolved("cuda", path=here, compile=False) == (False, None)
    assert resolved("cuda", path=here, apex=True) == (False, None)
    assert resolved("cuda")[1]  # triton or a C compiler
    with pytest.raises(ValueError, match=r"--compile \(given\): needs a C\+\+ compiler: g\+\+ or clang"):
        resolved("cpu", compile=True)


def test_kernels_are_kept_where_only_this_user_can_write(tmp_path: Path) -> None:
    """And the ranks of a node share its processors."""
    found: dict[str, str] = {"MEGATRON_ZPP_CACHE": str(tmp_path / "own")}
    prepare_compiler(Topology(0, 2, 0, 2), found)
    assert found["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "own" / "torch_compile")
    assert (tmp_path / "own").stat().st_mode & 0o077 == 0
    assert 1 <= int(found["TORCHINDUCTOR_COMPILE_THREADS"]) <= max(1, len(os.sched_getaffinity(0)) // 2)
    there = {"TORCHINDUCTOR_CACHE_DIR": "/there", "TRITON_CACHE_DIR": "/triton"}
    prepare_compiler(Topology(), there)
    assert (there["TORCHINDUCTOR_CACHE_DIR"], there["TRITON_CACHE_DIR"]) == ("/there", "/triton")
