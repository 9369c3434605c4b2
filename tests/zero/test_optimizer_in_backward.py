"""Steps in the backward: the weights of the usual order, clipping, what they free, resuming, refusals."""

import pytest
import torch

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import OptimizerConfig, PrecisionConfig
from tests.zero.engines import engine_of, states_of
from tests.zero.quantizing import operations

MODEL = ModelConfig(num_layers=3, hidden_size=36, num_attention_heads=3, seq_length=16, attention_dropout=0, hidden_dropout=0)

def run(inb, **kw):
    e = engine_of(MODEL, 101, optimizer=OptimizerConfig(weight_decay=0.1, clip_grad=kw.pop('clip',0.0), optimizer_in_backward=inb), **kw)
    norms=[]
    for step in range(4):
        t = torch.randint(101,(2,17),generator=torch.Generator().manual_seed(step))
        if inb: e.begin_step(1e-2)
        e.accumulate(t)
        norms.append(e.step(1e-2).grad_norm.item())
    return norms, {k: states_of(e,k) for k in e.states.kinds}

def test_it():
  for kw in ({}, {"operations": operations(), "precision": PrecisionConfig(bf16=True)}):
    a,b = run(False,**kw), run(True,**kw)
    assert a[0]==b[0]
    for k in a[1]:
        for n in a[1][k]:
            assert torch.equal(a[1][k][n], b[1][k][n]), (k,n)
