"""`Kfac`: K-FAC of the linear layers of a model, or of one of its stages, on one rank: one method per action.

    COV_A, COV_G   add_inputs, add_outputs   sums of a micro-batch                    captured layers
    REDUCE_COV     add_up                    sums of all holders, if they are summed
    X_INV          invert                    fold the sums of batch b - lag, invert   own layers
    PRECOND        precondition              gradients of the batch                   own layers
    X_BCAST        share                     the owners' gradients to all holders
    OPT            limit                     by kappa, before the optimizer's step

DP-KFAC (arXiv:2206.15143): the owner of a layer builds its factors from its own examples, so no factor travels. Summed
factors are those of the whole batch: more ranks then change summation order only.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from bagpipe.dense.precondition.capture import LayerCapture
from bagpipe.dense.precondition.exchange import KfacExchange
from bagpipe.dense.precondition.factors import BatchSums, LayerFactors
from bagpipe.dense.precondition.layers import LinearLayer, combined_gradient, factor_bytes, owners, set_gradient
from bagpipe.distributed.interface import RankGroup
from bagpipe.errors import InputError
from bagpipe.pipeline.stream import keep_for_current_stream

__all__ = ["Kfac", "KfacSettings", "step_limit"]

FactorSource = Literal["summed", "local"]

#: Tensors of a layer's state, in checkpoints.
_STATE = ("factor_a", "factor_g", "inverse_a", "inverse_g")


@dataclass(frozen=True, slots=True, kw_only=True)
class KfacSettings:
    """Numbers of K-FAC.

    Attributes:
        decay: weight of the factors before in their running averages, in [0, 1).
        damping: γ of the trace rule.
        kappa: largest step, ``lr² Σ preconditioned · gradient``; 0: no limit.
        factor_every: batches between two updates of the factors.
        inverse_every: batches between two updates of the inverses.
        lag: batches by which the inverses are behind the gradients, 0 or 1. With 1 the whole next step has room for an
            inversion.
        factors: ``summed`` over the holders of a layer, or ``local``, from the examples of its owner.

    Raises:
        InputError: a number is outside its range.
    """

    decay: float = 0.95
    damping: float = 0.003
    kappa: float = 0.001
    factor_every: int = 1
    inverse_every: int = 10
    lag: int = 0
    factors: FactorSource = "summed"

    def __post_init__(self) -> None:
        demands = (
            ("decay", "at least 0 and below 1", 0 <= self.decay < 1),
            ("damping", "at least 0", self.damping >= 0),
            ("kappa", "at least 0", self.kappa >= 0),
            ("factor_every", "at least 1", self.factor_every >= 1),
            ("inverse_every", "at least 1", self.inverse_every >= 1),
            ("lag", "0 or 1", self.lag in (0, 1)),
            ("factors", "summed or local", self.factors in get_args(FactorSource)),
        )
        for name, demand, is_met in demands:
            if not is_met:
                raise InputError(f"K-FAC: {name} must be {demand}, got {getattr(self, name)}")

    def makes_factors(self, batch: int) -> bool:
        """Whether a batch enters the factors."""
        return batch >= 0 and batch % self.factor_every == 0

    def makes_inverses(self, batch: int) -> bool:
        """Whether the inverses are made anew after a batch."""
        return batch >= 0 and batch % self.inverse_every == 0


class Kfac:
    """See above.

    Args:
        layers: of the model or stage; not empty.
        settings: numbers.
        owned: numbers of the layers that this rank owns.
        exchange: with the other holders; None: this rank is the only one.

    Numbers of batches are those of the job. Turns, and the state in checkpoints, count the batches of earlier jobs too.

    Attributes:
        sizes: ``[layers]``: preconditioned gradient times gradient, of the latest batch.
        can_leave_out: a batch can be left out after its inversions (`leave_out`); set before the first run.
    """

    def __init__(
        self,
        layers: Sequence[LinearLayer],
        settings: KfacSettings,
        *,
        owned: Sequence[int] | None = None,
        exchange: KfacExchange | None = None,
    ) -> None:
        self.layers = tuple(layers)
        self.settings = settings
        self.owned = tuple(range(len(layers)) if owned is None else owned)
        self.sizes = self._no_sizes()
        self._exchange = exchange
        self._factors = {
            number: LayerFactors(layers[number].name, decay=settings.decay, damping=settings.damping)
            for number in self.owned
        }
        self._captures: list[LayerCapture] = []
        self._pending: dict[int, dict[int, BatchSums]] = {}  # sums over the holders, by batch
        self._collected = -1  # latest batch of them
        self._earlier = 0
        self._lock = threading.RLock()
        self.can_leave_out, self._left_out = False, -1  # latest batch that was
        self._before: dict[int, tuple[int, Mapping[str, Tensor | None]]] = {}  # layer: batch, state before it
        self._next_turn = dict.fromkeys(self.owned, 0)
        self._gradients: list[Tensor | None] = []

    @classmethod
    def of_group(
        cls,
        layers: Sequence[LinearLayer],
        settings: KfacSettings,
        group: RankGroup | None,
        holders: Sequence[int] | None = None,
    ) -> Kfac:
        """K-FAC of layers that the ranks of a group share out (`owners`).

        Args:
            layers: of the model or stage; not empty.
            settings: numbers.
            group: the ranks that hold the layers; None: this rank is the only one.
            holders: the ranks within the group, in the order in which they own layers; None: ascending.
        """
        if group is None:
            return cls(layers, settings)
        places = owners(len(layers), range(group.world_size) if holders is None else holders)
        owned = [number for number, place in enumerate(places) if place == group.rank]
        return cls(layers, settings, owned=owned, exchange=KfacExchange(group, layers, places))

    @property
    def is_shared(self) -> bool:
        """Whether other ranks hold the layers too."""
        return self._exchange is not None

    def capture(self, layers: Sequence[LinearLayer], *, adds: bool = False) -> LayerCapture:
        """Capture a module with these layers: the model's own, or those of a copy that shares their values.

        Args:
            layers: of the module.
            adds: see `LayerCapture`.
        """
        self._captures.append(LayerCapture(layers, tuple(self._captured), adds=adds))
        self._captures[-1].open()
        return self._captures[-1]

    def makes_factors(self, batch: int) -> bool:
        """Whether a batch enters the factors."""
        return self.settings.makes_factors(self._earlier + batch)

    def begin(self, earlier: int = 0) -> None:
        """A run begins: forget what the one before has captured and not ended with.

        Args:
            earlier: batches of earlier jobs.
        """
        self._forget()
        self._earlier = earlier

    def _forget(self) -> None:
        for capture in self._captures:
            capture.close()
        self._captures, self._gradients = [], []

    def end(self) -> None:
        """The run is over: stop capturing. Sums of its last batch stay for the next turn."""
        for batch in {batch for capture in self._captures for batch in capture.sums}:
            self.add_up(batch)
        self._forget()

    @property
    def kept_bytes(self) -> int:
        """Bytes that this rank keeps; see `factor_bytes`."""
        owned, copies = [self.layers[number] for number in self.owned], int(self.can_leave_out)
        summed = self.captured_layers if self._sums_factors else ()
        return factor_bytes(owned, summed, lag=self.settings.lag, copies=copies)

    @property
    def captured_layers(self) -> tuple[LinearLayer, ...]:
        """The layers of which this rank makes sums: all if these go to owners, otherwise its own."""
        return tuple(self.layers[number] for number in self._captured)

    @property
    def _captured(self) -> Sequence[int]:
        return range(len(self.layers)) if self._sums_factors else self.owned

    @property
    def _sums_factors(self) -> bool:
        return self._exchange is not None and self.settings.factors == "summed"

    def add_up(self, batch: int) -> None:
        """Collect the sums of a batch; over all holders if they are summed, which then all call it before `invert`.

        Raises:
            PeerError: a peer is gone or silent.
        """
        self._add_up(self._earlier + batch)

    def _add_up(self, batch: int) -> None:
        with self._lock:
            if not self.settings.makes_factors(batch) or batch <= self._collected:
                return
            total: dict[int, BatchSums] = {}
            for capture in self._captures:
                for number, sums in capture.sums.pop(batch - self._earlier, {}).items():
                    keep_for_current_stream(sums.inputs)  # the lane of a stage has made them
                    keep_for_current_stream(sums.outputs)
                    if number in total:
                        total[number].add(sums)
                    else:
                        total[number] = sums
            if self._sums_factors:
                assert self._exchange is not None, "said so"
                total = self._exchange.add_up(total)
            self._collected = batch
            if total and batch != self._left_out:  # a rank can own no layer, or have no example
                self._pending[batch] = total

    def drop(self, batch: int) -> None:
        """Forget the sums of a batch that is left out."""
        for capture in self._captures:
            capture.drop(batch)
        self._collected = max(self._collected, self._earlier + batch)

    def leave_out(self, batch: int) -> None:
        """Undo what a batch has changed whose optimizer step is left out, after its inversions."""
        batch += self._earlier
        with self._lock:
            self._left_out = batch  # with a lag its sums may come later
            self._pending.pop(batch, None)
            for layer, (folded, state) in self._before.items():
                if folded != batch:
                    continue
                factors = self._factors[layer]
                for key, tensor in state.items():
                    setattr(factors, key, tensor)
                if self.settings.makes_inverses(batch) or factors.inverse_a is None:
                    factors.invert()
            self._before = {}

    def invert(self, turn: int, layer: int) -> None:
        """Fold the sums of batch ``turn - lag`` into a layer's factors, and invert them if it is time.

        Raises:
            InputError: a factor is singular.
        """
        turn += self._earlier
        with self._lock:  # a checkpoint has a layer before it or after it
            if layer not in self._factors or turn < self._next_turn[layer]:
                return
            batch, factors = turn - self.settings.lag, self._factors[layer]
            self._add_up(batch)
            sums = self._pending.get(batch, {}).pop(layer, None)
            if sums is not None:
                if self.can_leave_out:
                    self._before[layer] = (batch, factors.copy())
                factors.fold(sums)
            if self.settings.makes_inverses(batch) or factors.inverse_a is None:
                factors.invert()
            self._next_turn[layer] = turn + 1
            if layer == self.owned[-1]:
                self._pending.pop(batch, None)

    def precondition(self) -> None:
        """Precondition the gradients of the layers that this rank owns."""
        self.sizes = self._no_sizes()
        self._gradients = [combined_gradient(layer) for layer in self.layers]
        for number, factors in self._factors.items():
            gradient = self._gradients[number]
            if gradient is not None:
                found = factors.precondition(gradient)
                self.sizes[number] = torch.sum(found * gradient)
                self._gradients[number] = found

    def share(self) -> None:
        """Give the gradients and sizes of own layers to the other holders, and take theirs.

        Raises:
            PeerError: a peer is gone or silent.
        """
        if self._exchange is None:
            return
        for tensor in (self.sizes, *self._gradients):
            if tensor is not None:
                keep_for_current_stream(tensor)  # another lane made it
        self._gradients = self._exchange.share(self._gradients, self.sizes)

    def limit(self, factor: Tensor | None) -> None:
        """Put the preconditioned gradients, times a factor, in the place of the gradients."""
        for layer, gradient in zip(self.layers, self._gradients, strict=True):
            if gradient is not None:
                keep_for_current_stream(gradient)
                set_gradient(layer, gradient if factor is None else gradient * factor)
        self._gradients = []

    def tensors(self, step: int) -> dict[str, Tensor]:
        """State of the layers that this rank owns before a batch, by ``<layer>.<name>``; before its first forward.

        With a lag another lane can go on with the batch's inversions, so the tensors are copies.
        """
        if not self.settings.lag:
            return self._state()
        with self._lock:
            self.add_up(step - 1)
            return {name: tensor.clone() for name, tensor in self._state().items()}

    def _state(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for number, factors in self._factors.items():
            name = self.layers[number].name
            found |= {f"{name}.{key}": value for key in _STATE if (value := getattr(factors, key)) is not None}
            found[f"{name}.next_turn"] = torch.tensor(self._next_turn[number])
            for batch, sums in self._pending.items():
                if number in sums:
                    found[f"{name}.sum_a"], found[f"{name}.sum_g"] = sums[number].inputs, sums[number].outputs
                    found[f"{name}.counts"] = sums[number].counts
                    found[f"{name}.sum_batch"] = torch.tensor(batch)
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back the state of own layers.

        Args:
            tensors: as `tensors`, of all layers of the model.

        Raises:
            InputError: a layer is missing, or has another shape.
        """
        self._pending, self._collected, self._left_out, self._before = {}, -1, -1, {}
        for capture in self._captures:
            capture.clear()
        for number, factors in self._factors.items():
            layer = self.layers[number]
            prefix = f"{layer.name}."
            own = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            if "next_turn" not in own:
                raise InputError(
                    f"the checkpoint has no K-FAC factors of layer {layer.name}: expected one of a job with K-FAC of "
                    "the same layers"
                )
            self._check(layer, own)
            for key in _STATE:
                setattr(factors, key, own[key].to(layer.weight.device, copy=True) if key in own else None)
            self._next_turn[number] = int(own["next_turn"])
            if "sum_batch" in own:
                self._collected = int(own["sum_batch"])
                self._pending.setdefault(int(own["sum_batch"]), {})[number] = BatchSums(
                    inputs=own["sum_a"].to(layer.weight.device, copy=True),
                    outputs=own["sum_g"].to(layer.weight.device, copy=True),
                    counts=own["counts"].clone(),
                )

    def _check(self, layer: LinearLayer, own: Mapping[str, Tensor]) -> None:
        for key, size in (("factor_a", layer.num_inputs), ("factor_g", layer.num_outputs)):
            if key in own and tuple(own[key].shape) != (size, size):
                raise InputError(
                    f"the checkpoint's K-FAC {key} of layer {layer.name} is {list(own[key].shape)}, expected "
                    f"{[size, size]}"
                )

    def _no_sizes(self) -> Tensor:
        return torch.zeros(len(self.layers), dtype=self.layers[0].weight.dtype, device=self.layers[0].weight.device)


def step_limit(sizes: Tensor | None, *, kappa: float, lr: float) -> Tensor | None:
    """Factor of the preconditioned gradients: ``min(1, sqrt(kappa / |lr² Σ sizes|))``, a scalar; None: no limit.

    Args:
        sizes: preconditioned gradient times gradient, of all layers.
        kappa: largest step; 0: no limit.
        lr: learning rate.
    """
    if not kappa or sizes is None:
        return None
    total = (lr * lr * sizes.sum()).abs()
    return torch.sqrt(kappa / total).clamp(max=1.0)  # kappa / 0 is infinite
