"""A phase planned by one process and with shards, alternately: time, processor time by part, traffic.

files of one day ─> PlannedData (with Shards) ─> plans ─> every rank's message, dropped
"""

from __future__ import annotations

import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bagpipe.client.message import encode_message
from bagpipe.config.sections import CacheConfig, CacherConfig, Config, DataConfig, OracleConfig
from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.util.processor_time import process_s
from cacher.planning import PlannedData
from cacher.process import configure_process
from cacher.shards import Shards
from data.criteo_skew import CRITEO_KAGGLE_ROWS

__all__ = ["Setting", "log_files", "measure_phase"]

#: The first batch measured: the allocator has its arrays.
_FIRST = 10
#: Batches that shards and reader can be ahead.
_SHARDS_AHEAD = 12
#: The thread that writes the records, and without shards does all the rest; the process.
_RECORDS, _PROCESS = "records", "process"

#: Ranks, ids of a feature in an example, raw ids.
Setting = tuple[int, int, bool]


@contextmanager
def log_files(
    num_examples: int, hotness: int, ids: Callable[[np.random.Generator, int, int], NDArray[np.int64]]
) -> Iterator[Path]:
    """A folder with a day of so many examples. `ids(generator, rows, count)` draws ids of a table."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="bagpipe-shards-") as name:
        folder = Path(name)
        np.save(folder / "day_0_dense.npy", rng.random((num_examples, 13), dtype=np.float32))
        np.save(folder / "day_0_labels.npy", np.zeros(num_examples, np.float32))
        arrays = {
            str(table): ids(rng, rows, num_examples * hotness).astype(np.int32).reshape(num_examples, hotness)
            for table, rows in enumerate(CRITEO_KAGGLE_ROWS)
        }
        np.savez(folder / "day_0_sparse_multi_hot.npz", **arrays)  # type: ignore[arg-type] # no table is named allow_pickle
        tables = "".join(f"[tables.C{number}]\nrows = {rows}\n" for number, rows in enumerate(CRITEO_KAGGLE_ROWS, 1))
        (folder / "bounded.toml").write_text(tables)
        yield folder


def measure_phase(
    folder: Path,
    setting: Setting,
    *,
    num_shards: int,
    batch_size: int,
    num_batches: int,
    lookahead: int,
    cache_rows: int,
) -> dict[str, float]:
    """Means in ms and MB a batch, over the batches from `_FIRST` on for which others enter the window.

    Args:
        folder: from `log_files`.
        setting: see `Setting`.
        num_shards: 0: one process.
        batch_size, lookahead: of the plans.
        num_batches: in the folder.
        cache_rows: of all ranks together.
    """
    ranks, _, is_raw = setting
    configure_process()
    job = Config(
        data=DataConfig(
            format="mlperf-npz",
            path=str(folder),
            schema="" if is_raw else str(folder / "bounded.toml"),
            batch_size=batch_size,
            workers=0,
        ),
        oracle=OracleConfig(lookahead=lookahead),
        cache=CacheConfig(rows=cache_rows // ranks),
        cacher=CacherConfig(shards=(str(num_shards),) if num_shards else ()),
    )
    num_tables = len(CRITEO_KAGGLE_ROWS)
    spec = OracleSpec(
        table_rows=(None,) * num_tables if is_raw else CRITEO_KAGGLE_ROWS,
        features=tuple(FeatureRef(feature=table, table=table) for table in range(num_tables)),
        num_slots=cache_rows // ranks,
        lookahead=lookahead,
        world_size=ranks,
    )
    end = num_batches - lookahead - _SHARDS_AHEAD
    with ExitStack() as stack:
        data = PlannedData(job.data, 0)
        if num_shards:
            shards = Shards(job, data.schema, data.identity, data.ids_by_feature())
            data.shards = stack.enter_context(shards)
        count = num_bytes = 0
        start, start_s, shards_start_s = _thread_s(), time.perf_counter(), _shards_s(data.shards)
        with closing(data.phase("train", spec)) as batches:
            for batch in batches:
                if count == _FIRST:
                    start, start_s, shards_start_s = _thread_s(), time.perf_counter(), _shards_s(data.shards)
                if count == end:
                    break
                for rank in range(ranks):
                    rank_batch = batch.for_rank(rank, without_ids=True)
                    num_bytes += len(encode_message(0, 0, rank_batch, omit_values=True))
                count += 1
            wall_s, threads_s, shards_s = time.perf_counter() - start_s, _thread_s(), _shards_s(data.shards)
        per_batch = 1e3 / (count - _FIRST)
        thread_ms = {name: (end_s - start.get(name, 0.0)) * per_batch for name, end_s in threads_s.items()}
        totals = data.shards.totals if data.shards is not None else ()
        shards_ms = [(end_s - first_s) * per_batch for first_s, end_s in zip(shards_start_s, shards_s, strict=True)]
        return {
            "wall_ms": wall_s * per_batch,
            "records_ms": thread_ms[_RECORDS],
            "decide_ms": thread_ms.get("cacher-decider", 0.0),
            "join_ms": thread_ms.get("cacher-joiner", 0.0),
            "cacher_ms": thread_ms[_PROCESS],
            "busiest_shard_ms": max(shards_ms, default=0.0),
            "all_ms": thread_ms[_PROCESS] + sum(shards_ms),
            "from_shards_mb": sum(total.num_bytes / total.batches for total in totals) / 1e6,
            "to_ranks_mb": num_bytes / count / 1e6,
            "shard_rss_mb": max((total.rss_bytes / 1e6 for total in totals), default=0.0),
        }


def _shards_s(shards: Shards | None) -> list[float]:
    """Processor seconds of each shard's process."""
    names = [] if shards is None else shards.names()
    return [process_s(int(re.findall(r"process (\d+)", name)[0])) for name in names]


def _thread_s() -> dict[str, float]:
    """Processor seconds of each thread of this process by its name, and of all."""
    clocks = {
        _RECORDS if thread is threading.main_thread() else thread.name: time.pthread_getcpuclockid(thread.ident)
        for thread in threading.enumerate()
        if thread.ident is not None
    }
    return {**{name: time.clock_gettime(clock) for name, clock in clocks.items()}, _PROCESS: time.process_time()}
