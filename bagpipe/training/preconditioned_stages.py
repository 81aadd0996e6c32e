"""`PreconditionedStages`: the dense part in stages, with K-FAC: every stage owns its layers.

F, REC ──inputs──> COV_A    B, I W ──output gradients──> COV_G    REDUCE_COV  X_INV  PRECOND  X_BCAST per stage
X_KL: sizes of the steps of all stages, of which kappa limits the sum      OPT: that limit, step
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from bagpipe.dense.clip import Limited
from bagpipe.dense.precondition.capture import LayerCapture
from bagpipe.dense.precondition.kfac import Kfac, step_limit
from bagpipe.dense.precondition.layers import linear_layers
from bagpipe.dense.precondition.step_sizes import StepSizes
from bagpipe.pipeline.interpret import Handler
from bagpipe.pipeline.stream import keep_for_current_stream
from bagpipe.schedule.ir.actions import Action
from bagpipe.training.part import LoopRun
from bagpipe.training.staged_dense import StagedDense

__all__ = ["PreconditionedStages"]


class PreconditionedStages(StagedDense):
    """The stages of this process, with K-FAC.

    Args:
        kfacs: of each local stage with linear layers.
        sizes: sums the sizes of all stages' steps.
        settings: of `StagedDense`, without limits of gradients.
    """

    def __init__(self, *, kfacs: Mapping[int, Kfac], sizes: StepSizes, **settings: Any) -> None:
        super().__init__(**settings)
        self._kfacs = kfacs
        self.kfacs = {str(stage): kfac for stage, kfac in kfacs.items()}
        self._sizes = sizes
        self._captures: Mapping[int, LayerCapture] = {}
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        layers = [layer for kfac in kfacs.values() for layer in kfac.layers]
        self._layers = frozenset(names[id(parameter)] for layer in layers for parameter in layer.parameters)

    def reduce(self, stage: int, b: int) -> None:
        super().reduce(stage, b)
        if stage in self._kfacs and stage in self.pipeline.shares:
            self.pipeline.shares[stage].show(self._layers)

    def start(self, run: LoopRun) -> None:
        for kfac in self._kfacs.values():
            kfac.begin(run.earlier.dense)  # before the runtime copies modules, with their hooks
        super().start(run)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        found: dict[int, LayerCapture] = {}
        for instance in self.pipeline.step.instances:
            if instance.process == self.pipeline.process and instance.stage in self._kfacs:
                module = self._runtime.runner(instance.number).module  # of a second pipe: a copy with its own gradients
                pairs = zip(
                    module.parameters(), self.pipeline.staged.stages[instance.stage].module.parameters(), strict=True
                )
                twins = {id(twin): names[id(parameter)] for twin, parameter in pairs}
                found[instance.number] = self._kfacs[instance.stage].capture(linear_layers(module, twins))
        self._captures = found

    def handlers(self) -> Mapping[str, Handler]:
        handlers = dict(super().handlers())
        ops = {
            "COV_A": self.add_inputs,
            "COV_G": self.add_outputs,
            "REDUCE_COV": self.add_up,
            "X_INV": self.invert,
            "PRECOND": self.precondition,
            "X_BCAST": self.broadcast,
            "X_KL": self.measure_steps,
        }
        for text, atom in self._atoms().items():
            if atom.op in ops:
                handlers[text] = partial(ops[atom.op], atom.stage)
            elif atom.op in ("F", "REC") and atom.stage in self._captures:
                handlers[text] = partial(self._captured, atom.stage, handlers[text])
        return handlers

    def _atoms(self) -> Mapping[str, Action]:
        """The operations of this process, by the text of their templates."""
        step, process = self.pipeline.step, self.pipeline.process
        lanes = (*step.lanes_of(process), f"reduce{process}")
        return {
            f"{atom.stage}{atom.op}": atom
            for lane in lanes
            for action in step.program.lanes.get(lane, ())
            for atom in action.atoms
        }

    def _captured(self, instance: int, forward: Handler, index: int) -> None:
        if self._kfacs[self._stage_of[instance]].makes_factors(index // self._units[instance]):
            self._captures[instance].during(index, partial(forward, index))
        else:
            forward(index)

    def add_inputs(self, instance: int, index: int) -> None:
        """COV_A: the inputs of a micro-batch."""
        self._captures[instance].add_inputs(index, index // self._units[instance])

    def add_outputs(self, instance: int, index: int) -> None:
        """COV_G: the output gradients of a micro-batch."""
        b = index // self._units[instance]
        factor = self._run.in_flight[b].rank_batch.num_global_examples / self.loss_scale.value
        num_examples = self._runtime.runner(instance).num_examples(index)
        self._captures[instance].add_outputs(index, b, factor=factor, num_examples=num_examples)

    def add_up(self, instance: int, b: int) -> None:
        """REDUCE_COV: sums of factors of a batch over the holders."""
        self._kfac(instance).add_up(b)

    def invert(self, instance: int, index: int) -> None:
        """X_INV: the inverses of a layer."""
        kfac = self._kfac(instance)
        kfac.invert(*divmod(index, len(kfac.layers)))

    def precondition(self, instance: int, b: int) -> None:
        """PRECOND: the gradients of own layers."""
        stage, batch = self._stage_of[instance], self._run.in_flight[b]
        shown = [p for name, p in self.chunks[str(stage)].parameters if name in self._layers]
        parameters = [*{id(each): each for each in (*self.pipeline.stepped(stage), *shown)}.values()]
        for parameter in parameters:
            if parameter.grad is not None:
                keep_for_current_stream(parameter.grad)  # of the lane that sums gradients
        num_examples = self._stage_batch(b).num_global_examples
        batch.is_reached[stage] = self.pipeline.scale(stage, b, num_examples, parameters)
        self.loss_scale.unscale_parameters(parameters)
        self._kfac(instance).precondition()

    def broadcast(self, instance: int, b: int) -> None:
        """X_BCAST: the gradients of all layers of a stage."""
        self._kfac(instance).share()

    def measure_steps(self, instance: int, b: int) -> None:
        """X_KL: the size of the step over all stages."""
        self._sizes.add_up(self._kfacs)

    def measure(self, stage: int, b: int) -> None:
        if stage not in self._kfacs:  # else PRECOND has changed its gradients
            super().measure(stage, b)

    def leave_out(self, stage: int, b: int) -> None:
        if stage in self._kfacs:
            self._kfacs[stage].limit(None)  # forget what PRECOND has found: nothing
        super().leave_out(stage, b)

    def update(self, stage: int, b: int, limited: Limited | None) -> None:
        kfac = self._kfacs.get(stage)
        if kfac is not None:
            lr = float(self.pipeline.optimizers[stage].param_groups[0]["lr"])
            kfac.limit(step_limit(self._sizes.all, kappa=kfac.settings.kappa, lr=lr))
            if stage in self.pipeline.shares:
                self.pipeline.shares[stage].take_shown(self._layers)
        super().update(stage, b, limited)

    def end(self) -> None:
        for kfac in self._kfacs.values():
            kfac.end()
        super().end()

    def _kfac(self, instance: int) -> Kfac:
        return self._kfacs[self._stage_of[instance]]
