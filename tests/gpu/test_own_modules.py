"""Modules of users on a GPU: where the device is behind the host, reads are still right or refused."""

import pytest
import torch

from megatron_zpp.distributed.topology import Topology
from tests.zero.own_modules import TRAINED, check_trained, read_wrongly

STAGES = [{"zero_stage": 0}, {"zero_stage": 3}, {"zero_prefetch_units": 0}]


@pytest.mark.parametrize("kind", TRAINED)
def test_modules_of_users_train_as_torch_does(kind: str) -> None:
    """In fp32: by default cuDNN multiplies the matrices of an LSTM in TF32."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        check_trained(Topology(), [(kind, zero) for zero in STAGES], "cuda")


def test_a_read_of_weights_that_are_not_gathered_names_the_parameter() -> None:
    for kind, case, said in read_wrongly(Topology(), STAGES, "cuda"):
        assert said == "right" or "is read while its unit" in said or "is returned by" in said, (kind, case)
