"""Finds the first difference between the shards of a checkpoint and those of the present run."""

import os
from collections.abc import Sequence

from megatron_zpp.data.samples import ShardRecord


def changed_shard(saved: Sequence[ShardRecord], present: Sequence[ShardRecord]) -> str | None:
    """Return the name of a shard and what happened to it, None if all shards are as they were.

    Shards that were moved to another directory together are the same shards. A file that is where it was, but
    has another modification time, has changed: its contents are compared in part only.
    """
    moved = {shard.name for shard in saved}.isdisjoint(shard.name for shard in present)

    def called(shard: ShardRecord) -> str:
        return os.path.basename(shard.name) if moved else shard.name

    now = {called(shard): shard for shard in present}
    for shard in saved:
        found = now.get(called(shard))
        if found is None:
            return f"{shard.name} is missing since the checkpoint"
        if found.contents != shard.contents:
            return f"{found.name} has changed since the checkpoint"
        if not moved and found.modified != shard.modified:
            return f"{found.name} was modified since the checkpoint"
    before = {called(shard) for shard in saved}
    added = next((shard for shard in present if called(shard) not in before), None)
    if added is not None:
        return f"{added.name} is new since the checkpoint"
    contents = [[shard.contents for shard in shards] for shards in (saved, present)]
    return None if contents[0] == contents[1] else f"{present[0].name} and others have another order"
