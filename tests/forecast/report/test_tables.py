from __future__ import annotations

import re

from bagpipe.forecast.axes import AXES
from bagpipe.forecast.report.tables import front_table, gains_table, reasons_table
from tests.forecast.report.views import made


def titles(table: str) -> list[str]:
    return re.findall(r"<button[^>]*>([^<]*)", table)


def test_the_front_has_all_axes_and_its_figures() -> None:
    view = made("full")
    text = front_table(view)
    assert titles(text)[: len(AXES)] == [axis.title for axis in AXES]
    assert text.partition("<tbody>")[2].count("<tr") == len(view.front)
    assert text.count('class="best"') == 1
    found = view.front[0].forecast
    assert found is not None
    assert f'data-v="{found.step_s * 1e3!r}"' in text


def test_each_purchase_has_its_column() -> None:
    view = made("full")
    text = gains_table(view)
    assert "helps most" in titles(text)
    assert {"2 x ranks: step", "2 x ranks: price", "2 x store servers: step"} <= {
        title.replace("&#x27;", "'") for title in titles(text)
    }
    assert "2 x trainers' ports: price" not in text.replace("&#x27;", "'"), "a port has no price"
    assert "2 x cores of the machine: step" not in text, "a column without any value"
    assert text.partition("<tbody>")[2].count("<tr") == len(view.front)


def test_reasons_say_where() -> None:
    view = made("full")
    text = reasons_table(view)
    count = len(view.reasons[0].points)
    assert f'<td data-v="{count}">{count}</td>' in text
    assert "expected a cluster with 99 devices, got 16" in text
    assert '<td class="text" data-v="99, 2048">99, 2048</td>' in text
    assert '<td class="text" data-v="1, 2, 4">1, 2, 4</td>' in text
    assert reasons_table(made("single")) == ""
