"""Several learning rates, weighted losses and norms of a step, against plain torch at any stage."""

import dataclasses
from functools import cache

import pytest
import torch

from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.model.gpt import GPT
from megatron_zpp.train.setup.build_engine import DECOUPLED, decoupled_of
from tests.support import nightly
from tests.zero.engines import engine_of, model_of, operations, same_bits, weights_of
from tests.zero.ranks import on_ranks
from tests.zero.zeropp_engines import DELTA4, QGZ, QWZ

VOCAB, STEPS, MICRO_BATCHES, RANKS = 101, 3, 2, 2
RATE, DECOUPLED_RATE = 1e-2, 3e-3
MODEL = model_of(
    seq_length=10,
    untie_embeddings_and_output_weights=True,
    disable_bias_linear=True,  # the gradient of keys' biases is zero but for rounding
)
OPTIMIZER = OptimizerConfig(
    weight_decay=0.1, clip_grad=0.5, adam_eps=1e-4
)  # rounding of tiny ones matters not
Numbers = list[tuple[float, float, float]]  # of each step: loss, norm, norm of the weights


def model_of(untied: bool, mup: bool = False) -> ModelConfig:
    ratio = {"use_mup": True, "mup_base_hidden_size": 12} if mup else {}  # of 3
    return dataclasses.replace(MODEL, untie_embeddings_and_output_weights=untied, **ratio)


def batch_of(step: int, index: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets; a share of the targets, another one in every batch, does not count."""
    generator = torch.Generator().manual_seed(100 * step + 10 * index + rank)
    tokens = torch.randint(60, (2, 11), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.2 * (1 + index + rank)] = -100
    return tokens[:, :-1], targets


@cache
def plain(ranks: int, untied: bool, decoupled: bool, mup: bool) -> tuple[Numbers, dict[str, list[float]]]:
    """torch's AdamW in float64 with a group for each parameter."""
    model, groups = GPT(model_of(untied, mup), VOCAB).initialize(3).double(), []
    for name, parameter in model.named_parameters():
        rate = DECOUPLED_RATE if decoupled and name in DECOUPLED else RATE
        decay = OPTIMIZER.weight_decay if parameter.dim() >= 2 else 0.0
        factor = 1 / 3 if mup and name.startswith("layers.") and parameter.dim() >= 2 else 1.0
        group = {"lr": rate * factor, "eps": OPTIMIZER.adam_eps * factor, "weight_decay": decay}
        groups.append({"params": [parameter], **group})
    adam = torch.optim.AdamW(groups, betas=(OPTIMIZER.adam_beta1, OPTIMIZER.adam_beta2))
    numbers: Numbers = []
    for step in range(STEPS):
        adam.zero_grad()
        total, count = torch.zeros((), dtype=torch.float64), 0
        for index in range(MICRO_BATCHES):
            for rank in range(ranks):
                tokens, targets = batch_of(step, index, rank)
                counted = int((targets != -100).sum())
                total, count = total + model(tokens, targets) * counted, count + counted
        (total / count).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad).item()
        adam.step()
        weights = sum(parameter.detach().square().sum().item() for parameter in model.parameters()) ** 0.5
        numbers.append(((total / count).item(), norm, weights))
    return numbers, {name: value.flatten().tolist() for name, value in model.named_parameters()}


def train(
    topology: Topology, stages: list[int], untied: bool, decoupled: bool, mup: bool
) -> list[tuple[Numbers, dict[str, list[float]]]]:
    found = []
    for stage in stages:
        engine = engine_of(
            model_of(untied, mup),
            VOCAB,
            zero=ZeroConfig(zero_stage=stage),
            optimizer=OPTIMIZER,
            topology=topology,
            decoupled=decoupled_of(model_of(untied)) if decoupled else (),
        )
        numbers: Numbers = []
        for step in range(STEPS):
            losses = torch.zeros(())
            for index in range(MICRO_BATCHES):
                batch = batch_of(step, index, topology.rank)
                weight = (batch[1] != -100).double().mean().item()
                loss = engine.accumulate(batch, index=index, micro_batches=MICRO_BATCHES, weight=weight)
                losses += loss * weight
            result = engine.step(RATE, DECOUPLED_RATE if decoupled else None)
            loss = engine.sum_over_ranks(losses) / result.weight
            numbers.append((loss.item(), result.grad_norm.item(), engine.weights_norm().item()))
        weights = {name: weight.flatten().tolist() for name, weight in weights_of(engine).items()}
        found.append((numbers, weights))
        engine.close()
    return found


@pytest.mark.parametrize(
    ("ranks", "untied", "decoupled", "mup"),
    [
        (1, False, False, True),
        (RANKS, True, True, True),
        nightly(1, True, True, False),
        *(nightly(RANKS, *kind, False) for kind in ((False, False), (False, True), (True, False))),
    ],
)
def test_a_step_is_that_of_plain_torch(ranks: int, untied: bool, decoupled: bool, mup: bool) -> None:
    """At every stage."""
    stages = [0, 1, 2, 3] if ranks > 1 else [0, 3]
    expected, weights = plain(ranks, untied, decoupled, mup)
    for by_stage in on_ranks(ranks, train, stages, untied, decoupled, mup):
        for numbers, found in by_stage:
            for ours, theirs in zip(numbers, expected, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-5)
            for name, weight in found.items():
                assert weight == pytest.approx(weights[name], rel=1e-3, abs=2e-5), name


STAGE_3 = {"zero_stage": 3}
FORMATS = {"fp32": {"zero_stage": 1}, "bf16": STAGE_3, "qwZ": STAGE_3 | QWZ, "delta4": STAGE_3 | DELTA4}
FORMATS["qgZ"] = {"zero_stage": 2} | QGZ


def same_rate_twice(topology: Topology, formats: list[str]) -> list[bool]:
    """Whether weights are equal bit for bit when both rates are the same."""
    found = []
    for name in formats:
        zero = ZeroConfig(**FORMATS[name])
        precision = PrecisionConfig(fp32=True) if name == "fp32" else PrecisionConfig(bf16=True)
        weights = []
        for decoupled in ((), DECOUPLED):
            engine = engine_of(
                MODEL,
                VOCAB,
                zero=zero,
                precision=precision,
                topology=topology,
                operations=operations(),
                decoupled=decoupled,
            )
            for step in range(STEPS):
                engine.accumulate(batch_of(step, 0, topology.rank), index=0, micro_batches=1)
                engine.step(RATE, RATE if decoupled else None)
            weights.append(weights_of(engine))
            engine.close()
        found.append(same_bits(*weights))
    return found


def test_two_equal_rates_are_one_rate_in_every_format() -> None:
    for rank in on_ranks(2, same_rate_twice, list(FORMATS), ranks_per_node=1):
        assert dict(zip(FORMATS, rank, strict=True)) == dict.fromkeys(FORMATS, True)


def skips(topology: Topology) -> tuple[float, float, float]:
    engine = engine_of(MODEL, VOCAB, zero=ZeroConfig(zero_stage=1), topology=topology)
    tokens, targets = batch_of(0, 0, topology.rank)
    engine.accumulate((tokens, torch.full_like(targets, -100)), index=0, micro_batches=1, weight=0.0)
    result = engine.step(RATE)
    engine.close()
    return result.skipped.item(), result.grad_norm.item(), result.weight.item()


def test_a_batch_without_a_token_that_counts_has_a_gradient_of_zero() -> None:
    assert on_ranks(2, skips) == [(0.0, 0.0, 0.0)] * 2
