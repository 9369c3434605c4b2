"""Ranks that write each other's memory, as GPUs of one node do: processes that map the same files."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.distributed.comm_stream import CommStream


class SharedMemoryStream(CommStream):
    """A communication stream with peer buffers, between processes of this machine."""

    @property
    def writes_peers(self) -> bool:
        """See CommStream."""
        return True

    def peer_buffers(self, nbytes: int) -> list[Tensor]:
        """See CommStream."""
        directory = [tempfile.mkdtemp()]
        dist.broadcast_object_list(directory, src=self.ranks[0], group=self._group)
        self._barrier_buffers = torch.zeros(len(self.ranks)), torch.zeros(len(self.ranks))
        files = (str(Path(directory[0], str(group_rank))) for group_rank in range(len(self.ranks)))
        return [torch.from_file(file, shared=True, size=nbytes, dtype=torch.uint8) for file in files]
