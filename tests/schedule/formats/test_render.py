from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from bagpipe.schedule.analysis.simulate import simulate
from bagpipe.schedule.builders.prefetch_loop import prefetch_loop
from bagpipe.schedule.formats import render
from bagpipe.schedule.ir.actions import parse
from bagpipe.schedule.ir.ops import OPS
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.lowering.sends import add_sends
from tests.schedule.dense import dense
from tests.schedule.tables import read_csv

PREFETCH = prefetch_loop(prefetch_depth=2, read_ahead=4, write_depth=1, microbatches=2).unroll(3)


#: Tooltip of an action.
TIMED = re.compile(r"[^:]+(:[0-9]+)?: [0-9.]+ to [0-9.]+\n")


def test_dense_programs_are_written_as_torch_reads_them() -> None:
    text = render.csv(dense("1f1b", 2, 3))
    assert text == "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    assert list(read_csv(text)) == ["rank0", "rank1"]


def test_csv_round_trips_with_lane_names() -> None:
    lanes = read_csv(render.csv(PREFETCH))
    assert lanes == dict(PREFETCH.lanes)
    assert list(lanes) == list(PREFETCH.lanes)


def test_grid_draws_time_to_scale() -> None:
    # One unit of time is four columns.
    assert render.grid(simulate(dense("1f1b", 2, 2))) == (
        "rank0 |0F0|0F1........|0B0----....|0B1----|\n"
        "rank1 ....|1F0|1B0----|1F1|1B1----........|\n"
    )  # fmt: skip


def test_an_empty_grid() -> None:
    assert render.grid(simulate(Program(lanes={"a": (), "b": ()}))) == "a\nb\n"


def test_a_wide_grid_is_truncated() -> None:
    *lines, exposed = render.grid(simulate(PREFETCH, {"B": 1000})).splitlines()
    assert exposed.startswith("exposed 0 ")
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) < 7100


def test_svg_is_well_formed_and_self_contained() -> None:
    drawing = render.svg(simulate(PREFETCH))
    root = ElementTree.fromstring(drawing)
    boxes = [box for box in boxes_of(drawing) if TIMED.match(box[0])]
    assert len(boxes) == sum(len(actions) for actions in PREFETCH.lanes.values())
    assert "href" not in drawing
    assert root.get("width") == "1200"


def boxes_of(drawing: str) -> list[tuple[str, str, str]]:
    """Tooltip, label and fill of every box."""
    groups = [element for element in ElementTree.fromstring(drawing).iter() if element.tag.endswith("}g")]
    parts = [{child.tag.partition("}")[2]: child for child in group} for group in groups]
    assert all(part["title"].text for part in parts)
    return [
        (part["title"].text or "", part["text"].text or "" if "text" in part else "", part["rect"].get("fill", ""))
        for part in parts
    ]


@pytest.mark.parametrize("width_px", [1200, 400])
def test_every_operation_of_a_drawing_can_be_told(width_px: int) -> None:
    """By its label, or by a colour that the legend gives to no other operation of the lane."""
    simulation = simulate(PREFETCH)
    drawing = render.svg(simulation, width_px=width_px)
    found = boxes_of(drawing)
    drawn = [box for box in found if TIMED.match(box[0])]
    legend = {fill: title.partition(":")[0] for title, _, fill in found[len(drawn) :]}
    for title, label, fill in drawn:
        op = parse(title.partition(":")[0]).op
        assert OPS[op].meaning in title
        assert legend[fill] == op
        assert label or width_px < 500, f"{title}: no label"
    texts = [element for element in ElementTree.fromstring(drawing).iter() if element.tag.endswith("}text")]
    assert all(float(text.get("x", "0")) < width_px for text in texts)
    numbers = [text.text for text in texts if text.get("text-anchor") == "middle"]
    assert numbers[:2] in (["0", "1"], ["0", "5"])  # the axis


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


def lowered(name: str, ranks: int, micro: int) -> Program:
    program = dense(name, ranks, micro)
    return add_sends(program, {lane: rank for rank, lane in enumerate(program.lanes)})


def test_messages_without_duration_are_ticks_and_with_one_are_boxes() -> None:
    program = lowered("1f1b", 2, 2)
    messages = sum(OPS[action.op].role in ("send", "recv") for row in program.lanes.values() for action in row)
    instant = ElementTree.fromstring(render.svg(simulate(program)))
    widths = [float(box.get("width", "0").rstrip("%")) for box in instant.iter() if box.tag.endswith("rect")]
    assert widths.count(1.5) == messages == 8
    assert "0SENDX_F0:1" in render.svg(simulate(program))
    assert "0SENDX_F0:1" in render.grid(simulate(program, {"SENDX_F": 1}))


def test_directions_look_different() -> None:
    drawing = render.svg(simulate(dense("chimera", 4, 8)))
    root = ElementTree.fromstring(drawing)
    fills: dict[str, set[str]] = {}
    for group in (element for element in root.iter() if element.tag.endswith("}g")):
        title, box = group[0].text or "", group[1]
        if not TIMED.match(title):  # of the legend
            continue
        kind = title.partition(":")[0].lstrip("0123456789")[0] + ("~1" if "~1" in title else "")
        fills.setdefault(kind, set()).add(box.get("fill", ""))
    assert fills.keys() == {"F", "B", "F~1", "B~1"}
    assert all(len(found) == 1 for found in fills.values())
    assert len(set.union(*fills.values())) == 4


def test_perfetto_distinguishes_messages_and_pipes() -> None:
    events = json.loads(render.perfetto(simulate(lowered("chimera", 4, 8))))["traceEvents"]
    categories = {event["cat"] for event in events if event["ph"] == "X"}
    assert categories == {"action", "action,pipe1", "send", "send,pipe1", "recv", "recv,pipe1"}


def test_many_lanes() -> None:
    simulation = simulate(dense("1f1b", 40, 40))
    assert len(render.grid(simulation).splitlines()) == 40
    assert render.summary(simulation)["peak_in_flight"] == [40 - rank for rank in range(40)]
    assert ElementTree.fromstring(render.svg(simulation)).get("height") == str(28 * 40 + 73)
