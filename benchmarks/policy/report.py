"""Results to tables and a plot.

results/NAME.json ──> README.md, between its marks: ratio to the offline optimum, by policy and cache size
                  └─> curves.svg: the same against the size of the cache
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.readme import fill_in

__all__ = ["write_report"]

_ORDER = ("sample", "kaggle", "zipf")
_BASELINES = ("static-hot", "lfu", "lru")
_LABELS: Mapping[str, str] = {
    "offline-belady": "offline-belady: rows fetched again, of unique rows",
    "hindsight": "belady-window told each row's uses in the whole log",
}

#: A cell of the results as `benchmarks.policy.replay.Cell` wrote it.
_Cell = Mapping[str, Any]


def write_report(results: Path, folder: Path) -> None:
    """Tables and plot of all results that are there."""
    found = {
        name: json.loads((results / f"{name}.json").read_text())
        for name in _ORDER
        if (results / f"{name}.json").exists()
    }
    fill_in(folder / "README.md", "\n".join(_tables(result) for result in found.values()))
    _draw(found, folder / "curves.svg")


def _tables(result: Mapping[str, Any]) -> str:
    lines: list[str] = []
    for log in result["logs"]:
        cells = [cell for cell in result["cells"] if cell["batch_size"] == log["batch_size"]]
        sizes = list(dict.fromkeys((cell["share"], cell["cache_rows"]) for cell in cells))
        lines += [
            f"**{result['title']}, batch {log['batch_size']:,}**: {log['batches']:,} batches, "
            f"{log['distinct']:,} distinct rows, {log['rows_unique'] // log['batches']:,} unique rows in a batch",
            "",
            "| policy | lookahead | " + " | ".join(_size(*size) for size in sizes) + " |",
            "|---|---|" + "---|" * len(sizes),
        ]
        for policy, lookahead in _rows(cells):
            of_size = {
                (cell["share"], cell["cache_rows"]): cell
                for cell in cells
                if (cell["policy"], cell["lookahead"]) == (policy, lookahead)
            }
            shown = " | ".join(_entry(of_size.get(size)) for size in sizes)
            lines.append(f"| {_LABELS.get(policy, policy)} | {lookahead or ''} | {shown} |")
        lines.append("")
    return "\n".join(lines)


def _rows(cells: Sequence[_Cell]) -> list[tuple[str, int | None]]:
    """Policies and lookaheads in the order of the table: ours from the longest, then what it is compared with."""
    known = {(cell["policy"], cell["lookahead"]) for cell in cells}
    looking = sorted({lookahead for _, lookahead in known if lookahead}, reverse=True)
    order = [(policy, n) for policy in ("belady-window", "drop-unused", "hindsight") for n in looking]
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
    waits = f" (w {cell['waiting']:.0%})" if cell["waiting"] and cell["policy"] == "belady-window" else ""
    return f"{cell['ratio']:.2f}{waits}"


def _draw(found: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Ratio against the size of the cache, one picture per log."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "policy"  # the same figures give the same file
    logs = [(result, log["batch_size"]) for result in found.values() for log in result["logs"]]
    figure, axes = pyplot.subplots(1, len(logs), figsize=(5 * len(logs), 4), squeeze=False)
    for axis, (result, batch_size) in zip(axes[0], logs, strict=True):
        target = result["lookahead"]
        for policy, lookahead in (
            ("belady-window", target),
            ("belady-window", 8),
            ("drop-unused", target),
            *((p, None) for p in _BASELINES),
        ):
            points = sorted(
                (cell["share"] * 100, cell["ratio"])
                for cell in result["cells"]
                if (cell["policy"], cell["lookahead"], cell["batch_size"]) == (policy, lookahead, batch_size)
                and cell["share"]
                and cell["ratio"]
            )
            if points:
                label = f"{policy}, {lookahead} ahead" if lookahead else policy
                axis.plot(*zip(*points, strict=True), marker="o", linestyle="-" if lookahead else ":", label=label)
        axis.axhline(1.1, color="black", linestyle="--", linewidth=1, label="target, 1.10")
        axis.set_title(f"{result['title']},\nbatch {batch_size:,}", fontsize=9)
        axis.set_xlabel("cache, % of the distinct rows")
        axis.set_ylabel("rows fetched again / offline optimum")
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.grid(visible=True, which="both", alpha=0.3)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
