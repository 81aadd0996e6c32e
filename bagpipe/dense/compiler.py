"""`Compiler`: torch.compile for the dense stages, held to what makes its results a function of the inputs.

    stage module ──first call with a shape: trace, generate, build──> code for this shape ──> every later call

* One shape, one code (`dynamic=False`): the last, smaller batch gets its own, and what a batch computes does not depend
  on which sizes came before.
* No choice by measured time: inductor's deterministic mode takes, for every kernel, the variant its rules name.
* No graph breaks: a stage holds tensor operators only; what cannot be compiled whole is refused by torch, which says
  why.
"""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from bagpipe.errors import InputError

__all__ = ["Compiler", "check_compiler"]

#: torch's own; tests use one that generates nothing.
BACKEND = "inductor"

#: The C++ compilers that inductor looks for, by the names they have.
_CPP_COMPILERS = ("g++", "clang++", "c++")


class Compiler:
    """Calls a module's compiled code. A copy of it (with a copied stage) compiles the copied module anew."""

    def __init__(self) -> None:
        self._call: Any = None

    def __call__(self, module: nn.Module, *inputs: Tensor) -> Any:
        if self._call is None:
            self._call = torch.compile(module, fullgraph=True, dynamic=False, backend=BACKEND, options=_options())
        return self._call(*inputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiler:
        return Compiler()


def check_compiler(device: torch.device) -> None:
    """Refuse to compile where that cannot work.

    Raises:
        InputError: no C++ compiler, or no Triton for a CUDA device.
    """
    names = (os.environ["CXX"],) if os.environ.get("CXX") else _CPP_COMPILERS
    if not any(shutil.which(name) for name in names):
        raise InputError(f"run.compile needs a C++ compiler ({' or '.join(names)}) on PATH, there is none")
    if device.type == "cuda" and find_spec("triton") is None:
        raise InputError(f"run.compile needs triton for run.device {device}, which is not installed")


def _options() -> dict[str, Any] | None:
    return {"deterministic": True} if BACKEND == "inductor" else None
