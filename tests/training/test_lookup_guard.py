"""`LookupGuard`: an evaluation on a device ends with an error after a lookup of other ids."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bagpipe.cache.verdicts import Verdict, Verdicts
from bagpipe.errors import InputError
from bagpipe.training.lookup_guard import LookupGuard
from bagpipe.training.part import LoopRun


class Late:
    """A flag that has come once it is asked to."""

    def __init__(self, is_bad: bool) -> None:
        self.is_bad = is_bad
        self.has_come = False

    def is_ready(self) -> bool:
        return self.has_come

    def get(self) -> Tensor:
        return torch.tensor(self.is_bad)


def _guarded(flags: list[Late]) -> LookupGuard:
    verdicts = Verdicts()
    guard = LookupGuard(verdicts)
    verdicts.add(Verdict(0, Late(is_bad=True), lambda flag: not flag, lambda: InputError("of a run before")))
    guard.start(LoopRun(batches=iter(()), parts=()))
    for b, flag in enumerate(flags):
        verdicts.add(Verdict(b, flag, lambda found: not found, lambda b=b: InputError(f"batch {b}")))
    return guard


def test_a_flag_is_looked_at_when_it_has_come_and_at_the_end() -> None:
    good, bad = Late(is_bad=False), Late(is_bad=True)
    guard = _guarded([good, bad])
    good.has_come = True
    guard.finish_batch(0)
    with pytest.raises(InputError, match="batch 1"):
        guard.end()
    bad.has_come = True
    with pytest.raises(InputError, match="batch 1"):
        guard.finish_batch(1)


def test_good_flags_end_nothing() -> None:
    guard = _guarded([Late(is_bad=False)])
    guard.finish_batch(0)
    guard.end()
