"""How fast does the oracle plan? One core, full-scale Criteo Kaggle cardinalities, steady eviction.

    python -m benchmarks.planner.main [--batch-size 16384] [--lookahead 200] [--cache-rows 1000000] [--out DIR]

Beside every plan, one `np.sort` of the batch's packed (row, position) words is timed: the lower bound of any planner
that finds unique rows by sorting. Times are CPU times of the thread, which other processes hardly affect.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.oracle.planner import make_planner
from bagpipe.types.batch import Batch
from benchmarks.harness.benchmark import Benchmark, Measure, Part, Values, found_of, run_benchmark
from benchmarks.harness.report import table
from benchmarks.planner.shards import Setting, log_files, measure_phase
from data.criteo_skew import CRITEO_KAGGLE_ROWS

#: Exponent of the bounded Zipf law: about 1 % of the rows get 80 % of the accesses at this scale.
ZIPF_EXPONENT = 1.05

#: Raw ids, policy, ranks, assignment of examples to ranks.
SETTINGS = (
    (False, "belady-window", 1, "contiguous"),
    (True, "belady-window", 1, "contiguous"),
    (False, "drop-unused", 1, "contiguous"),
    (False, "belady-window", 8, "contiguous"),
    (True, "belady-window", 8, "contiguous"),
    (False, "belady-window", 8, "locality"),
)

#: With shards: ranks, ids of a feature in an example, raw ids.
SHARDED: tuple[Setting, ...] = ((8, 1, False), (8, 1, True), (8, 8, False))


SHARD_COLUMNS = (
    "wall_ms", "records_ms", "decide_ms", "join_ms", "busiest_shard_ms", "all_ms", "from_shards_mb", "to_ranks_mb",
    "shard_rss_mb",
)  # fmt: skip


def zipf(rng: np.random.Generator, rows: int, count: int) -> NDArray[np.int64]:
    """Ids in [0, rows) by inverse transform of a bounded Pareto law; smaller ids are more popular."""
    a = 1.0 - ZIPF_EXPONENT
    ranks = ((rows**a - 1.0) * rng.random(count) + 1.0) ** (1.0 / a)
    ids: NDArray[np.int64] = np.minimum(ranks.astype(np.int64) - 1, rows - 1)
    return ids


def batches(batch_size: int, count: int, *, scramble: bool) -> Iterator[Batch]:
    """Fresh batches; `scramble` spreads ids over 40 bits, like hashed raw ids."""
    rng = np.random.default_rng(0)
    for index in range(count):
        values = np.concatenate([zipf(rng, rows, batch_size) for rows in CRITEO_KAGGLE_ROWS])
        if scramble:
            values = (values * np.int64(0x9E3779B97F4A7C15 - 2**64)).view(np.uint64) >> np.uint64(24)
            values = values.view(np.int64)
        yield Batch(
            index=index,
            dense=np.zeros((batch_size, 0), dtype=np.float32),
            values=values,
            lengths=np.ones((len(CRITEO_KAGGLE_ROWS), batch_size), dtype=np.int32),
            labels=np.zeros(batch_size, dtype=np.float32),
        )


def measure(
    *,
    batch_size: int,
    lookahead: int,
    cache_rows: int,
    raw_ids: bool,
    policy: str,
    num_measured: int,
    ranks: int = 1,
    assign: str = "contiguous",
) -> dict[str, object]:
    """Medians over the measured batches, which begin once the window is full and the caches evict.

    Args:
        cache_rows: of all ranks together.
    """
    num_tables = len(CRITEO_KAGGLE_ROWS)
    spec = OracleSpec(
        table_rows=(None,) * num_tables if raw_ids else CRITEO_KAGGLE_ROWS,
        features=tuple(FeatureRef(feature=table, table=table) for table in range(num_tables)),
        num_slots=cache_rows // ranks,
        lookahead=lookahead,
        policy=policy,
        world_size=ranks,
        assign=assign,
    )
    planner = make_planner(spec)
    bases = np.repeat(np.concatenate([[0], np.cumsum(CRITEO_KAGGLE_ROWS)[:-1]]), batch_size)
    plan_s: list[float] = []
    sort_s: list[float] = []
    unique: list[int] = []
    evicted: list[int] = []
    for batch in batches(batch_size, lookahead + 2000, scramble=raw_ids):
        packed = ((batch.values + bases) << 19) | np.arange(len(batch.values))
        start = time.thread_time()
        np.sort(packed)
        sorted_at = time.thread_time()
        planner.push(batch)
        plan = planner.plan() if planner.is_ready else None
        end = time.thread_time()
        if plan is None:
            continue
        num_evicted = sum(len(owner.evict) for owner in plan.owners)
        if num_evicted:
            plan_s.append(end - sorted_at)
            sort_s.append(sorted_at - start)
            unique.append(sum(len(exchange.owned) for exchange in plan.exchanges) or len(plan.consumers[0].unique))
            evicted.append(num_evicted)
        if len(plan_s) == num_measured:
            break
    num_ids = batch_size * num_tables
    return {
        "batch_size": batch_size,
        "lookahead": lookahead,
        "cache_rows": cache_rows,
        "ids": "raw 64-bit" if raw_ids else "bounded",
        "policy": policy,
        "ranks": ranks,
        "assign": assign,
        "batches": len(plan_s),
        "unique_rows": round(statistics.mean(unique)),
        "evicted_rows": round(statistics.mean(evicted)),
        "plan_ms": round(statistics.median(plan_s) * 1e3, 3),
        "sort_ms": round(statistics.median(sort_s) * 1e3, 3),
        "million_ids_per_s": round(num_ids / statistics.median(plan_s) / 1e6, 1),
        "ratio_to_sort": round(statistics.median(plan_s) / statistics.median(sort_s), 2),
    }


def _parts(options: argparse.Namespace) -> Mapping[str, Measure]:
    def plans(part: Part) -> None:
        for raw_ids, policy, ranks, assign in SETTINGS:
            record = measure(
                batch_size=options.batch_size,
                lookahead=options.lookahead,
                cache_rows=options.cache_rows,
                raw_ids=raw_ids,
                policy=policy,
                num_measured=options.batches,
                ranks=ranks,
                assign=assign,
            )
            part.add(record)
            part.say(f"{record['ids']}, {policy}, {ranks} ranks, {assign}: {record['plan_ms']} ms")

    def shards(part: Part) -> None:
        for setting in SHARDED:
            ranks, hotness, is_raw = setting
            size = max(1, options.batch_size // hotness)
            with log_files(size * options.sharded_batches, hotness, zipf) as folder:
                for _ in range(options.rounds):
                    for num_shards in (0, 2):
                        found = measure_phase(
                            folder,
                            setting,
                            num_shards=num_shards,
                            batch_size=size,
                            num_batches=options.sharded_batches,
                            lookahead=min(options.lookahead, options.sharded_batches // 4),
                            cache_rows=options.cache_rows,
                        )
                        part.add(
                            {
                                "ranks": ranks,
                                "hotness": hotness,
                                "ids": "raw 64-bit" if is_raw else "bounded",
                                "shards": num_shards,
                                **{name: round(value, 2) for name, value in found.items()},
                            }
                        )

    parts = {"plans": plans, "shards": shards}
    return {name: measure for name, measure in parts.items() if options.only in (None, name)}


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-size", type=int, default=16_384)
    parser.add_argument("--lookahead", type=int, default=200)
    parser.add_argument("--cache-rows", type=int, default=1_000_000)
    parser.add_argument("--batches", type=int, default=200, help="measured batches")
    parser.add_argument("--sharded-batches", type=int, default=120, help="batches of a phase planned with shards")
    parser.add_argument("--only", choices=("plans", "shards"), help="measure one part; the other's results stay")
    parser.add_argument("--rounds", type=int, default=3, help="alternate runs with and without shards")


def _tables(values: Values) -> str:
    shards = _shard_table(values)
    return f"{_plan_table(values)}\n\n{shards}" if shards else _plan_table(values)


def _shard_table(values: Values) -> str:
    """Medians of the rounds: one process, and two shards beside it."""
    found = found_of(values, "shards") or []
    if not found:
        return ""
    keys = list(dict.fromkeys((r["ranks"], r["hotness"], r["ids"]) for r in found))
    rows = []
    for key in keys:
        one, two = (
            {
                name: statistics.median(
                    r[name] for r in found if (r["ranks"], r["hotness"], r["ids"], r["shards"]) == (*key, shards)
                )
                for name in SHARD_COLUMNS
            }
            for shards in (0, 2)
        )
        one_ms = one["records_ms"]
        rows.append(
            (
                *key,
                round(one["wall_ms"] / two["wall_ms"], 2),
                *(round(two[name] / one_ms, 2) for name in ("decide_ms", "records_ms", "join_ms", "busiest_shard_ms")),
                round(two["all_ms"] / one["all_ms"], 2),
                round(two["from_shards_mb"], 1),
                round(two["to_ranks_mb"], 1),
                round(two["shard_rss_mb"]),
            )
        )
    return table(
        (
            "ranks", "ids of a feature", "ids", "one / 2 shards", "decisions", "records", "joining", "a shard",
            "all processors", "MB from shards", "MB to ranks", "MB a shard",
        ),
        rows,
    )  # fmt: skip


def _plan_table(values: Values) -> str:
    columns = ("unique_rows", "evicted_rows", "plan_ms", "sort_ms", "million_ids_per_s", "ratio_to_sort")
    return table(
        ("ranks", "ids", "policy", "unique rows", "evicted", "plan ms", "np.sort ms", "M ids/s", "plan / sort"),
        [
            (
                "1" if r["ranks"] == 1 else f"{r['ranks']}, {r['assign']}",
                r["ids"],
                r["policy"],
                *(r[column] for column in columns),
            )
            for r in found_of(values, "plans")
        ],
    )


BENCHMARK = Benchmark(
    folder=Path(__file__).parent,
    about=__doc__,
    flags=_flags,
    parts=_parts,
    tables=_tables,
    rehearsal={
        "batch_size": 256,
        "lookahead": 8,
        "cache_rows": 20_000,
        "batches": 10,
        "sharded_batches": 32,
        "rounds": 1,
    },
)

if __name__ == "__main__":
    sys.exit(run_benchmark(BENCHMARK))
