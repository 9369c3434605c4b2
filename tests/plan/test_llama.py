"""Plans of Llamas beside what one H200 took: the files that the models page names."""

import dataclasses
import json

import pytest

from benchmarks.common import RESULTS
from benchmarks.plan_rows import h200
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.plan.memory import memory_of
from megatron_zpp.plan.step_time import step_time
from megatron_zpp.plan.traffic import traffic_of
from tests.plan.jobs import job_of


@pytest.mark.parametrize(("size", "samples", "length"), [("1b", 8, 2048), ("3b", 2, 4096)])
def test_measured_steps_of_a_llama_are_predicted(size: str, samples: int, length: int) -> None:
    """Memory within 0.5%, time within 5%, with the share of the peak that was fitted to GPT-2 1.3B."""
    figures = json.loads((RESULTS / f"throughput_llama_{size}.json").read_text())["figures"]
    measured = figures[f"llama3.2-{size}:{samples}"]["stage 0"]
    model = ModelConfig(model_preset=f"llama3.2-{size}", seq_length=length)
    planned = job_of(model, figures["settings"]["vocab_size"], micro_batch_size=samples)
    job = dataclasses.replace(planned, compiled=True)
    assert memory_of(job).peak / 2**30 == pytest.approx(measured["peak_gib"], rel=0.005)
    found = 1000 * step_time(job, h200(), traffic_of(job)).seconds
    assert found == pytest.approx(measured["milliseconds"], rel=0.05)
