"""Exchanges run one after the other, in order; after an error none runs, and every wait raises it."""

from __future__ import annotations

import pytest
import torch

from bagpipe.dense.parallel.ordered_exchanges import OrderedExchanges
from bagpipe.errors import PeerError


def fail() -> None:
    raise PeerError("rank 1 is gone")


def test_exchanges_run_in_order() -> None:
    done: list[int] = []
    with OrderedExchanges(torch.device("cpu"), name="test", limit=2) as lane:
        tickets = [lane.submit(lambda number=number: done.append(number)) for number in range(9)]
        tickets[-1].wait()
        assert done == [*range(9)]


def test_the_first_error_is_that_of_all_later_exchanges() -> None:
    done: list[int] = []
    with OrderedExchanges(torch.device("cpu"), name="test", limit=4) as lane:
        tickets = [lane.submit(lambda: done.append(0)), lane.submit(fail), lane.submit(lambda: done.append(2))]
        tickets[0].wait()
        for ticket in tickets[1:]:
            with pytest.raises(PeerError, match="rank 1 is gone"):
                ticket.wait()
    assert done == [0]
