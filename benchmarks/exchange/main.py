"""How many bytes do the ranks of a job exchange per batch, and how many of them must a step wait for?

    python -m benchmarks.exchange.main [--sample FILE] [--ranks 2 4 8] [--only sample|criteo-kaggle] [--out DIR]

Everything is counted from plans and batches; nothing is trained. Without `--sample` (a file of Criteo's click logs)
only the generated data set is counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from bagpipe.config.sections import DataConfig
from bagpipe.errors import InputError
from benchmarks.exchange.accounting import GlobalCounts, count_global, count_owned, mean
from benchmarks.exchange.workload import KAGGLE_SCHEMA, WORKLOADS, Workload
from benchmarks.harness.benchmark import Benchmark, Measure, Part, Values, run_benchmark
from benchmarks.harness.report import table, verdict
from data.replay.plan_counts import ExchangeCounts

WEIGHT_BYTES, ID_BYTES, LENGTH_BYTES = 4, 8, 4
#: Largest share that our critical bytes can be of all bytes of replicate-and-all-reduce.
TARGET_SHARE = 0.40


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Megabytes (10**6 bytes) sent per batch, over all ranks.

    Attributes:
        workload, ranks, way: what was counted.
        critical_mb: bytes sent while no rank can compute.
        total_mb: all bytes sent.
        busiest_critical_mb, busiest_total_mb: the same of the rank that sends most, per batch.
        share: critical bytes over all bytes of replicate-and-all-reduce.
        store_reads, store_writes: rows read from and written to the store, over all ranks.
        busiest_store_reads: rows read by the rank that reads most.
        parts_mb: summands of the total.
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
    """Every rank keeps every row of the window, and gradients are all-reduced.

    An all-reduce moves ``2 (N - 1) / N`` vectors per rank and row.
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
    """No cache; the id determines the rank of a row. One in N of the `vectors` and of their gradients stays local.

    Ids (one per vector) and bag lengths are sent ahead of time, so a step waits for vectors and gradients only.
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
    """Every row lives at its owner; other ranks pull it and push their gradients."""
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


def measure(name: str, workload: Workload, data: DataConfig, all_ranks: Sequence[int]) -> Iterator[Result]:
    """All ways of exchanging rows, for each number of ranks."""
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


def _parts(options: argparse.Namespace) -> Mapping[str, Measure]:
    if options.sample and not Path(options.sample).is_file():
        raise InputError(f"--sample: {options.sample} does not exist")
    return {
        name: partial(_measure, options, name)
        for name, workload in WORKLOADS.items()
        if (options.sample or workload.format != "criteo-tsv") and options.only in (None, name)
    }


def _measure(options: argparse.Namespace, name: str, part: Part) -> None:
    workload = WORKLOADS[name]
    if options.rehearse:
        workload = dataclasses.replace(workload, batch_size=256, lookahead=8, cache_rows=20_000, warmup=10, measured=10)
    with tempfile.TemporaryDirectory() as folder:
        schema = Path(folder) / "kaggle.toml"
        schema.write_text(KAGGLE_SCHEMA)
        is_sample = workload.format == "criteo-tsv"
        data = DataConfig(
            format=workload.format,
            path=options.sample if is_sample else "",
            schema="" if is_sample else str(schema),
            batch_size=workload.batch_size,
            eval_fraction=0.0,
        )
        for result in measure(name, workload, data, options.ranks):
            part.add(asdict(result))


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sample", default="", help="file of Criteo's click logs")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--only", choices=sorted(WORKLOADS))


def _tables(values: Values) -> str:
    """Bytes between ranks and rows of the store; the summands of our bytes; whether the target is met."""
    results = [Result(**record) for part in values["parts"].values() for record in part.get("found") or []]
    ours = [result for result in results if result.way.startswith("ours")]
    headers = ("data", "ranks", "way", "critical MB", "total MB", "busiest rank: critical", "total", "critical / (a)")
    lines = [
        table((*headers, "store: rows read", "by the busiest rank", "written"), map(_row, results)),
        table(
            ("data", "ranks", "way", "pull now", "pull early", "push now", "push late"),
            [(r.workload, r.ranks, r.way, *(f"{mb:.2f}" for mb in r.parts_mb.values())) for r in ours],
        ),
    ]
    if ours:
        worst = max(ours, key=lambda result: result.share)
        lines.append(
            f"Target: at most {TARGET_SHARE:.0%} of (a): {verdict(worst.share, at_most=TARGET_SHARE)}, at worst "
            f"{worst.share:.1%} ({worst.workload}, {worst.ranks} ranks, {worst.way}).\n"
        )
    return "\n".join(lines)


def _row(result: Result) -> tuple[object, ...]:
    sent = (result.critical_mb, result.total_mb, result.busiest_critical_mb, result.busiest_total_mb)
    rows = (result.store_reads, result.busiest_store_reads, result.store_writes)
    megabytes, counts = [f"{mb:.2f}" for mb in sent], [f"{count:.0f}" for count in rows]
    return (result.workload, result.ranks, result.way, *megabytes, f"{result.share:.1%}", *counts)


BENCHMARK = Benchmark(
    folder=Path(__file__).parent,
    about=__doc__,
    flags=_flags,
    parts=_parts,
    tables=_tables,
    rehearsal={"ranks": [2], "only": "criteo-kaggle"},
)

if __name__ == "__main__":
    sys.exit(run_benchmark(BENCHMARK))
