"""Modules of users on a GPU: where the device is behind the host, reads are still right or refused."""

from megatron_zpp.distributed.topology import Topology
from tests.zero.own_modules import TRAINED, check_trained, read_wrongly

STAGES = [{"zero_stage": 0}, {"zero_stage": 3}, {"zero_prefetch_units": 0}]


def test_modules_of_users_train_as_torch_does() -> None:
    check_trained(Topology(), [(kind, zero) for kind in TRAINED for zero in STAGES], "cuda")


def test_a_read_of_weights_that_are_not_gathered_names_the_parameter() -> None:
    for case, said in read_wrongly(Topology(), STAGES, "cuda"):
        assert said == "right" or "is read while its unit" in said or "is returned by" in said, (case, said)
