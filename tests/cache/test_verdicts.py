"""`Verdicts`: bad numbers are errors when they have come, again and again; nobody waits but who asks for it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bagpipe.cache.verdicts import Verdict, Verdicts
from bagpipe.errors import InputError


class Late:
    """A number that has come once it is said to."""

    def __init__(self, value: int) -> None:
        self.value = value
        self.has_come = False
        self.was_awaited = False

    def is_ready(self) -> bool:
        return self.has_come

    def get(self) -> Tensor:
        self.was_awaited = self.was_awaited or not self.has_come
        return torch.tensor(self.value)


def _verdicts(*numbers: Late) -> Verdicts:
    verdicts = Verdicts()
    for b, number in enumerate(numbers):
        verdicts.add(Verdict(b, number, lambda found: int(found) == 0, lambda b=b: InputError(f"batch {b}")))
    return verdicts


def test_numbers_are_looked_at_when_they_have_come_in_any_order() -> None:
    first, second = Late(0), Late(1)
    verdicts = _verdicts(first, second)
    verdicts.check()
    second.has_come = True
    for _ in range(2):
        with pytest.raises(InputError, match="batch 1"):
            verdicts.check()
    assert not first.was_awaited


def test_who_may_wait_waits_for_the_batches_before() -> None:
    first, second, third = numbers = (Late(0), Late(1), Late(1))
    verdicts = _verdicts(*numbers)
    verdicts.check_before(1)
    assert [number.was_awaited for number in numbers] == [True, False, False]
    with pytest.raises(InputError, match="batch 1"):
        verdicts.check_before()
    verdicts.clear()
    verdicts.check_before()
    assert not third.was_awaited
    assert first.was_awaited
    assert second.was_awaited
