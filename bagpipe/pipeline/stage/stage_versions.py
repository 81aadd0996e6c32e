"""`StageVersions`: the weights that a stage of an asynchronous schedule keeps beside its newest ones.

    parameters        the newest version: b before OPT of batch b
    versions          a ring of the `gap` versions before, if forwards use an older one     written before OPT
    predictions       a ring of weights for the forwards of the next `gap` batches          … or for the first of them
    replaced          the prediction before those, if its forwards or recomputations run beside those of the next one
    backward          weights for the backwards of the batch, if they are predicted too     after OPT, as all with gap 0

A forward that comes before the OPT that ends its version has the parameters themselves; its backward comes after it.

Which batch has which weights is a function of its number (`VersionLags`), which counts on from earlier jobs. Buffers
are made once and used again: batch b has place ``b % gap`` of a ring, and what that held has been used for the last
time. Autograd counts the writes, and refuses a backward whose weights were overwritten. All of it is in checkpoints,
except what is replaced: between two batches nothing needs it.

Where the weights lie is the business of a `VersionMemory`, which calls the stage's module with them.

Where ranks divide the state or the gradients of a stage, all of this is whole on each of them. The parameters are new
after the gather that follows the step, so that `gathered` and `after_step` come behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from bagpipe.dense.parallel.stage_shards import StageShare
from bagpipe.dense.versioned_call import CallWeights, SavedHooks, versioned_call
from bagpipe.errors import InputError
from bagpipe.pipeline.stage.prediction import WeightPredictor
from bagpipe.schedule.ir.version_lags import VersionLags

__all__ = ["StageVersions", "VersionMemory", "kinds_of"]

_Buffers = list[Tensor]


class VersionMemory(Protocol):
    """Where the weights of a stage lie."""

    def write(
        self, weights: Mapping[Parameter, Tensor], write: Callable[[Sequence[Parameter]], None], *, predicts: bool
    ) -> None:
        """Have weights written.

        Args:
            weights: to be written, by parameter.
            write: writes those of some parameters. All parameters come, maybe in several calls.
            predicts: it reads what the optimizer keeps of these parameters, and steps through its groups.
        """
        ...

    def call(
        self,
        module: Module,
        arguments: tuple[Any, ...],
        weights: CallWeights,
        *,
        buffers: Mapping[str, Tensor],
        around: SavedHooks | None = None,
    ) -> Any:
        """See `versioned_call`."""
        ...


class _Resident:
    """All weights stay where they are."""

    call = staticmethod(versioned_call)

    def write(
        self, weights: Mapping[Parameter, Tensor], write: Callable[[Sequence[Parameter]], None], *, predicts: bool
    ) -> None:
        write([*weights])


def kinds_of(lags: VersionLags, *, alternates: bool, recomputes: bool) -> tuple[str, ...]:
    """Names of the copies of all parameters that a stage keeps beside the newest ones.

    Args:
        lags: of the stage.
        alternates, recomputes: see `StageVersions`.
    """
    gap, repeats = lags.forward_base, alternates and recomputes and lags.forward_base > 0 and not lags.is_same
    places = max(gap, 1) + (alternates and lags.is_same and gap > 0)
    if not lags.predicts_forward:
        found = [f"version{number}" for number in range(gap)]
    else:
        found = [f"prediction{number}" for number in range(places)] + ["replaced"] * repeats
    return (*found, *(["backward"] if lags.predicts_backward else []))


class StageVersions:
    """The weights of one stage. The lane of the stage's steps calls it, and lanes of further parts for `weights`.

    Args:
        lags: of the stage.
        parameters: trainable parameters, by their names in the whole model; always the newest version.
        optimizer: of these parameters, or of the segments of `share`.
        share: this rank's, if ranks divide the stage; None: they do not.
        alternates: forwards of a batch can precede backwards of the batch before. Predictions that a backward shares
            then take one place more.
        recomputes: forwards are repeated before their backwards, with the same weights; or several lanes compute
            forwards, of which one can be a batch ahead of another.

    Attributes:
        memory: where the weights lie; they stay where they are unless it is replaced.
        kept: all copies by the names of `kinds_of`, each in the order of the parameters. Their tensors stay the same.

    Raises:
        InputError: the schedule predicts weights, for which the optimizer has no rule.
    """

    def __init__(
        self,
        lags: VersionLags,
        parameters: Sequence[tuple[str, Parameter]],
        optimizer: Optimizer,
        *,
        share: StageShare | None = None,
        alternates: bool = False,
        recomputes: bool = False,
    ) -> None:
        self._lags = lags
        self._names = [name for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        predicts = lags.predicts_forward or lags.predicts_backward
        self._predictor = WeightPredictor(optimizer, share) if predicts else None
        kinds = kinds_of(lags, alternates=alternates, recomputes=recomputes)
        self.memory: VersionMemory = _Resident()
        self.kept: Mapping[str, _Buffers] = {kind: self._buffers() for kind in kinds}
        self._versions = [own for kind, own in self.kept.items() if kind.startswith("version")]
        self._predictions = [own for kind, own in self.kept.items() if kind.startswith("prediction")]
        self._replaced = self.kept.get("replaced", [])
        self._backward = self.kept.get("backward", [])
        self._earlier = 0
        self._has_loaded = self._has_begun = False
        self._newest = 0  # version
        self._predicted = 0  # batches that have a prediction
        self._lock = Lock()  # of what lanes of several parts find and change

    def call(
        self,
        module: Module,
        arguments: tuple[Any, ...],
        b: int,
        *,
        parameters: Sequence[Tensor],
        buffers: Mapping[str, Tensor],
        around: SavedHooks | None = None,
    ) -> Any:
        """The outputs of the stage's module with the weights of batch b, in its backward too; see `versioned_call`."""
        forward, backward = self.weights("forward", b), self.weights("backward", b)
        weights = CallWeights(parameters=parameters, forward=forward, backward=backward)
        return self.memory.call(module, arguments, weights, buffers=buffers, around=around)

    @property
    def last_gradients(self) -> Mapping[Parameter, Tensor]:
        """Gradients of the latest step by which weights are predicted, as far as there are any."""
        return {} if self._predictor is None else self._predictor.gradients

    def weights(self, of: Literal["forward", "backward"], b: int) -> Sequence[Tensor] | None:
        """The weights of batch b, in the order of the parameters; None: the parameters themselves."""
        lags, b = self._lags, self._earlier + b
        if of == "backward" and not lags.is_same:
            return self._backward if lags.predicts_backward else None
        if lags.predicts_forward:
            with self._lock:
                if of == "forward" and b >= self._predicted:
                    self._predict_next()
                if self._replaced and b < self._predicted - len(self._predictions):
                    return self._replaced
                return self._predictions[b % len(self._predictions)]
        version = max(0, b - lags.forward)
        is_newest = version == (self._newest if of == "forward" else b)
        return None if is_newest else self._versions[version % len(self._versions)]

    def start(self, first_batch: int, earlier: int = 0) -> None:
        """Before a run, whose first batch this is: all batches before are done.

        Args:
            first_batch: of the job. Before batch 0, unless `load` gave them, all versions are the present weights.
            earlier: batches of earlier jobs, whose versions `load` gave.

        Raises:
            InputError: the weights of earlier batches were not loaded.
            PeerError: the stage is divided, and a peer is gone or silent.
        """
        self._earlier = earlier
        self.gathered()
        self._newest = earlier + first_batch
        self._predicted = self._newest + max(self._lags.forward_base, 1)
        if self._has_loaded:
            return
        if first_batch == 0:
            self._begin()
        elif not self._has_begun:
            self._check({})

    def _begin(self) -> None:
        """Before batch 0: the weights of the batches that begin before the first step."""
        self._has_begun = True
        for buffers in (*self._versions, *self._predictions, *filter(None, [self._backward])):
            self._copy(buffers)
        for b in range(max(self._lags.forward_base, 1) if self._predictions else 0):
            self._predict(self._predictions[b], 0, b, self._lags.forward)
        if self._backward:
            self._predict(self._backward, 0, 0, self._lags.backward)

    def before_step(self, b: int) -> None:
        """Before OPT of batch b: keep version b, and predict from it for the batch that starts from it."""
        gap, b = self._lags.forward_base, self._earlier + b
        if self._versions:
            self._copy(self._versions[b % gap])
        elif self._predictions and gap and b + gap >= self._predicted:
            self._predict_next()

    def stepped(self) -> None:
        """Right after the optimizer's step, while the parameters have the gradients of the batch."""
        if self._predictor is not None:
            self._predictor.stepped()

    def gathered(self) -> None:
        """The parameters are those of all holders: so is what predictions follow. All holders call it.

        Raises:
            PeerError: a peer is gone or silent.
        """
        if self._predictor is not None:
            self._predictor.gather()

    def after_step(self, b: int) -> None:
        """After OPT of batch b, when the parameters are new: predict from version b + 1 for batch b + 1."""
        b += self._earlier
        self._newest = b + 1
        if self._predictions and not self._lags.forward_base:
            self._predict_next()
        if self._backward:
            self._predict(self._backward, b + 1, b + 1, self._lags.backward)

    def num_bytes(self) -> int:
        """Bytes of what is kept beside the newest version, without last gradients."""
        return sum(tensor.nbytes for buffers in (*self._named().values(), self._replaced) for tensor in buffers)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, by name: ``version0.NAME``, ``prediction0.NAME``, ``backward.NAME``."""
        kept = {
            f"{kind}.{name}": tensor
            for kind, buffers in self._named().items()
            for name, tensor in zip(self._names, buffers, strict=True)
        }
        names = dict(zip(self._parameters, self._names, strict=True))
        gradients = {f"gradient.{names[parameter]}": tensor for parameter, tensor in self.last_gradients.items()}
        return {**kept, **gradients}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `tensors` gave, of all stages. None at all: the checkpoint is of initial weights.

        Raises:
            InputError: a version or prediction is missing, or has another shape.
        """
        if not tensors:
            return
        self._check(tensors)
        self._has_loaded = True
        for kind, buffers in self._named().items():
            for name, buffer in zip(self._names, buffers, strict=True):
                buffer.copy_(tensors[f"{kind}.{name}"])
        if self._predictor is not None:
            for name, parameter in zip(self._names, self._parameters, strict=True):
                if f"gradient.{name}" in tensors:
                    self._predictor.gradients[parameter] = tensors[f"gradient.{name}"].to(parameter.device)

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        for kind, buffers in self._named().items():
            for name, buffer in zip(self._names, buffers, strict=True):
                found = tensors.get(f"{kind}.{name}")
                if found is None or found.shape != buffer.shape:
                    shape = "none" if found is None else list(found.shape)
                    raise InputError(
                        f"expected {kind} of {name} {list(buffer.shape)} in the checkpoint, got {shape}: it is of "
                        "another pipeline.schedule"
                    )

    def _named(self) -> dict[str, _Buffers]:
        found = {f"version{n}": buffers for n, buffers in enumerate(self._versions)}
        found |= {f"prediction{n}": buffers for n, buffers in enumerate(self._predictions)}
        return {**found, **({"backward": self._backward} if self._backward else {})}

    def _buffers(self) -> _Buffers:
        return [parameter.detach().clone() for parameter in self._parameters]

    def _copy(self, buffers: _Buffers) -> None:
        weights = dict(zip(self._parameters, buffers, strict=True))

        def copy(own: Sequence[Parameter]) -> None:
            torch._foreach_copy_([weights[each] for each in own], [each.detach() for each in own])

        self.memory.write(weights, copy, predicts=False)

    def _predict_next(self) -> None:
        """Predict for the first batch without a prediction, which starts from the newest version."""
        b = self._predicted
        place = b % len(self._predictions)
        if self._replaced:
            self._replaced, self._predictions[place] = self._predictions[place], self._replaced
        self._predict(self._predictions[place], self._newest, b, self._lags.forward)
        self._predicted = b + 1

    def _predict(self, buffers: _Buffers, base: int, b: int, lag: int) -> None:
        """Predict the weights of batch b from version `base`, which is the newest."""
        assert self._predictor is not None, "made where weights are predicted"
        weights, steps = dict(zip(self._parameters, buffers, strict=True)), max(0, b - lag) - base
        predictor = self._predictor
        self.memory.write(weights, lambda own: predictor.predict(steps, weights), predicts=True)
