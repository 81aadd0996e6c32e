from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.cli.sweep_file import SweepFile, digest
from bagpipe.errors import InputError
from bagpipe.forecast.forecast import Forecast
from bagpipe.forecast.sweep import Outcome
from tests.effort import at_most
from tests.forecast.points import swept

INPUTS = {"the replay": digest("rows"), "--ranks": "1,2"}
[FORECAST] = [point.forecast for point in swept() if point.forecast is not None]

NUMBERS = st.floats(0, allow_nan=False, allow_infinity=False)
OUTCOMES = st.dictionaries(
    st.integers(0, 9),
    st.text() | st.builds(lambda step_s: dataclasses.replace(FORECAST, step_s=step_s), NUMBERS),
    max_size=5,
)


def known_in(path: Path, inputs: dict[str, str] = INPUTS) -> dict[int, Outcome]:
    with SweepFile("--resume", str(path), inputs) as file:
        return file.known


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@at_most(30)
@given(st.lists(OUTCOMES, max_size=3))
def test_what_is_added_is_known_later_to_the_bit(folder: Path, parts: list[dict[int, Outcome]]) -> None:
    path = folder / "points.jsonl"
    path.unlink(missing_ok=True)
    expected: dict[int, Outcome] = {}
    for part in parts:
        with SweepFile("--resume", str(path), INPUTS) as file:
            assert file.known == expected
            file.add(part)
        expected |= part
    assert known_in(path) == expected


@at_most(30)
@given(st.data())
def test_a_torn_last_line_is_dropped(folder: Path, data: st.DataObject) -> None:
    """Wherever a process was killed while it wrote, the points before are known and the file can be continued."""
    path = folder / "torn.jsonl"
    path.unlink(missing_ok=True)
    with SweepFile("--resume", str(path), INPUTS) as file:
        file.add({0: "no", 1: FORECAST})
    whole = path.read_bytes()
    length = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:length])
    lines = whole[:length].count(b"\n")
    expected: dict[int, Outcome] = {}
    if lines > 1:
        expected[0] = "no"
    if lines > 2:
        expected[1] = FORECAST
    with SweepFile("--resume", str(path), INPUTS) as file:
        assert file.known == expected
        file.add({2: "later"})
    assert known_in(path) == {**expected, 2: "later"}


@pytest.mark.parametrize(
    ("inputs", "line"),
    [
        ({**INPUTS, "--ranks": "1"}, "--ranks is 1,2 there and 1 here"),
        ({**INPUTS, "--new": "3"}, "--new is nothing there and 3 here"),
        ({"the replay": INPUTS["the replay"]}, "--ranks is 1,2 there and nothing here"),
        (
            {**INPUTS, "the replay": digest("others")},
            f"the replay is {digest('rows')[:12]} there and {digest('others')[:12]} here",
        ),
    ],
)
def test_another_grid_is_refused(tmp_path: Path, inputs: dict[str, str], line: str) -> None:
    path = tmp_path / "points.jsonl"
    known_in(path)
    before = path.read_bytes()
    with pytest.raises(InputError) as caught:
        known_in(path, inputs)
    assert str(caught.value) == f"--resume: {path} is of another grid: {line}; name another file"
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "line"), [("a file of the user", 1), ("[1, 2]\n", 1), ('{"a": 1}\n', 1), ("\n", 1), ("\x00\xff", 1)]
)
def test_another_file_is_refused_and_stays(tmp_path: Path, content: str, line: int) -> None:
    path = tmp_path / "mine"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(InputError, match=f"{path}:{line}: expected the points of a sweep; name another file"):
        known_in(path)
    assert path.read_text(encoding="latin-1") == content


@pytest.mark.parametrize(
    "line", ["{}", "[]", "[" * 99_999, '{"point": 3}', '{"point": 3, "forecast": {"step_s": 1}}', "\udcff"]
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "points.jsonl"
    known_in(path)
    with path.open("ab") as file:
        file.write(line.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(InputError, match=f"{path}:2: expected the points of a sweep"):
        known_in(path)


def test_an_unknown_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    path.write_text(json.dumps({"bagpipe_sweep": 9, "inputs": {}}) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"expected version 1 of the file, .* is of 9"):
        known_in(path)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    with SweepFile("--resume", str(path), INPUTS), pytest.raises(InputError, match="is in use by another sweep"):
        known_in(path)
    assert known_in(path) == {}


def test_infinite_rates_survive(tmp_path: Path) -> None:
    """A job that takes no time."""
    path = tmp_path / "points.jsonl"
    endless: Forecast = dataclasses.replace(FORECAST, step_s=0.0, examples_per_s=math.inf)
    with SweepFile("--resume", str(path), INPUTS) as file:
        file.add({0: endless})
    assert known_in(path) == {0: endless}
