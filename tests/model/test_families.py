"""GPT-2, Llama-like models, BLOOM against transformers: logits and gradients, with and without a cache."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from docs.site.families import CASES, cases, naming_files, table
from megatron_zpp.checkpoint.huggingface.architecture import read_architecture
from megatron_zpp.checkpoint.huggingface.named_directory import NamedDirectory
from megatron_zpp.checkpoint.huggingface.weights import HuggingFaceWeights
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.options import flag_of
from megatron_zpp.generate.cached import Cache, decode, logits_of, prefill
from megatron_zpp.generate.continuation import Stop, continue_texts
from megatron_zpp.generate.draw import Sampling
from megatron_zpp.model.flops import parameter_count
from megatron_zpp.model.gpt import GPT
from megatron_zpp.tokenizer.null import NullTokenizer
from tests.model.families import FAMILIES, VOCAB, cases_of_pieces, ours
from tests.model.variants import SCORES, WINDOWS

TOKENS = torch.randint(VOCAB, (2, 33), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_transformers(family: str, tmp_path: Path) -> None:
    theirs = FAMILIES[family].model()
    theirs.save_pretrained(tmp_path)
    model = ours(tmp_path)
    expected, found = theirs(TOKENS).logits, model(TOKENS)
    scale = expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * max(1.0, scale))
    targets = TOKENS.roll(-1, 1)
    F.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()
    model(TOKENS, targets).backward()
    for parameter in theirs.parameters():
        parameter.data = parameter.grad  # so that gradients are read by the names of weights
    theirs.save_pretrained(tmp_path / "gradients")
    named = NamedDirectory("HF_DIR", "", tmp_path / "gradients")
    with HuggingFaceWeights(named, read_architecture(named).model, VOCAB) as gradients:
        wanted = gradients.parameters()
    assert sum(map(torch.numel, model.parameters())) == parameter_count(model.config, VOCAB)
    for name, parameter in model.named_parameters():
        error = torch.linalg.vector_norm(parameter.grad - wanted[name])
        assert error <= 1e-5 * torch.linalg.vector_norm(wanted[name]), name


@pytest.mark.parametrize(
    "family",
    [
        *("llama-tied-scaled", "qwen3", "mistral-window", "qwen2-window", "qwen3-window"),
        *("bloom-heads", "olmo2", "olmo3", "phi4-mini", "glm4", "granite", "smollm3", "gemma2", "gemma3"),
        "scores",
    ],
)
def test_a_cache_gives_the_logits_of_the_whole_text(family: str, tmp_path: Path) -> None:
    """Rows have different lengths, and keys are kept for the groups alone."""
    if family == "scores":
        shape = {"num_layers": 2, "hidden_size": 48, "num_attention_heads": 6, "seq_length": 33}
        model = (
            GPT(ModelConfig(**shape, **SCORES, **WINDOWS, init_method_std=0.3), VOCAB).initialize(3).eval()
        )
    else:
        FAMILIES[family].model().save_pretrained(tmp_path)
        model = ours(tmp_path)
    cache = Cache(model, 2, 33)
    first, second = TOKENS.tolist()
    prefill(model, cache, [first[:20], second[:15]])
    for column in range(13):
        found = logits_of(model, decode(model, cache, [first[20 + column], second[15 + column]]))
    expected = [model(TOKENS[:1])[0, -1], model(TOKENS[1:, :28])[0, -1]]
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-4)
    groups, width = model.config.num_query_groups, model.config.kv_channels
    cache.end, cache.index = 33, None
    with torch.inference_mode():
        k, _ = cache.extend(0, *[torch.zeros(2, 0, groups, width)] * 2)
    assert k.shape == (2, 33, groups, width)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_what_transformers_writes(family: str, tmp_path: Path) -> None:
    """Both compute a Phi-3's text anew when it outgrows the original length, beside one that does not."""
    theirs = FAMILIES[family].model()
    theirs.save_pretrained(tmp_path)
    prompts = [TOKENS[:1, :12], TOKENS[1:, :2]]
    settings = {"max_new_tokens": 11, "do_sample": False, "eos_token_id": None}
    expected = [theirs.generate(each, **settings) for each in prompts]
    found = continue_texts(
        ours(tmp_path),
        NullTokenizer(VOCAB - 1),
        [each[0].tolist() for each in prompts],
        **{"new_tokens": 11, "sampling": Sampling(temperature=0), "seed": 1, "stop": Stop(), "batch_size": 2},
    )
    assert [[*text.prompt, *text.ids] for text in found] == [each[0].tolist() for each in expected]


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_do_not_see_each_other(family: str, tmp_path: Path) -> None:
    FAMILIES[family].model().save_pretrained(tmp_path)
    model = ours(tmp_path)
    first, second = TOKENS[:1, :13], TOKENS[:1, 13:]
    positions = torch.cat([torch.arange(13), torch.arange(20)])[None]
    ends = torch.tensor([0, 13, 33, 33], dtype=torch.int32)
    found = model(TOKENS[:1], positions=positions, documents=ends)
    expected = torch.cat([model(first), model(second)], 1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_site_knows_which_family_has_which_piece() -> None:
    """And for each piece a case of them, or a test that names it."""
    assert CASES.read_text() == cases_of_pieces(), "run python -m tests.model.families"
    assert not [piece for piece, found in cases().items() if not found and not naming_files(piece)]
    shown = table()
    assert all(f"| `{flag_of(ModelConfig.__dataclass_fields__[piece])}` | " in shown for piece in cases())


VARIANTS = [  # with what no family has
    {"position_embedding_type": "rope", "squared_relu": True, "disable_bias_linear": True},
    {"position_embedding_type": "none", "normalization": "RMSNorm", "group_query_attention": True},
    {"norm_placement": "both", "apply_layernorm_1p": True, "geglu": True, "logits_multiplier": 0.5},
    SCORES,
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_any_combination_of_components_counts_and_learns(variant: dict) -> None:
    """Parameters are as many as the formula says, each has a gradient, and norms and biases do not decay."""
    shape = {"num_layers": 2, "hidden_size": 48, "num_attention_heads": 6, "seq_length": 16}
    config = ModelConfig(**shape, **variant, attention_dropout=0.0, hidden_dropout=0.0)
    model = GPT(config, VOCAB).initialize(3)
    assert sum(map(torch.numel, model.parameters())) == parameter_count(config, VOCAB)
    tokens = TOKENS[:, :16]
    model(tokens, tokens.roll(-1, 1)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name
        assert (parameter.dim() == 1) == (name.endswith(("bias", "sinks")) or "norm" in name)
