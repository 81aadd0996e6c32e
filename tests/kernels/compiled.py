"""Compiles the kernels that `TritonKernels` launches for a GPU, without a GPU and without running them.

TritonKernels(launch=compiler) ──Launch──> Triton, its driver replaced by the name of a GPU ──> PTX, SASS, registers
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from bagpipe.kernels.triton_kernels import Launch

__all__ = ["Compiled", "Compiler", "usage"]

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class _NamedGpu:
    """A stand-in for Triton's GPU driver, with a given compute capability."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """One kernel.

    Attributes:
        name: of the function.
        ptx: its code, as Triton gives it to ptxas.
        cubin: what ptxas makes of it.
        arguments: what it was launched with.
    """

    name: str
    ptx: str
    cubin: bytes
    arguments: Mapping[str, Any]

    def count(self, pattern: str) -> int:
        """Instructions of the PTX that match, from their beginning."""
        return len(re.findall(rf"^\s*(?:@%?!?\w+\s+)?(?:{pattern})", self.ptx, re.MULTILINE))


class Compiler:
    """Receives launches and keeps the compiled kernels.

    Args:
        capability: 80, 90, ….
    """

    def __init__(self, capability: int) -> None:
        self._capability = capability
        self.kernels: list[Compiled] = []

    def __call__(self, launch: Launch) -> None:
        with _driver(_NamedGpu(self._capability)):
            kernel = launch.kernel.run(grid=launch.grid, warmup=True, **launch.arguments, **launch.options)
        self.kernels.append(
            Compiled(
                name=launch.kernel.__name__,
                ptx=kernel.asm["ptx"],
                cubin=kernel.asm["cubin"],
                arguments=launch.arguments,
            )
        )


@contextmanager
def _driver(stub: _NamedGpu) -> Iterator[None]:
    config = triton.runtime.driver
    before = config._active
    config.set_active(stub)
    try:
        yield
    finally:
        config._active = before


def usage(kernel: Compiled, folder: Path) -> dict[str, int]:
    """Registers (REG), bytes of stack (STACK) and of spilled registers (LOCAL), as cuobjdump reports them."""
    file = folder / f"{os.getpid()}.cubin"
    file.write_bytes(kernel.cubin)
    command = [str(_TOOLS / "cuobjdump"), "--dump-resource-usage", str(file)]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=250).stdout
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", text)}
