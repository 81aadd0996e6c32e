"""Sortable tables of the records, the trials, the tables of the data, and of thresholds and limits for rows."""

from __future__ import annotations

from collections.abc import Sequence

from bagpipe.report.charts import short
from bagpipe.report.tables import Column, table
from data.replay.records import LimitSavings, Replay, ReplayRecord, Setting, TableSkew, ThresholdSavings, Trial
from data.replay.report.sweep_charts import bounds_of, refetch_ratio
from data.replay.report.trial_charts import exposed_share, mean_step_s

__all__ = ["is_setting", "limit_table", "moved_of", "record_table", "skew_table", "threshold_table", "trial_table"]


def is_setting(item: ReplayRecord | Trial, setting: Setting | None) -> bool:
    """Whether the record or trial has this setting."""
    return setting is not None and all(getattr(item, name) == getattr(setting, name) for name in Setting.__slots__)


def record_table(replay: Replay) -> str:
    """All records: failed ones in red with their error, the recommended one marked."""
    bounds = bounds_of(replay.records)
    columns: list[Column[ReplayRecord]] = [
        Column(title="policy", value=lambda r: r.policy),
        Column(title="lookahead", value=lambda r: r.lookahead, hint="batches"),
        Column(title="cache rows", value=lambda r: r.cache_rows, hint="rows per rank"),
        Column(title="batch size", value=lambda r: r.batch_size, hint="examples"),
        Column(title="ranks", value=lambda r: r.world_size),
        Column(title="hit rate", value=lambda r: r.hit_rate, text=_percent, hint="share of unique rows"),
        Column(title="× offline", value=lambda r: refetch_ratio(r, bounds), text=_ratio, hint="rows fetched again"),
        Column(title="unique rows", value=lambda r: r.rows_unique, hint="summed over batches"),
        Column(title="first touches", value=lambda r: r.rows_first_touch, hint="rows that need no read"),
        Column(title="fetched", value=lambda r: r.rows_fetched, hint="rows read again after an eviction"),
        Column(title="written", value=lambda r: r.rows_written, hint="rows"),
        Column(
            title="waiting",
            value=lambda r: _scaled(r.batches_waiting, 1 / (r.batches or 1)),
            text=_percent,
            hint="batches whose insert waits for the update of the batch before",
        ),
        Column(title="peak rows", value=lambda r: r.peak_rows, hint="in the caches of all ranks"),
        Column(title="bytes fetched", value=lambda r: r.bytes_fetched, text=_bytes),
        Column(title="bytes written", value=lambda r: r.bytes_written, text=_bytes),
        Column(
            title="link ms/batch",
            value=lambda r: _scaled(r.link_s, 1e3 / (r.batches or 1)),
            text=lambda value: f"{value:,.4g}",
            hint="rows of a batch, fetched and written, on your link",
            data=moved_of,
        ),
        Column(
            title="link s",
            value=lambda r: r.link_s,
            text=lambda value: f"{value:,.4g}",
            hint="rows of the whole log on your link",
            data=lambda r: {name: value for name, value in moved_of(r).items() if name != "batches"},
        ),
        Column(title="exchange now", value=lambda r: r.exchange_bytes_now, text=_bytes, hint="bytes a step waits for"),
        Column(title="ids/s", value=lambda r: r.ids_per_s, text=short, hint="replayed per second"),
        Column(title="seconds", value=lambda r: r.seconds, text=lambda value: f"{value:.1f}"),
    ]
    return table(
        "records",
        columns,
        replay.records,
        setting_columns=5,
        error_of=lambda r: r.error,
        is_best=lambda r: is_setting(r, replay.recommended),
    )


def trial_table(replay: Replay) -> str:
    """All training trials."""
    columns: list[Column[Trial]] = [
        Column(title="policy", value=lambda t: t.policy if t.cache_rows else "direct mode"),
        Column(title="lookahead", value=lambda t: t.lookahead, hint="batches"),
        Column(title="cache rows", value=lambda t: t.cache_rows, hint="rows per rank; 0: no cache"),
        Column(title="batch size", value=lambda t: t.batch_size, hint="examples"),
        Column(title="ranks", value=lambda t: t.world_size),
        Column(title="step p50 (ms)", value=lambda t: _scaled(t.step_s_p50, 1e3), text=lambda value: f"{value:.2f}"),
        Column(title="mean (ms)", value=lambda t: _scaled(mean_step_s(t), 1e3), text=lambda value: f"{value:.2f}"),
        Column(title="samples/s", value=lambda t: t.samples_per_s, text=lambda value: f"{value:,.0f}"),
        Column(title="exposed (s)", value=lambda t: t.exposed_embedding_s, text=lambda value: f"{value:.3f}"),
        Column(title="exposed share", value=exposed_share, text=_percent, hint="of the run's time"),
        Column(title="steps", value=lambda t: t.steps),
        Column(title="hit rate", value=lambda t: t.hit_rate, text=_percent),
        Column(title="fetched", value=lambda t: t.rows_fetched, hint="rows"),
        Column(title="written", value=lambda t: t.rows_written, hint="rows"),
        Column(title="AUC", value=lambda t: t.auc, text=lambda value: f"{value:.5f}"),
        Column(title="loss", value=lambda t: t.loss, text=lambda value: f"{value:.5f}"),
    ]
    return table(
        "trial-figures",
        columns,
        replay.trials,
        setting_columns=5,
        error_of=lambda t: t.error,
        is_best=lambda t: is_setting(t, replay.recommended),
    )


def skew_table(skew: Sequence[TableSkew]) -> str:
    """All tables of the data."""
    columns: list[Column[TableSkew]] = [
        Column(title="table", value=lambda t: t.table),
        Column(title="distinct rows", value=lambda t: t.rows),
        Column(title="accesses", value=lambda t: t.accesses),
        Column(title="top 0.1%", value=lambda t: t.top_0_1, text=_percent, hint="share of accesses"),
        Column(title="top 1%", value=lambda t: t.top_1, text=_percent, hint="share of accesses"),
        Column(title="top 10%", value=lambda t: t.top_10, text=_percent, hint="share of accesses"),
        Column(title="used once", value=lambda t: t.singletons, text=_percent, hint="share of the rows"),
        Column(title="empty bags", value=lambda t: t.missing, text=_percent, hint="share of the bags"),
    ]
    return table("tables", columns, skew, setting_columns=1)


def threshold_table(replay: Replay) -> str:
    """All thresholds; empty if none was tried."""
    items = [(size, each) for size, saved in replay.savings.items() for each in saved.thresholds]
    columns: list[Column[tuple[int, ThresholdSavings]]] = [
        Column(title="min_uses", value=lambda t: t[1].min_uses, hint="data.min_uses"),
        Column(title="batch size", value=lambda t: t[0], hint="examples"),
        Column(title="rows", value=lambda t: t[1].total.rows, hint="with so many uses"),
        Column(title="rows saved", value=lambda t: t[1].total.rows_saved, text=_percent, hint="of those with any use"),
        Column(title="bytes", value=lambda t: t[1].total.bytes, text=_bytes, hint="of their records"),
        Column(title="bytes saved", value=lambda t: t[1].total.bytes_saved, text=_percent),
        Column(title="uses before", value=lambda t: t[1].total.default_uses, hint="ids that read the default row"),
        Column(title="share", value=lambda t: t[1].total.default_share, text=_percent, hint="of all ids"),
    ]
    return table("thresholds", columns, items, setting_columns=2) if items else ""


def limit_table(replay: Replay) -> str:
    """All limits; empty if none was tried."""
    items = [(size, each) for size, saved in replay.savings.items() for each in saved.limits]
    if not items:
        return ""
    unit = items[0][1].unit
    columns: list[Column[tuple[int, LimitSavings]]] = [
        Column(title="expire_after", value=lambda t: t[1].expire_after, text=lambda value: f"{value:,g}", hint=unit),
        Column(title="batch size", value=lambda t: t[0], hint="examples"),
        Column(title="every", value=lambda t: t[1].every, hint="batches from one expiry to the next"),
        Column(title="rows at the end", value=lambda t: t[1].total.rows_at_end),
        Column(title="rows at most", value=lambda t: t[1].total.rows_at_most, hint="at the same time"),
        Column(title="bytes at most", value=lambda t: t[1].total.bytes_at_most, text=_bytes, hint="of their records"),
        Column(title="deleted", value=lambda t: t[1].total.rows_deleted, hint="rows that expired"),
        Column(title="born anew", value=lambda t: t[1].total.rows_born_anew, hint="rows used after they expired"),
    ]
    return table("limits", columns, items, setting_columns=2)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def moved_of(record: ReplayRecord) -> dict[str, int]:
    """The counts from which the script computes seconds when the reader changes the link."""
    counts = (record.rows_fetched, record.rows_written, record.bytes_fetched, record.bytes_written, record.batches)
    if None in counts:
        return {}
    rows, more_rows, num_bytes, more_bytes, batches = (count or 0 for count in counts)
    return {"rows": rows + more_rows, "bytes": num_bytes + more_bytes, "batches": batches}


def _percent(value: float) -> str:
    return f"{value:.2%}"


def _ratio(value: float) -> str:
    return f"{value:.3f}"


def _bytes(value: float) -> str:
    return f"{short(value)}B" if value >= 1000 else f"{value:.0f} B"
