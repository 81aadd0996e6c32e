"""A failing rank ends a job of several ranks: the same error everywhere, in time, and nothing left behind."""

from __future__ import annotations

import itertools
import os
import signal
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

import trainer.job
import trainer.open_job
from bagpipe.cache.upload import Uploader
from bagpipe.config.sections import Config
from bagpipe.distributed.membership import Membership
from bagpipe.errors import InputError
from bagpipe.jobs.ranks import Ranks
from bagpipe.types.batch import Batch
from bagpipe.types.model_inputs import ModelInputs
from tests.distributed.processes import DEADLINE_S, LONG_DEADLINE_S, run_ranks
from tests.system.jobs import change
from tests.system.streams import FailingStore
from tests.system.test_ranks import digests_of, run_to_the_end, whole_job
from trainer.open_job import TrainerJob

pytestmark = [pytest.mark.alone, pytest.mark.redis, pytest.mark.multiproc]

MakeConfig = Callable[..., Config]


def broken_job(membership: Membership, config: Config, how: str, broken_rank: int = 1) -> dict[str, Any]:
    """One rank of a job; one of the ranks breaks at its sixth batch."""
    open_job = trainer.job.open_trainer_job
    batches = itertools.count()

    def open_broken(config: Config, ranks: Ranks, stack: ExitStack, *more: Any) -> TrainerJob:
        parts = open_job(config, ranks, stack, *more)
        prepare = parts.open.engine.prepare

        def breaks(batch: Batch, upload: Uploader) -> ModelInputs:
            if next(batches) == 5:
                if how == "input":
                    raise InputError("clicks.parquet: row group 2 cannot be read")
                if how == "defect":
                    raise ZeroDivisionError("division by zero")
                if how != "store":
                    os.kill(os.getpid(), getattr(signal, how))
            return prepare(batch, upload)

        if ranks.rank == broken_rank:
            parts.open.engine.prepare = breaks
            if how == "store":
                parts.open.engine.store = FailingStore(parts.open.store, at_read=4)
        return parts

    trainer.job.open_trainer_job = open_broken  # type: ignore[assignment] # of this process, which ends with the job
    return whole_job(membership, config)


@pytest.mark.parametrize(
    ("how", "kind", "line"),
    [
        ("input", "InputError", "clicks.parquet: row group 2 cannot be read"),
        ("store", "PeerError", "read 4 failed"),
        ("defect", "PeerError", "ZeroDivisionError: division by zero"),
        ("SIGKILL", "PeerError", "lost rank 1, dead or stopped"),
        ("SIGSTOP", "PeerError", "lost rank 1, dead or stopped"),
    ],
)
def test_a_failing_rank_ends_all_ranks(how: str, kind: str, line: str, clicks: MakeConfig) -> None:
    """Rank 0 runs the cacher and the store for all and is not the failing rank."""
    stopped, timeout_s = (1, DEADLINE_S) if how == "SIGSTOP" else (-1, LONG_DEADLINE_S)
    config = change(clicks(epochs=50), cache__rows=0, store__url="", run__peer_timeout_s=timeout_s)
    ends = run_ranks(3, broken_job, config, how, stopped=stopped)
    for rank in (0, 2):
        error = ends[rank].error
        assert error is not None
        assert error[0] == kind
        told_by = {"input": 1, "store": 1, "defect": 1}.get(how, 2 - rank)
        assert error[1].removeprefix(f"rank {told_by}: ").startswith(line), error
    own = {"input": "InputError", "store": "StoreError", "defect": "ZeroDivisionError"}
    if how in own:
        assert ends[1].error is not None
        assert ends[1].error[0] == own[how]
        assert not ends[1].error[1].startswith("rank")
    else:
        assert ends[1].code == -signal.SIGKILL  # a stopped process was killed by the test


@pytest.mark.parametrize(
    ("how", "kind", "line"),
    [("defect", "PeerError", "rank 0: ZeroDivisionError"), ("SIGKILL", "PeerError", "lost rank 0")],
)
def test_a_failure_of_rank_0_ends_all_ranks(how: str, kind: str, line: str, clicks: MakeConfig) -> None:
    """The other ranks lose the store as a consequence, but their errors name the cause."""
    config = change(clicks(epochs=50), cache__rows=0, store__url="", run__peer_timeout_s=LONG_DEADLINE_S)
    ends = run_ranks(3, broken_job, config, how, 0)
    for rank in (1, 2):
        error = ends[rank].error
        assert error is not None
        assert error[0] == kind
        assert error[1].removeprefix(f"rank {3 - rank}: ").startswith(line), error


def test_a_batch_that_cannot_fit_is_refused_by_all(clicks: MakeConfig) -> None:
    config = change(clicks(), cache__rows=3, store__url="", run__peer_timeout_s=LONG_DEADLINE_S)
    ends = run_ranks(2, whole_job, config)
    for end in ends:
        assert end.error is not None
        assert end.error[0] in ("InputError", "CapacityError")
        assert "unique rows" in end.error[1]


def test_a_signal_to_one_rank_stops_all_at_the_same_batch(clicks: MakeConfig, redis_server: Any) -> None:
    config = change(
        clicks(epochs=50),
        cache__rows=200,
        store__url=redis_server.url,
        store__namespace=uuid.uuid4().hex,
        run__peer_timeout_s=20.0,
    )
    ends = run_ranks(3, broken_job, config, "SIGINT")
    assert [end.error for end in ends] == [None] * 3
    stopped = ends[0].value
    assert stopped["stopped"]
    assert stopped["steps"] > 5
    digests = digests_of([end.value for end in ends])
    # All trained batches are in the store: an uninterrupted job of as many batches ends the same.
    config = change(config, run__steps=stopped["steps"], store__namespace=uuid.uuid4().hex)
    assert digests_of(run_to_the_end(config, 3)) == digests


def other_config(membership: Membership, config: Config, **values: object) -> dict[str, Any]:
    return whole_job(membership, change(config, **values) if membership.rank == 1 else config)


def another_rate(membership: Membership, config: Config) -> dict[str, Any]:
    return other_config(membership, config, optim__rows_lr=0.5, run__trace="/tmp/elsewhere.json")


def another_model(membership: Membership, config: Config) -> dict[str, Any]:
    """The same configuration with a model that depends on another setting."""
    build = trainer.open_job.build_training_model
    wide = change(config, model__bottom_mlp=(7,))

    def build_other(config: Config, *more: Any) -> Any:
        return build(wide if membership.rank == 1 else config, *more)

    trainer.open_job.build_training_model = build_other  # type: ignore[assignment] # of this process
    return whole_job(membership, config)


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (another_rate, "the ranks' configurations differ: optim.rows_lr is 0.1 on rank 0 and 0.5 on rank 1"),
        (another_model, "the ranks' models differ: "),
    ],
)
def test_ranks_that_differ_are_refused(work: Callable[..., Any], words: str, clicks: MakeConfig) -> None:
    config = change(clicks(), cache__rows=200, store__url="", run__peer_timeout_s=LONG_DEADLINE_S)
    for end in run_ranks(2, work, config):
        assert end.error is not None
        assert end.error[0] == "InputError"
        assert words in end.error[1]
