"""`DenseStage`: a stage of a model under autocast, optionally compiled on its first call.

Each stage enters autocast itself, in the thread of its lane. A model in stages therefore computes what the whole model
computes, and values between stages have the dtypes that the operators of the whole model see.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn

from bagpipe.dense.compiler import Compiler
from bagpipe.dense.precision import Precision
from bagpipe.split.staged_model import StagedModel

__all__ = ["DenseStage", "prepared"]


class DenseStage(nn.Module):
    """A module as a stage of one rank. It has the parameters and buffers of `inner`.

    Args:
        inner: the module.
        precision: what it computes in.
        compiler: of its forward; None: operator by operator.
    """

    def __init__(self, inner: nn.Module, precision: Precision, compiler: Compiler | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.training = inner.training
        self._precision = precision
        self._compiler = compiler

    @property
    def is_compiled(self) -> bool:
        """Whether the forward is compiled."""
        return self._compiler is not None

    def by_operator(self) -> DenseStage:
        """The same stage, computed operator by operator."""
        return DenseStage(self.inner, self._precision)

    def forward(self, *inputs: Any) -> tuple[Tensor, ...]:
        with self._precision.autocast():
            outputs: tuple[Tensor, ...]
            outputs = self.inner(*inputs) if self._compiler is None else self._compiler(self.inner, *inputs)
        return outputs


def prepared(
    staged: StagedModel, precision: Precision, *, compiles: bool = False, saves_all: bool = False
) -> StagedModel:
    """The same model with lookups and stages under autocast, and its stages compiled if asked.

    The embedding stage is not compiled: what it does is done by the kernels of rows.

    Args:
        staged: split from the model's graph under this autocast, so that the dtypes of its values fit.
        precision: what it computes in.
        compiles: whether to compile.
        saves_all: see `Compiler`.
    """
    if precision.autocast_dtype is None and not compiles:
        return staged

    def prepare(module: nn.Module) -> DenseStage:
        return DenseStage(module, precision, Compiler(saves_all=saves_all) if compiles else None)

    return dataclasses.replace(
        staged,
        embedding=DenseStage(staged.embedding, precision),
        stages=tuple(dataclasses.replace(stage, module=prepare(stage.module)) for stage in staged.stages),
    )
