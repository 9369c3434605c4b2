"""8-bit products that a run has only where a layer is faster with them."""

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_zpp.config.root import Config, parse_args
from megatron_zpp.distributed.grid import Grid
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.supervision.activity import Activity
from megatron_zpp.supervision.signals import StopSignals
from megatron_zpp.tokenizer import build_tokenizer, describe
from megatron_zpp.train.build_engine import build_engine
from megatron_zpp.train.choose_fp8 import with_chosen_products
from megatron_zpp.train.device import prepare_device
from megatron_zpp.train.inputs import RunInputs
from megatron_zpp.train.layer_times import LayerTimesCache, measured_layer
from megatron_zpp.train.ranks import Ranks
from megatron_zpp.train.reading import open_data
from megatron_zpp.train.run_schedule import RunSchedule
from megatron_zpp.train.time_layers import time_layers
from tests.gpu.test_fp8 import HELD, needs_fp8


def measured_config(hidden: int) -> Config:
    """A run that measures whether 8-bit products pay."""
    flags = (
        "--mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --num-layers 4 --seq-length 1024 "
        f"--hidden-size {hidden} --num-attention-heads {hidden // 64} --micro-batch-size 8 --train-iters 30 "
        "--lr 1e-3 --bf16 --hidden-dropout 0 --attention-dropout 0 --fp8-products measured"
    )
    return parse_args([*flags.split(), *HELD.split()])


@needs_fp8
@pytest.mark.parametrize(("hidden", "large"), [(256, False), (2048, True)])
def test_8_bit_products_are_chosen_where_they_are_faster(
    hidden: int, large: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = {"MEGATRON_ZPP_CACHE": str(tmp_path / "cache")}
    config = measured_config(hidden)
    device = prepare_device(config, Grid(Topology()))
    schedule = RunSchedule.from_config(config.training, config.learning_rate, 1)
    tokenizer = describe(build_tokenizer(config.tokenizer))
    inputs = RunInputs(
        config=config,
        tokenizer=tokenizer,
        tokenizer_files={},
        schedule=schedule,
        splits=open_data(config, schedule, tokenizer, print),
    )
    ranks = Ranks(topology=Topology(), store=dist.HashStore(), signals=StopSignals(), activity=Activity())
    first, second = (
        with_chosen_products(inputs, device, each, environ=environ)
        for each in (ranks, replace(ranks, store=dist.HashStore()))
    )
    with capsys.disabled():
        print(f"\nhidden {hidden}:{first.lines[0]}")
    assert "(measured in " in first.lines[0]
    assert "(from the cache)" in second.lines[0]
    assert first.config == second.config
    times = LayerTimesCache(environ, print).read(measured_layer(config, device))
    assert times is not None
    assert first.config.precision.fp8 == (times.bits8 <= 0.98 * times.bits16)
    assert first.config.precision.fp8 or not large
    engine = build_engine(first.config, 1001, device, Grid(Topology()))
    tokens = torch.randint(1000, (8, 1025), device="cuda")
    for _ in range(3):
        loss = engine.accumulate(tokens, index=0, micro_batches=1)
        assert engine.step(1e-3).skipped.item() == 0
    assert loss.isfinite()
    assert "compiles a layer again" not in capsys.readouterr().err
    engine.close()


@needs_fp8
def test_a_measurement_leaves_no_memory() -> None:
    config = measured_config(1024)
    device = prepare_device(config, Grid(Topology()))
    gc.collect()
    torch.cuda.empty_cache()
    reserved, left = torch.cuda.memory_reserved(), []
    for _ in range(2):
        time_layers(config, device, Topology(), lambda: None)
        left.append(torch.cuda.memory_allocated())
    assert left[1] <= left[0]
    assert torch.cuda.memory_reserved() - reserved < 2**27  # workspaces of cuBLAS, which a run has as well
    assert torch.cuda.max_memory_allocated() == left[1]  # the peaks in the log are the run's
