"""Lion (2302.06675), an optimizer from outside of the package, trains as it does in plain torch."""

import torch

from megatron_zpp import ShardSegment
from tests.api.models import Vision, engine_of, steps_of, steps_of_torch


class Lion:
    state_names, accepts_16bit_gradients, writes_gather_source = ("exp_avg",), False, False

    def scalars(
        self, steps: torch.Tensor, learning_rate: float, divisor: torch.Tensor, found_inf: torch.Tensor
    ) -> tuple:
        return learning_rate, divisor, found_inf > 0

    def step(self, shard: ShardSegment, gradient: torch.Tensor, scalars: tuple) -> None:
        rate, divisor, skip = scalars
        (average,), mean = shard.states, gradient / divisor
        new = shard.master - rate * average.lerp(mean, 0.1).sign()
        new[: shard.decayed] -= rate * 0.01 * shard.master[: shard.decayed]
        shard.master.copy_(torch.where(skip, shard.master, new))
        average.copy_(torch.where(skip, average, average.lerp(mean, 0.01)))


class PlainLion(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group, weight in [(each, weight) for each in self.param_groups for weight in each["params"]]:
            average = self.state[weight].setdefault("average", torch.zeros_like(weight))
            weight *= 1 - group["lr"] * group["weight_decay"]
            weight -= group["lr"] * (0.9 * average + 0.1 * weight.grad).sign()
            average.mul_(0.99).add_(0.01 * weight.grad)


def test_lion_trains_as_it_does_in_torch() -> None:
    model, plain = Vision(), Vision()
    plain.load_state_dict(model.state_dict())
    expected = torch.tensor(steps_of_torch(plain, ranks=1, steps=5, optimizer=PlainLion))
    assert torch.allclose(torch.tensor(steps_of(engine_of(model, optimizer=Lion()), steps=5)), expected)
