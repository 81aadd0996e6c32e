"""Tables of the parts with stages: K-FAC in bubbles, and partial backwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any, TypeAlias

from benchmarks.harness.report import table
from benchmarks.harness.rounds import paired_ratios

__all__ = ["bubble_tables", "share_tables", "simulated_tables"]

Record: TypeAlias = Mapping[str, Any]
Records: TypeAlias = Sequence[Record]


def bubble_tables(records: Records) -> str:
    """Time of a step with K-FAC's work in the bubbles and behind the backwards, measured and simulated."""
    by_name: dict[str, list[Record]] = {}
    for record in records:
        by_name.setdefault(record["name"], []).append(record)
    rows = []
    for name, own in by_name.items():
        plain = by_name[own[0]["schedule"]]
        measured = paired_ratios([r["measured_s"] for r in own], [r["measured_s"] for r in plain[: len(own)]])
        rows.append(
            (
                name,
                f"{median(r['measured_s'] for r in own) * 1e3:.1f}",
                f"{median(r['simulated_s'] for r in own) * 1e3:.1f}",
                f"{median(r['measured_s'] / r['simulated_s'] for r in own):.2f}",
                f"{measured.median:.2f} ({measured.least:.2f} to {measured.most:.2f})",
            )
        )
    title = f"### K-FAC in a pipeline of two ranks, medians of {len(next(iter(by_name.values())))} rounds\n\n"
    headers = ("job", "step p50 ms", "simulated ms", "measured / simulated", "times the schedule's without K-FAC")
    return title + table(headers, rows)


def share_tables(records: Records) -> str:
    """Quality, time and bytes of jobs over shares."""
    settings: dict[tuple[str, str], dict[str, list[Record]]] = {}
    for record in records:
        key = record["source"], record["job"]["setting"]
        settings.setdefault(key, {}).setdefault(record["job"]["shares"], []).append(record)
    return "\n".join(_shares(*key, of_shares) for key, of_shares in settings.items())


def _shares(source: str, setting: str, of_shares: Mapping[str, Records]) -> str:
    whole = of_shares[""]
    rows = []
    for shares, own in of_shares.items():
        base = whole[: len(own)]
        processor = paired_ratios([r["processor_s"] for r in own], [r["processor_s"] for r in base])
        wall = paired_ratios([r["step_s_p50"] for r in own], [r["step_s_p50"] for r in base])
        sent = {kind: count / 1024 for kind, count in own[0].get("sent_bytes", {}).items()}
        rows.append(
            (
                shares or "whole",
                f"{fmean(r['scores'][-1]['auc'] for r in own):.4f}",
                f"{fmean(r['scores'][-1]['ne'] for r in own):.4f}",
                f"{processor.median:.2f} ({processor.least:.2f} to {processor.most:.2f})",
                f"{wall.median:.2f} ({wall.least:.2f} to {wall.most:.2f})",
                f"{fmean(r['rows_written'] for r in own):,.0f}",
                *(f"{sent.get(kind, 0.0):,.0f}" for kind in ("activations", "sums", "row gradients")),
            )
        )
    title = f"### Partial backwards: {setting}, {source}, {whole[0]['examples']:,} examples, {len(whole)} seeds\n\n"
    headers = (
        "shares", "AUC", "NE", "processor time of a step", "step p50", "rows written", "KiB of activations a step",
        "of sums", "of row gradients",
    )  # fmt: skip
    return title + table(headers, rows)


def simulated_tables(record: Record) -> str:
    """Simulated time of a batch over shares."""
    found: Mapping[str, Mapping[str, float]] = record["times"]
    names = list(next(iter(found.values())))
    rows = [(shares, *(f"{times[name]:.4g}" for name in names)) for shares, times in found.items()]
    title = "### Partial backwards: simulated time of a batch, four ranks, eight micro-batches, in forwards\n\n"
    return title + table(("shares", *names), rows)
