"""Pairs of runs with 8-bit products or compact states: each run's flags are those of a run."""

import numpy as np
import pytest
import torch

from benchmarks import precision_losses
from benchmarks.contest.protocol import plain_model
from benchmarks.plain_engine import PlainEngine
from megatron_zpp.config.root import parse_args
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.train.setup.build_engine import build_engine
from megatron_zpp.train.setup.device import prepare_device


@pytest.mark.parametrize("name", precision_losses.RUNS)
def test_flags_are_those_of_a_run(name: str) -> None:
    for size, (layers, *_, steps, samples) in precision_losses.SIZES.items():
        settings = {"size": size, "steps": steps, "micro_batch_size": samples, "lr": 1e-3, "device": "cpu"}
        settings |= {"text": {"vocabulary": 32768}, "extra": ["--clip-grad=0.5"]}
        config = parse_args(precision_losses.flags_of(settings, name, seed=3))
        assert (config.model.num_layers, config.training.micro_batch_size) == (layers, samples)
        assert (config.training.train_iters, config.training.seed) == (steps, 3)
        assert config.optimizer.clip_grad == 0.5
        assert config.precision.fp8 == ("fp8" in name)
        assert config.precision.fp8_delayed == ("delayed" in precision_losses.RUNS[name])
        assert config.precision.fp8_param_gather == ("codes" in name)
        assert config.precision.fp8_output_layer == ("output" in name)
        assert config.optimizer.use_precision_aware_optimizer == ("compact" in name)
        assert (config.learning_rate.lr > np.float32(1e-3)) == (name == "bf16, nudged")


def test_plain_pytorch_has_the_losses_of_the_engine_in_fp32() -> None:
    """After 10 steps they differ by the order of sums: some units in the last place of a loss near 6."""
    settings = {"size": "tiny", "steps": 10, "micro_batch_size": 8, "lr": 1e-2, "device": "cpu", "extra": []}
    flags = precision_losses.flags_of(
        settings | {"text": {"vocabulary": 384}}, precision_losses.PLAIN, seed=3
    )
    config, topology = parse_args([flag for flag in flags if flag != "--bf16"] + ["--fp32"]), Topology()
    device = prepare_device(config, topology)
    ours = build_engine(config, 384, device, topology)
    model = plain_model(config.model, 384, device.device, seed=3)
    plain = PlainEngine(model, config.optimizer, bf16=False, compiled=False)
    tokens = torch.randint(384, (10, 8, 33), generator=torch.Generator().manual_seed(0)) ** 2 // 384
    for batch in tokens:
        losses = []
        for engine in (ours, plain):
            losses.append(engine.accumulate(batch, index=0, micro_batches=1).item())
            engine.step(1e-2)
        assert losses[0] == pytest.approx(losses[1], rel=2e-6)
    assert losses[0] < 5.8  # they have learnt something; untrained it is log 384 = 5.95
    assert ours.evaluate(tokens[0]).item() == pytest.approx(plain.evaluate(tokens[0]).item(), rel=2e-6)
    ours.close()
