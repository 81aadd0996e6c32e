"""Rows of the store that another program sets back to an earlier, valid value: never trained on silently."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import bagpipe.jobs.open_job
from bagpipe.config.sections import Config
from bagpipe.distributed.membership import Membership
from bagpipe.errors import EXIT_FAILED, ChangedRowError, exit_code
from bagpipe.store.memory.store import MemoryStore
from bagpipe.store.open import open_store
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.training.engine import Engine
from tests.distributed.processes import run_ranks
from tests.effort import some_of
from tests.system.jobs import change, largest_batch
from tests.system.recording import NUM_BUCKETS, recorded
from tests.system.resumed import Resumed, digests
from tests.system.setting_back import Call, SetBack, SettingBackStore, chances
from tests.system.writes import client_of
from trainer.job import run_job

MakeConfig = Callable[..., Config]

#: Batches of the click log.
NUM_BATCHES = 26


def run(
    config: Config, set_back: SetBack | None = None, membership: Membership | None = None
) -> tuple[dict[str, Any], list[Call]]:
    """A job as the program runs it, in a new namespace: its result, and its exchanges with the store."""
    stores: list[SettingBackStore] = []

    def open_watched(*args: Any, **kwargs: Any) -> SettingBackStore:
        stores.append(SettingBackStore(open_store(*args, **kwargs), open_store(*args, **kwargs), set_back))
        return stores[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bagpipe.jobs.open_job, "open_store", open_watched)
        result = run_job(config, membership=membership)
    return dataclasses.asdict(result), stores[0].calls


def in_new_namespace(config: Config) -> Config:
    return change(config, store__namespace=uuid.uuid4().hex)


@pytest.mark.redis
@pytest.mark.multiproc
@pytest.mark.parametrize("mode", some_of(["cached", "direct"], {0}))
def test_a_row_set_back_in_the_middle_of_a_job_ends_it(
    mode: str, clicks: MakeConfig, redis_servers: tuple[str, ...]
) -> None:
    config = change(clicks(), store__url=redis_servers[0])
    config = change(config, cache__rows=largest_batch(config) + 7 if mode == "cached" else 0)
    _, calls = run(in_new_namespace(config))
    unused = next(chance for chance in chances(calls) if chance.next_read is None)
    used = next(chance for chance in chances(calls) if chance.next_read is not None)
    assert unused.write < sum(call.kind == "write" for call in calls) - 1, "the last write is that of the whole cache"
    for set_back in (unused, used):
        with pytest.raises(ChangedRowError, match=r"1 of 8 buckets \(\d\) do not hold the rows last written") as failed:
            run(in_new_namespace(config), set_back)
        assert exit_code(failed.value) == EXIT_FAILED
        assert "train anew, in another store.namespace" in str(failed.value)


def rank_of_job(
    membership: Membership, config: Config, set_back: SetBack | None, rank: int
) -> tuple[dict[str, Any], list[Call]]:
    return run(config, set_back if rank == membership.rank else None, membership)


@pytest.mark.redis
@pytest.mark.multiproc
def test_a_row_that_any_rank_wrote_is_compared_at_the_end(clicks: MakeConfig, redis_servers: tuple[str, ...]) -> None:
    config = change(clicks(), store__url=redis_servers[0], run__peer_timeout_s=20.0)
    config = change(config, cache__rows=-(-largest_batch(config) // 2) + 3)
    ends = run_ranks(2, rank_of_job, in_new_namespace(config), None, 0)
    assert [end.error for end in ends] == [None, None]
    calls = ends[1].value[1]
    writes = sum(call.kind == "write" for call in calls)
    # Nobody reads it: what other ranks do with it is not in these exchanges.
    set_back = next(chance for chance in chances(calls) if chance.write > writes // 3 and chance.next_read is None)
    ends = run_ranks(2, rank_of_job, in_new_namespace(config), set_back, 1)
    assert ends[0].error is not None
    assert ends[0].error[0] == "ChangedRowError"
    assert ends[1].error is not None


@pytest.mark.parametrize("world_size", some_of([1, 2], {1}))
def test_a_checkpoint_trained_from_a_row_set_back_is_skipped(
    clicks: MakeConfig, tmp_path: Path, world_size: int
) -> None:
    """Each checkpoint knows: a job that is killed compares nothing at its end."""
    config = clicks(optimizer="adam")
    config = change(config, cache__rows=largest_batch(config) // world_size + 7)
    whole = recorded(config, tmp_path, every=1_000, world_size=world_size).run()
    watched: list[SettingBackStore] = []
    recorded(config, tmp_path, world_size=world_size, prepare=watch(watched, [None] * world_size)).run()
    plans, used_at = next(choices([store.calls for store in watched]))
    broken: list[str] = []
    job = recorded(config, tmp_path, world_size=world_size, on_broken=broken.append)
    job.prepare = watch([], plans, job.name)
    with pytest.raises(ChangedRowError):
        job.run()
    job.prepare = lambda engine: None
    end = job.run()
    assert end.digests == whole.digests
    assert end.first_batch == used_at // job.every * job.every
    assert len(broken) == len([*range(end.first_batch + job.every, NUM_BATCHES, job.every), NUM_BATCHES])
    assert all("trained from values other than the last ones written" in line for line in broken)


def choices(calls: Sequence[Sequence[Call]]) -> Iterator[tuple[list[SetBack | None], int]]:
    """The row that each rank's other program sets back, and the batch that trains on it: batches 8 to 13."""
    for rank, own in enumerate(calls):
        elsewhere = {row for other in calls if other is not own for call in other for row in call.rows}
        for chance in chances(own):
            if chance.row not in elsewhere and chance.next_read is not None and 8 <= chance.next_read < 14:
                yield [chance if rank == number else None for number in range(len(calls))], chance.next_read


def watch(stores: list[SettingBackStore], plans: Sequence[SetBack | None], name: str = "") -> Callable[[Engine], None]:
    """`Recorded.prepare` that puts a `SettingBackStore` in front of each engine's store."""
    left = list(plans)

    def prepare(engine: Engine) -> None:
        other = MemoryStore(engine.store.schema, name=name, num_buckets=NUM_BUCKETS)
        engine.store = SettingBackStore(engine.store, other, left.pop(0))
        stores.append(engine.store)

    return prepare


@pytest.fixture
def job(server: EmbeddedServer, tmp_path: Path) -> Resumed:
    return Resumed(folder=tmp_path, arguments=["--store.url", server.url, "--checkpoint.keep", "99"])


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """Final numbers of the uninterrupted job."""
    job = Resumed(folder=tmp_path_factory.mktemp("uninterrupted"))
    assert job.run().code == 0
    return digests(job.result)


def set_rows_back(server: EmbeddedServer, job: Resumed) -> None:
    """Train 6 batches, then 5 more, and then set all rows of one bucket back that the later ones changed."""
    bucket = f"{job.namespace}:{{3}}"
    with closing(client_of(server.url)) as client:
        assert job.run("--run.steps", "6").code == 0
        earlier = client.hgetall(bucket)
        assert job.run("--run.steps", "11").code == 0
        later = client.hgetall(bucket)
        older = {field: value for field, value in earlier.items() if later[field] != value}
        assert older
        client.hset(bucket, mapping=older)


@pytest.mark.redis
@pytest.mark.multiproc
def test_rows_set_back_between_two_starts_are_found_at_the_end(
    server: EmbeddedServer, job: Resumed, expected: object
) -> None:
    """The next start resumes from a checkpoint without these rows, and reloads the store."""
    set_rows_back(server, job)
    failed = job.run()
    assert failed.code == EXIT_FAILED
    assert "1 of 8 buckets (3) do not hold the rows last written to them" in failed.error_line
    assert "checkpoints after step 11 may hold rows trained from these" in failed.error_line
    done = job.run()
    assert done.code == 0
    assert "trained from values other than the last ones written" in done.err
    assert "8 of the store's 8 buckets were loaded" in done.err
    assert digests(job.result) == expected
    assert job.resumed_from() == 11


@pytest.mark.redis
@pytest.mark.multiproc
def test_an_audit_finds_rows_set_back_before_training(server: EmbeddedServer, job: Resumed, expected: object) -> None:
    set_rows_back(server, job)
    done = job.run("--store.audit", "true")
    assert done.code == 0
    assert "rows of 1 of the store's 8 buckets are not those of the checkpoint" in done.err
    assert "1 of the store's 8 buckets were loaded from the checkpoint's files" in done.err
    assert digests(job.result) == expected


@pytest.mark.redis
@pytest.mark.multiproc
def test_a_job_that_goes_on_from_rows_without_a_checkpoint_compares_if_it_audits(
    clicks: MakeConfig, redis_servers: tuple[str, ...], tmp_path: Path
) -> None:
    """Without an audit it does not know what the sums were, unless it saves the rows as its first checkpoint."""
    config = change(clicks(), store__url=redis_servers[0], cache__rows=0)
    again = change(in_new_namespace(config), store__existing="rows-only")
    run(again)
    _, calls = run(again)
    set_back = next(chance for chance in chances(calls) if chance.next_read is None)
    run(again, set_back)
    with pytest.raises(ChangedRowError, match="do not hold the rows last written"):
        run(change(again, store__audit=True), set_back)
    run(change(again, store__audit=True))
    with pytest.raises(ChangedRowError, match="checkpoints after step 0 may hold rows trained from these"):
        run(change(again, checkpoint__dir=str(tmp_path / "checkpoints")), set_back)
