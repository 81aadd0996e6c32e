"""Planning of a job's batches in one process."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bagpipe.client.codec import encode_rank_batch
from bagpipe.config.sections import DataConfig
from bagpipe.errors import CapacityError, InputError
from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.oracle.rank_batch import PlanSpan
from bagpipe.oracle.verify import Verifier
from bagpipe.types.batch import Batch
from cacher.planning import PlannedData
from data.next_use_writer import NextUseOrder
from tests.cacher.daemons import assert_same_batches, config, planned_batches, spec_of
from tests.client.rank_batches import assert_same
from tests.data.next_uses import annotated

GOOD_LINE = "\t".join(["1", *["3"] * 13, *["af"] * 26]) + "\n"
#: A folder whose files come whole.
FOLLOW: dict[str, Any] = {"follow": "age", "follow_age_s": 0.0, "stream_wait_s": 0.01, "eval_fraction": 0.0}


def test_the_ranks_share_out_every_batch() -> None:
    job = config(assign="locality")
    [whole] = planned_batches(job)
    parts = planned_batches(job, 3)
    for number, rank_batch in enumerate(whole):
        ours = [part[number].batch for part in parts]
        assert sum(batch.num_examples for batch in ours) == rank_batch.batch.num_examples
        assert {part[number].num_global_examples for part in parts} == {rank_batch.batch.num_examples}
        assert sorted(np.concatenate([ids_of(batch) for batch in ours])) == sorted(ids_of(rank_batch.batch))


def ids_of(batch: Batch) -> list[int]:
    return [int(value) for value in batch.values]


@pytest.mark.parametrize("lookahead", [1, 3, 64])
@pytest.mark.parametrize("max_steps", [1, 17, 18, 19])
def test_a_limited_phase_is_planned_like_the_whole(lookahead: int, max_steps: int) -> None:
    job = config(lookahead=lookahead)
    [batches], [first] = planned_batches(job), planned_batches(job, max_steps=max_steps)
    assert_same_batches(first, batches[:max_steps])


@pytest.mark.parametrize("first_batch", [0, 1, 5, 17, 18, 99])
def test_a_plan_from_the_middle_holds_the_same_batches(first_batch: int) -> None:
    job = config(batch_size=10)
    data = PlannedData(job.data, job.run.seed)
    first = list(data.batches("train", spec_of(job, data.schema), first_batch=first_batch))
    [whole] = planned_batches(job)
    assert [ours.batch.index for ours in first] == list(range(first_batch, 90))
    for ours, other in zip(first, whole[first_batch:], strict=False):
        assert_same(ours.batch, other.batch)


@cache
def reader_states(shuffle: bool) -> dict[int, Mapping[str, Any] | None]:
    """Reader state of every batch."""
    job = config(batch_size=10, shuffle=shuffle)
    data = PlannedData(job.data, job.run.seed)
    return {item.batch.index: item.batch.reader_state for item in data.batches("train", spec_of(job, data.schema))}


@cache
def planned_without_state(first_batch: int, shuffle: bool) -> list[list[bytes]]:
    job = config(batch_size=10, shuffle=shuffle)
    return planned(PlannedData(job.data, job.run.seed), first_batch)


@pytest.mark.parametrize(
    ("first_batch", "distance"),
    [
        *[(1, 0), (16, 15), (21, 1), (64, 15), (90, 0)],
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(16, 0), (16, 1), (21, 0), (21, 15), (64, 0)]),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(64, 1), (90, 1), (90, 15)]),
    ],
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_plan_is_the_same_bytes_with_and_without_a_reader_state(
    first_batch: int, distance: int, shuffle: bool
) -> None:
    """The state is used in another process than the one that made it. Each batch carries one."""
    job = config(batch_size=10, shuffle=shuffle)
    states = reader_states(shuffle)
    state = states[max(first_batch - 1 - distance, 0)]
    assert state is not None
    assert all(known is not None and known["batch"] == index + 1 for index, known in states.items())
    expected = planned_without_state(first_batch, shuffle)
    resumed = PlannedData(job.data, job.run.seed)
    loader = resumed._loader("train", first_batch, state)
    assert loader.state() == state
    assert planned(resumed, first_batch, state) == expected


@pytest.mark.parametrize(
    "state", [{}, {"batch": "x"}, {"batch": 2}, {"batch": 17}, {"version": 1, "batch": 2, "order": {}}]
)
def test_a_reader_state_of_other_data_is_ignored(state: dict[str, object]) -> None:
    job = config(batch_size=10)
    expected = planned(PlannedData(job.data, job.run.seed), 16)
    assert planned(PlannedData(job.data, job.run.seed), 16, state) == expected


def planned(data: PlannedData, first_batch: int, reader_state: Mapping[str, Any] | None = None) -> list[bytes]:
    """Serialised batches from a batch on, without their times."""
    spec = spec_of(config(batch_size=10), data.schema)
    batches = data.batches("train", spec, first_batch=first_batch, reader_state=reader_state)
    span = PlanSpan(read_start_ns=0, plan_start_ns=0, plan_end_ns=0)
    return [b"".join(map(bytes, encode_rank_batch(dataclasses.replace(batch, span=span)))) for batch in batches]


@pytest.mark.parametrize("first_batch", [1, 7, 17])
def test_the_assignment_does_not_depend_on_the_first_batch(first_batch: int) -> None:
    """Also if the split depends on earlier batches."""
    job = config(assign="locality")
    whole = planned_batches(job, 2)
    data = PlannedData(job.data, job.run.seed)
    spec = spec_of(job, data.schema, 2)
    for state in (None, whole[0][first_batch - 1].batch.reader_state):  # the state must not be used
        batches = list(data.phase("train", spec, first_batch=first_batch, reader_state=state))
        assert len(batches) == 18 - first_batch
        for batch in batches:
            for rank in (0, 1):
                assert_same(batch.for_rank(rank).batch, whole[rank][batch.batch.index].batch)


@pytest.mark.parametrize("lookahead", [1, 2, 3, 64])
def test_a_batch_that_is_too_large_matters_only_if_requested(tmp_path: Path, lookahead: int) -> None:
    path = tmp_path / "day"
    distinct = (GOOD_LINE.replace("\taf", f"\t{number:x}") for number in range(10))
    path.write_text(GOOD_LINE * 20 + "".join(distinct))
    data = PlannedData(DataConfig(format="criteo-tsv", path=str(path), batch_size=10, eval_fraction=0.0, workers=0), 0)
    spec = spec_of(config(lookahead=lookahead, rows=100), data.schema)
    phase = data.phase("train", spec, max_steps=2)
    assert [planned.batch.index for planned in phase] == [0, 1]
    assert phase.end == 2
    with pytest.raises(CapacityError, match="batch 2 needs 260 unique rows"):
        list(data.batches("train", spec, max_steps=3))


@pytest.mark.parametrize(
    ("lookahead", "max_steps", "needed", "last_batch"),
    [(1, 0, 130, 2), (2, 0, 182, 3), (3, 0, 260, 4), (64, 0, 260, 5), (64, 4, 182, 3)],
)
def test_a_refusal_names_the_largest_need_of_the_window(
    tmp_path: Path, lookahead: int, max_steps: int, needed: int, last_batch: int
) -> None:
    """Batch 2 is the first that does not fit; 3 and 4 need more, 5 less. Each distinct line has 26 ids of its own."""
    numbers = [0] * 20 + [*range(5)] * 2 + [*range(7), 0, 0, 0] + [*range(10)] + [0] * 10
    path = tmp_path / "day"
    path.write_text("".join(GOOD_LINE.replace("\taf", f"\t{number:x}") for number in numbers))
    data = PlannedData(DataConfig(format="criteo-tsv", path=str(path), batch_size=10, eval_fraction=0.0, workers=0), 0)
    spec = spec_of(config(lookahead=lookahead, rows=100), data.schema)
    match = f"batch 2 needs 130 .* to at least {needed}, the largest need up to batch {last_batch} "
    with pytest.raises(CapacityError, match=match):
        list(data.batches("train", spec, max_steps=max_steps))


def test_a_held_out_batch_that_does_not_fit_is_called_so() -> None:
    """The batches of each phase are numbered from 0."""
    job = config(rows=9)
    data = PlannedData(job.data, job.run.seed)
    with pytest.raises(CapacityError, match=r"^held-out batch 0 needs "):
        list(data.batches("eval", spec_of(job, data.schema)))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_batch_that_does_not_fit_is_refused_when_it_enters_the_window(tmp_path: Path, data: st.DataObject) -> None:
    """For any ranks, stages, assignment, policy and first batch. The number that it names is enough for the window."""
    needs = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=16))  # distinct lines of a batch
    world_size, lookahead = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 20))
    first = data.draw(st.integers(0, len(needs) - 1))
    assign = data.draw(st.sampled_from(["contiguous", "locality"]))
    shares = () if assign == "locality" else data.draw(st.sampled_from([(), (1, *[0] * (world_size - 1))]))  # stages
    path = tmp_path / "day"
    path.write_text("".join(GOOD_LINE.replace("\taf", f"\t{line % need:x}") for need in needs for line in range(5)))
    source = PlannedData(DataConfig(format="criteo-tsv", path=str(path), batch_size=5, eval_fraction=0.0, workers=0), 0)

    def refusal(rows: int) -> tuple[int, str]:
        """The batches planned, and the message of the refusal, if any."""
        job = config(lookahead=lookahead, rows=rows, assign=assign)
        policy = data.draw(st.sampled_from(["belady-window", "drop-unused"]))
        spec = dataclasses.replace(spec_of(job, source.schema, world_size, shares), policy=policy)
        count = 0
        try:
            for _ in source.phase("train", spec, first_batch=first):
                count += 1
        except CapacityError as error:
            return count, str(error)
        return count, ""

    rows, wanted = -(-26 // world_size), needs[first:]
    while True:
        slots = rows * world_size
        too_large = next((number for number, need in enumerate(wanted) if 26 * need > slots), None)
        planned, message = refusal(rows)
        if too_large is None:
            assert (planned, message) == (len(wanted), "")
            break
        window = wanted[too_large : too_large + lookahead]
        assert planned == max(0, too_large - lookahead + 1)
        assert message.startswith(f"batch {first + too_large} needs {26 * wanted[too_large]} unique rows")
        assert f"the largest need up to batch {first + too_large + len(window) - 1} " in message
        rows = int(message.split("to at least ")[1].split(",")[0])
        assert rows == -(-26 * max(window) // world_size)
    assert refusal(0) == (len(wanted), ""), "direct mode has no capacity"


def test_bad_data_comes_after_every_good_batch(tmp_path: Path) -> None:
    (tmp_path / "day_0").write_text(GOOD_LINE * 100)
    (tmp_path / "day_1").write_text(GOOD_LINE + "bad\n")
    data = DataConfig(format="criteo-tsv", path=str(tmp_path), batch_size=10, eval_fraction=0.0, workers=0)
    planned = PlannedData(data, 0)
    seen: list[int] = []
    with pytest.raises(InputError, match="day_1:2: expected 40"):
        seen.extend(
            batch.batch.index for batch in planned.batches("train", spec_of(config(lookahead=64), planned.schema))
        )
    assert seen == list(range(10))


def test_skipped_rows_are_counted_to_the_end_of_the_data(tmp_path: Path) -> None:
    path = tmp_path / "day"
    path.write_text(f"{GOOD_LINE}bad\n{GOOD_LINE}{GOOD_LINE}worse\n{GOOD_LINE}worst\n")
    data = DataConfig(format="criteo-tsv", path=str(path), batch_size=2, eval_fraction=0.0, workers=0, bad_rows="skip")
    planned = PlannedData(data, 0)
    batches = planned.batches("train", spec_of(config(), planned.schema))
    assert next(batches).batch.labels.tolist() == [1, 1]
    assert len(list(batches)) == 1
    assert planned.skipped_rows() == 3


@pytest.mark.parametrize("first_batch", [0, 1, 2])
@pytest.mark.parametrize("has_state", [False, True])
def test_skipped_rows_do_not_depend_on_where_a_limited_run_resumes(
    tmp_path: Path, first_batch: int, has_state: bool
) -> None:
    """Not even if it resumes after its last step."""
    path = tmp_path / "day"
    path.write_text(f"{GOOD_LINE}bad\n{GOOD_LINE}{GOOD_LINE}worse\n{GOOD_LINE}worst\n{GOOD_LINE}")
    data = DataConfig(format="criteo-tsv", path=str(path), batch_size=2, eval_fraction=0.0, workers=0, bad_rows="skip")
    whole = PlannedData(data, 0)
    states = [
        batch.batch.reader_state for batch in whole.batches("train", spec_of(config(), whole.schema), max_steps=2)
    ]
    assert whole.skipped_rows() == 3
    resumed = PlannedData(data, 0)
    state = states[first_batch - 1] if has_state and first_batch else None
    batches = resumed.batches(
        "train", spec_of(config(), resumed.schema), max_steps=2, first_batch=first_batch, reader_state=state
    )
    assert [batch.batch.index for batch in batches] == list(range(first_batch, 2))
    assert resumed.skipped_rows() == 3


def test_the_window_of_a_stream_is_planned_when_nothing_comes(tmp_path: Path) -> None:
    """The batches are those of the whole folder; what has come is planned, so that it can be trained."""
    for name, rows in (("a", 23), ("b", 20), ("c", 20)):
        (tmp_path / f".{name}").write_text(GOOD_LINE * rows)
    (tmp_path / ".a").rename(tmp_path / "a")
    job = config(batch_size=5, limit=0, lookahead=30, format="criteo-tsv", path=str(tmp_path), **FOLLOW)
    data = PlannedData(job.data, job.run.seed)
    spec = spec_of(job, data.schema)
    with closing(data.phase("train", spec)) as phase:
        got = [next(phase) for _ in range(4)]  # of a window of 30
        assert phase.end is None
        (tmp_path / ".b").rename(tmp_path / "b")
        got += [next(phase) for _ in range(4)]
        (tmp_path / ".c").rename(tmp_path / "c")
        (tmp_path / "_END").touch()
        got += phase
        assert phase.end == 13
    verifier, whole = Verifier(spec), config(batch_size=5, limit=0, lookahead=30, format="criteo-tsv")
    whole_data = dataclasses.replace(whole.data, path=str(tmp_path), eval_fraction=0.0)
    batches = [planned.batch for planned in PlannedData(whole_data, job.run.seed).phase("train", spec)]
    seen = [3, 3, 3, 3, 7, 7, 7, 7, *[None] * 5]
    for planned, batch, last_seen in zip(got, batches, seen, strict=True):
        verifier.check(batch, planned.plan, last_seen=last_seen)
    verifier.finish()


def stream_in(folder: Path) -> PlannedData:
    (folder / "a").write_text(GOOD_LINE * 23)
    return PlannedData(config(batch_size=5, limit=0, format="criteo-tsv", path=str(folder), **FOLLOW).data, 0)


def test_a_stopped_phase_does_not_wait_for_more(tmp_path: Path) -> None:
    data = stream_in(tmp_path)
    phase = data.phase("train", spec_of(config(), data.schema))
    for _ in range(4):
        next(phase)
    stopper = threading.Timer(0, phase.stop)
    stopper.start()
    assert next(phase, None) is None
    assert phase.end is None
    stopper.join()


def test_every_rank_of_a_stream_makes_the_same_plans(tmp_path: Path) -> None:
    """In a process of their own, ranks wait for whole windows."""
    data = stream_in(tmp_path)
    (tmp_path / "b").write_text(GOOD_LINE * 20)
    (tmp_path / "_END").touch()
    job = config(batch_size=5, lookahead=3)
    spec = spec_of(job, data.schema, 2)
    assert len(list(data.batches("train", spec, rank=1))) == 9


@pytest.mark.parametrize("state", [None, {"batch": 3}, {"batch": "1"}, {}])
def test_a_stream_goes_on_from_a_position_only(state: Mapping[str, Any] | None, tmp_path: Path) -> None:
    data = stream_in(tmp_path)
    with pytest.raises(InputError, match="a stream goes on from a position at or before batch 2"):
        data.phase("train", spec_of(config(), data.schema), first_batch=2, reader_state=state)
    with pytest.raises(InputError, match="loader state: expected version"):
        data.phase("train", spec_of(config(), data.schema), first_batch=2, reader_state={"batch": 2})


def test_a_batch_of_a_stream_that_does_not_fit_is_refused_with_what_is_there(tmp_path: Path) -> None:
    data = stream_in(tmp_path)
    phase = data.phase("train", spec_of(config(rows=7, lookahead=8), data.schema))
    with pytest.raises(CapacityError):
        next(phase)


@pytest.mark.parametrize(("min_uses", "num_slots"), [(1, 24), (40, 16)])
def test_the_horizon_is_the_whole_log_where_files_are_annotated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, min_uses: int, num_slots: int
) -> None:
    path = annotated(tmp_path / "a.arrow", 300, NextUseOrder())
    spec = OracleSpec(
        table_rows=(None, None),
        features=(FeatureRef(feature=0, table=0), FeatureRef(feature=1, table=1), FeatureRef(feature=2, table=1)),
        num_slots=num_slots,
        lookahead=2,
        horizon="log",
    )
    config = DataConfig(path=path, format="parquet", batch_size=4, eval_fraction=0.0, epochs=2, min_uses=min_uses)
    fetched = {}
    for horizon in ("window", "log"):
        data = PlannedData(config, 0)
        planned = data.phase("train", dataclasses.replace(spec, horizon=horizon))
        with closing(planned):
            fetched[horizon] = sum(len(batch.plan.owners[0].fetch) for batch in planned)
        assert planned.spec.horizon == horizon
    assert fetched["log"] < fetched["window"]
    assert data.phase("eval", spec).spec.horizon == "window"
    assert not caplog.records
    synthetic = PlannedData(DataConfig(format="synthetic"), 0)
    assert synthetic.phase("train", spec).spec.horizon == "window"
    assert "oracle.horizon log: synthetic is not annotated" in caplog.text


def test_an_annotation_for_another_order_is_refused(tmp_path: Path) -> None:
    path = annotated(tmp_path / "a.arrow", 30, NextUseOrder())
    data = PlannedData(DataConfig(path=path, format="parquet", shuffle=True), 0)
    spec = OracleSpec(table_rows=(None,), features=(FeatureRef(feature=0, table=0),), num_slots=9, lookahead=2)
    with pytest.raises(InputError, match=r"data\.shuffle is on"):
        data.phase("train", dataclasses.replace(spec, horizon="log"))
