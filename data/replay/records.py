"""Results of a replay as plain records; JSON and the report are made from them."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = [
    "LimitCounts",
    "LimitSavings",
    "Link",
    "Replay",
    "ReplayRecord",
    "Savings",
    "Setting",
    "Span",
    "TableSkew",
    "ThresholdCounts",
    "ThresholdSavings",
    "Trial",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One combination of the sweep.

    Attributes:
        policy: an oracle policy (`bagpipe.oracle.eviction.POLICIES`) or a baseline (`data.replay.baselines.BASELINES`).
        lookahead: batches in the window; ignored by baselines.
        cache_rows: rows per rank. batch_size: examples in a global batch. world_size: ranks.
    """

    policy: str
    lookahead: int
    cache_rows: int
    batch_size: int
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRecord:
    """Costs of one setting over the whole log. Counts are None if the setting failed.

    Attributes:
        policy, lookahead, cache_rows, batch_size, world_size: the setting.
        error: why it failed, in one line; None: it succeeded.
        batches, ids: of the log; ids are occurrences.
        rows_unique: unique rows, summed over batches.
        rows_first_touch: rows that enter a cache for the first time, or the first time since they expired: they need no
            read.
        rows_fetched: rows read from the store: those that enter again after an eviction.
        rows_written: rows written to the store: at eviction and at the end.
        rows_deleted: rows that expire; those in a cache are not written.
        evictions_waiting: rows that left a cache right after the batch that used them, so that the next forward waits
            for its update; batches_waiting: batches in which any did. None for baselines.
        hit_rate: share of `rows_unique` that was in a cache when its batch came.
        peak_rows: most rows in the caches of all ranks.
        row_bytes: of one record (weights and optimizer state); None if tables differ.
        bytes_fetched, bytes_written: bytes of those rows' records, exact even if tables differ.
        exchange_rows, exchange_rows_now: rows and row gradients sent between ranks; those on a step's critical path.
        exchange_bytes_now: the latter in bytes of weights (no optimizer state is sent).
        link_s: seconds that the rows fetched and written take on the link to the store; see `Link`.
        seconds: wall time of the replay of this setting, including reading.
        ids_per_s: `ids` over `seconds`.
        step_s_p50, samples_per_s, exposed_embedding_s: as in `Trial`; None without a trial.
    """

    policy: str
    lookahead: int
    cache_rows: int
    batch_size: int
    world_size: int
    error: str | None = None
    batches: int | None = None
    ids: int | None = None
    rows_unique: int | None = None
    rows_first_touch: int | None = None
    rows_fetched: int | None = None
    rows_written: int | None = None
    rows_deleted: int | None = None
    evictions_waiting: int | None = None
    batches_waiting: int | None = None
    hit_rate: float | None = None
    peak_rows: int | None = None
    row_bytes: int | None = None
    bytes_fetched: int | None = None
    bytes_written: int | None = None
    exchange_rows: int | None = None
    exchange_rows_now: int | None = None
    exchange_bytes_now: int | None = None
    link_s: float | None = None
    seconds: float | None = None
    ids_per_s: float | None = None
    step_s_p50: float | None = None
    samples_per_s: float | None = None
    exposed_embedding_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The reader's link to the store, and the size of a row.

    Attributes:
        bytes_per_s: that the link moves. Default: 10 Gbit/s.
        row_bytes: of one row with its optimizer state; None: those of the replayed model.
    """

    bytes_per_s: float = 1.25e9
    row_bytes: float | None = None

    def seconds(self, record: ReplayRecord) -> float | None:
        """Time for the record's rows, fetched and written one after the other; None without counts."""
        rows, num_bytes = (record.rows_fetched, record.rows_written), (record.bytes_fetched, record.bytes_written)
        moved = num_bytes if self.row_bytes is None else tuple(None if n is None else n * self.row_bytes for n in rows)
        if moved[0] is None or moved[1] is None:
            return None
        return (moved[0] + moved[1]) / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSkew:
    """Skew of the accesses to one table.

    Attributes:
        table: its name.
        rows: distinct rows. accesses: ids. missing: share of empty bags among the table's bags.
        top_0_1, top_1, top_10: share of accesses to the most used 0.1, 1 and 10 % of the rows.
        singletons: share of the rows that are used once.
        curve: at most 100 points (share of rows, share of accesses), most used first.
    """

    table: str
    rows: int
    accesses: int
    missing: float
    top_0_1: float
    top_1: float
    top_10: float
    singletons: float
    curve: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdCounts:
    """Counts of a threshold, over one table or all.

    Attributes:
        rows: that are created: those with so many uses. bytes: of their records. The default row is not counted.
        rows_saved, bytes_saved: shares of those of threshold 1.
        uses: ids. default_uses: those before their row is created, which read the default row; default_share: their
            share.
    """

    rows: int
    rows_saved: float
    bytes: int
    bytes_saved: float
    uses: int
    default_uses: int
    default_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdSavings:
    """A threshold of `data.min_uses`, and its counts: of all tables, and of each table of the data by its name."""

    min_uses: int
    total: ThresholdCounts
    tables: dict[str, ThresholdCounts]


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitCounts:
    """Counts of a limit, over one table or all.

    Attributes:
        rows_at_end: alive after the last batch. rows_at_most: alive at the same time, after any batch.
        rows_deleted: that expired. rows_born_anew: used again after that.
        bytes_at_most: of the records alive at the same time.
    """

    rows_at_end: int
    rows_at_most: int
    rows_deleted: int
    rows_born_anew: int
    bytes_at_most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitSavings:
    """A limit of `data.expire_after`, and its counts: of all tables, and of each table of the data by its name.

    Attributes:
        unit, every: as `data.expire_unit` and `data.expire_every`.
    """

    expire_after: float
    unit: str
    every: int
    total: LimitCounts
    tables: dict[str, LimitCounts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Savings:
    """The thresholds and limits that were tried over a log in batches of one size, in the order of the command line."""

    thresholds: tuple[ThresholdSavings, ...]
    limits: tuple[LimitSavings, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One action of a traced step: its lane, and its time in seconds from the step's beginning."""

    lane: str
    name: str
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A training run with one setting.

    Attributes:
        policy, lookahead, cache_rows, batch_size, world_size: the setting; cache_rows 0: direct mode.
        error: why it failed; None: it succeeded.
        steps: trained. step_s_p50: median step. samples_per_s: over the run.
        exposed_embedding_s: time that computation waited for rows.
        rows_fetched, rows_written, evictions_waiting, hit_rate, auc, loss: as reported by the trainer.
        step: the actions of one step from the middle of the run.
    """

    policy: str
    lookahead: int
    cache_rows: int
    batch_size: int
    world_size: int
    error: str | None = None
    steps: int | None = None
    step_s_p50: float | None = None
    samples_per_s: float | None = None
    exposed_embedding_s: float | None = None
    rows_fetched: int | None = None
    rows_written: int | None = None
    evictions_waiting: int | None = None
    hit_rate: float | None = None
    auc: float | None = None
    loss: float | None = None
    step: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """All results of a replay.

    Attributes:
        path, format: of the data. examples, batches, ids: read. rows: distinct rows.
        largest: by batch size, unique rows of the largest batch: the slots that all caches together must have.
        machine: hardware and versions, name -> value, for the report's footer.
        records: one per combination, in the order of the command line: batch sizes, policies, lookaheads, cache sizes.
        skew: by table.
        link: for `link_s` of the records, and what the report's inputs begin with.
        recommended: the recommended setting, and the reason in one sentence; None if no setting could be replayed.
        trials: training runs, if requested.
        savings: by batch size, if thresholds or limits were tried.
    """

    path: str
    format: str
    examples: int
    batches: int
    ids: int
    rows: int
    largest: dict[int, int]
    machine: dict[str, str]
    records: tuple[ReplayRecord, ...]
    skew: tuple[TableSkew, ...]
    link: Link = field(default_factory=Link)
    recommended: Setting | None = None
    reason: str = ""
    trials: tuple[Trial, ...] = ()
    savings: dict[int, Savings] = field(default_factory=dict)
