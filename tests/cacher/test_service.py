"""The cacher and its client over a real socket pair, each in its own thread; and as a process."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bagpipe.client.remote import RemoteSteps
from bagpipe.client.step import Step
from bagpipe.config import DataConfig
from bagpipe.errors import CapacityError, InputError, JobError
from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.proto.channel import Channel, Kind
from bagpipe.schema import DataSchema
from cacher.embedded import EmbeddedCacher
from cacher.planning import PlannedData
from cacher.service import serve, spec_from_json
from tests.proto.steps import arrays_of

DATA = DataConfig(format="synthetic", batch_size=50, limit=1000, eval_fraction=0.1, workers=0)


def spec_for(schema: DataSchema, num_slots: int = 50_000, lookahead: int = 3) -> OracleSpec:
    refs = tuple(FeatureRef(feature=number, table=number) for number in range(len(schema.features)))
    rows = tuple(schema.table(feature.table).rows for feature in schema.features)
    return OracleSpec(table_rows=rows, features=refs, num_slots=num_slots, lookahead=lookahead)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    """Ours, and that of a served cacher."""
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=serve, args=(Channel(theirs),), name="served-cacher")
    thread.start()
    with ours, theirs:
        yield Channel(ours), Channel(theirs)
        Channel(ours).close()
        thread.join()


def same(ours: list[Step], theirs: list[Step]) -> bool:
    return len(ours) == len(theirs) and all(
        a.tobytes() == b.tobytes()
        for x, y in zip(ours, theirs, strict=True)
        for a, b in zip(arrays_of(x), arrays_of(y), strict=True)
    )


def test_steps_over_the_wire_are_those_planned_here(ends: tuple[Channel, Channel]) -> None:
    remote = RemoteSteps(ends[0], credits=2)
    remote.open(DATA, seed=5)
    local = PlannedData(DATA, 5)
    spec = spec_for(remote.schema)
    assert remote.schema == local.schema
    assert same(list(remote.steps("train", spec)), list(local.steps("train", spec)))
    assert same(list(remote.steps("eval", spec)), list(local.steps("eval", spec)))
    assert same(list(remote.steps("train", spec, max_steps=4)), list(local.steps("train", spec, max_steps=4)))
    remote.close()


def test_steps_waiting_are_bounded_by_the_credits(ends: tuple[Channel, Channel]) -> None:
    remote = RemoteSteps(ends[0], credits=3)
    remote.open(DATA, seed=5)
    count = sum(1 for _ in remote.steps("train", spec_for(remote.schema)))
    statistics = remote.statistics()
    assert count == 18
    assert statistics.peak <= statistics.maximum + 1 == 4  # the END frame needs no credit
    remote.close()


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_a_trainer_that_leaves_early_ends_the_cacher(ends: tuple[Channel, Channel], taken: int) -> None:
    remote = RemoteSteps(ends[0], credits=2)
    remote.open(DATA, seed=5)
    steps = remote.steps("train", spec_for(remote.schema))
    for _ in range(taken):
        next(steps)
    remote.close()  # the fixture joins the served cacher


def test_errors_travel_as_what_they_are(ends: tuple[Channel, Channel], tmp_path: Path) -> None:
    remote = RemoteSteps(ends[0], credits=2)
    with pytest.raises(InputError, match="no such file"):
        remote.open(dataclasses.replace(DATA, format="criteo-tsv", path=str(tmp_path / "gone")), seed=5)
    remote.close()


def test_a_batch_that_does_not_fit_travels_too(ends: tuple[Channel, Channel]) -> None:
    remote = RemoteSteps(ends[0], credits=2)
    remote.open(DATA, seed=5)
    with pytest.raises(CapacityError, match=r"cache\.rows is 3"):
        list(remote.steps("train", spec_for(remote.schema, num_slots=3)))
    remote.close()


def test_bad_data_comes_after_every_good_step(tmp_path: Path) -> None:
    good = "\t".join(["1", *["3"] * 13, *["af"] * 26])
    folder = tmp_path / "days"
    folder.mkdir()
    (folder / "day_0").write_text((good + "\n") * 100)
    (folder / "day_1").write_text(good + "\nbad\n")
    config = DataConfig(format="criteo-tsv", path=str(folder), batch_size=10, eval_fraction=0.0, workers=0)
    planned = PlannedData(config, 0)
    steps = planned.steps("train", spec_for(planned.schema, lookahead=64))
    seen: list[int] = []
    with pytest.raises(InputError, match="day_1:2: expected 40"):
        seen.extend(step.batch.index for step in steps)
    assert seen == list(range(10))


def test_a_cacher_that_dies_is_named() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        remote = RemoteSteps(Channel(ours), credits=2)
        other = Channel(theirs)
        other.send_json(Kind.SCHEMA, PlannedData(DATA, 0).schema.to_json())
        remote.open(DATA, seed=0)
        steps = remote.steps("train", spec_for(remote.schema))
        other.close()
        with pytest.raises(JobError, match="ended unexpectedly"):
            next(steps)
        remote.close()


@pytest.mark.multiproc
def test_the_embedded_process_gives_the_same_steps() -> None:
    local = PlannedData(DATA, 5)
    spec = spec_for(local.schema)
    with EmbeddedCacher(DATA, 5, credits=2) as remote:
        assert same(list(remote.steps("train", spec)), list(local.steps("train", spec)))


@pytest.mark.multiproc
def test_the_embedded_process_is_gone_after_an_error() -> None:
    cacher = EmbeddedCacher(dataclasses.replace(DATA, format="parquet", path="/nowhere"), 5, credits=2)
    with pytest.raises(InputError, match="/nowhere"), cacher:
        pass


def test_a_spec_survives_json() -> None:
    spec = spec_for(PlannedData(DATA, 0).schema)
    assert spec_from_json(dataclasses.asdict(spec)) == spec
    with pytest.raises(InputError, match="oracle spec"):
        spec_from_json({"lookahead": 3})


def test_skipped_rows_are_counted(tmp_path: Path) -> None:
    good = "\t".join(["1", *["3"] * 13, *["af"] * 26])
    (tmp_path / "day").write_text("\n".join([good, "bad", good, "worse", good, ""]))
    config = DataConfig(
        format="criteo-tsv", path=str(tmp_path / "day"), batch_size=2, eval_fraction=0.0, workers=0, bad_rows="skip"
    )
    planned = PlannedData(config, 0)
    steps = list(planned.steps("train", spec_for(planned.schema)))
    assert np.concatenate([step.batch.labels for step in steps]).tolist() == [1, 1, 1]
    assert planned.skipped_rows() == 2
