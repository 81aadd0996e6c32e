from __future__ import annotations

import math
import re

from bagpipe.report.tables import Column, cell_data, escape, table

HOSTILE = "</script><img src=x onerror='x'>\"&"


def test_a_cell_has_its_text_and_what_it_is_sorted_by() -> None:
    text = table("t", [Column(title="n", value=lambda n: n, text=lambda n: f"{n:.1f} s", hint="time")], [2.5, 1.25])
    assert '<th scope="col" aria-sort="none" title="time"><button type="button">n</button></th>' in text
    assert re.findall(r'<td data-v="([^"]*)">([^<]*)</td>', text) == [("2.5", "2.5 s"), ("1.25", "1.2 s")]


def test_gaps_are_dashes_and_columns_of_gaps_are_left_out() -> None:
    columns: list[Column[int]] = [
        Column(title="setting", value=lambda n: None),
        Column(title="some", value=lambda n: math.nan if n else 1.0),
        Column(title="nothing", value=lambda n: None),
    ]
    text = table("t", columns, [0, 1], setting_columns=1)
    assert re.findall(r"<button[^>]*>([^<]*)", text) == ["setting", "some"]
    assert text.count("<td>–</td>") == 3


def test_rows_of_errors_span_the_columns() -> None:
    columns = [Column(title=title, value=lambda s: s) for title in "abc"]
    text = table("t", columns, ["x"], setting_columns=1, error_of=lambda s: HOSTILE)
    assert f'<td class="error" colspan="2"><span>{escape(HOSTILE)}</span></td>' in text


def test_hostile_text_is_escaped() -> None:
    text = table("t", [Column(title=HOSTILE, value=lambda s: s, hint=HOSTILE)], [HOSTILE], is_best=lambda s: True)
    assert "<img" not in text
    assert "</script" not in text
    assert text.count('class="best"') == 1


def test_data_of_cells() -> None:
    assert cell_data({"rows": 3, "bytes": 7}) == ' data-rows="3" data-bytes="7"'
