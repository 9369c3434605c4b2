"""A save behind the training holds the states of its step, whatever the training does next."""

import torch

from megatron_zpp.checkpoint.snapshot import Snapshot


def test_copies_hold_while_the_tensors_change() -> None:
    tensors = {f"{index}": torch.full((1 << 20,), float(index)) for index in range(4)}
    snapshot = Snapshot(tensors)
    for _ in range(3):
        snapshot.take(lambda: tensors)
        snapshot.settle()
        for tensor in tensors.values():
            tensor.add_(1)
        copies = snapshot.wait()
        assert all(torch.equal(copies[name], tensor - 1) for name, tensor in tensors.items())


def test_a_step_before_the_first_save_waits_for_nothing() -> None:
    tensors = {"a": torch.ones(3)}
    snapshot = Snapshot(tensors)
    snapshot.settle()
    tensors["a"].add_(1)
    snapshot.take(lambda: tensors)
    assert torch.equal(snapshot.wait()["a"], torch.full((3,), 2.0))
