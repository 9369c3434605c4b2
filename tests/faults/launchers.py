"""Environments that a launcher did not make well, and sizes that do not fit its ranks."""

from dataclasses import replace

from tests.faults.cases import Case

FOUR = {
    "RANK": "0",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29999",
}
ALONE = "--heartbeat-timeout 0 --distributed-timeout-minutes 0.02"


def on_four(argv: str, said: str, **env: str) -> Case:
    """The first of four ranks of one node."""
    return Case(argv, said, env=FOUR | env)


def refused_on_four(argv: str, said: str, **env: str) -> Case:
    """The same with a command line or an environment that no four ranks could obey."""
    return replace(on_four(argv, said, **env), status=2)


def lacking(name: str) -> Case:
    """Without one of the variables."""
    env = {k: FOUR[k] for k in FOUR if k != name}
    return Case("", f"{name} (not set): … start with torchrun", status=2, env=env)


LAUNCHERS = [
    Case("", "OMPI_COMM_WORLD_SIZE 4: … start with torchrun", status=2, env={"OMPI_COMM_WORLD_SIZE": "4"}),
    Case("", "PMI_SIZE 4: … start with torchrun", status=2, env={"PMI_SIZE": "4"}),
    *map(lacking, FOUR),
    refused_on_four("", "RANK 4: must be at least 0 and below WORLD_SIZE, which is 4", RANK="4"),
    refused_on_four("", "RANK '-1': must be a whole number", RANK="-1"),
    refused_on_four("", "WORLD_SIZE '2.5': must be a whole number", WORLD_SIZE="2.5"),
    refused_on_four("", "LOCAL_RANK 4: must be at least 0 and below LOCAL_WORLD_SIZE", LOCAL_RANK="4"),
    refused_on_four("", "WORLD_SIZE 4: must be a multiple of LOCAL_WORLD_SIZE 3", LOCAL_WORLD_SIZE="3"),
    refused_on_four("", "MASTER_PORT '70000': must be a whole number from 1", MASTER_PORT="70000"),
    on_four("", "MASTER_ADDR nowhere.invalid: … give rank 0's host", MASTER_ADDR="nowhere.invalid"),
    on_four("", "MASTER_ADDR 192.0.2.1: is not an address of … must be rank 0's", MASTER_ADDR="192.0.2.1"),
    on_four(
        ALONE, "WORLD_SIZE 4: ranks 1-3 of 4 (node 0) did not connect within --distributed-timeout-minut"
    ),
    on_four(
        ALONE, "29998: rank 1 on … cannot reach rank 0", RANK="1", LOCAL_WORLD_SIZE="1", MASTER_PORT="29998"
    ),
    refused_on_four("--global-batch-size 6", ": … 4 data-parallel ranks = 16, such as 16"),
    refused_on_four(
        "--zero-stage 3 --zero-hpz-partition-size 3",
        ": not possible on nodes of 4 data ranks; give 1, 2, 4 or auto",
    ),
    refused_on_four(
        "--zero-stage 1 --zero-quantized-weights --zero-quantized-weights-format delta4",
        ": needs 2 or more nodes; on one node use int8, or omit",
    ),
]
