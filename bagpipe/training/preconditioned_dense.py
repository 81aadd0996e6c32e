"""`PreconditionedDense`: the whole model in one lane, its gradients preconditioned by K-FAC before each step.

F ──inputs──> COV_A     B ──output gradients──> COV_G     REDUCE_GRAD: gradients, and factors, over the ranks
X_INV: inverses of own layers     PRECOND: their gradients     X_BCAST: to all ranks     OPT: limit by kappa, step
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from bagpipe.dense.precondition.capture import LayerCapture
from bagpipe.dense.precondition.kfac import Kfac, step_limit
from bagpipe.pipeline.interpret import Handler
from bagpipe.schedule.builders.whole_model import declare_dense
from bagpipe.schedule.ir.loop_builder import LoopBuilder
from bagpipe.training.dense import WholeDense
from bagpipe.training.part import InFlightBatch, LoopRun

__all__ = ["PreconditionedDense"]


class PreconditionedDense(WholeDense):
    """The whole model, with K-FAC.

    Args:
        kfac: of the model's linear layers.
        settings: of `WholeDense`, without limits of gradients.
    """

    def __init__(self, *, kfac: Kfac, **settings: Any) -> None:
        super().__init__(**settings)
        self.kfac = kfac
        self.kfacs = {"model": kfac}
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        self._layers = frozenset(names[id(parameter)] for layer in kfac.layers for parameter in layer.parameters)
        self._capture: LayerCapture

    def declare(self, loop: LoopBuilder) -> None:
        declare_dense(loop, preconditions=True, broadcasts=self.kfac.is_shared)

    def handlers(self) -> Mapping[str, Handler]:
        shared = {"X_BCAST": self.broadcast} if self.kfac.is_shared else {}
        return {
            "F": self.forward,
            "B": self.backward,
            "COV_A": self.add_inputs,
            "COV_G": self.add_outputs,
            "REDUCE_GRAD": self.reduce,
            "X_INV": self.invert,
            "PRECOND": self.precondition,
            **shared,
            "OPT": self.apply,
        }

    def start(self, run: LoopRun) -> None:
        super().start(run)
        self.kfac.begin(run.earlier.dense)
        self._capture = self.kfac.capture(self.kfac.layers)

    def forward(self, b: int) -> None:
        if self.kfac.makes_factors(b):
            self._capture.during(b, partial(super().forward, b))
        else:
            super().forward(b)

    def add_inputs(self, b: int) -> None:
        """COV_A: the inputs of the layers."""
        self._capture.add_inputs(b, b)

    def add_outputs(self, b: int) -> None:
        """COV_G: the output gradients of the layers."""
        rank_batch = self._run.in_flight[b].rank_batch
        factor = rank_batch.num_global_examples / self.loss_scale.value
        self._capture.add_outputs(b, b, factor=factor, num_examples=rank_batch.batch.num_examples)

    def reduce(self, b: int) -> None:
        super().reduce(b)
        if self._run.in_flight[b].is_skipped:
            self.kfac.drop(b)
        else:
            self.kfac.add_up(b)

    def invert(self, b: int) -> None:
        """X_INV: the inverses of own layers."""
        for layer in self.kfac.owned:
            self.kfac.invert(b, layer)

    def precondition(self, b: int) -> None:
        """PRECOND: the gradients of own layers."""
        if not self._run.in_flight[b].is_skipped:
            self.loss_scale.unscale_parameters(self._held.stepped)
            self._held.show(self._layers)
            self.kfac.precondition()

    def broadcast(self, b: int) -> None:
        """X_BCAST: the gradients of all layers."""
        if not self._run.in_flight[b].is_skipped:
            self.kfac.share()

    def update(self, batch: InFlightBatch) -> None:
        lr = float(next(group["lr"] for group in self.optimizer.param_groups if group["params"]))
        self.kfac.limit(step_limit(self.kfac.sizes, kappa=self.kfac.settings.kappa, lr=lr))
        self._held.take_shown(self._layers)
        self.limited((), batch)  # of rows
        self._held.step()

    def end(self) -> None:
        self.kfac.end()
        super().end()
