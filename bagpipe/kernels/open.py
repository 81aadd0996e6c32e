"""Which kernels a device gets."""

from __future__ import annotations

import torch

from bagpipe.kernels.interface import Kernels
from bagpipe.kernels.torch_kernels import TorchKernels
from bagpipe.schema import RowSchema

__all__ = ["open_kernels"]


def open_kernels(schema: RowSchema, device: torch.device) -> Kernels:
    """The kernels for rows of a schema on a device."""
    return TorchKernels(schema, device)
