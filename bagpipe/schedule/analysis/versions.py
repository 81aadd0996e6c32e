"""R7: the weights of every action, the version that every optimizer step makes, how many are kept, how old they are.

    lane            weights      newest version
    0F0@0           0            0                F of batch b in an asynchronous schedule names its version
    0F1@0  0B0@0    0            0
    0OPT0           0            1                OPT of batch b makes version b + 1 of version b
    0PRED2@1        1            1                predicts weights for the forwards of batch 2, from version 1, …
    0F2@2           1 + 1 step   1                … as they will be at version 2

Version 0 are the initial weights. The gradient of batch b is applied to version b: an action of batch b with version v
is b - v updates behind, its *staleness*. In a synchronous program it is 0, and actions need not name their version.

A version is kept until its last use. OPT works in place, unless an action after it uses the version before it. A
prediction is kept from its PRED to its last use.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from bagpipe.errors import ScheduleError
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.program import Program

__all__ = ["KeptWeights", "Pass", "VersionUse", "Weights", "kept_weights", "version_problems", "version_table"]

#: What an action does with weights. REC is a forward once more.
Pass = Literal["forward", "backward", "step", "prediction"]

PASSES: Mapping[str, Pass] = {
    "F": "forward",
    "REC": "forward",
    "B": "backward",
    "I": "backward",
    "W": "backward",
    "OPT": "step",
    "PRED": "prediction",
    "PRED_B": "prediction",
}

#: Pass -> the op that predicts weights for it.
_PREDICTS_FOR: Mapping[str, str] = {"forward": "PRED", "backward": "PRED_B"}

#: Op -> earlier op of the micro-batch with the same weights: in every program …
_SAME_WEIGHTS: Mapping[str, str] = {"REC": "F", "W": "I"}
#: … and where a backward uses the weights of its forward.
_STASHED_WEIGHTS: Mapping[str, str] = {**_SAME_WEIGHTS, "B": "F", "I": "F"}


@dataclass(frozen=True, slots=True, order=True)
class Weights:
    """Weights of a stage.

    Attributes:
        base: a version that exists.
        steps: optimizer steps by which they are predicted ahead of it; 0: they are that version.
    """

    base: int
    steps: int = 0

    @property
    def version(self) -> int:
        """The version that they are, or stand for."""
        return self.base + self.steps

    @property
    def text(self) -> str:
        """``2``, or ``2+1``: version 2, predicted one step ahead."""
        return f"{self.base}+{self.steps}" if self.steps else str(self.base)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionUse:
    """An action and its weights.

    Attributes:
        lane: its lane.
        stage: the stage whose parameters it uses.
        action: F, B, I, W, REC, OPT, PRED or PRED_B.
        batch: its batch.
        weights: what it computes with; of OPT and of predictions: the version they start from.
        prediction: the op that predicted the weights; empty: they are a version.
    """

    lane: str
    stage: int
    action: Action
    batch: int
    weights: Weights
    prediction: str = ""

    @property
    def of(self) -> Pass:
        """Its pass, which says what it does with the weights."""
        return PASSES[self.action.op]

    @property
    def makes(self) -> int | None:
        """The version that it makes; None for all but OPT."""
        return self.batch + 1 if self.of == "step" else None

    @property
    def staleness(self) -> int:
        """Updates between the version it uses and the one to which the gradient of its batch is applied."""
        return self.batch - self.weights.base


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptWeights:
    """Most weights of a stage that are kept at a time.

    Attributes:
        versions: versions, the newest one among them.
        predictions: predictions.
    """

    versions: int
    predictions: int


def version_table(program: Program) -> tuple[VersionUse, ...]:
    """Every action that uses weights, lane after lane, in the order of the lanes.

    Raises:
        ScheduleError: the first of `version_problems`.
    """
    found: list[VersionUse] = []
    for use, problem in _walk(program):
        if problem:
            raise ScheduleError(f"versions: {problem}")
        found.append(use)
    return tuple(found)


def version_problems(program: Program) -> Iterator[str]:
    """R7: an action uses weights that exist, and those that the program's semantics demand.

    ``sync``: all of batch b use version b. ``delay``: version ``max(0, b - 1)``. ``stash``: a backward uses the weights
    of its forward. ``predict``: each uses a version or a prediction of its own. Predictions start from the newest
    version, since the optimizer has only the state of that one.
    """
    return (problem for _, problem in _walk(program) if problem)


def kept_weights(program: Program) -> Mapping[int, KeptWeights]:
    """Stage -> the most weights that its lane keeps at a time, each dropped after its last use.

    For a loop, ``loop.unroll(loop.ramp())`` gives the bound for any number of batches.

    Raises:
        ScheduleError: the first of `version_problems`.
    """
    rows: dict[int, list[VersionUse]] = {}
    for use in version_table(program):
        rows.setdefault(use.stage, []).append(use)
    if program.semantics in ("sync", "partial"):
        return {stage: KeptWeights(versions=1, predictions=0) for stage in sorted(rows)}
    return {stage: _kept(rows[stage]) for stage in sorted(rows)}


def _walk(program: Program) -> Iterator[tuple[VersionUse, str]]:
    """Every use, and what is wrong with it."""
    parameters = {stage.number: stage.parameters for stage in program.stages}
    for lane, actions in program.lanes.items():
        walk = _Walk(program)
        for atom in (atom for action in actions for atom in action.atoms):
            if atom.op not in PASSES or atom.index is None:
                continue
            batch = atom.index // program.units_per_batch((atom.stage, atom.op), atom.peer)
            weights, prediction, problem = walk.use(atom, batch)
            use = VersionUse(
                lane=lane,
                stage=parameters.get(atom.stage, atom.stage),
                action=atom,
                batch=batch,
                weights=weights,
                prediction=prediction,
            )
            yield use, problem


@dataclass(slots=True)
class _Walk:
    """A lane up to some action.

    Attributes:
        program: the program of the lane.
        newest: by stage, the newest version.
        used: (stage, pipe, op, index) -> weights and what predicted them.
        predicted: (stage, op, batch) -> the version from which PRED or PRED_B predicted.
    """

    program: Program
    newest: dict[int, int] = field(default_factory=dict)
    used: dict[tuple[int, int, str, int | None], tuple[Weights, str]] = field(default_factory=dict)
    predicted: dict[tuple[int, str, int], int] = field(default_factory=dict)

    def use(self, atom: Action, batch: int) -> tuple[Weights, str, str]:
        """The action's weights, the op that predicted them, and a complaint; either can be empty."""
        semantics, stage, of = self.program.semantics, atom.stage, PASSES[atom.op]
        if semantics in ("sync", "partial"):
            names_another = semantics == "sync" and atom.version not in (None, batch)
            return Weights(batch), "", _sync_complaint(atom, batch) if names_another else ""
        newest = self.newest.get(stage, 0)
        if of == "step":
            self.newest[stage] = batch + 1
            wrong = f"{atom.text} makes version {batch + 1}; the newest is version {newest}"
            return Weights(batch), "", wrong if newest != batch else ""
        if atom.version is None:
            return Weights(newest), "", f"{atom.text} names no version, in a program of semantics {semantics}"
        if of == "prediction":
            self.predicted[stage, atom.op, batch] = atom.version
            wrong = f"{atom.text} predicts from version {atom.version}; the newest is version {newest}"
            return Weights(atom.version), "", wrong if atom.version != newest else ""
        weights, prediction, problem = self._of_micro_batch(atom, batch, atom.version)
        self.used[stage, atom.pipe, atom.op, atom.index] = weights, prediction
        if semantics == "delay" and not problem and weights != Weights(max(0, batch - 1)):
            problem = f"{atom.text} uses version {weights.text}, expected version {max(0, batch - 1)} (delay 1)"
        return weights, prediction, problem

    def _of_micro_batch(self, atom: Action, batch: int, version: int) -> tuple[Weights, str, str]:
        """As `use`, for F, REC, B, I and W."""
        earlier = (_STASHED_WEIGHTS if self.program.semantics == "stash" else _SAME_WEIGHTS).get(atom.op, "")
        before = self.used.get((atom.stage, atom.pipe, earlier, atom.index))
        if before is not None:
            wrong = f"{atom.text} uses version {version}, its {earlier} used version {before[0].version}"
            return *before, wrong if before[0].version != version else ""
        op = _PREDICTS_FOR[PASSES[atom.op]]
        base = self.predicted.get((atom.stage, op, batch))
        if base is not None:
            wrong = f"{atom.text} uses version {version}, predicted from the later version {base}"
            weights = Weights(base, max(0, version - base))
            return weights, op if weights.steps else "", wrong if version < base else ""
        newest = self.newest.get(atom.stage, 0)
        wrong = f"{atom.text} uses version {version}; the newest is version {newest}"
        return Weights(version), "", wrong if version > newest else ""


def _sync_complaint(atom: Action, batch: int) -> str:
    return f"{atom.text} uses version {atom.version}; in a sync program batch {batch} uses version {batch}"


def _kept(uses: list[VersionUse]) -> KeptWeights:
    """The most weights between the use that makes them and the last use of them, by kind."""
    made = {("", 0): -1}
    last: dict[tuple[str, int], int] = {}
    for place, use in enumerate(uses):
        last[(use.prediction, use.batch) if use.prediction else ("", use.weights.base)] = place
        if use.of == "prediction":
            made[use.action.op, use.batch] = place
        elif use.makes is not None:
            made["", use.makes] = place
    last["", max(version for op, version in made if not op)] = len(uses)
    peaks: dict[bool, int] = {}
    for is_prediction in (False, True):
        changes = [0] * (len(uses) + 2)
        for key, end in last.items():
            if bool(key[0]) == is_prediction:
                changes[made[key] + 1] += 1
                changes[end + 1] -= 1
        peaks[is_prediction] = max(itertools.accumulate(changes))
    return KeptWeights(versions=peaks[False], predictions=peaks[True])
