from __future__ import annotations

import pytest

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.check import check
from bagpipe.schedule.lowering.embedding import add_embedding, embedding_stages
from bagpipe.schedule.lowering.rewrite import flatten_pipes
from tests.schedule.dense import dense, rows

HOME = {"rank0": 0, "rank1": 1}


def test_a_process_where_a_pipe_begins_embeds_for_it() -> None:
    program = add_embedding(dense("gpipe", 2, 1), HOME)
    assert rows(program) == ["2X_EMBED0,0F0,0B0,2X_EMBED_GRAD0", "3X_EMBED0,1F0,1B0,3X_EMBED_GRAD0"]
    assert {edge.text for edge in program.edges if "X_EMBED" in edge.text} == {
        "0F(b) <- 2X_EMBED(b)",
        "2X_EMBED_GRAD(b) <- 0I(b)",
        "1F(b) <- 2X_EMBED(b)",
    }
    assert [(stage.pipes, stage.position) for stage in embedding_stages(dense("gpipe", 2, 1), HOME)] == [
        ((0,), 0),
        ((), 1),
    ]
    check(program)


def test_embedding_consumers_can_be_given() -> None:
    program = add_embedding(dense("gpipe", 2, 1), HOME, [(1, True)])
    assert {edge.text for edge in program.edges if "X_EMBED" in edge.text} == {
        "1F(b) <- 2X_EMBED(b)",
        "2X_EMBED_GRAD(b) <- 1I(b)",
    }


def test_every_pipe_has_its_embedding_stage() -> None:
    flat = flatten_pipes(dense("chimera", 2, 4))
    assert [stage.pipes for stage in embedding_stages(flat, HOME)] == [(0,), (1,)]
    assert [stage.pipes for stage in embedding_stages(flat, dict.fromkeys(HOME, 0))] == [(0, 1)]
    with pytest.raises(ScheduleError, match=r"1F0~1: expected flat pipes; run flatten-pipes first"):
        add_embedding(dense("chimera", 2, 4), HOME)
