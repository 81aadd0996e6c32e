"""Whole streams: every rank receives exactly the locally planned batches, under any failure."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bagpipe.client.agreement import job_label
from bagpipe.config.sections import DataConfig
from bagpipe.errors import CapacityError, InputError, JobError
from bagpipe.oracle.plan import OracleSpec
from bagpipe.oracle.rank_batch import RankBatch
from cacher.planned_phase import PlannedBatch, PlannedPhase
from cacher.planning import PlannedData
from cacher.server import Limits
from tests.cacher.daemons import (
    CuttingProxy,
    Daemon,
    all_batches,
    assert_same_batches,
    config,
    planned_batches,
    remote,
    served,
    spec_of,
)
from tests.data.files import criteo_lines


@pytest.mark.parametrize("assign", ["contiguous", "locality"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_gets_its_part_of_the_plan(listen: str, world_size: int, assign: str) -> None:
    job = config(assign=assign)
    with served(job, listen):
        ours = all_batches(listen, job, world_size, phases=("train", "eval"))
    train, held_out = planned_batches(job, world_size), planned_batches(job, world_size, "eval")
    for rank in range(world_size):
        assert_same_batches(ours[rank], train[rank] + held_out[rank])


@pytest.mark.parametrize("rows", [0, 1500])
def test_small_caches_and_direct_mode(listen: str, rows: int) -> None:
    job = config(rows=rows)
    with served(job, listen):
        ours = all_batches(listen, job, 2)
    for rank, rank_batches in enumerate(planned_batches(job, 2)):
        assert_same_batches(ours[rank], rank_batches)


def test_several_jobs_at_once(listen: str) -> None:
    job = config()
    expected = planned_batches(job, 2)
    with served(job, listen), ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(all_batches, listen, job, 2, job_id=f"job {number}") for number in range(3)]
        for future in jobs:
            for rank, rank_batches in enumerate(future.result()):
                assert_same_batches(rank_batches, expected[rank])


@pytest.mark.parametrize(("first", "max_steps"), [(0, 5), (7, 0), (7, 9), (16, 0), (18, 0), (30, 0), (4, 4)])
def test_a_phase_begins_and_ends_at_any_batch(listen: str, first: int, max_steps: int) -> None:
    job = config()
    [expected] = planned_batches(job, max_steps=max_steps, first_batch=first)
    with served(job, listen), remote(listen, job) as source:
        spec = spec_of(job, source.schema)
        for _ in range(2):  # with and without reader_states
            assert_same_batches(list(source.batches("train", spec, max_steps=max_steps, first_batch=first)), expected)
    indices = [rank_batch.batch.index for rank_batch in expected]
    assert indices == list(range(first, min(max_steps or 18, 18)))


def test_a_rank_can_start_at_a_later_batch(listen: str) -> None:
    job = config()
    [expected] = planned_batches(job, first_batch=2)
    with served(job, listen), remote(listen, job) as source:
        rank_batches = source.batches("train", spec_of(job, source.schema), first_batch=2, next_batch=9)
        assert_same_batches(list(rank_batches), expected[7:])


def test_plans_of_a_stream_are_not_made_again_in_the_middle(listen: str, tmp_path: Path) -> None:
    """They depend on when its batches came."""
    (tmp_path / "day_0").write_bytes(criteo_lines(300))
    follow = {"follow": "age", "follow_age_s": 0.0, "eval_fraction": 0.0, "stream_wait_s": 0.01}
    job = config(limit=0, format="criteo-tsv", path=str(tmp_path), **follow)
    with served(job, listen), remote(listen, job) as source:
        rank_batches = source.batches("train", spec_of(job, source.schema), next_batch=1)
        with pytest.raises(JobError, match="plans of a stream cannot be made twice: resume the job"):
            next(rank_batches)


def test_a_late_rank_gets_every_batch(listen: str) -> None:
    """The first rank takes as many batches as its credits allow before the second one connects."""
    job = config()
    expected = planned_batches(job, 2)
    with served(job, listen), remote(listen, job, rank=0, world_size=2, job_id="job") as first:
        spec = spec_of(job, first.schema, 2)
        rank_batches = first.batches("train", spec)
        early = [next(rank_batches) for _ in range(3)]
        with remote(listen, job, rank=1, world_size=2, job_id="job") as second, ThreadPoolExecutor(1) as pool:
            other = pool.submit(list, second.batches("train", spec))
            assert_same_batches(early + list(rank_batches), expected[0])
            assert_same_batches(other.result(), expected[1])


def test_ranks_read_the_shares_they_ask_for(listen: str) -> None:
    """All ranks must ask for the same shares."""
    job = config()
    with served(job, listen), remote(listen, job, rank=0, world_size=2, job_id="job") as first:
        specs = [spec_of(job, first.schema, 2, shares) for shares in ((0, 3), (1, 1), ())]
        with remote(listen, job, rank=1, world_size=2, job_id="job") as second, ThreadPoolExecutor(1) as pool:
            mine = pool.submit(list, first.batches("train", specs[0]))
            rank_batches = list(second.batches("train", specs[0]))
            assert_same_batches(rank_batches, planned_batches(job, 2, shares=(0, 3))[1])
            assert [rank_batch.batch.num_examples for rank_batch in mine.result()] == [0] * len(rank_batches)
            next(first.batches("eval", specs[0]))
            with pytest.raises(
                InputError, match=r"spec.example_shares\[0\]: the job's other ranks request 0, rank 1 requests 1"
            ):
                next(second.batches("eval", specs[1]))


class GatedPhase(PlannedPhase):
    """A phase whose batches each wait for the gate."""

    gate: threading.Semaphore

    def __next__(self) -> PlannedBatch:
        assert self.gate.acquire(timeout=30)
        return super().__next__()


class GatedData(PlannedData):
    """Data planned as fast as its gate opens."""

    gate = threading.Semaphore(0)

    def phase(self, phase: object, spec: OracleSpec, **options: int) -> PlannedPhase:
        planned = super().phase(phase, spec, **options)  # type: ignore[arg-type]
        planned.__class__ = GatedPhase
        planned.gate = self.gate  # type: ignore[attr-defined]
        return planned


def test_a_slow_oracle_changes_no_batch(listen: str) -> None:
    """The trainers always wait for the oracle, which continues only when they have taken all batches."""
    job = config()
    data = GatedData(job.data, job.run.seed)
    barrier = threading.Barrier(2, action=data.gate.release)

    def take(rank: int, rank_batches: Iterator[RankBatch]) -> list[RankBatch]:
        taken = []
        barrier.wait(30)
        for rank_batch in rank_batches:
            taken.append(rank_batch)
            barrier.wait(30)
        return taken

    with served(job, listen, data=data):
        ours = all_batches(listen, job, 2, take=take)
    for rank, rank_batches in enumerate(planned_batches(job, 2)):
        assert_same_batches(ours[rank], rank_batches)


def test_the_number_of_ending_planners_is_bounded(listen: str) -> None:
    """A rank can leave one phase for the next arbitrarily fast."""
    job = config()
    data = GatedData(job.data, job.run.seed)
    data.gate = threading.Semaphore(0)
    with served(job, listen, data=data), remote(listen, job) as source:
        runs = [source.batches("train", spec_of(job, source.schema)) for _ in range(18)]
        try:
            with pytest.raises(JobError, match=r"^the cacher is still ending 16 phases, at most 16$"):
                next(runs[17])
        finally:
            data.gate.release(len(runs))


def test_a_slow_trainer_stops_the_planner(listen: str) -> None:
    """The planner stops at the credits of the slowest rank plus one batch that waits for room."""
    job = config()
    with served(job, listen) as server:
        fast = remote(listen, job, rank=0, world_size=2, job_id="job", credits=9)
        slow = remote(listen, job, rank=1, world_size=2, job_id="job", credits=2)
        with fast, slow:
            spec = spec_of(job, fast.schema, 2)
            waiting, rank_batches = slow.batches("train", spec), fast.batches("train", spec)
            assert [next(rank_batches).batch.index for _ in range(2)] == [0, 1]
            [(_, _, run)] = server.jobs.runs()
            statistics = run.statistics()
            assert statistics.batches_planned == 2
            assert statistics.batches_buffered[1] == 2
            assert statistics.credits_free[1] == 0
            assert next(waiting).batch.index == 0
            assert next(rank_batches).batch.index == 2


def test_the_next_phase_starts_after_one_left_early(listen: str) -> None:
    job = config()
    [held_out] = planned_batches(job, phase="eval")
    with served(job, listen), remote(listen, job) as source:
        spec = spec_of(job, source.schema)
        rank_batches = source.batches("train", spec)
        assert next(rank_batches).batch.index == 0
        assert_same_batches(list(source.batches("eval", spec)), held_out)


def test_one_rank_can_leave_a_phase_early(listen: str) -> None:
    """Batches that a rank no longer takes do not stop the planner."""
    job = config()
    expected, held_out = planned_batches(job, 2), planned_batches(job, 2, "eval")

    def take(rank: int, rank_batches: Iterator[RankBatch]) -> list[RankBatch]:
        first = next(rank_batches)
        return [first] if rank == 0 and first.batch.num_examples else [first, *rank_batches]

    with served(job, listen):
        ours = all_batches(listen, job, 2, phases=("train", "eval"), take=take)
    assert_same_batches(ours[0], [expected[0][0], held_out[0][0]])
    assert_same_batches(ours[1], expected[1] + held_out[1])


@pytest.mark.parametrize("cuts", [[300], [2_000], [40_000, 5, 90_000], [30_000] * 6, [1, 9, 25, 26, 27, 100, 400, 800]])
def test_cut_connections_change_no_batch(tmp_path: Path, listen: str, cuts: list[int]) -> None:
    """Connections are cut before the welcome, in the middle of a batch, and again before any data."""
    job = config()
    [expected] = planned_batches(job)
    with served(job, listen), CuttingProxy(tmp_path / "proxy.sock", tmp_path / "cacher.sock", cuts) as proxy:
        with remote(proxy.url, job) as source:
            assert_same_batches(list(source.batches("train", spec_of(job, source.schema))), expected)
        assert proxy.num_cut == len(cuts)


@pytest.mark.multiproc
@pytest.mark.parametrize("address", ["unix", "tcp"])
def test_a_restarted_daemon_changes_no_batch(tmp_path: Path, address: str) -> None:
    """Both ranks are in the middle of the run, one further than the other."""
    job = config(limit=2000)
    expected = planned_batches(job, 2)
    half_way = threading.Barrier(3)
    again = threading.Event()

    def take(rank: int, rank_batches: Iterator[RankBatch]) -> list[RankBatch]:
        taken = [next(rank_batches) for _ in range(8 + 2 * rank)]
        half_way.wait(60)
        assert again.wait(60)
        return taken + list(rank_batches)

    with ThreadPoolExecutor(1) as pool:
        with Daemon(job, f"unix:{tmp_path}/c.sock" if address == "unix" else "127.0.0.1:0") as daemon:
            url = daemon.url
            ours = pool.submit(all_batches, url, job, 2, take=take)
            half_way.wait(60)
            daemon.kill()
        again.set()
        with Daemon(job, url):
            for rank, rank_batches in enumerate(ours.result()):
                assert_same_batches(rank_batches, expected[rank])


def test_trainers_wait_for_a_late_cacher(listen: str) -> None:
    job = config()
    with ThreadPoolExecutor(1) as pool:
        ours = pool.submit(all_batches, listen, job)
        with served(job, listen):
            assert_same_batches(ours.result()[0], planned_batches(job)[0])


def test_a_cacher_that_never_comes(listen: str) -> None:
    with pytest.raises(InputError, match=r"the cacher at unix:.*cacher\.sock was not reached within 0\.3 s"):
        all_batches(listen, config(timeout_s=0.3))


@pytest.mark.multiproc
def test_a_cacher_lost_for_good(listen: str) -> None:
    """Received batches are still handed out, and the error is permanent."""
    job = config(timeout_s=0.3)
    with Daemon(job, listen) as daemon, remote(listen, job) as source:
        rank_batches = source.batches("train", spec_of(job, source.schema))
        assert next(rank_batches).batch.index == 0
        daemon.kill()
        with pytest.raises(JobError, match=r"was not reached within 0\.3 s: "):
            list(rank_batches)
        with pytest.raises(JobError, match="was not reached"):
            next(source.batches("eval", spec_of(job, source.schema)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 51}, r"^data\.batch_size: the cacher has 50, the trainer 51$"),
        ({"limit": 999}, r"^data\.limit: the cacher has 1000, the trainer 999$"),
        ({"path": "other"}, r"^data\.path: the cacher has '', the trainer 'other'$"),
        ({"shuffle": True}, r"^data\.shuffle: the cacher has False, the trainer True$"),
        ({"seed": 6}, r"^run\.seed: the cacher has 5, the trainer 6$"),
        ({"lookahead": 4}, r"^oracle\.lookahead: the cacher has 3, the trainer 4$"),
        ({"rows": 7}, r"^cache\.rows: the cacher has 50000, the trainer 7$"),
        ({"assign": "locality"}, r"^cacher\.assign: the cacher has 'contiguous', the trainer 'locality'$"),
    ],
)
def test_another_configuration_is_refused(listen: str, change: dict[str, object], message: str) -> None:
    with served(config(), listen) as server:
        with pytest.raises(InputError, match=message):
            all_batches(listen, config(**change))  # type: ignore[arg-type]
        assert server.counters.totals().refused == 1


def test_each_side_has_its_own_number_of_parser_processes(listen: str) -> None:
    with served(config(), listen):
        assert len(all_batches(listen, config(workers=3))[0]) == 18


def test_inconsistent_ranks_are_refused(listen: str) -> None:
    job = config()
    with served(job, listen), remote(listen, job, rank=0, world_size=2, job_id="job") as first:
        with pytest.raises(InputError, match=r"^world size: the job's other ranks have 2, rank 1 has 4$"):
            remote(listen, job, rank=1, world_size=4, job_id="job").__enter__()
        with pytest.raises(InputError, match=rf"^rank 0 of job {job_label('job')} belongs to another process$"):
            remote(listen, job, rank=0, world_size=2, job_id="job").__enter__()
        spec = spec_of(job, first.schema, 2)
        rank_batches = first.batches("train", spec, max_steps=5)
        assert next(rank_batches).batch.index == 0
        with remote(listen, job, rank=1, world_size=2, job_id="job") as second:
            with pytest.raises(
                InputError, match=r"^run 0, max_steps: the job's other ranks request 5, rank 1 requests 6$"
            ):
                next(second.batches("train", spec, max_steps=6))
        assert [rank_batch.batch.index for rank_batch in rank_batches] == [1, 2, 3, 4]


def test_a_rank_lost_for_good_ends_the_job_for_the_others(listen: str, tmp_path: Path) -> None:
    job = config()
    with served(job, listen, limits=Limits(grace_s=0.2)) as server:
        with remote(listen, job, rank=0, world_size=2, job_id="job") as left:
            rank_batches = left.batches("train", spec_of(job, left.schema, 2))
            with CuttingProxy(tmp_path / "proxy.sock", tmp_path / "cacher.sock", []) as proxy:
                lost = remote(proxy.url, config(timeout_s=0.1), rank=1, world_size=2, job_id="job")
                lost.__enter__()
            with pytest.raises(JobError, match=r"^rank 1 was lost and not back within 0\.2 s$"):
                list(rank_batches)
        lost.close()
        while server.jobs.counts() != (0, 0):  # the last rank's stream can end after its error was sent
            pass


def test_a_capacity_error_keeps_its_class(listen: str) -> None:
    job = config(rows=3)
    with served(job, listen), pytest.raises(CapacityError, match=r"cache\.rows is 3"):
        all_batches(listen, job)


GOOD_LINE = "\t".join(["1", *["3"] * 13, *["af"] * 26]) + "\n"


def text_job(path: Path, **changes: object) -> object:
    data = DataConfig(
        format="criteo-tsv",
        path=str(path),
        batch_size=10,
        eval_fraction=0.0,
        workers=0,
        **changes,  # type: ignore[arg-type]
    )
    base = config(lookahead=64)
    return type(base)(**{**{name: getattr(base, name) for name in ("oracle", "cache", "cacher", "run")}, "data": data})


def test_bad_data_comes_after_every_good_batch(tmp_path: Path, listen: str) -> None:
    folder = tmp_path / "days"
    folder.mkdir()
    (folder / "day_0").write_text(GOOD_LINE * 100)
    (folder / "day_1").write_text(GOOD_LINE + "bad\n")
    job = text_job(folder)
    seen: list[int] = []
    with served(job, listen), remote(listen, job) as source:  # type: ignore[arg-type]
        with pytest.raises(InputError, match="day_1:2: expected 40"):
            seen.extend(rank_batch.batch.index for rank_batch in source.batches("train", spec_of(job, source.schema)))  # type: ignore[arg-type]
    assert seen == list(range(10))


def test_skipped_rows_are_counted(tmp_path: Path, listen: str) -> None:
    (tmp_path / "day").write_text(f"{GOOD_LINE}bad\n{GOOD_LINE}worse\n{GOOD_LINE}")
    job = text_job(tmp_path / "day", bad_rows="skip")
    with served(job, listen), remote(listen, job) as source:  # type: ignore[arg-type]
        assert len(list(source.batches("train", spec_of(job, source.schema)))) == 1  # type: ignore[arg-type]
        assert source.skipped_rows() == 2
