"""Host time per step of what makes reads of weights that are not gathered errors (zero/read_guard.py).

python benchmarks/read_guards.py [--device cuda] [--preset 345m]

At stage 3, where units take turns in slots: how often a unit becomes readable or ceases to be in a step, and
what one such change takes, with Python's timer around each.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the root, not installed

import torch

from benchmarks.common import RESULTS, write_result
from megatron_zpp.config.model import ModelConfig
from megatron_zpp.config.optimizer import OptimizerConfig, PrecisionConfig
from megatron_zpp.config.zero import ZeroConfig
from megatron_zpp.distributed.topology import Topology
from megatron_zpp.model.gpt import GPT
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.read_guard import ReadGuard

STEPS, TOKENS, VOCAB = 10, 128, 50304


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--preset", default="345m")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    with torch.device("meta"):
        model = GPT(ModelConfig(model_preset=options.preset, seq_length=TOKENS), VOCAB)
    engine = ZeroEngine(
        model,
        partial(model.initialize_parameter, seed=1),
        zero=ZeroConfig(zero_stage=3),
        optimizer=OptimizerConfig(),
        precision=PrecisionConfig(bf16=True),
        topology=Topology(),
        device=torch.device(options.device),
    )
    tokens = torch.randint(VOCAB, (1, TOKENS + 1))
    for _ in range(3):
        engine.accumulate(tokens, index=0, micro_batches=1)
        engine.step(1e-4)
    seconds: list[float] = []
    change = ReadGuard.set_readable

    def timed(guard: ReadGuard, readable: bool) -> None:
        start = time.perf_counter()
        change(guard, readable)
        seconds.append(time.perf_counter() - start)

    ReadGuard.set_readable = timed  # type: ignore[method-assign,assignment]  # the only seam that costs runs nothing
    for _ in range(STEPS):
        engine.accumulate(tokens, index=0, micro_batches=1)
        engine.step(1e-4)
    largest = max(len(unit.guard) for unit in engine.units)
    figures = {
        "preset": options.preset,
        "units": len(engine.units),
        "parameters_of_the_largest_unit": largest,
        "changes_per_step": len(seconds) / STEPS,
        "microseconds_per_change": round(1e6 * sum(seconds) / len(seconds), 2),
        "milliseconds_per_step": round(1e3 * sum(seconds) / STEPS, 3),
    }
    write_result("read_guards", figures, options.output)


if __name__ == "__main__":
    main()
