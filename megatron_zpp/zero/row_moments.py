"""NorMuon (2510.05491): each row of what Newton-Schulz made is divided by its root mean square over steps.

Matrices keep their norms, so that --muon-scale-mode says the size of an update as without it.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron_zpp.distributed.comm_stream import CommStream, Pending
from megatron_zpp.zero.whole_matrices import Round

_EPSILON, _NORM_EPSILON = 1e-8, 1e-7  # of a row's root mean square, and of a matrix's norm


def scale_rows_(matrices: Tensor, moments: Tensor, beta2: float, skipped: Tensor) -> None:
    """Divide the rows of matrices (n, rows, columns) of any float format by the roots of their moments.

    `moments` (n, rows, 1) fp32 take in the rows' mean squares first, unless `skipped` () is not 0.
    """
    norms = torch.linalg.vector_norm(matrices, dim=-1, keepdim=True, dtype=torch.float32)
    averages = moments.lerp(norms.square() / matrices.shape[-1], 1 - beta2)
    moments.copy_(torch.where(skipped != 0, moments, averages))
    factors = (averages.sqrt() + _EPSILON).reciprocal()
    before, after = (
        torch.linalg.vector_norm(each, dim=-2, keepdim=True) for each in (norms, norms * factors)
    )
    matrices.mul_(factors * (before / (after + _NORM_EPSILON)))


class RowMoments:
    """The moments of all rows of a round's matrices, on every rank of the node: rank 0 can save them all.

    `parts`: the matrices of the round with their moments, each (rows,) fp32.
    """

    def __init__(self, work: Round, beta2: float, stream: CommStream, device: torch.device) -> None:
        """`stream`: among the ranks of the node."""
        self._beta2, self._stream = beta2, stream
        self._all = torch.zeros(work.rows, device=device)
        by_rank = self._all.chunk(len(work.matrices))
        self._own, own = by_rank[stream.group_rank], by_rank[stream.group_rank]
        self._batches = []
        for count, rows, _ in (batch.shape for batch in work.batches):
            self._batches.append(own[: count * rows].view(count, rows, 1))
            own = own[count * rows :]
        self.parts = [
            (matrix, part)
            for matrices, flat in zip(work.matrices, by_rank, strict=True)
            for sizes in [[len(each.rows) for each in matrices]]
            for matrix, part in zip(matrices, flat[: sum(sizes)].split(sizes), strict=True)
        ]

    def scale(self, batches: Sequence[Tensor], skipped: Tensor) -> Pending:
        """Divide the rows of the round's `batches` on this rank; returns the exchange of their moments."""
        for batch, moments in zip(batches, self._batches, strict=True):
            scale_rows_(batch, moments, self._beta2, skipped)
        return self._stream.submit(lambda: self._stream.all_gather(self._all, self._own))


def by_parameter(rounds: Iterable[RowMoments]) -> dict[str, list[Tensor]]:
    """The moments of the rows of each parameter, in order."""
    found: dict[str, list[Tensor]] = {}
    parts = (part for of_round in rounds for part in of_round.parts)
    for matrix, moments in sorted(parts, key=lambda part: part[0].rows.start):
        found.setdefault(matrix.placement.name, []).append(moments)
    return found
