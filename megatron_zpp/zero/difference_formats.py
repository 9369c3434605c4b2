"""Decides which units send their weight differences with more bits than the run's format has, step by step.

A unit whose codes fall behind its weights is raised: it sends 8 bits.

Let u be the norm of a step's update and e that of what the codes had missed before, so that the difference
which is coded has a norm of u + e or less. If codes miss the share p of its squares, then e settles at no
more than q / (1 - q) times u, q = sqrt(p): at twice the update for p = 4/9. So the difference and what its
codes miss, both of one step, decide. The update itself would have to be kept, and would raise every unit of a
sound run whose learning rate ends at 0.

    step t        every rank sums the squares of the differences and of what their codes miss, per unit
    step t + 1    all ranks add them up, in the all-reduce of the gradient norm, and the device decides
    step t + 2    the host, which never waits for the device here, reads the decision: 8 bits in this step

A raised unit is coded with the run's format as well, to find out whether that suffices again. Where nothing
was coded, as in a skipped step, the decision before it stays. Decisions depend on whole units, not on how
data ranks shard them, and all ranks take the same ones. What all tensor ranks have, such as norms, counts
once for each of them.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_zpp.exchange.route import CodeFormat, eight_bits
from megatron_zpp.ops.formats import LloydMaxFormat

LOST_SHARE = 4 / 9  # of the squares of differences


class DifferenceFormats:
    """The formats of one run, whose units send codes of `format` unless they are raised."""

    def __init__(self, format: LloydMaxFormat, units: int, device: torch.device) -> None:
        self.format = format
        on_gpu = device.type == "cuda"
        self.measured = torch.zeros(units, 2, dtype=torch.float64, device=device)
        self._behind = torch.zeros(units, dtype=torch.bool, device=device)  # the newest decision
        self._decided = torch.zeros(units, dtype=torch.bool, pin_memory=on_gpu)  # its copy to the host
        self._copied = torch.cuda.Event() if on_gpu else None
        self._raised = [False] * units

    def sent(self, index: int) -> CodeFormat:
        """The format in which unit `index` travels in the present step."""
        return eight_bits(self.format) if self._raised[index] else self.format

    @property
    def raised(self) -> int:
        """The number of units that send 8 bits in the present step."""
        return sum(self._raised)

    def decide(self, measured: Tensor) -> None:
        """Begin a step: `measured` (units, 2) fp64 are the sums over all ranks of the step before.

        What was decided a step ago is in force from now on. The copy to the host is that of a step ago, which
        the device has finished: a run reads whether that step was skipped before it begins this one.
        """
        if self._copied is not None:
            self._copied.synchronize()
        self._raised = self._decided.tolist()
        difference, lost = measured.unbind(1)
        self._behind = torch.where(difference == 0, self._behind, lost > LOST_SHARE * difference)
        self._decided.copy_(self._behind, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def state(self, measured: Tensor) -> dict[str, Any]:
        """Return as JSON what decides the next two steps; `measured` as in `decide`. Waits for the device."""
        if self._copied is not None:
            self._copied.synchronize()
        return {"raised": self._decided.tolist(), "measured": measured.tolist()}

    def load_state(self, state: dict[str, Any] | None, *, first_rank: bool) -> None:
        """Restore what `state` returned, or a run's start if None. One rank keeps the sums of all."""
        if self._copied is not None:
            self._copied.synchronize()
        raised = [False] * len(self._raised) if state is None else state["raised"]
        self._decided.copy_(torch.tensor(raised))
        self._behind.copy_(self._decided)
        self.measured.zero_()
        if state is not None and first_rank:
            self.measured.copy_(torch.tensor(state["measured"], dtype=torch.float64))
