"""Ratio to the offline optimum, by policy and cache size: a table and a panel of the plot for every log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.benchmark import Values
from benchmarks.harness.plot import log_log, panels
from benchmarks.harness.report import table

__all__ = ["draw", "tables"]

_ORDER = ("sample", "kaggle", "zipf")
_BASELINES = ("static-hot", "lfu", "lru")
_LABELS: Mapping[str, str] = {
    "offline-belady": "offline-belady: rows fetched again, of unique rows",
    "belady-log": "belady-log: true next use in the whole log",
    "hindsight": "belady-window told each row's uses in the whole log",
}

#: A `benchmarks.policy.replay.Cell` as plain values.
_Cell = Mapping[str, Any]


def tables(values: Values) -> str:
    """A table per log."""
    return "\n".join(text for result, log in _logs(values) for text in _log_table(result, log))


def _logs(values: Values) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Every log, with the result it belongs to."""
    found = [values["parts"].get(name, {}).get("found") for name in _ORDER]
    return [(result, log) for result in found if result for log in result["logs"]]


def _log_table(result: Mapping[str, Any], log: Mapping[str, Any]) -> Iterator[str]:
    cells = [cell for cell in result["cells"] if cell["batch_size"] == log["batch_size"]]
    by_place = {(cell["policy"], cell["lookahead"], cell["share"], cell["cache_rows"]): cell for cell in cells}
    sizes = list(dict.fromkeys((cell["share"], cell["cache_rows"]) for cell in cells))
    yield (
        f"**{result['title']}, batch {log['batch_size']:,}**: {log['batches']:,} batches, "
        f"{log['distinct']:,} distinct rows, {log['rows_unique'] // log['batches']:,} unique rows in a batch\n"
    )
    yield table(
        ("policy", "lookahead", *(_size(*size) for size in sizes)),
        [
            (
                _LABELS.get(policy, policy),
                lookahead,
                *(_entry(by_place.get((policy, lookahead, *size))) for size in sizes),
            )
            for policy, lookahead in _rows(cells)
        ],
    )


def _rows(cells: Sequence[_Cell]) -> list[tuple[str, int | None]]:
    """Policies and lookaheads in the order of the table: ours from the longest lookahead, then the baselines."""
    known = {(cell["policy"], cell["lookahead"]) for cell in cells}
    looking = sorted({lookahead for _, lookahead in known if lookahead}, reverse=True)
    order = [(policy, n) for policy in ("belady-log", "belady-window", "drop-unused", "hindsight") for n in looking]
    order += [(policy, None) for policy in (*_BASELINES, "offline-belady")]
    return [row for row in order if row in known]


def _size(share: float | None, cache_rows: int) -> str:
    return f"{cache_rows:,}" if share is None else f"{share:.1%}: {cache_rows:,}"


def _entry(cell: _Cell | None) -> str:
    if cell is None:
        return ""
    if cell["error"]:
        return "a batch does not fit"
    if cell["policy"] == "offline-belady":
        return f"{cell['rows_fetched'] / cell['rows_unique']:.2%}"
    if cell["ratio"] is None:
        return "-"
    is_ours = cell["policy"] in ("belady-log", "belady-window")
    waits = f" (w {cell['waiting']:.0%})" if cell["waiting"] and is_ours else ""
    return f"{cell['ratio']:.2f}{waits}"


def draw(values: Values, folder: Path) -> None:
    """Ratio against the size of the cache, a panel per log."""
    logs = _logs(values)
    with panels(folder / "curves.svg", len(logs), size=(5 * len(logs), 4)) as axes:
        for axis, (result, log) in zip(axes, logs, strict=True):
            cells = [cell for cell in result["cells"] if cell["batch_size"] == log["batch_size"]]
            target = result["lookahead"]
            drawn = [("belady-window", target), ("belady-window", 8), ("drop-unused", target)]
            for policy, lookahead in [*drawn, *((name, None) for name in _BASELINES)]:
                points = sorted(
                    (cell["share"] * 100, cell["ratio"])
                    for cell in cells
                    if (cell["policy"], cell["lookahead"]) == (policy, lookahead) and cell["share"] and cell["ratio"]
                )
                if points:
                    label = f"{policy}, {lookahead} ahead" if lookahead else policy
                    axis.plot(*zip(*points, strict=True), marker="o", linestyle="-" if lookahead else ":", label=label)
            axis.axhline(1.1, color="black", linestyle="--", linewidth=1, label="target, 1.10")
            title = f"{result['title']},\nbatch {log['batch_size']:,}"
            log_log(axis, title, x="cache, % of the distinct rows", y="rows fetched again / offline optimum")
            axis.legend(fontsize=7)
