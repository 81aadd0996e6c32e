"""The dense part: which parameters, buffers and optimizer states of a source fit a new job, and its first dense state.

    source's DenseState, initial DenseState ──match_dense──> DensePlan, Takings
    DensePlan, both states ──first_state──> the DenseState of the new job's checkpoint 0

Names are those of `bagpipe.checkpoint.dense_state`. An average that is new begins as the weight that is taken.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bagpipe.checkpoint.dense_state import MODEL, OPTIM, PART, RNG, DenseState, type_name
from bagpipe.start_from.takings import Fate, Taking, matches

__all__ = ["AVERAGE", "DensePlan", "JobDense", "first_state", "match_dense"]

#: Beginning of the full names of averages.
AVERAGE = f"{PART}average."


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobDense:
    """The dense part of a new job.

    Attributes:
        initial: its initial state, with the state that a new optimizer has.
        trainable: names of its parameters.
        optimizer: name of its optimizer, in lower case.
        keeps_state: the optimizer has state after its first step.
        has_averages: it keeps averages of its weights.
    """

    initial: DenseState
    trainable: Collection[str]
    optimizer: str
    keeps_state: bool
    has_averages: bool

    @property
    def names(self) -> frozenset[str]:
        """Names of its parameters and buffers."""
        return frozenset(self.initial.below(MODEL))


@dataclass(frozen=True, slots=True, kw_only=True)
class DensePlan:
    """The dense tensors that are taken.

    Attributes:
        weights: names of parameters and buffers.
        states: names of parameters whose optimizer state is taken.
        averages: names of parameters whose average is taken.
    """

    weights: frozenset[str]
    states: frozenset[str]
    averages: frozenset[str]


def match_dense(
    theirs: DenseState, ours: JobDense, optimizer: str, without: Sequence[str]
) -> tuple[DensePlan, list[Taking]]:
    """Compare the dense part of a source with that of a new job.

    Args:
        theirs: of the source; only names, shapes and dtypes are read.
        ours: of the new job.
        optimizer: name of the source's optimizer, in lower case; empty: not known.
        without: see `checkpoint.start_without`.
    """
    found = theirs.below(MODEL)
    targets = ours.initial.below(MODEL)
    states = theirs.optimizer_states()
    is_same = optimizer == ours.optimizer and ours.keeps_state
    items: list[Taking] = []
    weights, taken_states = set(), set()
    for name, target in targets.items():
        label = f"dense.{name}"
        state = "new" if name in ours.trainable and ours.keeps_state else ""
        if name not in found or matches(label, without):
            why = "not there" if name not in found else "left out (checkpoint.start_without)"
            detail = f"{type_name(target)}, {why}"
            items.append(Taking(kind="dense", name=name, fate=Fate.NEW, detail=detail, state=state))
            continue
        if not _fits(found[name], target):
            detail = f"{type_name(found[name])} there, {type_name(target)} here"
            items.append(Taking(kind="dense", name=name, fate=Fate.CLASH, detail=detail))
            continue
        weights.add(name)
        if name in states:
            if state and is_same and not matches(f"state.{label}", without):
                taken_states.add(name)
                state = "taken"
            else:
                words = [f"{optimizer or 'its own'}: dropped", *([f"{ours.optimizer}: new"] if state else [])]
                state = ", ".join(words)
        detail = type_name(found[name])
        if found[name].dtype != target.dtype:
            detail += f", as {str(target.dtype).removeprefix('torch.')}"
        items.append(Taking(kind="dense", name=name, fate=Fate.TAKEN, detail=detail, state=state))
    for name in found:
        if name not in targets:
            detail = f"{type_name(found[name])}; this job's model has none of this name"
            items.append(Taking(kind="dense", name=name, fate=Fate.DROPPED, detail=detail))
    averages, more = _match_averages(theirs, ours, weights, without)
    plan = DensePlan(weights=frozenset(weights), states=frozenset(taken_states), averages=frozenset(averages))
    return plan, items + more


def _match_averages(
    theirs: DenseState, ours: JobDense, weights: Collection[str], without: Sequence[str]
) -> tuple[set[str], list[Taking]]:
    """Averages of weights that are taken; one line for all."""
    found = theirs.below(AVERAGE)
    if not ours.has_averages:
        text = f"{len(found)} averages of weights; this job keeps none"
        return set(), [Taking(kind="job", name="average", fate=Fate.DROPPED, detail=text)] if found else []
    if matches("job.average", without) or not found:
        text = "averages of weights begin as the weights"
        return set(), [Taking(kind="job", name="average", fate=Fate.NEW, detail=text)]
    averages = {name for name in found if name in weights}
    text = f"averages of {len(averages)} weights"
    return averages, [Taking(kind="job", name="average", fate=Fate.TAKEN, detail=text)]


def first_state(
    plan: DensePlan, theirs: DenseState, ours: JobDense, *, takes_random: bool, parts: Iterable[tuple[str, Tensor]] = ()
) -> DenseState:
    """The dense state with which the new job begins.

    Args:
        plan: of `match_dense`.
        theirs: the source's, of one rank.
        ours: the new job's.
        takes_random: with the state of the source's random number generators.
        parts: tensors of other parts, by full name.
    """
    tensors: dict[str, Tensor] = dict(parts)
    values: dict[str, Any] = {}
    for name, target in ours.initial.below(MODEL).items():
        source = theirs.tensors[MODEL + name] if name in plan.weights else target
        tensors[MODEL + name] = source.to(target.dtype)
    ours_states, theirs_states = ours.initial.optimizer_states(), theirs.optimizer_states()
    for name in ours.trainable:
        weight = tensors[MODEL + name]
        state = theirs_states[name] if name in plan.states else ours_states.get(name, {})
        for key, value in state.items():
            full_name = f"{OPTIM}{name}.{key}"
            if not isinstance(value, Tensor):
                values[full_name] = value
            else:  # a count of steps keeps its dtype
                tensors[full_name] = value.to(weight.dtype) if value.shape == weight.shape and value.dim() else value
        if ours.has_averages:
            average = theirs.tensors[AVERAGE + name] if name in plan.averages else weight
            tensors[AVERAGE + name] = average.to(weight.dtype).clone()
    if takes_random:
        tensors.update({name: value for name, value in theirs.tensors.items() if name.startswith(RNG)})
    return DenseState(tensors=tensors, values=values)


def _fits(theirs: Tensor, ours: Tensor) -> bool:
    is_convertible = theirs.dtype == ours.dtype or (theirs.dtype.is_floating_point and ours.dtype.is_floating_point)
    return theirs.shape == ours.shape and is_convertible
