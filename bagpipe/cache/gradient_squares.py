"""Squared norm of the gradients of a batch's rows, each summed over the batch: the same bits wherever the rows are.

    Gradients of a table group ──sum──> one per row ──squared norms──> limbs, added over groups and ranks ──> total

Owners of rows differ between cached and direct training. The sum over rows is exact (`bagpipe.kernels.exact_sum`), so
it does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from bagpipe.kernels.exact_sum import NUM_LIMBS, limbs_of, squared_norms
from bagpipe.kernels.interface import Gradients, Kernels

__all__ = ["limbs_of_gradients"]


def limbs_of_gradients(kernels: Kernels, groups: Iterable[Sequence[Gradients]], device: torch.device) -> Tensor:
    """int64 ``[NUM_LIMBS]``: the sum of the squared gradients of rows, each row once.

    Args:
        kernels: sum the gradients.
        groups: gradients of distinct rows; none of the sequences is empty.
        device: of the gradients.
    """
    limbs = torch.zeros(NUM_LIMBS, dtype=torch.int64, device=device)
    for gradients in groups:
        limbs += limbs_of(squared_norms(kernels.sum(gradients)))
    return limbs
