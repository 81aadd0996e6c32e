"""`Compiler`: torch.compile for the dense stages, with settings that make results a function of the inputs.

    stage module ──first call with a shape: trace, generate, build──> code for this shape ──> every later call

* One shape, one compilation (`dynamic=False`). The last, smaller batch has its own code, and results do not depend on
  earlier batch sizes.
* No autotuning: inductor's deterministic mode selects every kernel by fixed rules.
* No graph breaks: a stage holds tensor operators only. torch refuses a stage that it cannot compile whole, with the
  reason.
* One compilation for all weights (`call_with_leaves`).
* Lanes of one process share a random generator. torch saves its state before it compiles and restores it, so nothing is
  compiled while another lane draws.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config

from bagpipe.dense.leaf_call import call_with_leaves
from bagpipe.dense.seeding import alone
from bagpipe.errors import InputError

__all__ = ["Compiler", "check_compiler"]

#: torch's default. Tests use a backend that generates no code.
BACKEND = "inductor"

#: Names of the C++ compilers that inductor looks for.
_CPP_COMPILERS = ("g++", "clang++", "c++")


class Compiler:
    """Compiles a module on its first call. A deep copy compiles its own module again.

    Args:
        saves_all: a backward computes no value of its forward again. With other weights than those of its forward it
            would compute another value.
    """

    def __init__(self, *, saves_all: bool = False) -> None:
        self._saves_all = saves_all
        self._call: Any = None
        self._settings: AbstractContextManager[Any] = nullcontext()  # of torch, while it compiles and calls
        self._known: set[Hashable] = set()  # what it has compiled for

    def __call__(self, module: nn.Module, *inputs: Tensor) -> tuple[Tensor, ...]:
        if self._call is None:
            options = _options(saves_all=self._saves_all)
            self._call = torch.compile(module, fullgraph=True, dynamic=False, backend=BACKEND, options=options)
            # Split backwards pass a graph twice, so its code may not write over what the forward has saved. Made once:
            # the context of a thread keeps something of each.
            self._settings = functorch_config.patch(donated_buffer=False)
        key = (torch.is_grad_enabled(), module.training, *((each.shape, each.requires_grad) for each in inputs))
        with self._settings, nullcontext() if key in self._known else alone():
            outputs = call_with_leaves(self._call, module, inputs)
        self._known.add(key)
        return outputs

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiler:
        return Compiler(saves_all=self._saves_all)


def check_compiler(device: torch.device) -> None:
    """Check that this machine can compile for a device.

    Raises:
        InputError: no C++ compiler, or no Triton for a CUDA device.
    """
    names = (os.environ["CXX"],) if os.environ.get("CXX") else _CPP_COMPILERS
    if not any(shutil.which(name) for name in names):
        raise InputError(f"run.compile needs a C++ compiler ({' or '.join(names)}) on PATH, there is none")
    if device.type == "cuda" and find_spec("triton") is None:
        raise InputError(f"run.compile needs triton for run.device {device}, which is not installed")


def _options(*, saves_all: bool = False) -> dict[str, Any] | None:
    if BACKEND != "inductor":
        return None  # torch's other backends compute nothing again
    options: dict[str, Any] = {"deterministic": True}
    if saves_all:
        from bagpipe.dense.saved_values import SavesAll

        options["custom_partitioner_fn"] = SavesAll()
    return options
