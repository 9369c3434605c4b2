"""Numbers of a step that are read from the device."""

import pytest
import torch

from megatron_zpp.reporting.metrics import NewestLoss, PowerMeter

CPU = torch.device("cpu")


def test_a_cpu_has_no_power_meter() -> None:
    assert PowerMeter(CPU).record() == {}


def test_power_is_in_watts_and_asked_for_no_more_once_it_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch gives milliwatts, and ModuleNotFoundError without nvidia-ml-py."""
    meter, asked = PowerMeter(torch.device("cuda", 1)), []

    def power_draw(device: torch.device) -> int:
        asked.append(device)
        if len(asked) > 1:
            raise ModuleNotFoundError("pynvml")
        return 612_300

    monkeypatch.setattr(torch.cuda, "power_draw", power_draw)
    assert meter.record() == {"power_watts": 612.3}
    assert meter.record() == {}
    assert meter.record() == {}
    assert asked == [torch.device("cuda", 1)] * 2


def test_the_newest_loss_of_a_cpu_is_there_at_once() -> None:
    newest = NewestLoss(CPU)
    assert [newest.after(torch.tensor(value)) for value in (2.5, 2.25)] == [2.5, 2.25]
