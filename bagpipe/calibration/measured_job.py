"""A small job on generated batches, whose operations are measured in processor time: one rank, in a process of its own.

    torchrun ranks ──python -m bagpipe.calibration.measured_job──> OpenPipeline, ProcessorTimes ──> JobTimes per rank

The job is that of `bagpipe.TrainPipeline`: fence, planner process and lanes are those of any job. Its model looks rows
up, and has as many dense layers as it is told.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from bagpipe import optim
from bagpipe.calibration.job_times import TABLES, JobSettings, JobTimes, OpTimes
from bagpipe.calibration.zipf_ids import zipf_ids
from bagpipe.cluster.model import OTHER_THREADS
from bagpipe.pipeline.trace import Trace
from bagpipe.train_pipeline.batch_ids import BatchIds
from bagpipe.train_pipeline.initial_rows import InitialRows
from bagpipe.train_pipeline.model_parts import model_parts
from bagpipe.train_pipeline.open_pipeline import open_pipeline
from bagpipe.train_pipeline.options import Options
from bagpipe.train_pipeline.user_batches import Position, UserBatches
from bagpipe.training.part import LoopPart, LoopRun
from bagpipe.util.documents import parse_json
from bagpipe.util.processor_time import children_s, process_s

__all__ = ["measure_job"]

#: Rows of the tables, small and large as those of click logs: 1,024 examples have as many distinct rows as Criteo's.
_TABLE_ROWS = np.geomspace(4, 200_000, TABLES).astype(np.int64).tolist()
_WARM_UP = 40
_LOOKAHEAD = 8
#: As a trainer's process.
_SWITCH_INTERVAL_S = 0.5e-3
#: Spans of another process.
_OF_PLANNER = ("0X_PLAN",)


class ProcessorTimes(Trace):
    """Processor time of every action, by operation. What a lane does between two actions counts for the later one."""

    def __init__(self) -> None:
        super().__init__(capacity=1)
        self.by_op: dict[str, dict[int, int]] = {}
        self._last_ns: dict[int, int] = {}

    def note(self, lane: str, name: str, index: int, start_ns: int, end_ns: int, category: str = "action") -> None:
        if category != "action" or name in _OF_PLANNER:  # waits belong to the action after them
            return
        now_ns, thread = time.thread_time_ns(), threading.get_ident()
        before_ns = self._last_ns.get(thread)
        self._last_ns[thread] = now_ns
        if before_ns is not None:
            self.by_op.setdefault(name[1:], {})[index] = now_ns - before_ns


class _Counting(LoopPart):
    """Counts the items of every operation, and notes the ends of batches and the processor time until some of them.

    Args:
        server_process: its processor time is noted, too.
        used_at: batches at whose ends processor times are noted.
    """

    name = "calibration"

    def __init__(self, server_process: int, used_at: Sequence[int]) -> None:
        self.items: list[Mapping[str, int]] = []
        self.ends: list[float] = []
        self.used: list[tuple[float, float, float]] = []
        self._server_process = server_process
        self._used_at = used_at
        self._run: LoopRun

    def start(self, run: LoopRun) -> None:
        self._run = run

    def finish_batch(self, b: int) -> None:
        self.ends.append(time.monotonic())
        if b in self._used_at:
            self.used.append((time.process_time(), children_s(), process_s(self._server_process)))
        self.items.append(_counts(self._run, b))


def _counts(run: LoopRun, b: int) -> Mapping[str, int]:
    """Operation -> ids or rows of batch b."""
    found = run.in_flight[b].rank_batch
    ids, unique = found.consumer.order.size, found.consumer.unique.ids.size
    left, fetched = found.owner.evict.ids.size, found.owner.fetch.ids.size
    owned, late, pushed_late, updated_late = unique, 0, 0, 0
    if found.exchange is not None:
        owned = found.exchange.owned.ids.size
        updated_late = owned - int(found.exchange.owned_push_now.sum())
        late = int((~found.exchange.pull_now).sum())
        pushed_late = int((~found.consumer.push_now).sum())
    return {
        "X_READ": ids,
        "X_FETCH": int((~found.owner.fetch_new).sum()),
        "X_EVICT": left,
        "X_INSERT": fetched,
        "X_WRITEBACK": left,
        "F": ids,
        "B": ids,
        "OPT": 0,
        "X_UPDATE": owned - updated_late,
        "X_UPDATE_LATE": updated_late,
        "X_PREPULL": late,
        "X_PULL": unique - late,
        "X_PUSH": unique - pushed_late,
        "X_PUSH_LATE": pushed_late,
        "X_ACK": 0,
    }


class _Lookups(nn.Module):
    """Pooled rows of 26 tables, and dense layers behind them."""

    def __init__(self, dim: int, layers: Sequence[int]) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(name=f"t{n}", embedding_dim=dim, num_embeddings=rows, feature_names=[f"f{n}"])
                for n, rows in enumerate(_TABLE_ROWS)
            ],
        )
        widths = [TABLES * dim, *layers] if layers else []
        parts = [part for inputs, outputs in pairwise(widths) for part in (nn.Linear(inputs, outputs), nn.ReLU())]
        self.layers = nn.Sequential(*parts)
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, batch: KeyedJaggedTensor) -> tuple[Tensor, None]:
        return self.factor * self.layers(self.bags(batch).values()).sum(), None


def _batches(settings: JobSettings, seed: int) -> Iterator[KeyedJaggedTensor]:
    generator = np.random.default_rng(seed)
    for _ in range(_WARM_UP + settings.batches):
        ids = np.concatenate([zipf_ids(generator, settings.examples, rows) for rows in _TABLE_ROWS])
        yield KeyedJaggedTensor(
            keys=[f"f{n}" for n in range(TABLES)],
            values=torch.from_numpy(ids),
            lengths=torch.ones(TABLES * settings.examples, dtype=torch.int32),
        )


def measure_job(settings: JobSettings, rank: int = 0) -> JobTimes:
    """Run the job, as one rank of those that the environment tells of.

    Raises:
        StoreError: the server does not answer.
    """
    measured = range(_WARM_UP, _WARM_UP + settings.batches - _LOOKAHEAD)  # all lanes have work
    times = ProcessorTimes()
    counting = _Counting(settings.server_process, (measured[0], measured[-1]))
    options = _options(settings)
    model = model_parts(
        _Lookups(settings.dim, settings.layers),
        lambda parameters: torch.optim.Adagrad(parameters, lr=1e-6),
        torch.device("cpu"),
        optim.Adagrad(lr=1e-6),
        options,
    )
    batches = UserBatches(BatchIds(model.features, None), model.device)
    opened = open_pipeline(model, options, batches, InitialRows.of(model), (counting,), trace=times)
    with opened.session as session, session.failing():
        planned = opened.planner.run(batches.read(_batches(settings, rank), Position()), 0)
        run = session.begin(planned, 0)
        while run.step_part() is not None:
            batches.forget(run.next_batch)
        session.end()
    return _medians(settings, measured, times, counting)


def _medians(settings: JobSettings, measured: range, times: ProcessorTimes, counting: _Counting) -> JobTimes:
    ends = [counting.ends[b] for b in measured]
    first, last = counting.used
    own_s, planner_s, server_s = ((one - other) / (len(measured) - 1) for one, other in zip(last, first, strict=True))
    ops = {
        op: OpTimes(
            items=statistics.median(counting.items[b].get(op, 0) for b in measured),
            processor_s=statistics.median(found[b] for b in measured if b in found) / 1e9,
        )
        for op, found in times.by_op.items()
        if any(b in found for b in measured)
    }
    # Collectives and the link to the planner have threads of their own.
    others_s = max(0.0, own_s - sum(each.processor_s for each in ops.values()))
    ids = float(TABLES * settings.examples)
    return JobTimes(
        step_s=statistics.median(np.diff(ends).tolist()),
        ops={**ops, OTHER_THREADS: OpTimes(items=ids, processor_s=others_s)},
        planner_s=planner_s,
        server_s=server_s,
        ids=ids,
    )


def _options(settings: JobSettings) -> Options:
    return Options(
        store=settings.store_url,
        namespace=settings.namespace,
        existing="refuse",
        lookahead=_LOOKAHEAD,
        cache_rows=settings.cache_rows,
        cache_max_rows=0,
        prefetch_depth=4,
        planner="process",
        uneven="stop",
        unbounded=(),
        seed=0,
        row_dtype=None,
        rounding="stochastic",
        nonfinite="stop",
        accumulate=1,
        sparse=None,
        checkpoint_dir="",
        checkpoint_every=0,
        keep=1,
        resume="auto",
        start_from="",
        start_without=(),
        take_over=False,
        durability="memory",
        timeout_s=30.0,
        peer_timeout_s=120.0,
    )


def main() -> None:
    """Measure the jobs of a file, a list of `JobSettings` as JSON, and write their times into another one."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    torch.set_num_threads(1)
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    rank = int(os.environ.get("RANK", "0"))
    jobs = [JobSettings(**each) for each in parse_json(source.read_text(encoding="utf-8"))]
    found = [dataclasses.asdict(measure_job(each, rank)) for each in jobs]
    if rank == 0:
        target.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
