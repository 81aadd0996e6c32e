"""Selects torch or Triton kernels for a device.

    run.kernels   auto     CUDA: Triton if supported, else torch, with a warning that gives the reason; CPU: torch
                  torch    torch
                  triton   Triton, or an error that names what is missing

Triton kernels need Triton (part of torch's CUDA builds) and a device of compute capability 8.0 or later, the oldest
that Triton supports (its README, "Compatibility"). They also need a C compiler and the Python headers, with which
Triton builds its launcher; a test launch checks this. Under ``TRITON_INTERPRET=1``, ``triton`` also works on a CPU.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from dataclasses import dataclass

import torch

from bagpipe.errors import InputError
from bagpipe.kernels.initialization import TORCH_DTYPE
from bagpipe.kernels.interface import Bags, Kernels, RowView
from bagpipe.kernels.torch_kernels import TorchKernels
from bagpipe.types.schema import RowSchema

__all__ = ["MIN_CAPABILITY", "TritonSupport", "missing_support", "select_kernels"]

MIN_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonSupport:
    """Facts that decide whether Triton kernels run.

    Attributes:
        device: cpu or cuda.
        capability: compute capability of the CUDA device.
        has_triton: Triton is installed.
        is_interpreted: Triton's interpreter is enabled.
    """

    device: str
    capability: tuple[int, int] | None
    has_triton: bool
    is_interpreted: bool

    @classmethod
    def of(cls, device: torch.device) -> TritonSupport:
        return cls(
            device=device.type,
            capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
            has_triton=importlib.util.find_spec("triton") is not None,
            is_interpreted=os.environ.get("TRITON_INTERPRET") == "1",
        )


def missing_support(found: TritonSupport) -> str | None:
    """The reason why Triton kernels do not run, as the end of an error line; None if they do."""
    if not found.has_triton:
        return "Triton is not installed"
    if found.device != "cuda" and not found.is_interpreted:
        return f"run.device is {found.device}, and Triton's kernels need a CUDA device"
    if found.device == "cuda" and found.is_interpreted:
        return "TRITON_INTERPRET=1 is set, and Triton's interpreter is for the CPU"
    if found.capability is not None and found.capability < MIN_CAPABILITY:
        have, need = (".".join(map(str, version)) for version in (found.capability, MIN_CAPABILITY))
        return f"the device has compute capability {have}, and Triton's kernels need {need} or later"
    return None


def select_kernels(schema: RowSchema, device: torch.device, choice: str = "auto") -> Kernels:
    """The kernels for rows of a schema on a device.

    Args:
        schema: schema of the rows.
        device: device of the rows.
        choice: auto, torch or triton.

    Raises:
        InputError: `choice` is triton, and Triton kernels do not run here.
    """
    if choice == "torch" or (choice == "auto" and device.type != "cuda"):
        return TorchKernels(schema, device)
    problem = missing_support(TritonSupport.of(device))
    if problem is None:
        from bagpipe.kernels.triton_kernels import TritonKernels

        kernels = TritonKernels(schema, device)
        problem = _first_launch(kernels, schema, device)
        if problem is None:
            return kernels
    if choice == "triton":
        raise InputError(f"run.kernels is triton, but {problem}")
    warnings.warn(f"run.kernels = auto selects torch's kernels, which are slower: {problem}", stacklevel=2)
    return TorchKernels(schema, device)


def _first_launch(kernels: Kernels, schema: RowSchema, device: torch.device) -> str | None:
    """Launch a small kernel; returns the reason for a failure, as the end of an error line, or None.

    The launch also initialises Triton's driver in one thread, before several lanes use it.
    """
    rows = RowView(records=torch.zeros(1, 4, dtype=TORCH_DTYPE[schema.dtype], device=device), slot_index=None, dim=4)
    index = torch.zeros(1, dtype=torch.int32, device=device)
    try:
        kernels.pool(rows, Bags(indices=index, offsets=None, factors=None, mean=False))
    except Exception as error:  # from Triton, the C compiler or the driver
        first_line = next(iter(str(error).splitlines()), "")
        return f"a test launch of a Triton kernel failed: {type(error).__name__}: {first_line}"
    return None
