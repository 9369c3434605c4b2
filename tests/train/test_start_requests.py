"""What ranks ask of the storage of checkpoints at a start: as much with many checkpoints as with few."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from megatron_zpp.checkpoint.directory import checkpoint_name
from megatron_zpp.checkpoint.manifest import MARKER
from megatron_zpp.config.run import CheckpointConfig
from megatron_zpp.storage.location import location
from megatron_zpp.storage.objects import path as object_path
from megatron_zpp.train.resume import start as start_of_run
from megatron_zpp.train.resume.checkpoint_arguments import read_arguments
from tests.object_server import BUCKET, object_server

URL = f"s3://{BUCKET}/checkpoints"
CHECKPOINTS = 40
MODEL: Any = None  # no check of a --load that is no published model reads it


@pytest.fixture(scope="module")
def requests() -> Iterator[list[str]]:
    """Requests to an object store with many checkpoints; only their markers exist."""
    sent: list[str] = []
    send = object_path.request
    with object_server() as server, pytest.MonkeyPatch.context() as patch:
        for iteration in range(1, CHECKPOINTS + 1):
            server.put(f"checkpoints/{checkpoint_name(iteration)}/{MARKER}", b"")
        patch.setattr(object_path, "request", lambda *what, **how: sent.append(what[1]) or send(*what, **how))
        yield sent


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"load": URL}, None),
        ({"load": URL, "ckpt_step": CHECKPOINTS}, None),
        ({"load": URL, "save": f"s3://{BUCKET}/other", "finetune": True}, None),
        ({"load": URL, "ckpt_step": 7}, f"--ckpt-step 7: {checkpoint_name(CHECKPOINTS)} in --save"),
        ({"load": URL, "finetune": True}, f"the next start would load {checkpoint_name(CHECKPOINTS)} there"),
        ({}, f"the next start would load {checkpoint_name(CHECKPOINTS)} there"),
    ],
)
def test_a_rank_looks_for_few_markers_before_it_joins_and_finds_a_newer_checkpoint(
    requests: list[str], flags: dict[str, Any], problem: str | None
) -> None:
    requests.clear()
    with pytest.raises(ValueError, match=problem) if problem else nullcontext():
        start_of_run.check_start(CheckpointConfig(**{"save": URL, **flags}), MODEL, {})
    assert requests[:2] == ["put_object", "delete_object"]  # whether --save can be written to
    assert len(requests) <= (6 if problem else 5)


def test_a_lost_marker_costs_one_more_request(requests: list[str]) -> None:
    """The older checkpoint is found, and --ckpt-step names all that there are."""
    lost = location(URL) / checkpoint_name(CHECKPOINTS)
    (lost / MARKER).unlink()
    (lost / "state.json").write(b"{}")
    requests.clear()
    found = next(start_of_run.each_candidate(URL))
    assert found == location(URL) / checkpoint_name(CHECKPOINTS - 1)
    assert requests == ["list_objects_v2", "head_object", "head_object"]
    with pytest.raises(ValueError, match=rf"--ckpt-step {CHECKPOINTS}: .* iterations there: 1, .*, 39$"):
        read_arguments(URL, CHECKPOINTS)
    (lost / "state.json").unlink()
    (lost / MARKER).write(b"")
