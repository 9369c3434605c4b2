"""Attention inside windows and documents, recomputed and compiled, and the choice of a kernel."""

import dataclasses
import importlib.util
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from megatron_zpp.config.model import ModelConfig, RecomputeConfig
from megatron_zpp.model.attention import DotProduct, PackedFlash
from megatron_zpp.model.attention_choice import check_runs, choose_attention
from megatron_zpp.model.flex import Flex
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.masks import Mask
from megatron_zpp.model.scores import Scores, alibi_slopes
from megatron_zpp.train.setup.compiling import compile_parts
from tests.model.variants import LLAMA, MODELS, NO_DROPOUT, SCORES, WINDOWS
from tests.support import GROUPED_FLASH, refusal

VOCAB = 50
SHAPE = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16}
MODEL = ModelConfig(**SHAPE, **NO_DROPOUT, init_method_std=0.3)  # so that attention prefers some tokens
LENGTHS = ((5, 1, 1, 9), (16,), (2, 14))  # of the documents of each row
TORCHS = DotProduct()
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def model_of(
    recompute: RecomputeConfig | None = None, kernel: DotProduct = TORCHS, config: ModelConfig = MODEL
) -> GPT:
    return GPT(config, VOCAB, recompute, kernel).initialize(3).double()


def packed(lengths: tuple[tuple[int, ...], ...] = LENGTHS) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions, and the ends of documents with some empty ones behind them."""
    tokens = torch.randint(VOCAB, (len(lengths), 16), generator=torch.Generator().manual_seed(5))
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    flat = torch.tensor([length for row in lengths for length in row])
    ends = torch.cat([torch.zeros(1), flat.cumsum(0), torch.full((7,), tokens.numel())])
    return tokens, positions, ends.to(torch.int32)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("window", [1, 2, 5, 15, 16, 100])
@pytest.mark.parametrize(
    ("backend", "scores"),
    [
        *((backend, Scores()) for backend in (None, "math", "flash")),
        (None, Scores(0.3, 2.0)),
        (None, Scores(slopes=alibi_slopes(12, 5, 4, CPU), sinks=torch.tensor([-1.0, 0.0, 1.0, 2.0]))),
    ],
    ids=["torch's", "math", "flash", "soft cap", "ALiBi and sinks"],
)
def test_a_window_hides_what_came_before_it(
    documents: bool, window: int, backend: str | None, scores: Scores
) -> None:
    """Each token by itself: the softmax over the tokens that it may see, in float64."""
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(3, 16, heads, 8, generator=draw, dtype=torch.double) for heads in (4, 2, 2))
    _, _, ends = packed()
    kernel = DotProduct(backend)
    if backend == "flash" and not GROUPED_FLASH:
        pytest.skip("this torch's flash attention for CPUs knows no groups of queries")
    found = kernel(q, k, v, 0.0, kernel.mask(q, window, ends if documents else None), scores)
    begins = torch.zeros(3, 16, dtype=torch.long)
    if documents:
        firsts = [[first] * length for row in LENGTHS for first, length in _firsts(row)]
        begins = torch.tensor([place for part in firsts for place in part]).view(3, 16)
    for row in range(3):
        for token in range(16):
            seen = slice(max(int(begins[row, token]), token - window + 1), token + 1)
            for head in range(4):
                logits = k[row, seen, head // 2] @ q[row, token, head] * (scores.scale or 8**-0.5)
                if scores.softcap:
                    logits = scores.softcap * (logits / scores.softcap).tanh()
                if scores.slopes is not None:  # of heads 6 to 9 of 12, 8 and 9 after those of a power of two
                    slope = [2.0**-6, 2.0**-7, 2.0**-8, 2.0**-0.5][head]
                    logits -= slope * torch.arange(len(logits)).flip(0)
                total = logits.exp().sum() + (0 if scores.sinks is None else scores.sinks[head].exp())
                expected = logits.exp() / total @ v[row, seen, head // 2]
                torch.testing.assert_close(found[row, token, head], expected)


def _firsts(lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    """The place in the row and the length of each document."""
    return [(sum(lengths[:number]), length) for number, length in enumerate(lengths)]


def test_positions_alone_leave_attention_whole() -> None:
    """A token sees across documents, and the first ones of a document take the first rows of the table."""
    model = model_of()
    tokens, positions, _ = packed()
    x = model.embedding.tokens(tokens) + model.embedding.positions.weight[positions]
    for layer in model.layers:
        x = layer(x)
    expected = model.head(x, model.embedding.tokens.weight)[..., :VOCAB]
    assert torch.equal(model(tokens, positions=positions), expected)
    assert not torch.allclose(expected, model(tokens))


FULL: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform"}
RECOMPUTED = {
    "selective": RecomputeConfig(recompute_activations=True),
    "uniform": RecomputeConfig(**FULL, recompute_num_layers=2),
    "block": RecomputeConfig(**FULL | {"recompute_method": "block"}),
    "MLPs in chunks": RecomputeConfig(**FULL, mlp_chunks_for_training=3),
}


@pytest.mark.parametrize("recompute", RECOMPUTED)
@pytest.mark.parametrize("backend", [None, "math"])
@pytest.mark.parametrize(
    "model", [*MODELS.values(), LLAMA | WINDOWS | SCORES], ids=[*MODELS, "windows and scores"]
)
def test_recomputation_sees_the_same_documents_and_repeats_the_dropout(
    recompute: str, backend: str | None, model: dict[str, Any]
) -> None:
    tokens, positions, ends = packed()
    again, gradients = RECOMPUTED[recompute], []
    config = dataclasses.replace(MODEL, **model, attention_dropout=0.3, hidden_dropout=0.3)
    for how in (RecomputeConfig(mlp_chunks_for_training=again.mlp_chunks_for_training), again):
        gpt = model_of(how, DotProduct(backend), config)
        torch.manual_seed(11)
        gpt(tokens, tokens, positions, ends).backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in gpt.parameters()]))
    assert torch.equal(*gradients)


@pytest.mark.parametrize("changes", [WINDOWS, {"group_query_attention": True, "num_query_groups": 1}])
def test_flash_of_variable_lengths_fits_the_model(changes: dict[str, Any]) -> None:
    """On the meta device, where the kernel's own shapes are checked and nothing is computed."""
    pytest.importorskip("torch.nn.attention.varlen", reason="torch 2.10 brought it")
    with torch.device("meta"):
        config = dataclasses.replace(MODEL, **changes)
        model = GPT(config, VOCAB, attention=PackedFlash()).bfloat16()
        tokens, positions, ends = (part.to("meta") for part in packed())
        model(tokens, tokens).backward()
        loss = model(tokens, tokens, positions, ends)
        loss.backward()
        assert model(tokens).shape == (3, 16, VOCAB)  # as a text is written, without documents
    assert loss.shape == ()
    for parameter in model.parameters():
        assert parameter.grad.shape == parameter.shape
    layer = model.layers[1]
    compiled = torch.compile(layer.forward, backend="aot_eager", fullgraph=True, dynamic=False)
    x = torch.empty(3, 16, 32, dtype=torch.bfloat16, device="meta", requires_grad=True)
    (gradient,) = torch.autograd.grad(compiled(x, Mask(documents=True, bounds=ends)).sum(), x)
    assert gradient.shape == x.shape


@pytest.mark.parametrize("window", [None, 1, 128, 150])
@pytest.mark.parametrize("documents", [False, True])
def test_blocks_of_a_mask_hold_every_token_that_is_seen(documents: bool, window: int | None) -> None:
    """As torch finds them in the whole mask: whole blocks, and those in which the mask decides."""
    x, ends = torch.empty(2, 400, 1), torch.tensor([0, 3, 131, 400, 656, 657, 800, 800], dtype=torch.int32)
    found = Flex().mask(x, window, ends if documents else None).bounds
    expected = create_block_mask(found.mask_mod, 2 if documents else 1, 1, 400, 400, device="cpu")
    if window or documents:
        seen = create_mask(found.mask_mod, 2 if documents else 1, 1, 400, 400, device="cpu")
        dense = DotProduct().mask(x, window, ends if documents else None)
        assert torch.equal(seen, dense.bounds == 0)
    for kind in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(found, kind), getattr(expected, kind)), kind
    assert torch.equal(found.to_dense(), expected.to_dense())


@pytest.mark.parametrize("documents", [False, True])
def test_flex_attention_is_attention_in_memory(documents: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients too, in compiled layers with windows and without them, each compiled once; by torch's oracle.

    Which has gradients on CPUs, but they are refused before anything else.
    """
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    torch._dynamo.reset()
    changes = LLAMA | SCORES | {"window_size": "150,0", "window_attn_skip_freq": "2"}
    sizes = {"num_attention_heads": 6, "seq_length": 300, "max_position_embeddings": 300}
    config = dataclasses.replace(MODEL, **changes | sizes)
    recompute = RecomputeConfig(recompute_activations=documents)
    models = [model_of(recompute, kernel, config) for kernel in (TORCHS, Flex())]
    compile_parts(models[1], (2, 300), pytest.fail, "aot_eager", masked=documents)
    for cut in (7, 200):
        tokens = torch.randint(VOCAB, (2, 300), generator=torch.Generator().manual_seed(cut))
        ends = torch.tensor([0, cut, 300, 400, 600, 600], dtype=torch.int32) if documents else None
        for model in models:
            model.zero_grad()
            model(tokens, tokens, documents=ends).backward()
        for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(other.grad, one.grad, rtol=1e-6, atol=1e-9, msg=name)


CHOICE = {"masked": False, "head_width": 64, "dropout": 0.0, "dtype": torch.bfloat16, "device": GPU}
SCORED = {"scored": "--attn-logit-softcapping"}


@pytest.mark.parametrize(
    ("backend", "given", "said"),
    [
        ("flash3", {"device": CPU}, "its kernels need a Hopper GPU; on the cpu use auto"),
        ("flash3", {}, "module flash_attn_interface, of FlashAttention-3, is not installed; use auto"),
        ("flash", {"masked": True, "dropout": 0.1}, "--reset-attention-mask it needs --attention-dropout 0"),
        ("flash", {"masked": True, "dtype": torch.float32}, "--reset-attention-mask it needs --bf16 or"),
        ("flash", {"masked": True, "head_width": 20}, "multiple of 8 up to 256, not 20, or use auto"),
        ("flash", {"windowed": True, "dropout": 0.1}, "--window-size it needs --attention-dropout 0"),
        ("flex", {"device": CPU}, "needs a GPU; use auto"),
        ("flex", {"dropout": 0.1}, "needs --attention-dropout 0; use auto"),
        ("flash3", {"scored": "--softmax-type learnable"}, "cannot compute --softmax-type learnable; use"),
    ],
)
def test_what_cannot_serve_is_refused(backend: str, given: dict, said: str) -> None:
    error = refusal(choose_attention, backend, **CHOICE | given)
    assert error.startswith(f"--attention-backend {backend}: ")
    assert said in error


def test_a_mask_that_is_slow_is_said() -> None:
    kernel = choose_attention("auto", **CHOICE | {"masked": True, "dropout": 0.1}).make()
    assert kernel.describe() == (
        "torch's choice, documents through a dense mask; flash attention needs --attention-dropout 0"
    )
    sinks = {"scored": "--softmax-type learnable", "dropout": 0.1}
    kernel = choose_attention("auto", **CHOICE | sinks).make()
    assert kernel.describe() == (
        "math, --softmax-type learnable through scores in memory; FlexAttention needs --attention-dropout 0"
    )
    assert choose_attention("auto", **CHOICE | SCORED | {"device": CPU}).make().describe() == "math"
    assert choose_attention("auto", **CHOICE | {"device": CPU}).make().describe() == ""


@pytest.mark.parametrize(
    "given", [SCORED, {"windowed": True, "dtype": torch.float32}, {"masked": True, "head_width": 20}], ids=str
)
def test_flex_attention_serves_what_flash_attention_cannot(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    assert choose_attention("auto", **CHOICE | given).make().describe() == "flex_attention"


@pytest.mark.parametrize(
    ("backend", "masked", "dropout"), [("cudnn", False, 0.0), ("efficient", True, 0.0), ("flash", False, 0.1)]
)
def test_a_kernel_that_torch_lacks_is_refused_before_a_model_is_built(
    backend: str, masked: bool, dropout: float
) -> None:
    given = {"masked": masked, "head_width": 8, "dropout": dropout, "dtype": torch.float32, "device": CPU}
    try_it = partial(check_runs, backend=backend, lengths=(16,), **given)
    said = refusal(try_it, choose_attention(backend, **given).make())
    assert said.startswith(f"--attention-backend {backend}: cannot compute 16 tokens")
    check_runs(DotProduct("math"), "math", (1, 2, 16), **given)


def test_dropout_of_attention_takes_a_mask() -> None:
    """The same numbers are dropped with and without a mask that hides nothing."""
    config = dataclasses.replace(MODEL, attention_dropout=0.5)
    model = GPT(config, VOCAB).initialize(3).double()
    tokens, _, _ = packed()
    whole, losses = torch.tensor([0, 16, 32, 48], dtype=torch.int32), []
    for documents in (None, whole):
        torch.manual_seed(1)
        losses.append(model(tokens, tokens, documents=documents).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
