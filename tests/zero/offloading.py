"""An offloaded optimizer on CPUs, where no stream has to be waited for."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch

from megatron_zpp.zero import adamw, optimizer


@contextmanager
def offloaded() -> Iterator[None]:
    """Engines that are built and stepped in this block have an OffloadedOptimizer, without a GPU."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(adamw, "DeviceOptimizer", optimizer.OffloadedOptimizer))
        stack.enter_context(patch.object(optimizer, "_pinned_like", torch.empty_like))
        for part in ("Stream", "stream", "current_stream"):
            stack.enter_context(patch.object(torch.cuda, part))
        yield
