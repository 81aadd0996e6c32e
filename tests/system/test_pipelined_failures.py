"""A failing rank in the middle of a staged step ends the job; no other rank waits forever."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import threading
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import trainer.job
from bagpipe.config.load import parse_config
from bagpipe.config.sections import Config
from bagpipe.distributed.membership import Membership
from bagpipe.jobs.ranks import Ranks
from bagpipe.store.server.embedded import EmbeddedServer
from tests.distributed.processes import DEADLINE_S, LONG_DEADLINE_S, run_ranks
from tests.system.jobs import change, run_job
from tests.system.programs import Program, await_gone
from tests.system.staging import staged
from tests.system.test_exactness import MakeConfig
from tests.system.test_ranks import digests_of, run_to_the_end, whole_job
from tests.system.test_torchrun import ENDLESS, stopped_by_ctrl_c
from tests.system.writes import Writes
from trainer.open_job import TrainerJob

pytestmark = [pytest.mark.alone, pytest.mark.redis, pytest.mark.multiproc]

#: In the middle of the sixth batch; a stage has eight micro-batches of it (with two pipes, four in each).
_FORWARD = 5 * 8 + 3

#: A hanging lane continues after this time, so the test does not hang. The others must have given up before.
_HANG_S = 3 * DEADLINE_S

_STAGES = ["--pipeline.stages", "2", "--pipeline.microbatches", "8"]


def broken_job(membership: Membership, config: Config, how: str, broken_rank: int) -> dict[str, Any]:
    """One rank of a job; the forward of one stage breaks on one of the ranks."""
    open_job = trainer.job.open_trainer_job
    forwards = itertools.count()

    def breaks(*_: object) -> None:
        if next(forwards) == _FORWARD:
            if how == "defect":
                raise ZeroDivisionError("division by zero")
            if how == "hang":
                threading.Event().wait(_HANG_S)
                return
            os.kill(os.getpid(), getattr(signal, how))

    def open_broken(config: Config, ranks: Ranks, stack: ExitStack, *more: Any) -> TrainerJob:
        parts = open_job(config, ranks, stack, *more)
        if ranks.rank == broken_rank:
            stages = parts.built.stages
            assert stages is not None
            module: nn.Module = stages.staged.stages[stages.mesh.stages_of(ranks.rank)[0]].module
            module.register_forward_pre_hook(breaks)
        return parts

    trainer.job.open_trainer_job = open_broken  # type: ignore[assignment] # of this process, which ends with the job
    return whole_job(membership, config)


#: Schedule, pipeline ranks, ranks of the job, failing rank, kind of failure.
FAILURES = [
    ("1f1b", 2, 2, 1, "defect"),
    ("1f1b", 2, 2, 1, "SIGKILL"),
    pytest.param(("1f1b", 2, 2, 0, "SIGKILL"), marks=pytest.mark.slow),
    ("graph", 4, 4, 2, "defect"),
    ("graph", 2, 2, 1, "hang"),
    ("chimera", 2, 4, 3, "SIGSTOP"),
    pytest.param(("zb-h1", 4, 4, 3, "SIGKILL"), marks=pytest.mark.slow),
    pytest.param(("1f1b", 2, 2, 1, "SIGSTOP"), marks=pytest.mark.slow),
]


#: Kind of failure -> message of the other ranks. A rank that waits for a hanging rank keeps others waiting in turn.
SAID = {
    "defect": r"rank {0}: ZeroDivisionError: division by zero",
    "hang": r"waited for rank \d at the other end of .* at most 3 s \(run\.peer_timeout_s\)",
}


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: "-".join(map(str, failure)))
def test_a_failing_rank_ends_all_ranks(failure: tuple[str, int, int, int, str], clicks: MakeConfig) -> None:
    """Rank 0 owns the store and the cacher. The error names the cause, not its consequences."""
    schedule, num_ranks, world_size, broken, how = failure
    timeout_s = DEADLINE_S if how in ("hang", "SIGSTOP") else LONG_DEADLINE_S
    config = change(clicks("mixed", "deepfm", epochs=50), cache__rows=0, store__url="", run__peer_timeout_s=timeout_s)
    stopped = broken if how == "SIGSTOP" else -1
    ends = run_ranks(world_size, broken_job, staged(config, schedule, num_ranks), how, broken, stopped=stopped)
    for rank, end in enumerate(ends):
        if rank == broken:
            continue
        assert end.error is not None
        kind, line = end.error
        assert kind == "PeerError"
        assert re.search(SAID.get(how, "lost rank {0}").format(broken), line), line
    if how == "hang":
        assert ends[broken].error is not None
    elif how == "defect":
        assert ends[broken].error == ("ZeroDivisionError", "division by zero")
    else:
        assert ends[broken].code == -signal.SIGKILL  # a stopped process was killed by the test


def test_a_signal_to_one_rank_stops_all_at_the_same_batch(clicks: MakeConfig, redis_server: EmbeddedServer) -> None:
    config = change(
        staged(clicks("mixed", "deepfm", epochs=50), "1f1b", 2),
        cache__rows=200,
        store__url=redis_server.url,
        store__namespace=uuid.uuid4().hex,
        run__peer_timeout_s=20.0,
    )
    ends = run_ranks(2, broken_job, config, "SIGINT", 1)
    assert [end.error for end in ends] == [None] * 2
    stopped = ends[0].value
    assert stopped["stopped"]
    assert stopped["steps"] > 5
    # All trained batches are in the store: an uninterrupted job of as many batches ends the same.
    config = change(config, run__steps=stopped["steps"], store__namespace=uuid.uuid4().hex)
    assert digests_of(run_to_the_end(config, 2)) == digests_of([end.value for end in ends])


def test_ctrl_c_in_one_process(server: EmbeddedServer, writes: Writes, namespace: str, tmp_path: Path) -> None:
    result = tmp_path / "out.json"
    flags = [*ENDLESS, *_STAGES, "--pipeline.schedule", "chimera"]
    store = ["--store.url", server.url, "--store.namespace", namespace, "--result", str(result)]
    with Program([*flags, *store], forked=tmp_path) as program:
        writes.wait(200)
        program.interrupt_group()
        done = program.finish()
    assert (done.code, done.err) == (130, "")
    await_gone(done.mark)
    stopped = json.loads(result.read_text())
    assert stopped["stopped"] is True
    again = parse_config([*flags, "--run.steps", str(stopped["steps"]), "--store.url", "memory://"], "test").config
    assert run_job(again).digests == (stopped["dense_digest"], stopped["embedding_digest"])


@pytest.mark.slow  # the launcher behaves as without stages, see test_torchrun
def test_ctrl_c_under_torchrun(server: EmbeddedServer, writes: Writes, namespace: str, tmp_path: Path) -> None:
    flags = [*ENDLESS, *_STAGES, "--pipeline.schedule", "1f1b"]
    stopped = stopped_by_ctrl_c(flags, server.url, writes, namespace, tmp_path)
    again = parse_config([*flags, "--run.steps", str(stopped["steps"]), "--store.url", "memory://"], "test").config
    # One pipe: one process ends with the same bits as several ranks.
    assert run_job(again).digests == (stopped["dense_digest"], stopped["embedding_digest"])
