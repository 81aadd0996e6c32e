"""Hand-made replays for tests of the report: plausible curves and every kind of record."""

from __future__ import annotations

import dataclasses
from itertools import product

from data.replay.records import (
    LimitCounts,
    LimitSavings,
    Replay,
    ReplayRecord,
    Savings,
    Setting,
    Span,
    TableSkew,
    ThresholdCounts,
    ThresholdSavings,
    Trial,
)

POLICIES = ("belady-window", "drop-unused", "lru", "lfu", "static-hot", "offline-belady")
WINDOWED = ("belady-window", "drop-unused")

#: Untrusted text that would break out of HTML, a script element, an attribute, a label and a template.
HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>\"'&amp;%{x}\u2028\udcff"


def record(policy: str, lookahead: int, cache_rows: int, batch_size: int, world_size: int = 1) -> ReplayRecord:
    """One setting: fewer misses with more memory, a longer window and a cleverer policy."""
    rows_unique, rows_first_touch, row_bytes, batches = 3_000_000, 250_000, 136, 80_000 // batch_size
    skill = {
        "belady-window": 1.02,
        "drop-unused": 1.9,
        "lru": 3.3,
        "lfu": 2.1,
        "static-hot": 2.7,
        "offline-belady": 1.0,
    }
    window = 1.0 + (4.0 / lookahead if policy in WINDOWED else 0.0)
    refetched = int(900_000 * (5_000 / (cache_rows * world_size)) ** 0.6 * skill[policy] * window)
    misses = min(rows_first_touch + refetched, rows_unique)
    oracle = policy in WINDOWED
    exchange = int(rows_unique * 0.3) if oracle and world_size > 1 else 0
    return ReplayRecord(
        policy=policy,
        lookahead=lookahead,
        cache_rows=cache_rows,
        batch_size=batch_size,
        world_size=world_size,
        batches=batches,
        ids=80_000 * 26,
        rows_unique=rows_unique,
        rows_first_touch=rows_first_touch,
        rows_fetched=misses - rows_first_touch,
        rows_written=misses,
        evictions_waiting=12 if oracle else None,
        batches_waiting=3 if oracle else None,
        hit_rate=1 - misses / rows_unique,
        peak_rows=cache_rows * world_size,
        row_bytes=row_bytes,
        bytes_fetched=(misses - rows_first_touch) * row_bytes,
        bytes_written=misses * row_bytes,
        exchange_rows=2 * exchange if oracle else None,
        exchange_rows_now=exchange if oracle else None,
        exchange_bytes_now=exchange * 64 if oracle else None,
        link_s=(2 * misses - rows_first_touch) * row_bytes / 1.25e9,
        seconds=0.4,
        ids_per_s=80_000 * 26 / 0.4,
    )


def failed(policy: str, lookahead: int, cache_rows: int, batch_size: int, error: str) -> ReplayRecord:
    return ReplayRecord(
        policy=policy, lookahead=lookahead, cache_rows=cache_rows, batch_size=batch_size, world_size=1, error=error
    )


def skew(name: str, rows: int, exponent: float) -> TableSkew:
    shares = [10 ** (-4 + place / 10) for place in range(41)]
    curve = tuple((share, share**exponent) for share in shares)
    return TableSkew(
        table=name,
        rows=rows,
        accesses=80_000,
        missing=0.02,
        top_0_1=0.001**exponent,
        top_1=0.01**exponent,
        top_10=0.1**exponent,
        singletons=0.4,
        curve=curve,
    )


def trial(policy: str, cache_rows: int, step_s: float, exposed_s: float, step: tuple[Span, ...] = ()) -> Trial:
    return Trial(
        policy=policy,
        lookahead=32,
        cache_rows=cache_rows,
        batch_size=512,
        world_size=1,
        steps=150,
        step_s_p50=step_s,
        samples_per_s=512 / step_s,
        exposed_embedding_s=exposed_s,
        rows_fetched=10_000,
        rows_written=20_000,
        hit_rate=0.9,
        auc=0.74,
        loss=0.1,
        step=step,
    )


STEP = (
    Span(lane="read", name="READ12", start_s=0.000, stop_s=0.004),
    Span(lane="net-in", name="FETCH9", start_s=0.001, stop_s=0.006),
    Span(lane="copy", name="INSERT6", start_s=0.006, stop_s=0.007),
    Span(lane="compute", name="0F5", start_s=0.000, stop_s=0.003),
    Span(lane="compute", name="0B5", start_s=0.003, stop_s=0.008),
    Span(lane="compute", name="UPDATE5", start_s=0.008, stop_s=0.009),
    Span(lane="net-out", name="STORE4", start_s=0.001, stop_s=0.005),
)

BEST = Setting(policy="belady-window", lookahead=32, cache_rows=20_000, batch_size=512, world_size=1)

#: A whole sweep: two batch sizes, four windows, four cache sizes (one is too small), and trials.
FULL = Replay(
    path="datasets/criteo_day.tsv.gz",
    format="criteo-tsv",
    examples=80_000,
    batches=157,
    ids=80_000 * 26,
    rows=361_000,
    largest={512: 4_100, 1024: 7_312},
    machine={"processor": "2 cores of an Intel Xeon", "memory": "8 GiB", "python": "3.11.9", "numpy": "2.4.6"},
    records=tuple(
        failed(policy, lookahead, cache_rows, batch_size, "batch 17 needs 7,312 unique rows, the cache holds 5,000")
        if cache_rows * 512 < 5_000 * batch_size and policy != "lfu"
        else record(policy, lookahead, cache_rows, batch_size)
        for batch_size, policy, lookahead, cache_rows in product(
            (512, 1024), POLICIES, (1, 8, 32, 200), (5_000, 10_000, 20_000, 40_000)
        )
    ),
    skew=tuple(skew(f"C{number}", 3 * 2**number // 2, 0.08 + number / 40) for number in range(1, 18)),
    recommended=BEST,
    reason="The smallest cache within 5 % of the traffic of the largest, and the shortest window that keeps it there.",
    trials=(
        trial("belady-window", 20_000, 0.0093, 0.02, STEP),
        trial("drop-unused", 20_000, 0.0101, 0.14, STEP[:4]),
        trial("belady-window", 0, 0.0412, 4.6),
    ),
)

#: A single record.
SINGLE = dataclasses.replace(
    FULL, records=(record("lru", 32, 20_000, 512),), skew=(), recommended=None, reason="", trials=(), machine={}
)

#: All records failed.
FAILED = dataclasses.replace(
    SINGLE, records=(failed("drop-unused", 1, 10, 512, "too small"), failed("lru", 1, 10, 512, "too small"))
)

#: Two ranks: the exchange counts.
RANKS = dataclasses.replace(
    SINGLE,
    records=tuple(record(policy, 32, rows, 512, 2) for policy in POLICIES for rows in (5_000, 10_000)),
    recommended=Setting(policy="drop-unused", lookahead=32, cache_rows=5_000, batch_size=512, world_size=2),
)

#: Every text is hostile.
ATTACK = dataclasses.replace(
    FULL,
    path=HOSTILE,
    format=HOSTILE,
    machine={HOSTILE: HOSTILE},
    records=(
        dataclasses.replace(record("lru", 8, 10_000, 512), policy=HOSTILE),
        failed(HOSTILE, 8, 20_000, 512, HOSTILE),
    ),
    skew=(skew(HOSTILE, 100, 0.5),),
    recommended=Setting(policy=HOSTILE, lookahead=8, cache_rows=10_000, batch_size=512, world_size=1),
    reason=HOSTILE,
    trials=(
        dataclasses.replace(
            trial(HOSTILE, 10_000, 0.01, 0.1),
            step=(Span(lane=HOSTILE, name=HOSTILE, start_s=0.0, stop_s=1.0),),
        ),
    ),
)

#: Thresholds and limits.
SAVINGS = dataclasses.replace(
    SINGLE,
    savings={
        size: Savings(
            thresholds=tuple(
                ThresholdSavings(
                    min_uses=min_uses,
                    total=ThresholdCounts(
                        rows=361_000 // min_uses,
                        rows_saved=1 - 1 / min_uses,
                        bytes=49_096_000 // min_uses,
                        bytes_saved=1 - 1 / min_uses,
                        uses=80_000 * 26,
                        default_uses=before,
                        default_share=before / (80_000 * 26),
                    ),
                    tables={},
                )
                for min_uses, before in ((2, 183_000), (10, 431_000 - size))
            ),
            limits=tuple(
                LimitSavings(
                    expire_after=limit,
                    unit="examples",
                    every=10,
                    total=LimitCounts(
                        rows_at_end=90_000,
                        rows_at_most=110_000,
                        rows_deleted=300_000,
                        rows_born_anew=29_000,
                        bytes_at_most=14_960_000,
                    ),
                    tables={},
                )
                for limit in (1e4, 2.5e4)
            ),
        )
        for size in (512, 1024)
    },
)

ALL = {"full": FULL, "savings": SAVINGS, "single": SINGLE, "failed": FAILED, "ranks": RANKS, "attack": ATTACK}
