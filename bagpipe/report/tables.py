"""`table`: sortable HTML tables.

A cell holds its text and, if different, the value that the script sorts by (``data-v``); empty cells sort last.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Column", "cell_data", "escape", "table"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Column(Generic[T]):
    """One column. `text` formats a value; None is drawn as a dash.

    Attributes:
        title: of the head. value: the sort value. text: its format. hint: shown on hover.
        data: attributes of the cell (``data-NAME``), for the script.
    """

    title: str
    value: Callable[[T], str | float | None]
    text: Callable[[float], str] = lambda value: f"{value:,}"
    hint: str = ""
    data: Callable[[T], Mapping[str, int]] = lambda _: {}


def escape(text: str) -> str:
    return html.escape(text, quote=True)


def table(
    name: str,
    columns: Sequence[Column[T]],
    items: Sequence[T],
    *,
    setting_columns: int = 0,
    error_of: Callable[[T], str | None] = lambda _: None,
    is_best: Callable[[T], bool] = lambda _: False,
) -> str:
    """A table without the columns after `setting_columns` that have no value at all."""
    shown = [
        column
        for position, column in enumerate(columns)
        if position < setting_columns or any(_sound(column.value(item)) is not None for item in items)
    ]
    head = "".join(_head(column) for column in shown)
    rows = []
    for item in items:
        error = error_of(item)
        width = setting_columns if error is not None else len(shown)
        cells = "".join(_cell(column, item) for column in shown[:width])
        kind = ""
        if error is not None:
            cells += f'<td class="error" colspan="{max(len(shown) - width, 1)}"><span>{escape(error)}</span></td>'
            kind = ' class="failed"'
        elif is_best(item):
            kind = ' class="best" title="recommended"'
        rows.append(f"<tr{kind}>{cells}</tr>")
    return (
        f'<div class="wide"><div class="scroll" tabindex="0"><table id="{name}"><thead><tr>{head}</tr></thead>'
        f"<tbody>\n{chr(10).join(rows)}\n</tbody></table></div>"
        '<p class="more" hidden></p></div>'
    )


def _head(column: Column[T]) -> str:
    hint = f' title="{escape(column.hint)}"' if column.hint else ""
    return f'<th scope="col" aria-sort="none"{hint}><button type="button">{escape(column.title)}</button></th>'


def _cell(column: Column[T], item: T) -> str:
    value = _sound(column.value(item))
    if value is None:
        return "<td>–</td>"
    if isinstance(value, str):
        return f'<td class="text" data-v="{escape(value)}">{escape(value)}</td>'
    return f'<td data-v="{value!r}"{cell_data(column.data(item))}>{escape(column.text(value))}</td>'


def _sound(value: str | float | None) -> str | float | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def cell_data(values: Mapping[str, int]) -> str:
    """The values as attributes ``data-NAME`` of an element."""
    return "".join(f' data-{name}="{number}"' for name, number in values.items())
