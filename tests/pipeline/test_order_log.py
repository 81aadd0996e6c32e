from __future__ import annotations

from bagpipe.pipeline.order_log import OrderLog

LANES = {"compute0": 0, "compute1": 1}


def test_orders_are_taken_down_batch_by_batch() -> None:
    with OrderLog(lanes=LANES, replica=2, num_actions=3, orders=None, records=True) as log:
        for batch in (7, 8):
            for lane in LANES.values():
                log.lanes[f"compute{lane}"].taken(batch, [lane, 0, 1])
        assert log.lanes["compute0"].given(7) is None
        assert list(log.batches()) == [
            [((batch, 2, 0), bytes([0, 0, 1])), ((batch, 2, 1), bytes([1, 0, 1]))] for batch in (7, 8)
        ]
    assert list(log.batches()) == []


def test_orders_are_given() -> None:
    log = OrderLog(lanes=LANES, replica=0, num_actions=2, orders={(3, 0, 1): b"\1\0"}, records=False)
    assert log.lanes["compute1"].given(3) == b"\1\0"
    assert log.lanes["compute1"].given(4) is None
    log.lanes["compute1"].taken(3, [1, 0])
    assert list(log.batches()) == []
