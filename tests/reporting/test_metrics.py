"""Numbers of a logged step."""

import pytest
import torch

from megatron_zpp.model.flops import peak_tflops
from megatron_zpp.reporting.metrics import Interval, Stopwatch, losses_of, throughput
from megatron_zpp.zero.engine import StepResult


def test_mfu_is_relative_to_the_peak_of_the_products() -> None:
    """6 GFLOP per token and 100,000 tokens per second are 600 TFLOP/s."""
    peaks = {dtype: peak_tflops("NVIDIA H200", dtype) for dtype in ("bfloat16", "float8")}
    both = {"mfu": peaks["float8"], "mfu_16bit": peaks["bfloat16"]}
    of_16_bits = throughput(100_000, 1.0, 6e9, 1, {"mfu": peaks["bfloat16"]})
    of_8_bits = throughput(100_000, 1.0, 6e9, 1, both)
    assert of_16_bits["mfu"] == pytest.approx(600 / 989)
    assert "mfu_16bit" not in of_16_bits
    assert of_8_bits["mfu"] == pytest.approx(600 / 1979)
    assert of_8_bits["mfu_16bit"] == of_16_bits["mfu"]


def test_a_stop_within_a_step_keeps_the_time_of_that_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """An island that stops while it waits for others resumes a watch that runs."""
    seconds = iter((10.0, 11.0, 20.0, 25.0, 25.0, 31.0))
    monkeypatch.setattr("time.perf_counter", lambda: next(seconds))
    watch = Stopwatch()
    watch.resume()  # 10
    watch.pause()  # 11
    watch.resume()  # 20
    watch.resume()
    assert watch.lap() == 6.0  # 25, 25
    watch.pause()
    watch.pause()
    assert watch.total() == 6.0


def interval_of(*steps: tuple[float, int], device: str = "cpu") -> Interval:
    """Steps with (loss, skipped)."""
    interval = Interval(torch.device(device))
    for loss, skipped in steps:
        zero, flag = torch.zeros((), device=device), torch.full((), float(skipped), device=device)
        result = StepResult(grad_norm=zero, skipped=flag, loss_scale=zero)
        interval.add(torch.full((), loss, device=device), 1.0, result, samples=1, traffic=(0, 0))
    return interval


@pytest.mark.parametrize(
    ("steps", "mean"),
    [
        ([(1.0, 0), (2.0, 0)], 1.5),
        ([(1.0, 0), (9.0, 1), (2.0, 0)], 1.5),
        ([(9.0, 1), (7.0, 1)], 8.0),  # none to tell of but these
        ([(1.0, 0), (float("nan"), 1), (2.0, 0)], float("nan")),
        ([(1.0, 0), (float("inf"), 1), (9.0, 1)], float("inf")),
    ],
)
def test_the_loss_of_an_interval_leaves_out_skipped_steps(
    steps: list[tuple[float, int]], mean: float
) -> None:
    interval = interval_of(*steps)
    assert interval.mean_loss(interval.sums).item() == pytest.approx(mean, nan_ok=True)


def test_the_loss_of_a_step_is_that_of_all_tokens_that_count() -> None:
    """Two ranks, of which one has no such token in the second step."""
    zero = torch.zeros(())
    ranks = [Interval(torch.device("cpu")) for _ in range(2)]
    for interval, losses in zip(ranks, ([(6.0, 1.5), (2.0, 0.5)], [(1.0, 0.5), (0.0, 0.0)]), strict=True):
        for loss, weight in losses:
            interval.add(torch.tensor(loss), weight, StepResult(zero, zero, zero), samples=2, traffic=(0, 0))
    sums = ranks[0].sums + ranks[1].sums
    assert losses_of(sums).tolist() == [3.5, 4.0]
    assert ranks[0].mean_loss(sums).item() == 3.75


def test_the_loss_of_an_interval_is_not_read_from_the_device() -> None:
    """A number of a tensor on the meta device cannot be read."""
    interval = interval_of((1.0, 0), (2.0, 1), device="meta")
    assert interval.mean_loss(interval.sums).is_meta
