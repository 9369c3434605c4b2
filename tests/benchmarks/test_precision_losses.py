"""Pairs of runs with 8-bit products or compact states: each run's flags are those of a run."""

import numpy as np
import pytest

from benchmarks import precision_losses
from megatron_zpp.config.root import parse_args


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
