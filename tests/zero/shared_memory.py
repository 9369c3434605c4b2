"""Ranks that write each other's memory, as GPUs of one node do: processes that map the same files."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.zero.lane import Lane


class SharedLane(Lane):
    """A lane of processes of this machine that has rooms."""

    def rooms(self, nbytes: int) -> list[Tensor]:
        """See Lane."""
        directory = [tempfile.mkdtemp()]
        dist.broadcast_object_list(directory, src=self.ranks[0], group=self._group)
        self._met = torch.zeros(len(self.ranks)), torch.zeros(len(self.ranks))
        files = (str(Path(directory[0], str(place))) for place in range(len(self.ranks)))
        return [torch.from_file(file, shared=True, size=nbytes, dtype=torch.uint8) for file in files]
