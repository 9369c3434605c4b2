"""Tables in blocks of rows against whole ones: the lookup bit for bit; test_loss.py has the loss."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.model.build import build_model
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.loss import LossKernels, Objective, logits_to_gradient
from megatron_zpp.model.row_blocks import PLAIN, BlockPasses, LookupBlock, RowBlockTable, blocks_of
from tests.model.test_loss import IN_CHUNKS, chunked, exactly, in_blocks, inputs, results
from tests.model.variants import NO_DROPOUT

SHAPE = {"num_layers": 2, "hidden_size": 36, "num_attention_heads": 4, "seq_length": 10}


@pytest.mark.parametrize("rows", [1, 10, 32, 64, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_lookup_and_its_gradient_have_the_bits_of_a_whole_tables(dtype: torch.dtype, rows: int) -> None:
    """Rows that occur often, once and never; -0, which adding would lose, and NaN of other rows."""
    generator = torch.Generator().manual_seed(rows)
    whole = torch.randn(64, 12, generator=generator).to(dtype)
    whole[5] = -0.0
    whole[7] = math.nan
    ids = torch.randint(8, 50, (3, 40), generator=generator)
    ids[0, :3] = 5
    table = RowBlockTable(blocks_of(LookupBlock, 64, 12, rows))
    with torch.no_grad():
        for block, part in zip(table.blocks, whole.split(rows), strict=True):
            block.weight = nn.Parameter(part.clone())
    whole.requires_grad_()
    found, expected = table(ids), F.embedding(ids, whole)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    of_result = torch.randn(found.shape, generator=generator).to(dtype)
    found.backward(of_result)
    expected.backward(of_result)
    assert torch.equal(torch.cat([block.weight.grad for block in table.blocks]), whole.grad)


def test_gradients_of_tokens_that_are_all_but_certain_stay_accurate() -> None:
    """The softmax's denominator is 1 + 1e-4, rounded in fp32; large logits add no error to that."""
    x, weight, targets = torch.ones(1, 1), torch.full((30, 1), 100.0), torch.tensor([12])
    weight[12] += math.log(1e4 * 29)
    given = x, weight, targets, Objective(30)
    exact = exactly(*given)
    for found, expected in zip(results(in_blocks, *given)[::2], exact[::2], strict=True):
        rest = expected.flatten() if expected.dim() == 0 else expected[12]
        ours = found.double().flatten() if expected.dim() == 0 else found.double()[12]
        assert torch.allclose(ours, rest, rtol=2 * torch.finfo(torch.float32).eps / 1e-4, atol=0.0)


def test_graphs_change_no_bit() -> None:
    torch._dynamo.reset()
    x, weight, targets, _ = inputs(15, 48, 45, 64)
    compiler = partial(torch.compile, backend="aot_eager", fullgraph=True, dynamic=False)
    passes = BlockPasses(compiler(PLAIN.statistics), compiler(PLAIN.gradient), IN_CHUNKS.chunk_bytes)
    whole = LossKernels(compiler(logits_to_gradient))
    for objective in (Objective(45), Objective(45, cap=4.0, z_coeff=0.01)):
        given = x, weight, targets, objective
        for loss, usual in (
            (partial(in_blocks, passes=passes), partial(in_blocks, passes=IN_CHUNKS)),
            (partial(chunked, passes=whole), chunked),
        ):
            for found, expected in zip(results(loss, *given), results(usual, *given), strict=True):
                assert torch.equal(found, expected)


@pytest.mark.parametrize("untied", [False, True], ids=["tied", "untied"])
@pytest.mark.parametrize("rows", [20, 128])
def test_a_model_on_its_own_has_the_weights_logits_and_gradients_of_one_with_whole_tables(
    rows: int, untied: bool
) -> None:
    config = ModelConfig(**SHAPE, **NO_DROPOUT, untie_embeddings_and_output_weights=untied)
    whole = GPT(config, 101).initialize(3).double()
    blocks = build_model(config, 101, table_rows=rows).initialize(3).double()
    tokens = torch.randint(101, (2, 11))
    losses = [model(tokens[:, :-1], tokens[:, 1:]) for model in (whole, blocks)]
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-13)
    for loss in losses:
        loss.backward()
    with torch.no_grad():
        assert torch.allclose(blocks(tokens[:, :-1]), whole(tokens[:, :-1]), rtol=1e-12, atol=1e-14)
    of_blocks: dict[str, list[nn.Parameter]] = {}
    for unit, module in blocks.units():
        for path, parameter in module.named_parameters():
            parts = of_blocks.setdefault(f"{unit}.{path}", [])
            if all(parameter is not part for part in parts):
                parts.append(parameter)
    assert of_blocks.keys() == dict(whole.named_parameters()).keys()
    for name, parameter in whole.named_parameters():
        parts = of_blocks[name]
        assert torch.equal(torch.cat([part.data for part in parts]), parameter.data)
        gradient = torch.cat([part.grad for part in parts])
        assert torch.allclose(gradient, parameter.grad, rtol=1e-11, atol=1e-14), name


def test_the_gradients_of_one_block_at_a_time_are_there() -> None:
    """A hook is called for each block before the next block makes its gradient, so an engine may take it."""
    config = ModelConfig(**SHAPE, **NO_DROPOUT)
    model = build_model(config, 101, table_rows=20).initialize(3)
    blocks = list(model.head.output.blocks)
    for block in blocks:  # one leaf for each place of a tied block
        block.weight = nn.Parameter(block.weight.detach())
    order: list[int] = []
    for number, module in enumerate([*model.embedding.tokens.blocks, *blocks]):
        module.weight.register_post_accumulate_grad_hook(lambda _, number=number: order.append(number))
    tokens = torch.randint(101, (2, 11))
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    count = len(blocks)
    assert order == list(reversed(range(2 * count)))
