"""`Roofline`: seconds that the tensor operations of a block of code would take on another device.

operation ──shapes──> operations, bytes of inputs and outputs ──Device.roofline_s──> seconds, added up

An operation takes a call, and then as long as its arithmetic or its bytes need, whichever is longer (Williams et al.,
2009). Views and allocations take no time. Kernels are not fused: every tensor is read from and written to the device's
memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from bagpipe.cluster.model import Device

__all__ = ["Roofline"]

#: Operations that write nothing.
_ALLOCATIONS = frozenset({torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided})


class Roofline(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its metaclass hook is not annotated
    """Adds up the operations inside its context. On the meta device nothing is computed.

    Args:
        device: whose rates count.
        dtype: of the arithmetic, a key of `Device.flops`.

    Attributes:
        seconds: so far.

    Raises:
        InputError: in the context: the device has no rate for the dtype.
    """

    def __init__(self, device: Device, dtype: str = "float32") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds = 0.0
        self._device = device
        self._dtype = dtype

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if not (func.is_view or func.overloadpacket in _ALLOCATIONS):
            count = flop_registry.get(func.overloadpacket)
            flops = count(*args, **(kwargs or {}), out_val=found) if count is not None else 0
            tensors = [each for each in tree_leaves((args, kwargs, found)) if isinstance(each, torch.Tensor)]
            num_bytes = sum(tensor.nbytes for tensor in tensors)
            self.seconds += self._device.roofline_s(flops, num_bytes, self._dtype)
        return found
