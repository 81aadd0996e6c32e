"""Costs as text: ``F=1,2B=3``, or JSON with the same keys, whose values may be lists of measured durations.

A key is an op (``F``), stage and op (``2F``) or an action (``2F0``); `analysis.costs` has their precedence.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping

from bagpipe.errors import InputError, ScheduleError
from bagpipe.schedule.analysis.costs import measured_costs
from bagpipe.schedule.ir.actions import parse
from bagpipe.schedule.ir.ops import OPS, Role
from bagpipe.schedule.ir.program import Program
from bagpipe.util.documents import parse_json

__all__ = ["amount", "check_complete", "check_stages", "costs_of_json", "costs_of_text"]

_STAGE = re.compile(r"\d+")

#: Roles for which measured costs must be complete.
_COMPUTE: frozenset[Role] = frozenset({"forward", "backward", "input_grad", "weight_grad"})


def costs_of_text(text: str, where: str) -> dict[str, float]:
    """Costs of ``X_FETCH=2,0F=3``; an empty text has none.

    Args:
        text: the costs.
        where: what an error message calls the text, such as ``--cost``.

    Raises:
        InputError: an unknown op, or a duration that is not a number of at least 0.
    """
    costs: dict[str, float] = {}
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        _check_key(where, key)
        if not equals:
            raise InputError(f"{where}: expected {key}=NUMBER, got {item!r}")
        costs[key] = amount(f"{where}: {key}", value)
    return costs


def costs_of_json(text: str, where: str) -> dict[str, float]:
    """Costs of a file's text. Of a list of measured durations the median counts.

    Raises:
        InputError: not such an object, an unknown op, or a duration that is not a number of at least 0.
    """
    try:
        values = parse_json(text)
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{where}: expected an object of durations by action, stage and op, or op")
    durations: dict[str, list[float]] = {}
    for key, value in values.items():
        _check_key(where, key)
        numbers = value if isinstance(value, list) else [value]
        durations[key] = [amount(f"{where}: {key}", json.dumps(number)) for number in numbers]
    return measured_costs(durations)


def check_complete(costs: Mapping[str, float], program: Program, where: str) -> None:
    """Refuse measured costs that lack those of a stage's compute: they belong to another model.

    Raises:
        InputError: the first one that is missing.
    """
    for action in (action for actions in program.lanes.values() for action in actions):
        for atom in () if {action.text, action.op} & costs.keys() else action.atoms:
            key = f"{atom.stage}{atom.op}"
            if OPS[atom.op].role in _COMPUTE and not {atom.text, key, atom.op} & costs.keys():
                raise InputError(f"{where}: no duration for stage {atom.stage}: expected {key} or {atom.op}")


def check_stages(costs: Mapping[str, float], program: Program, where: str) -> None:
    """Refuse costs of stages that the program does not have.

    Raises:
        InputError: the first one.
    """
    known = {atom.stage for atom in program.atoms()}
    for key in costs:
        stage = _STAGE.match(key)
        if stage is not None and (stage[0] != str(int(stage[0])) or int(stage[0]) not in known):
            raise InputError(f"{where}: {key} names stage {stage[0]}, expected one of 0 to {max(known, default=0)}")


def _check_key(where: str, key: str) -> None:
    if key in OPS or key.lstrip("0123456789") in OPS:
        return
    try:
        parse(key)
    except ScheduleError:
        raise InputError(f"{where}: unknown op {key!r}; known ops: {', '.join(OPS)}") from None


def amount(what: str, text: str) -> float:
    """A number of at least 0.

    Raises:
        InputError: it is not one.
    """
    try:
        value = int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise InputError(f"{what}: expected a number, got {text!r}") from None
    if not 0 <= value < math.inf:
        raise InputError(f"{what}: expected a number of at least 0, got {text}")
    return value
