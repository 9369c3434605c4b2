"""8-bit products with document masks: documents that do not see each other."""

import pytest
import torch

from megatron_zpp.distributed.topology import Topology
from megatron_zpp.model.gpt import GPT
from tests.model.variants import MODELS, flags_of
from tests.train.test_fp8_scaling import batch, engine_of, three_steps


@pytest.mark.parametrize(
    ("model", "more"), [("gpt2", []), ("llama", ["--fp8-param-gather", "--fp8-output-layer"])], ids=str
)
def test_a_document_does_not_see_the_one_before(model: str, more: list[str]) -> None:
    """Not a bit: scales are of earlier steps, so that codes of a token are of that token alone."""
    torch.set_num_threads(1)
    engine = engine_of(Topology(), *more, *flags_of(MODELS[model]))
    three_steps(engine)
    tokens = batch(8, 0)[:, :16]
    engine.evaluate(batch(8, 0))  # without dropout, and with codes of the newest weights
    assert isinstance(engine.model, GPT)
    others = tokens.clone()
    others[:, :5] = 59 - tokens[:, :5]
    ends = torch.tensor([0, 5, 16, 21, 32, 32], dtype=torch.int32)  # rows of 5 and 11 tokens
    positions = torch.cat((torch.arange(5), torch.arange(11))).expand(2, 16)
    with torch.no_grad():
        apart = [engine.model(ids, positions=positions, documents=ends) for ids in (tokens, others)]
        whole = [engine.model(ids, positions=positions) for ids in (tokens, others)]
    assert torch.equal(apart[0][:, 5:], apart[1][:, 5:])
    assert not torch.equal(apart[0][:, :5], apart[1][:, :5])
    assert not torch.equal(whole[0][:, 5:], whole[1][:, 5:])
    engine.close()
