"""Charts of the sweep: hit rate, traffic, re-fetches relative to the offline bound, exchange.

records ──group by batch size and ranks──> one line per policy over cache sizes (for a chosen lookahead),
                                           or over lookaheads (for a chosen cache size); failed settings are red crosses
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bagpipe.report.charts import (
    Chart,
    Choice,
    Figure,
    Json,
    count_axis,
    distinct,
    finite,
    plain,
    value_axis,
)
from data.replay.records import Replay, ReplayRecord
from data.replay.report.looks import FAILED, look_of

__all__ = ["BOUND", "bounds_of", "refetch_ratio", "sweep_charts"]

#: The optimal policy, a lower bound of misses.
BOUND = "offline-belady"

#: Traffic as time for a batch's rows on the reader's link.
LINK_UNIT = "milliseconds per batch on your link"

_Value = Callable[[ReplayRecord], float | None]


def sweep_charts(replay: Replay) -> list[Chart]:
    """The charts for which the records have data."""
    frame = _Frame.of(replay)
    bounds = bounds_of(replay.records)
    charts = [_hit_rate(frame), _traffic(frame)]
    if any(refetch_ratio(record, bounds) is not None for record in replay.records if record.policy != BOUND):
        charts.append(_refetches(frame, bounds))
    if any(record.world_size > 1 and record.exchange_bytes_now is not None for record in replay.records):
        charts.append(_exchange(frame))
    return charts


def bounds_of(records: Sequence[ReplayRecord]) -> dict[tuple[int, int, int], int]:
    """(cache rows, batch size, ranks) -> rows that offline Belady fetches again."""
    return {
        (record.cache_rows, record.batch_size, record.world_size): record.rows_fetched
        for record in records
        if record.policy == BOUND and record.rows_fetched is not None
    }


def refetch_ratio(record: ReplayRecord, bounds: dict[tuple[int, int, int], int]) -> float | None:
    """Re-fetched rows over those of offline Belady; 1 if neither re-fetches any; None without the bound."""
    bound = bounds.get((record.cache_rows, record.batch_size, record.world_size))
    if record.rows_fetched is None or bound is None or (bound == 0 and record.rows_fetched > 0):
        return None
    return record.rows_fetched / bound if bound else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """The grid of the sweep and the reader's choices over it."""

    replay: Replay
    policies: tuple[str, ...]
    batch_sizes: list[int]
    world_sizes: list[int]
    lookaheads: list[int]
    caches: list[int]

    @classmethod
    def of(cls, replay: Replay) -> _Frame:
        records = replay.records
        return cls(
            replay=replay,
            policies=tuple(dict.fromkeys(record.policy for record in records)),
            batch_sizes=distinct(record.batch_size for record in records),
            world_sizes=distinct(record.world_size for record in records),
            lookaheads=distinct(record.lookahead for record in records),
            caches=distinct(record.cache_rows for record in records),
        )

    @property
    def cache_title(self) -> str:
        return "cache size (rows per rank)" if max(self.world_sizes, default=1) > 1 else "cache size (rows)"

    @property
    def best_policy(self) -> str | None:
        """The recommended policy, drawn on top, because policies often coincide."""
        return self.replay.recommended.policy if self.replay.recommended else None

    def choices(self, *names: str) -> tuple[Choice, ...]:
        """The reader's choices, batch size and ranks first; the recommended setting is the default."""
        best = self.replay.recommended
        made = []
        for name in ("batch_size", "world_size", *names):
            label, values = self.axes[name]
            wanted = getattr(best, name, None)
            default = values.index(wanted) if wanted in values else max(len(values) - 1, 0)
            options = tuple(f"{value:,}" for value in values)
            made.append(Choice(name=name, label=label, options=options, default=default))
        return tuple(made)

    @property
    def axes(self) -> dict[str, tuple[str, list[int]]]:
        """Varied fields of a record: field -> label and values."""
        return {
            "batch_size": ("batch size", self.batch_sizes),
            "world_size": ("ranks", self.world_sizes),
            "lookahead": ("lookahead", self.lookaheads),
            "cache_rows": ("cache rows", self.caches),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawing:
    """Contents of a chart's lines: the value, its axis, and the hover text (``%{y}`` and so on).

    `meta` "link" marks values that the page's script computes again for the reader's link.
    """

    value: _Value
    axis: dict[str, Json]
    hover: str
    policies: tuple[str, ...]
    meta: str = ""


_Figures = tuple[tuple[Choice, ...], dict[tuple[int, ...], Figure]]


def _over_caches(frame: _Frame, drawing: _Drawing) -> _Figures:
    x_axis = count_axis(frame.cache_title, frame.caches)
    return _figures_by(
        "lookahead", frame, lambda chosen: _figure(frame, chosen, lambda r: r.cache_rows, x_axis, drawing)
    )


def _over_lookaheads(frame: _Frame, drawing: _Drawing) -> _Figures:
    x_axis = count_axis("lookahead (batches)", frame.lookaheads)
    return _figures_by(
        "cache_rows", frame, lambda chosen: _figure(frame, chosen, lambda r: r.lookahead, x_axis, drawing)
    )


def _figures_by(name: str, frame: _Frame, figure: Callable[[list[ReplayRecord]], Figure]) -> _Figures:
    """One figure per combination of batch size, ranks and `name` with records."""
    choices = frame.choices(name)
    records: dict[tuple[int, ...], list[ReplayRecord]] = {}
    for record in frame.replay.records:
        key = tuple(frame.axes[choice.name][1].index(getattr(record, choice.name)) for choice in choices)
        records.setdefault(key, []).append(record)
    return choices, {key: figure(chosen) for key, chosen in records.items()}


def _figure(
    frame: _Frame,
    records: list[ReplayRecord],
    x_of: Callable[[ReplayRecord], int],
    x_axis: dict[str, Json],
    drawing: _Drawing,
) -> Figure:
    traces: list[Json] = []
    for policy in drawing.policies:
        points = sorted((r for r in records if r.policy == policy and drawing.value(r) is not None), key=x_of)
        if points:
            traces.append(_line(policy, points, x_of, drawing, frame))
    failed = sorted((r for r in records if r.error is not None and r.policy in drawing.policies), key=x_of)
    if failed:
        traces.append(_crosses(failed, x_of))
    hidden: dict[str, Json] = {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True}
    layout: dict[str, Json] = {"xaxis": x_axis, "yaxis": drawing.axis, "yaxis2": hidden}
    return {"data": traces, "layout": layout | ({"meta": drawing.meta} if drawing.meta else {})}


def _line(
    policy: str,
    points: list[ReplayRecord],
    x_of: Callable[[ReplayRecord], int],
    drawing: _Drawing,
    frame: _Frame,
) -> Json:
    look = look_of(policy, frame.policies)
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": plain(policy),
        "zorder": int(policy == frame.best_policy),
        "x": [x_of(point) for point in points],
        "y": [finite(drawing.value(point)) for point in points],
        "customdata": [_details(point, frame) for point in points],
        "line": {"color": look.color, "dash": look.dash, "width": 2},
        "marker": {"color": look.color, "symbol": look.symbol, "size": 8, "line": {"width": 2, "color": look.color}},
        "hovertemplate": f"<b>%{{fullData.name}}</b> · {drawing.hover}<extra></extra>",
    }


def _details(record: ReplayRecord, frame: _Frame) -> list[Json]:
    """For the hover text: 0 cache's share of the rows, 1-4 rows and bytes moved, 5 hit rate, 6 exchange, 7 batches."""
    total = record.cache_rows * record.world_size
    return [
        total / frame.replay.rows if frame.replay.rows else None,
        record.rows_fetched,
        record.rows_written,
        record.bytes_fetched,
        record.bytes_written,
        finite(record.hit_rate),
        record.exchange_bytes_now,
        record.batches,
    ]


def _crosses(failed: list[ReplayRecord], x_of: Callable[[ReplayRecord], int]) -> Json:
    """Failed settings, along the lower edge: they have a position but no value."""
    texts: dict[int, list[str]] = {}
    for record in failed:
        texts.setdefault(x_of(record), []).append(f"{plain(record.policy)}: {plain(record.error or '', 90)}")
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "failed",
        "x": list(texts),
        "y": [0.02] * len(texts),
        "yaxis": "y2",
        "cliponaxis": False,
        "customdata": [["<br>".join(lines[:8])] for lines in texts.values()],
        "marker": {"color": FAILED, "symbol": "x", "size": 10},
        "hovertemplate": "<b>failed</b><br>%{customdata[0]}<extra></extra>",
    }


_MOVED = (
    "<br>fetched %{customdata[1]:,} rows, %{customdata[3]:.3s}B"
    "<br>written %{customdata[2]:,} rows, %{customdata[4]:.3s}B"
)
_AT_CACHE = "cache %{x:,} rows (%{customdata[0]:.2%} of all rows)"


def _hit_rate(frame: _Frame) -> Chart:
    drawing = _Drawing(
        value=lambda record: record.hit_rate,
        axis=value_axis("hit rate (share of unique rows)", tickformat=".1~%", minallowed=0, maxallowed=1),
        hover=f"hit rate %{{y:.2%}}<br>{_AT_CACHE}{_MOVED}",
        policies=frame.policies,
    )
    choices, figures = _over_caches(frame, drawing)
    note = (
        "Higher is better. More memory pays where a line is steep, and does not where it is flat. "
        "The gap to 100% at a large cache is first touches, which no cache avoids."
    )
    if BOUND in frame.policies:
        note += f" No policy can lie above {BOUND}."
    return Chart(name="hit-rate", title="Hit rate against cache size", note=note, choices=choices, figures=figures)


def _traffic(frame: _Frame) -> Chart:
    figures: dict[tuple[int, ...], Figure] = {}
    choices: tuple[Choice, ...] = ()
    units: tuple[tuple[str, str, _Value], ...] = (
        ("bytes", "B", _bytes_moved),
        ("rows", "", _rows_moved),
        (LINK_UNIT, " ms", _link_ms),
    )
    for number, (unit, suffix, value) in enumerate(units):
        drawing = _Drawing(
            value=value,
            axis=value_axis(f"fetched + written ({unit})", tickformat="~s", ticksuffix=suffix, rangemode="tozero"),
            hover=f"lookahead %{{x:,}} batches{_MOVED}<br>hit rate %{{customdata[5]:.2%}}",
            policies=frame.policies,
            meta="link" if unit == LINK_UNIT else "",
        )
        choices, per_unit = _over_lookaheads(frame, drawing)
        figures |= {(*key, number): figure for key, figure in per_unit.items()}
    return Chart(
        name="traffic",
        title="Store traffic against lookahead",
        note="Lower is better: traffic between caches and store over the whole log. Where a line is flat, a longer "
        "window has no benefit. Policies without a window are level lines.",
        choices=(*choices, Choice(name="unit", label="in", options=tuple(unit for unit, _, _ in units))),
        figures=figures,
    )


def _link_ms(record: ReplayRecord) -> float | None:
    return record.link_s * 1e3 / record.batches if record.link_s is not None and record.batches else None


def _rows_moved(record: ReplayRecord) -> float | None:
    if record.rows_fetched is None or record.rows_written is None:
        return None
    return record.rows_fetched + record.rows_written


def _bytes_moved(record: ReplayRecord) -> float | None:
    if record.bytes_fetched is None or record.bytes_written is None:
        return None
    return record.bytes_fetched + record.bytes_written


def _refetches(frame: _Frame, bounds: dict[tuple[int, int, int], int]) -> Chart:
    drawing = _Drawing(
        value=lambda record: refetch_ratio(record, bounds),
        axis=value_axis(f"rows fetched again ({BOUND} = 1)", type="log", tickformat="~g"),
        hover=f"%{{y:.3f}} × {BOUND}<br>{_AT_CACHE}{_MOVED}",
        policies=frame.policies,
    )
    choices, figures = _over_caches(frame, drawing)
    return Chart(
        name="refetches",
        title="Re-fetches relative to the offline bound",
        note=f"1 is the bound: {BOUND} knows the whole log. A row's first touch needs no read and is not counted. "
        "Where the bound fetches nothing again, there is no ratio.",
        choices=choices,
        figures=figures,
    )


def _exchange(frame: _Frame) -> Chart:
    drawing = _Drawing(
        value=lambda r: r.exchange_bytes_now / r.batches if r.exchange_bytes_now is not None and r.batches else None,
        axis=value_axis(
            "exchange on the critical path (bytes per batch)", tickformat="~s", ticksuffix="B", rangemode="tozero"
        ),
        hover=f"%{{y:.3s}}B per batch, %{{customdata[6]:.3s}}B in all<br>{_AT_CACHE}",
        policies=frame.policies,
    )
    choices, figures = _over_caches(frame, drawing)
    return Chart(
        name="exchange",
        title="Exchange between ranks that a step waits for",
        note="Rows and row gradients on the critical path of the next batch, sent between ranks, in bytes of weights. "
        "Lower is better. Policies that plan no exchange are not drawn.",
        choices=choices,
        figures=figures,
    )
