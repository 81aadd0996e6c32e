"""Files of orders that cannot be used. `tests/system/test_dynamic_orders.py` uses the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagpipe.config.sections import PipelineConfig
from bagpipe.errors import InputError
from bagpipe.jobs.ranks import Ranks
from bagpipe.pipeline.order_log import OrderLog
from bagpipe.schedule.formats.order_text import OrderShape
from bagpipe.schedule.ir.stage_graph import chain
from trainer.orders import read_orders, replay_hash, write_orders

SHAPE = OrderShape(graph=chain(1, 1), replicas=1, model="m", limits=(1,))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    config = PipelineConfig(schedule="dynamic", replay=str(tmp_path / "missing"))
    for read in (lambda: replay_hash(config), lambda: read_orders(config, SHAPE)):
        with pytest.raises(InputError, match=r"pipeline.replay: cannot read .*missing: No such file"):
            read()
    (tmp_path / "missing").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"pipeline.replay: cannot read .*missing: expected UTF-8"):
        read_orders(config, SHAPE)


def test_orders_are_written_as_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "orders"
    with OrderLog(lanes={"compute0": 0}, replica=0, num_actions=2, orders=None, records=True) as log:
        for batch in range(1200):
            log.lanes["compute0"].taken(batch, [1, 0])
        assert write_orders(str(path), SHAPE, log, Ranks()) is None
        config = PipelineConfig(schedule="dynamic", replay=str(path))
        assert read_orders(config, SHAPE) == {(batch, 0, 0): b"\1\0" for batch in range(1200)}
        assert read_orders(PipelineConfig(), SHAPE) is None
        assert len(replay_hash(config)) == 64
        problem = write_orders(str(tmp_path / "no" / "orders"), SHAPE, log, Ranks())
        assert "pipeline.record: cannot write" in str(problem)
