"""`SerialVersions`: training by a program's table of weight versions, in one thread, with plain torch operations.

    version_table(program) ──> weights of every F and B
    batch b:   for every micro-batch   F of stages 0, 1, …, then the loss, then B of stages …, 1, 0
               for every stage         a step with the sum of the gradients; the new version, and predictions from it

The reference of tests and of `run.verify`. It shares the table and the rules of prediction with them, nothing else: no
lanes, no order of a pipeline, no buffers that are used again. A synchronous program gives plain training.

Where backwards are partial (`Backwards`), those that are left out give nothing, to parameters and to earlier stages. A
stage's gradient, and what it gives to the given values, is multiplied by a factor of its own.

A backward that has other weights than its forward: activations are those of the forward, and where a derivative needs
weights, they are those of the backward. (What a framework computes that exchanges the weights between the two.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from bagpipe.pipeline.stage.prediction import WeightPredictor
from bagpipe.schedule.analysis.versions import Weights, version_table
from bagpipe.schedule.ir.program import Program

__all__ = ["Backwards", "SerialStage", "SerialVersions", "TrainedBatch"]

#: Values of a micro-batch by name.
Values = Mapping[str, Tensor]
#: Parameters of a stage by name.
Parameters = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class SerialStage:
    """A stage of the model.

    Attributes:
        module: called with the inputs; returns a tensor, or a tuple of them.
        inputs: names of values that the micro-batch gives, or an earlier stage.
        outputs: names of its results.
    """

    module: nn.Module
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedBatch:
    """The loss and gradients of a batch.

    Attributes:
        loss: sum of the micro-batches' losses.
        gradients: per micro-batch, the gradients of the given values that ask for one.
    """

    loss: float
    gradients: tuple[Mapping[str, Tensor], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backwards:
    """The backwards of a batch.

    Attributes:
        computed: per micro-batch, the stages that compute it: all consumers of a stage's outputs if the stage does;
            None: all compute each. A stage without any makes no step.
        factors: stage -> factor of its gradients; 1 where it is missing.
        scale: of the loss: gradients are computed of the loss times this number, and divided by it.
    """

    computed: Sequence[Set[int]] | None = None
    factors: Mapping[int, float] = field(default_factory=dict)
    scale: float = 1.0

    def has(self, unit: int, stage: int) -> bool:
        """Whether a stage computes the backward of a micro-batch."""
        return self.computed is None or stage in self.computed[unit]

    def reaches(self, stage: int) -> bool:
        """Whether a stage computes any."""
        return self.computed is None or any(stage in stages for stages in self.computed)

    def factor(self, stage: int) -> float:
        """From what a backward of a stage gives to its gradients."""
        return self.factors.get(stage, 1.0) / self.scale


_WHOLE = Backwards()


@dataclass(slots=True, eq=False)
class _Forward:
    """A forward of a stage: what its backward needs.

    Attributes:
        inputs, outputs: values by name, ends of a graph of its own.
        parameters: of the forward.
        backward: of the backward.
    """

    inputs: dict[str, Tensor]
    parameters: Parameters
    backward: Parameters
    outputs: dict[str, Tensor] = field(default_factory=dict)


class SerialVersions:
    """See the module.

    Args:
        stages: stage s of the program is number s. Its module has the initial weights, and later the newest ones.
        make_optimizer: (number of a stage, its parameters) -> its optimizer; None: the stage trains no parameter.
        loss: loss of a micro-batch, of its values by name. What is minimized is the sum over a batch's micro-batches.
        program: of at least as many batches as are trained. A synchronous one can be of one batch.
        prepare: called with a batch between its backwards and its steps. It may change the gradients of the parameters
            of the stages' modules, and says whether the stages step; False: the batch only counts as a version.

    Raises:
        InputError: the program predicts weights of an optimizer that has no rule for it.
        ScheduleError: the program's versions are not valid.
    """

    def __init__(
        self,
        stages: Sequence[SerialStage],
        make_optimizer: Callable[[int, list[nn.Parameter]], torch.optim.Optimizer | None],
        loss: Callable[[Values], Tensor],
        program: Program,
        prepare: Callable[[TrainedBatch], bool] = lambda batch: True,
    ) -> None:
        self._stages = tuple(stages)
        self._loss = loss
        self._prepare = prepare
        made = {n: make_optimizer(n, list(s.module.parameters())) for n, s in enumerate(self._stages)}
        self._optimizers = {number: optimizer for number, optimizer in made.items() if optimizer is not None}
        self._weights: dict[tuple[int, str, int, int], Weights] = {}
        self._last_use: dict[tuple[int, Weights], int] = {}
        for use in () if program.semantics == "sync" else version_table(program):
            if use.of in ("forward", "backward"):
                unit = (use.action.index or 0) % program.units_per_batch((use.action.stage, use.action.op))
                self._weights[use.stage, use.of, use.batch, unit] = use.weights
                self._last_use[use.stage, use.weights] = max(use.batch, self._last_use.get((use.stage, use.weights), 0))
        self._units = 1 + max((unit for *_, unit in self._weights), default=0)
        self._is_sync = program.semantics == "sync"
        predicted = sorted({stage for stage, weights in self._last_use if weights.steps and stage in self._optimizers})
        self._predictors = {stage: WeightPredictor(self._optimizers[stage]) for stage in predicted}
        self._kept: dict[tuple[int, Weights], Parameters] = {}
        self._batch = 0
        self.keep()

    def parameters(self, stage: int) -> Mapping[str, Tensor]:
        """Copies of the newest weights of a stage, by name."""
        return {name: p.detach().clone() for name, p in self._stages[stage].module.named_parameters()}

    def train(self, micro_batches: Sequence[Values], backwards: Backwards = _WHOLE) -> TrainedBatch:
        """Train the next batch.

        Args:
            micro_batches: of each the given values by name; of all replicas, one after the other. Those of a batch have
                the same weights.
            backwards: which are computed.
        """
        sums: list[dict[str, Tensor]] = [{} for _ in self._stages]
        loss, given = 0.0, []
        for unit, values in enumerate(micro_batches):
            forwards, ends = self._forwards(unit, values)
            total = self._loss(ends)
            loss += float(total.detach())
            gradients = _gradients({"loss": total}, {"loss": torch.full_like(total, backwards.scale)}, ends)
            own: dict[str, Tensor] = {}  # of the given values
            for number in (n for n in reversed(range(len(self._stages))) if backwards.has(unit, n)):
                forward = forwards[number]
                found = _gradients(forward.outputs, gradients, {**forward.inputs, **_marked(forward.parameters)})
                for name, gradient in found.items():
                    if name in values:
                        _add(own, name, gradient * backwards.factor(number))
                    elif name in forward.inputs:
                        _add(gradients, name, gradient)
                    else:
                        _add(sums[number], name.removeprefix(_PARAMETER), gradient)
            given.append(own)
        for number, stage in enumerate(self._stages):
            for name, parameter in stage.module.named_parameters():
                gradient_sum = sums[number].get(name)
                parameter.grad = None if gradient_sum is None else gradient_sum * backwards.factor(number)
        trained = TrainedBatch(loss=loss, gradients=tuple(given))
        is_stepped = self._prepare(trained)
        for number, optimizer in self._optimizers.items():
            if is_stepped and backwards.reaches(number):
                optimizer.step()
                if number in self._predictors:
                    self._predictors[number].stepped()
            optimizer.zero_grad(set_to_none=True)
        self._batch += 1
        self.keep()
        return trained

    def _forwards(self, unit: int, given: Values) -> tuple[list[_Forward], dict[str, Tensor]]:
        """F of every stage, and all values as the loss sees them."""
        values = dict(given)
        forwards: list[_Forward] = []
        for number, stage in enumerate(self._stages):
            forward = _Forward(
                inputs={name: _leaf(values[name]) for name in stage.inputs},
                parameters=self._of(number, "forward", unit),
                backward=self._of(number, "backward", unit),
            )
            with saved_tensors_hooks(*_exchange(forward)):
                results = functional_call(stage.module, forward.parameters, tuple(forward.inputs.values()))
            results = results if isinstance(results, tuple) else (results,)
            forward.outputs = dict(zip(stage.outputs, results, strict=True))
            values |= forward.outputs
            forwards.append(forward)
        return forwards, {name: _leaf(tensor) for name, tensor in values.items()}

    def _of(self, stage: int, of: str, unit: int) -> Parameters:
        if self._is_sync:
            return self._kept[stage, Weights(self._batch)]
        return self._kept[stage, self._weights[stage, of, self._batch, unit % self._units]]

    def keep(self) -> None:
        """Keep the newest versions and what is predicted from them; drop what no later batch uses.

        To be called where the weights of the stages' modules have been changed between two batches.
        """
        for number, stage in enumerate(self._stages):
            names = {parameter: name for name, parameter in stage.module.named_parameters()}
            self._kept[number, Weights(self._batch)] = {name: _leaf(p, copy=True) for p, name in names.items()}
            for weights in (w for at, w in self._last_use if at == number and w.base == self._batch and w.steps):
                predicted = {parameter: _leaf(parameter, copy=True) for parameter in names}
                if number in self._predictors:
                    self._predictors[number].predict(weights.steps, predicted)
                self._kept[number, weights] = {names[parameter]: tensor for parameter, tensor in predicted.items()}
        is_needed = self._is_newest if self._is_sync else self._is_used_later
        self._kept = {key: kept for key, kept in self._kept.items() if is_needed(*key)}

    def _is_newest(self, stage: int, weights: Weights) -> bool:
        return weights.base == self._batch

    def _is_used_later(self, stage: int, weights: Weights) -> bool:
        return self._last_use.get((stage, weights), -1) >= self._batch


#: Before the names of parameters beside those of values.
_PARAMETER = "parameter "


def _marked(parameters: Parameters) -> Parameters:
    return {f"{_PARAMETER}{name}": tensor for name, tensor in parameters.items()}


def _add(into: dict[str, Tensor], name: str, gradient: Tensor) -> None:
    into[name] = into[name] + gradient if name in into else gradient


def _leaf(tensor: Tensor, *, copy: bool = False) -> Tensor:
    own = tensor.detach().clone() if copy else tensor.detach()
    return own.requires_grad_(tensor.requires_grad)


def _gradients(outputs: Values, gradients: Values, inputs: Values) -> dict[str, Tensor]:
    """Gradients of the inputs that ask for one and get one; outputs without a gradient do not count."""
    roots = [name for name, tensor in outputs.items() if tensor.requires_grad and name in gradients]
    wanted = [name for name, tensor in inputs.items() if tensor.requires_grad]
    if not roots or not wanted:
        return {}
    found = torch.autograd.grad(
        [outputs[name] for name in roots],
        [inputs[name] for name in wanted],
        [gradients[name] for name in roots],
        allow_unused=True,
    )
    return {name: gradient for name, gradient in zip(wanted, found, strict=True) if gradient is not None}


def _exchange(forward: _Forward) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Hooks that keep a view of a parameter by name, and read it from the parameters of the backward."""
    names = {tensor.untyped_storage().data_ptr(): name for name, tensor in forward.parameters.items()}

    def pack(tensor: Tensor) -> Any:
        name = names.get(tensor.untyped_storage().data_ptr())
        return tensor if name is None else (name, tensor.shape, tensor.stride(), tensor.storage_offset())

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        name, shape, stride, offset = packed
        return forward.backward[name].detach().as_strided(shape, stride, offset)

    return pack, unpack
