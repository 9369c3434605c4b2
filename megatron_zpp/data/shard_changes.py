"""Finds the first difference between the shards of a checkpoint and those of the present run."""

import os
from collections.abc import Sequence

from megatron_zpp.data.samples import ShardRecord


def changed_shard(saved: Sequence[ShardRecord], present: Sequence[ShardRecord]) -> str | None:
    """Return the name of a shard and what happened to it, None if all shards are as they were.

    Shards that were moved to another directory together are the same shards: of the same contents in the same
    order, whatever their names. A file that is where it was, but has another modification time, has changed:
    its contents are compared in part only.
    """
    contents = [[shard.contents for shard in shards] for shards in (saved, present)]
    moved = {shard.name for shard in saved}.isdisjoint(shard.name for shard in present)
    if moved and contents[0] == contents[1]:
        return None
    before, now = (_by_name(shards, moved) for shards in (saved, present))
    for name, shard in before.items():
        found = now.get(name)
        if found is None:
            return f"{shard.name} is missing since the checkpoint"
        if found.contents != shard.contents:
            return f"{found.name} has changed since the checkpoint"
        if not moved and found.modified != shard.modified:
            return f"{found.name} was modified since the checkpoint"
    added = next((shard for name, shard in now.items() if name not in before), None)
    if added is not None:
        return f"{added.name} is new since the checkpoint"
    return None if contents[0] == contents[1] else f"{present[0].name} and others have another order"


def _by_name(shards: Sequence[ShardRecord], moved: bool) -> dict[str, ShardRecord]:
    """Return the shards by name; of moved ones, the name is relative to the directory that holds them all."""
    parts = [shard.name.split("/") for shard in shards]
    shared = len(os.path.commonprefix([names[:-1] for names in parts])) if moved else 0
    return {"/".join(names[shared:]): shard for names, shard in zip(parts, shards, strict=True)}
