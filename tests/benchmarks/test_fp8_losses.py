"""Pairs of runs with 8-bit products: each run's flags are those of a run."""

import pytest

from benchmarks import fp8_losses
from megatron_zpp.config.root import parse_args


@pytest.mark.parametrize("name", fp8_losses.RUNS)
def test_flags_are_those_of_a_run(name: str) -> None:
    for size, (layers, *_, steps, samples) in fp8_losses.SIZES.items():
        settings = {"size": size, "steps": steps, "lr": 1e-3, "device": "cpu", "extra": ["--clip-grad=0.5"]}
        config = parse_args(fp8_losses.flags_of(settings, name, seed=3))
        assert (config.model.num_layers, config.training.micro_batch_size) == (layers, samples)
        assert (config.training.train_iters, config.training.seed) == (steps, 3)
        assert config.optimizer.clip_grad == 0.5
        assert config.precision.fp8 == ("fp8" in name)
        assert config.precision.fp8_delayed == (name not in ("bf16", "bf16, again", "fp8"))
        assert config.precision.fp8_param_gather == ("codes" in name)
        assert config.precision.fp8_output_layer == ("output" in name)
