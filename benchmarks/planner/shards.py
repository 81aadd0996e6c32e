"""A phase planned by one process and with shards, alternately: time, processor time by part, traffic.

files of one day ─> PlannedData (with Shards) ─> plans ─> every rank's message, dropped
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bagpipe.client.message import encode_message
from bagpipe.config.sections import CacheConfig, CacherConfig, Config, DataConfig, OracleConfig
from bagpipe.oracle.plan import FeatureRef, OracleSpec
from cacher.planning import PlannedData
from cacher.process import configure_process
from cacher.shards import Shards
from data.criteo_skew import CRITEO_KAGGLE_ROWS

__all__ = ["Setting", "log_files", "measure_phase"]

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
    folder: Path, setting: Setting, *, num_shards: int, batch_size: int, lookahead: int, cache_rows: int
) -> dict[str, float]:
    """Means over the batches after the first five, in ms and MB a batch.

    Args:
        folder: from `log_files`.
        setting: see `Setting`.
        num_shards: 0: one process.
        batch_size, lookahead: of the plans.
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
    with ExitStack() as stack:
        data = PlannedData(job.data, 0)
        if num_shards:
            shards = Shards(job, data.schema, data.identity, data.ids_by_feature())
            data.shards = stack.enter_context(shards)
        count = num_bytes = 0
        starts = (0.0, 0.0, 0.0)
        for batch in data.phase("train", spec):
            if count == 5:
                starts = (time.perf_counter(), time.thread_time(), time.process_time())
            for rank in range(ranks):
                num_bytes += len(encode_message(0, 0, batch.for_rank(rank, without_ids=True), omit_values=True))
            count += 1
        ends = (time.perf_counter(), time.thread_time(), time.process_time())
        wall_s, serial_s, process_s = ((end - start) / (count - 5) for start, end in zip(starts, ends, strict=True))
        totals = data.shards.totals if data.shards is not None else ()
        return {
            "wall_ms": wall_s * 1e3,
            "serial_ms": serial_s * 1e3,
            "process_ms": process_s * 1e3,
            "busiest_shard_ms": max((total.busy_s / total.batches * 1e3 for total in totals), default=0.0),
            "from_shards_mb": sum(total.num_bytes / total.batches for total in totals) / 1e6,
            "to_ranks_mb": num_bytes / count / 1e6,
            "shard_rss_mb": max((total.rss_bytes / 1e6 for total in totals), default=0.0),
        }
