"""Kernels of attention against fp32, documents packed against a dense mask, and no host synchronisation."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_zpp.config.data import DataConfig
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import PrecisionConfig
from megatron_zpp.data.documents import as_tensors, masked_samples
from megatron_zpp.data.mock import MockDataset
from megatron_zpp.model.attention import AttentionKernel, DotProduct
from megatron_zpp.model.attention_choice import check_runs, choose_attention
from megatron_zpp.model.flex import Flex
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.scores import Scores, alibi_slopes
from tests.gpu.steady import waits_are_errors
from tests.model.variants import NO_DROPOUT, SCORES
from tests.support import pretrain
from tests.zero.engines import engine_of

VOCAB, EOD, TOKENS = 40, 3, 256  # a document of 40 tokens on average
MASKS = DataConfig(mock_data=True, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
SHAPE = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "seq_length": TOKENS}
MODEL = ModelConfig(**SHAPE, **NO_DROPOUT)
EPSILON = torch.finfo(torch.bfloat16).eps


def settings(head_width: int, masked: bool) -> dict[str, Any]:
    given = {"masked": masked, "head_width": head_width, "dropout": 0.0, "dtype": torch.bfloat16}
    return given | {"device": torch.device("cuda")}


def batches(count: int, samples: int = 4) -> list[tuple[Tensor, ...]]:
    """Masked micro-batches in pinned memory, as the loader has them."""
    source = masked_samples(MockDataset(TOKENS, VOCAB, 1), MASKS, EOD)
    found = [as_tensors(source.batch(np.arange(samples) + samples * index)) for index in range(count)]
    return [tuple(part.pin_memory() for part in batch) for batch in found]


def results(
    kernel: AttentionKernel,
    qkv: Tensor,
    ends: Tensor | None,
    weights: Tensor,
    window: int | None,
    *,
    groups: int,
    copies: int = 1,
) -> list[Tensor]:
    """The output (B, T, N, H) and the gradients of q (B, T, N, H), k and v (B, T, G, H), in fp32.

    The kernel gets so many copies of keys and values, whose gradients are then sums.
    """
    qkv = qkv.detach().requires_grad_()  # (B, T, N + 2 G, H)
    mask = kernel.mask(qkv, window, ends)
    heads = [qkv.shape[2] - 2 * groups, groups, groups]
    q, k, v = qkv.split(heads, 2)
    mixed = kernel(q, *(part.repeat_interleave(copies, 2) for part in (k, v)), 0.0, mask, Scores())
    (gradient,) = torch.autograd.grad(mixed, qkv, weights.to(mixed.dtype))
    return [mixed.float(), *gradient.float().split(heads, 2)]


@pytest.mark.parametrize("head_width", [64, 80, 128])
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("backend", ["auto", "efficient", "flash", "cudnn", "flash3"])
def test_each_kernel_is_fp32s_within_the_rounding_of_bf16(
    backend: str, window: int | None, masked: bool, groups: int, head_width: int
) -> None:
    """Also for 4 heads of queries in groups, whose keys and values only the reference gets as copies."""
    given = settings(head_width, masked)
    try:
        kernel = choose_attention(backend, windowed=window is not None, **given).make()
        check_runs(kernel, backend, (TOKENS,), windows=(window,), queries_per_group=4 // groups, **given)
    except ValueError as refused:
        if backend in ("cudnn", "flash3") or (backend == "efficient" and groups < 4):
            pytest.skip(str(refused))
        raise
    generator = torch.Generator("cuda").manual_seed(1)
    qkv = torch.randn(4, TOKENS, 4 + 2 * groups, head_width, generator=generator, device="cuda").bfloat16()
    weights = torch.randn(4, TOKENS, 4, head_width, generator=generator, device="cuda").bfloat16()
    ends = batches(1)[0][3].cuda() if masked else None
    reference = DotProduct("math")
    expected = results(reference, qkv.float(), ends, weights, window, groups=groups, copies=4 // groups)
    found = results(kernel, qkv, ends, weights, window, groups=groups)
    # What fp32 sums over a head leave where the gradient is 0, as those of q and k in a window of one token.
    sums = head_width * 2.0**-24 * torch.linalg.vector_norm(weights.float())
    for ours, exact in zip(found, expected, strict=True):
        assert torch.linalg.vector_norm(ours - exact) <= 2 * EPSILON * torch.linalg.vector_norm(exact) + sums


def slopes(heads: int) -> Tensor:
    return alibi_slopes(heads, 0, heads, torch.device("cuda"))


@pytest.mark.parametrize(
    ("kinds", "heads", "groups", "head_width", "window", "masked", "dtype"),
    [
        ("", 4, 2, 64, 150, False, torch.bfloat16),
        ("cap", 4, 2, 256, None, False, torch.bfloat16),
        ("cap", 3, 1, 80, 150, True, torch.float32),
        ("slopes", 12, 12, 64, None, True, torch.bfloat16),
        ("sinks", 4, 4, 128, None, False, torch.bfloat16),
        ("cap slopes sinks", 6, 2, 40, 150, True, torch.float32),
        ("cap slopes sinks", 6, 2, 64, 150, True, torch.bfloat16),
    ],
)
def test_flex_attention_is_that_of_scores_in_memory(
    kinds: str, heads: int, groups: int, head_width: int, window: int | None, masked: bool, dtype: torch.dtype
) -> None:
    """Outputs and all gradients, of texts that blocks of 128 do not divide, within the format's rounding."""
    tokens, generator = 400, torch.Generator("cuda").manual_seed(1)
    torch._dynamo.reset()

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    qkv, weights = drawn(2, tokens, heads + 2 * groups, head_width), drawn(2, tokens, heads, head_width)
    own = drawn(heads)
    ends = torch.tensor([0, 3, 131, 400, 656, 657, 800, 800], dtype=torch.int32, device="cuda")
    results = []
    for kernel, form in ((DotProduct("math"), torch.float32), (Flex(), dtype)):
        x, sinks = qkv.to(form).requires_grad_(), own.to(form).requires_grad_()
        scores = Scores(
            head_width**-0.5,
            2.0 if "cap" in kinds else None,
            slopes(heads) if "slopes" in kinds else None,
            sinks if "sinks" in kinds else None,
        )
        mask = kernel.mask(x, window, ends if masked else None)
        mixed = kernel(*x.split([heads, groups, groups], 2), 0.0, mask, scores)
        wanted = [x, *[sinks] * ("sinks" in kinds)]
        of_x, *of_sinks = torch.autograd.grad(mixed, wanted, weights.to(form))
        results.append([mixed, *of_x.split([heads, groups, groups], 2), *of_sinks])
    rounding = 3 * EPSILON if dtype is torch.bfloat16 else 2e-5
    for exact, ours in zip(*results, strict=True):
        error = torch.linalg.vector_norm(ours.float() - exact)
        assert error <= rounding * torch.linalg.vector_norm(exact)


@pytest.mark.parametrize("backend", ["auto", "flex"])
def test_a_masked_step_does_not_wait_for_the_device(backend: str) -> None:
    kernel = choose_attention(backend, **settings(64, True)).make()
    engine = engine_of(MODEL, VOCAB, precision=PrecisionConfig(bf16=True), device="cuda", kernel=kernel)
    data = batches(6)

    def step(batch: tuple[Tensor, ...]) -> None:
        engine.accumulate(batch, index=0, micro_batches=1)
        engine.step(1e-3)

    for batch in data[:3]:
        step(batch)
    with waits_are_errors():
        for batch in data[3:]:
            step(batch)


@pytest.mark.parametrize(
    "backend",
    ["auto", "flex", *(pytest.param(kind, marks=pytest.mark.gpu_long) for kind in ("flash", "cudnn"))],
)
def test_the_compiler_takes_a_layer_whole_and_once_for_any_documents(backend: str) -> None:
    given = settings(64, True)
    kernel = choose_attention(backend, **given).make()
    try:
        check_runs(kernel, backend, (TOKENS,), **given)
    except ValueError as refused:
        if backend == "cudnn":
            pytest.skip(str(refused))
        raise
    config = dataclasses.replace(MODEL, **SCORES) if backend == "flex" else MODEL
    layer = GPT(config, VOCAB, attention=kernel).initialize(3).to("cuda", torch.bfloat16).layers[1]
    torch._dynamo.reset()  # another kernel's documents have another format
    compiled = torch.compile(layer.forward, fullgraph=True, dynamic=False)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in batches(3):
            x = torch.randn(4, TOKENS, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            mask = kernel.mask(x, None, batch[3].cuda())
            found = torch.autograd.grad(compiled(x, mask).square().sum(), x)[0]
            expected = torch.autograd.grad(layer(x, mask).square().sum(), x)[0]
            error = torch.linalg.vector_norm((found - expected).float())
            assert error <= 2 * EPSILON * torch.linalg.vector_norm(expected.float())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            "--reset-position-ids --reset-attention-mask --eod-mask-loss",
            "flash_attention over documents end to",
        ),
        ("--position-embedding-type alibi --softmax-type learnable --window-size 99,0", "flex_attention\n"),
    ],
    ids=["documents", "scores"],
)
def test_a_run_says_which_attention_it_takes(more: str, said: str) -> None:
    command = (
        "--mock-data --tokenizer-type NullTokenizer --vocab-size 40 --num-layers 2 --hidden-size 128 "
        "--num-attention-heads 2 --seq-length 256 --micro-batch-size 4 --lr 1e-3 --train-iters 3 "
        "--log-interval 1 --eval-iters 1 --sample-prompt 1 --attention-dropout 0 --hidden-dropout 0"
    )
    done = pretrain(*command.split(), *more.split())
    assert done.returncode == 0, done.stderr
    assert f" attention: {said}" in done.stdout
    assert "compiles a layer again" not in done.stderr
