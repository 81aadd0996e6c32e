"""A plateau's state in checkpoints. Whole jobs that follow one: `tests/system/test_plateau.py`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bagpipe.errors import InputError
from bagpipe.rates import Plateau, Schedule
from bagpipe.training.part import LoopRun
from bagpipe.training.plateau import PlateauFactor


def started(carried: Any = None) -> PlateauFactor:
    part = PlateauFactor(Plateau(drop=0.5, patience=1, larger_is_better=True))
    part.start(LoopRun(batches=iter(()), parts=(part,), carried=carried or {}))
    return part


def test_a_resumed_factor_goes_on() -> None:
    metrics = [0.7, None, 0.6, 0.8, 0.8, 0.8, None, 0.7]
    whole, factors = started(), []
    for metric in metrics:
        whole.note(metric)
        factors.append(Schedule(shape=whole).factor(99))
    assert factors == [1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.125]
    for cut in range(len(metrics)):
        before = started()
        for metric in metrics[:cut]:
            before.note(metric)
        after = started(json.loads(json.dumps(before.counters())))
        for metric in metrics[cut:]:
            after.note(metric)
        assert after.state == whole.state


def test_another_record_is_refused() -> None:
    with pytest.raises(InputError, match="expected the state of a plateau schedule in the checkpoint, got"):
        started({"plateau": {"rate": 1}})
