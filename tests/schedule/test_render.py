from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest

from bagpipe.schedule import render
from bagpipe.schedule.actions import parse
from bagpipe.schedule.errors import ScheduleError
from bagpipe.schedule.prefetch import prefetch
from bagpipe.schedule.program import Program
from bagpipe.schedule.simulate import simulate
from tests.schedule.dense import chain, one_f_one_b

PREFETCH = prefetch(prefetch_depth=2, read_ahead=4, write_depth=1, microbatches=2).unroll(3)


def test_dense_programs_are_written_as_torch_reads_them() -> None:
    text = render.csv(chain(2, 3, one_f_one_b))
    assert text == "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    assert list(render.parse_csv(text)) == ["rank0", "rank1"]


def test_csv_round_trips_with_lane_names() -> None:
    lanes = render.parse_csv(render.csv(PREFETCH))
    assert lanes == dict(PREFETCH.lanes)
    assert list(lanes) == list(PREFETCH.lanes)


def test_idle_cells_are_kept() -> None:
    assert render.parse_csv("0F0,,0B0\n,1F0,\n") == {
        "rank0": (parse("0F0"), None, parse("0B0")),
        "rank1": (None, parse("1F0"), None),
    }


@pytest.mark.parametrize("text", ["0F0,0FETCH1\n", "#resource=a\n0F0\n1F0\n", "#resource=a,a\n0F0\n1F0\n"])
def test_bad_csv_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ScheduleError) as error:
        render.parse_csv(text)
    assert "\n" not in str(error.value)


def test_grid_draws_time_to_scale() -> None:
    # One unit of time is four columns.
    assert render.grid(simulate(chain(2, 2, one_f_one_b))) == (
        "rank0 |0F0|0F1........|0B0----....|0B1----|\n"
        "rank1 ....|1F0|1B0----|1F1|1B1----........|\n"
    )  # fmt: skip


def test_grid_of_nothing() -> None:
    assert render.grid(simulate(Program(lanes={"a": (), "b": ()}))) == "a\nb\n"


def test_a_wide_grid_is_cut_not_broken() -> None:
    lines = render.grid(simulate(PREFETCH, {"B": 1000})).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) < 7100


def test_svg_is_well_formed_and_self_contained() -> None:
    drawing = render.svg(simulate(PREFETCH))
    root = ElementTree.fromstring(drawing)
    boxes = [element for element in root.iter() if element.tag.endswith("title")]
    assert len(boxes) == sum(len(actions) for actions in PREFETCH.lanes.values())
    assert "href" not in drawing


def test_summary_is_plain_json() -> None:
    values = json.loads(json.dumps(render.summary(simulate(PREFETCH))))
    assert values["makespan"] == simulate(PREFETCH).makespan
    assert {"bubble", "peak_in_flight", "critical_path", "occupancy", "lanes", "actions"} < set(values)


def test_perfetto_names_lanes_and_holds_every_action() -> None:
    events = json.loads(render.perfetto(simulate(PREFETCH)))["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == list(PREFETCH.lanes)
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == sum(len(actions) for actions in PREFETCH.lanes.values())
    assert {"ts", "dur", "pid", "tid", "cat"} < set(spans[0])
