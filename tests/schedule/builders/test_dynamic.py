from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.check import check, in_flight
from bagpipe.schedule.analysis.simulate import simulate
from bagpipe.schedule.builders.dynamic import dynamic, limits
from bagpipe.schedule.ir.stage_graph import chain
from tests.schedule.dense import SIZES, dense, rows


@pytest.mark.parametrize(("ranks", "micro"), SIZES)
def test_equal_stages_give_1f1b(ranks: int, micro: int) -> None:
    assert rows(dense("dynamic", ranks, micro)) == rows(dense("1f1b", ranks, micro))


def test_limits() -> None:
    assert limits(chain(4, 8)) == (4, 3, 2, 1)
    assert limits(chain(4, 8), 7) == (7, 5, 3, 1), "as eager-1f1b"
    assert limits(chain(4, 8), 6) == (6, 5, 3, 1)
    assert limits(chain(4, 8), 2) == (2, 2, 2, 1)
    assert limits(chain(4, 8), 1) == (1, 1, 1, 1)
    assert limits(chain(1, 8), 3) == (3,)
    with pytest.raises(ScheduleError, match=r"in flight must be at least 0 \(0: as 1f1b\), got -1"):
        limits(chain(4, 8), -1)


def test_a_backward_goes_first() -> None:
    """Rank 0 has room for F2 when the gradients of micro-batches 0 and 1 are here."""
    program = dynamic(chain(2, 4), 1, in_flight=4, costs={"1F": 0.5, "1B": 0.5, "0F": 1, "0B": 1})
    assert rows(program)[0] == "0F0,0F1,0B0,0B1,0F2,0F3,0B2,0B3"


costs = st.floats(0, 4) | st.sampled_from([0.0, 1.0])


@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 8), costs, st.data())
def test_any_costs_give_a_valid_order_within_the_limits(
    ranks: int, micro: int, most: int, latency: float, data: st.DataObject
) -> None:
    graph = chain(ranks, micro)
    taken = {f"{stage}{op}{m}": data.draw(costs) for stage in range(ranks) for op in "FB" for m in range(micro)}
    program = dynamic(graph, 1, in_flight=most, costs=taken, latency=latency)
    check(program)
    assert all(in_flight(row) <= m for row, m in zip(program.lanes.values(), limits(graph, most), strict=True))
    for stage, row in enumerate(program.lanes.values()):
        for op in "FB":
            assert [a.index for a in row if a.op == op] == list(range(micro)), f"{op} of stage {stage}"


@pytest.mark.parametrize(("latency", "plain", "eager", "tight", "loose"), [(0, 57, 57, 67, 63), (2, 97, 69, 97, 83)])
def test_unequal_stages_need_more_in_flight(
    latency: float, plain: float, eager: float, tight: float, loose: float
) -> None:
    """Backwards that go first leave later ranks without forwards, unless more are in flight than 1F1B has."""
    costs = {"F": 1.0, "B": 2.0, "1F": 2.0, "2B": 3.0}
    orders = [
        dense("1f1b", 4, 12), dense("eager-1f1b", 4, 12), dynamic(chain(4, 12), 1, costs=costs, latency=latency),
        dynamic(chain(4, 12), 1, in_flight=7, costs=costs, latency=latency),
    ]  # fmt: skip
    found = [simulate(order, costs, latency=latency).makespan for order in orders]
    assert found == [plain, eager, tight, loose]
