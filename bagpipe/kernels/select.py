"""Which kernels a device gets.

    run.kernels   auto     CUDA: Triton's where they run, else torch's, with a warning that says why; CPU: torch's
                  torch    torch's
                  triton   Triton's, or one line that says what is missing

Triton's want Triton itself (torch's CUDA builds bring it) and a device of compute capability 8.0 or later, the oldest
that Triton supports (its README, "Compatibility"). They also want a C compiler and Python's headers, of which Triton
makes what it launches with: whether that works is found by launching one. Under ``TRITON_INTERPRET=1`` they also run on
a CPU, by name.
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
    """What decides where Triton's kernels run.

    Attributes:
        device: cpu or cuda.
        capability: compute capability of the CUDA device.
        has_triton: Triton is installed.
        is_interpreted: Triton's interpreter is asked for.
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
    """Why Triton's kernels do not run: the rest of a line; None: they do."""
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
        schema: of the rows.
        device: where they live.
        choice: auto, torch or triton.

    Raises:
        InputError: Triton's are asked for, and do not run here.
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
    warnings.warn(f"rows are computed on with torch's operations, which are slower: {problem}", stacklevel=2)
    return TorchKernels(schema, device)


def _first_launch(kernels: Kernels, schema: RowSchema, device: torch.device) -> str | None:
    """Launch a small kernel. Why it fails: the rest of a line; None: it does not.

    It also makes Triton's driver in one thread, before several lanes ask for it.
    """
    rows = RowView(records=torch.zeros(1, 4, dtype=TORCH_DTYPE[schema.dtype], device=device), slot_index=None, dim=4)
    index = torch.zeros(1, dtype=torch.int32, device=device)
    try:
        kernels.pool(rows, Bags(indices=index, offsets=None, factors=None, mean=False))
    except Exception as error:  # whatever Triton, a C compiler and a driver have to say
        first_line = next(iter(str(error).splitlines()), "")
        return f"the first of Triton's kernels did not run: {type(error).__name__}: {first_line}"
    return None
