"""What the console reads from a GPU, without waiting for it."""

import torch

from megatron_zpp.reporting.metrics import NewestLoss, PowerMeter

GPU = torch.device("cuda", 0)


def test_the_newest_loss_arrives_while_the_device_goes_on() -> None:
    newest = NewestLoss(GPU)
    assert newest.after(torch.tensor(2.5, device=GPU)) is None
    torch.cuda.synchronize()
    assert newest.after(torch.tensor(2.25, device=GPU)) == 2.5
    busy, out = torch.randn(2, 8192, 8192, device=GPU)
    for _ in range(2):  # what is loaded for its first use waits for the device
        torch.cuda.synchronize()
        for _ in range(50):
            torch.mm(busy, busy, out=out)
        newest.after(out.sum())
        found = newest.after(torch.ones((), device=GPU))
    assert found is None  # the products are not done, and nobody waits


def test_power_is_plausible_or_missing() -> None:
    """Between an idle GPU and twice the most of an SXM module, where NVML can be asked."""
    assert 10 < PowerMeter(GPU).record().get("power_watts", 100) < 1500
