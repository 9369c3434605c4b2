"""Models of transformers as it makes them, without a word on units, train as torch trains them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_zpp.distributed.topology import Topology
from tests.api.models import OPTIMIZER, engine_of
from tests.zero.ranks import on_ranks

VOCAB, LENGTH, STEPS, RATE = 64, 12, 3, 1e-2
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
GROUPED = SHAPE | {"num_key_value_heads": 2, "pad_token_id": 0, "tie_word_embeddings": True}
EXPERTS = GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
LOCAL_EXPERTS = GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
OF_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
CAUSAL = {  # by model type: what a small configuration needs
    **dict.fromkeys(["llama", "mistral", "qwen2", "phi", "phi3", "stablelm", "olmo2", "cohere"], GROUPED),
    **dict.fromkeys(["granite", "starcoder2", "nemotron", "smollm3", "recurrent_gemma"], GROUPED),
    **dict.fromkeys(["qwen3", "gemma", "gemma2", "gemma3_text", "glm4"], GROUPED | {"head_dim": 8}),
    **dict.fromkeys(["qwen2_moe", "qwen3_moe", "olmoe"], EXPERTS),
    **dict.fromkeys(["mixtral", "gpt_oss", "granitemoe"], LOCAL_EXPERTS),
    **dict.fromkeys(["gpt_neox", "falcon", "bloom", "mpt", "rwkv"], SHAPE),
    **dict.fromkeys(["gpt2", "gptj"], OF_GPT2 | {"rotary_dim": 4}),
    "opt": SHAPE | {"ffn_dim": 48, "word_embed_proj_dim": 16},
    "mamba": SHAPE | {"state_size": 4},
    "mamba2": SHAPE | {"state_size": 4, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
}
MASKED = {"bert": SHAPE, "albert": SHAPE | {"embedding_size": 16}, "electra": SHAPE}
SEQUENCES = {
    "t5": {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    },
    "bart": {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 32},
}


class LossOf(nn.Module):
    """A model of transformers whose forward returns its loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

        shape = (CAUSAL | MASKED | SEQUENCES)[kind]
        config = AutoConfig.for_model(kind, vocab_size=VOCAB, use_cache=False, **shape)
        for name, value in vars(config).items():
            if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
                setattr(config, name, 0.0)
        made = AutoModelForMaskedLM if kind in MASKED else AutoModelForSeq2SeqLM
        torch.manual_seed(5)
        self.model = (AutoModelForCausalLM if kind in CAUSAL else made).from_config(config).float()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


def tokens_of(step: int, index: int) -> Tensor:
    return torch.randint(3, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(100 * step + index))


def losses(topology: Topology, kinds: list[str]) -> dict[str, list[float]]:
    """By kind, of the engine at stage 3: the mean loss over ranks of each step."""
    found: dict[str, list[float]] = {}
    for kind in kinds:
        engine = engine_of(LossOf(kind), topology.mesh())
        found[kind] = []
        for step in range(STEPS):
            loss = engine.accumulate((tokens_of(step, topology.rank),))
            found[kind] += [engine.mean_over_ranks(loss).item()]
            engine.step(RATE)
        engine.close()
    return found


def losses_of_torch(kind: str, ranks: int) -> list[float]:
    model: Any = LossOf(kind).train()
    matrices, others = ([each for each in model.parameters() if (each.dim() >= 2) == many] for many in (1, 0))
    groups = [
        {"params": matrices, "weight_decay": OPTIMIZER.weight_decay},
        {"params": others, "weight_decay": 0},
    ]
    adamw, found = torch.optim.AdamW(groups, RATE, eps=OPTIMIZER.adam_eps), []
    for step in range(STEPS):
        adamw.zero_grad()
        loss = torch.stack([model(tokens_of(step, rank)) for rank in range(ranks)]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad)
        adamw.step()
        found += [loss.item()]
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("kinds", [CAUSAL, MASKED | SEQUENCES], ids=["causal", "others"])
def test_models_of_transformers_train_as_torch_trains_them(kinds: dict[str, Any]) -> None:
    """Losses after updates agree within 100 roundings of fp32: gradients differ in the order of sums."""
    pytest.importorskip("transformers")
    ours = on_ranks(2, losses, list(kinds))[0]
    for kind, found in ours.items():
        assert found == pytest.approx(losses_of_torch(kind, 2), rel=100 * torch.finfo(torch.float32).eps), (
            kind
        )
