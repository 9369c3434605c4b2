"""The Python API on a GPU: defaults continue bit for bit; modules of users are trained as by torch."""

from pathlib import Path

import pytest
import torch

from megatron_zpp import EngineConfig, PrecisionConfig, ZeroConfig, ZeroEngine
from megatron_zpp.distributed.topology import Topology
from tests.api.models import Vision, engine_of, steps_of
from tests.api.test_lion import Lion
from tests.zero.own_modules import TRAINED, check_trained, read_wrongly

STAGES = [{"zero_stage": 0}, {"zero_stage": 3}, {"zero_prefetch_units": 0}]


def test_an_engine_with_defaults_continues_bit_for_bit(tmp_path: Path) -> None:
    """In bf16, which is the default there."""
    config = EngineConfig(zero=ZeroConfig(zero_stage=3))
    engine = ZeroEngine(Vision(), config=config)
    assert (engine.device.type, engine.plan.made) == ("cuda", torch.bfloat16)
    steps_of(engine)
    engine.save(tmp_path)
    state, expected = engine.state_dict(), steps_of(engine, first=3)
    for loads_state in (True, False):
        other = ZeroEngine(Vision(), config=config)
        if loads_state:
            other.load_state_dict(state)
        else:
            other.load(tmp_path)
        assert steps_of(other, first=3) == expected


def test_another_optimizer_is_as_on_a_cpu() -> None:
    """Weights in bf16, and as codes, are written by the engine; the device decides on roundings alone."""
    for codes in (False, True):
        found = []
        for device in ("cpu", "cuda"):
            torch.manual_seed(0)
            precision = PrecisionConfig(bf16=True)
            settings = {"zero_quantized_weights": codes, "precision": precision, "device": device}
            found.append(torch.tensor(steps_of(engine_of(Vision(), optimizer=Lion(), **settings))))
        assert torch.allclose(*found, rtol=0.1)


def test_a_model_without_values_is_drawn_on_the_gpu() -> None:
    before = torch.cuda.get_rng_state()
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(12, 3), torch.nn.BatchNorm1d(3))
    engine = ZeroEngine(model)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert engine.state_dict()["model"]["1.running_var"].tolist() == [1.0, 1.0, 1.0]
    assert engine.units[0].master.any()


@pytest.mark.parametrize("kind", TRAINED)
def test_modules_of_users_train_as_torch_does(kind: str) -> None:
    """In fp32: by default cuDNN multiplies the matrices of an LSTM in TF32."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        check_trained(Topology(), [(kind, zero) for zero in STAGES], "cuda")


def test_a_read_of_weights_that_are_not_gathered_names_the_parameter() -> None:
    for kind, case, said in read_wrongly(Topology(), STAGES, "cuda"):
        assert said == "right" or "is read while its unit" in said or "is returned by" in said, (kind, case)
