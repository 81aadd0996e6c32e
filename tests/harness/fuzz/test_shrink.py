"""Shrinking keeps what makes a draw wrong and drops the rest."""

from __future__ import annotations

from tests.harness.fuzz.draw import Draw
from tests.harness.fuzz.drawing import draw
from tests.harness.fuzz.shrink import shrink


def uses_adam(item: Draw) -> bool:
    return dict(item.job)["optim.rows"] == "adam"


def test_a_draw_is_shrunk_to_its_cause() -> None:
    wrong = next(item for number in range(100) if uses_adam(item := draw(1, number)) and item.world_size == 2)
    simple = shrink(wrong, uses_adam)
    values = dict(simple.job)
    assert simple.world_size == 1
    assert len(simple.twins) == 2
    assert (values["pipeline.schedule"], values["run.dtype"], values["cache.dtype"]) == ("none", "float32", "run")
    assert values["optim.rows"] == "adam"


def test_a_draw_that_nothing_simplifies_stays() -> None:
    wrong = draw(1, 0)
    assert shrink(wrong, lambda simpler: False) == wrong


def test_trials_are_bounded() -> None:
    tried: list[Draw] = []
    shrink(draw(1, 0), lambda simpler: bool(tried.append(simpler)), max_trials=4)
    assert len(tried) == 4
