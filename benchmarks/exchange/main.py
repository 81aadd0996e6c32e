"""How many bytes do the ranks of a job exchange per batch, and how many of them must a step wait for?

    python -m benchmarks.exchange.main [--sample FILE] [--ranks 2 4 8] [--only sample|criteo-kaggle] [--json FILE]

Everything is counted from plans and batches; nothing is trained. Without `--sample` (a file of Criteo's click logs)
only the generated data set is measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bagpipe.config.sections import DataConfig
from benchmarks.exchange.accounting import GlobalCounts, count_global, count_owned, mean
from benchmarks.exchange.workload import KAGGLE_SCHEMA, WORKLOADS, Workload
from data.replay.exchange import ExchangeCounts

WEIGHT_BYTES, ID_BYTES, LENGTH_BYTES = 4, 8, 4
#: Critical bytes of ours, at most this share of all bytes of replicate-and-all-reduce.
TARGET_SHARE = 0.40


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Megabytes (10**6 bytes) sent per batch, over all ranks.

    Attributes:
        workload, ranks, way: what was counted.
        critical_mb: sent while no rank can compute. total_mb: all.
        busiest_critical_mb, busiest_total_mb: by the rank that sends most, per batch.
        share: critical bytes over all bytes of replicate-and-all-reduce.
        store_reads, store_writes: rows read from and written to the store, over all ranks.
        busiest_store_reads: rows read by the rank that reads most.
        parts_mb: what the total is made of.
    """

    workload: str
    ranks: int
    way: str
    critical_mb: float
    total_mb: float
    busiest_critical_mb: float
    busiest_total_mb: float
    share: float
    store_reads: float
    store_writes: float
    busiest_store_reads: float
    parts_mb: dict[str, float]


def replicated(name: str, ranks: int, row_mb: float, counts: GlobalCounts) -> Result:
    """Every rank keeps every row of the window; gradients are all-reduced: ``2 (N - 1) / N`` vectors a rank and row.

    Rows that one example uses and the window does not use again need no reduction, and one rank reads them.
    """
    shared = counts.unique - counts.single
    now, late = (2 * (ranks - 1) * rows * row_mb for rows in (counts.needed_next, shared - counts.needed_next))
    everywhere = counts.leaving - counts.single
    return Result(
        workload=name,
        ranks=ranks,
        way="replicate, all-reduce",
        critical_mb=now,
        total_mb=now + late,
        busiest_critical_mb=now / ranks,
        busiest_total_mb=(now + late) / ranks,
        share=now / (now + late),
        store_reads=ranks * everywhere + counts.single,
        store_writes=counts.leaving,
        busiest_store_reads=everywhere + counts.single / ranks,
        parts_mb={"all_reduce_now": now, "all_reduce_late": late},
    )


def sharded(
    name: str, ranks: int, row_mb: float, counts: GlobalCounts, vectors: float, *, way: str, baseline_mb: float
) -> Result:
    """No cache, every row at the rank its id names: of `vectors` looked up and as many gradients, 1 in N stays at home.

    Ids (one per vector) and bag lengths go ahead, so a step waits for vectors and gradients only.
    """
    away = (ranks - 1) / ranks
    ids = (vectors * away * ID_BYTES + counts.bags * (ranks - 1) * LENGTH_BYTES) / 1e6
    critical = 2 * vectors * away * row_mb
    return Result(
        workload=name,
        ranks=ranks,
        way=way,
        critical_mb=critical,
        total_mb=critical + ids,
        busiest_critical_mb=critical / ranks,
        busiest_total_mb=(critical + ids) / ranks,
        share=critical / baseline_mb,
        store_reads=0.0,
        store_writes=0.0,
        busiest_store_reads=0.0,
        parts_mb={"vectors": critical / 2, "gradients": critical / 2, "ids_and_lengths": ids},
    )


def owned(name: str, ranks: int, row_mb: float, counts: ExchangeCounts, *, assign: str, baseline_mb: float) -> Result:
    """Every row at its owner; the others pull it and push their gradients."""
    parts = {part: getattr(counts, part) * row_mb for part in ("pull_now", "pull_early", "push_now", "push_late")}
    critical = parts["pull_now"] + parts["push_now"]
    return Result(
        workload=name,
        ranks=ranks,
        way=f"ours, {assign}",
        critical_mb=critical,
        total_mb=sum(parts.values()),
        busiest_critical_mb=counts.busiest_now * row_mb,
        busiest_total_mb=counts.busiest * row_mb,
        share=critical / baseline_mb,
        store_reads=counts.fetched,
        store_writes=counts.written,
        busiest_store_reads=counts.busiest_fetched,
        parts_mb=parts,
    )


def measure(name: str, workload: Workload, data: DataConfig, all_ranks: list[int]) -> Iterator[Result]:
    """All ways, for each number of ranks."""
    counted = slice(workload.warmup, workload.warmup + workload.measured)
    row_mb = workload.dim * WEIGHT_BYTES / 1e6

    def counts_of(ranks: int, assign: str) -> ExchangeCounts:
        start = time.perf_counter()
        counts = count_owned(workload.batches(data), workload.spec(data, ranks, assign))
        result = mean(list(itertools.islice(counts, counted.start, counted.stop)))
        print(f"{name}, {ranks} ranks, {assign}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
        return result

    global_counts = mean(
        list(
            itertools.islice(
                count_global(workload.batches(data), workload.spec(data, 1, "contiguous")), counted.start, counted.stop
            )
        )
    )
    print(f"{name}: {asdict(global_counts)}", file=sys.stderr)
    for ranks in all_ranks:
        baseline = replicated(name, ranks, row_mb, global_counts)
        yield baseline
        contiguous = counts_of(ranks, "contiguous")
        for way, vectors in (
            ("sharded, a vector per id", global_counts.occurrences),
            ("sharded, distinct rows", contiguous.used),
        ):
            yield sharded(name, ranks, row_mb, global_counts, vectors, way=way, baseline_mb=baseline.total_mb)
        for assign, counts in (("contiguous", contiguous), ("locality", counts_of(ranks, "locality"))):
            yield owned(name, ranks, row_mb, counts, assign=assign, baseline_mb=baseline.total_mb)


def print_tables(results: list[Result]) -> None:
    """Two Markdown tables: bytes between ranks and the store's rows, and what ours are made of."""
    print("| data | ranks | way | critical MB | total MB | busiest rank: critical | total | critical / (a) | "
          "store: rows read | by the busiest rank | written |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for r in results:
        bytes_sent = (r.critical_mb, r.total_mb, r.busiest_critical_mb, r.busiest_total_mb)
        rows = (r.store_reads, r.busiest_store_reads, r.store_writes)
        cells = [f"{mb:.2f}" for mb in bytes_sent] + [f"{r.share:.1%}"] + [f"{count:.0f}" for count in rows]
        print(f"| {r.workload} | {r.ranks} | {r.way} | {' | '.join(cells)} |")
    print()
    print("| data | ranks | way | pull now | pull early | push now | push late |")
    print("|---|---|---|---|---|---|---|")
    for r in results:
        if "pull_now" in r.parts_mb:
            shares = " | ".join(f"{mb:.2f}" for mb in r.parts_mb.values())
            print(f"| {r.workload} | {r.ranks} | {r.way} | {shares} |")
    print()
    worst = max((r for r in results if r.way.startswith("ours")), key=lambda r: r.share)
    verdict = "met" if worst.share <= TARGET_SHARE else "missed"
    print(f"Target: at most {TARGET_SHARE:.0%} of (a): {verdict}, at worst {worst.share:.1%} "
          f"({worst.workload}, {worst.ranks} ranks, {worst.way}).")  # fmt: skip


def main() -> None:
    """Measure every workload there is data for and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", default="", help="file of Criteo's click logs")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--only", choices=sorted(WORKLOADS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        schema = Path(folder) / "kaggle.toml"
        schema.write_text(KAGGLE_SCHEMA)
        for name, workload in WORKLOADS.items():
            is_sample = workload.format == "criteo-tsv"
            if (is_sample and not options.sample) or options.only not in (None, name):
                continue
            data = DataConfig(
                format=workload.format,
                path=options.sample if is_sample else "",
                schema="" if is_sample else str(schema),
                batch_size=workload.batch_size,
                eval_fraction=0.0,
            )
            results.extend(measure(name, workload, data, options.ranks))
    print_tables(results)
    if options.json:
        software = {"python": platform.python_version(), "numpy": np.__version__}
        settings = {name: asdict(workload) for name, workload in WORKLOADS.items()}
        document = {"software": software, "workloads": settings, "results": [asdict(result) for result in results]}
        options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
