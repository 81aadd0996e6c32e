"""One run of one contender in a process of its own (two ranks: two processes).

python -m benchmarks.peers.trial TASK.json OUTCOME.json        the launcher owns both files
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import redis
import torch

from bagpipe.config.sections import Config, DataConfig
from benchmarks.peers.contenders import CONTENDERS, Outcome, Task
from benchmarks.peers.meter import LOSS_STEPS, Meter, interface_bytes
from benchmarks.peers.sample import Sample, read_sample
from benchmarks.peers.settings import SETTINGS
from trainer.metrics import BinaryMetrics
from trainer.process import configure_process, peak_rss_bytes

with warnings.catch_warnings():  # importing torchrec and fbgemm warns about parts of their own that a CPU build lacks
    warnings.simplefilter("ignore")
    from benchmarks.peers.local_tables import batched_tables, plain_modules
    from benchmarks.peers.ours import run_ours
    from benchmarks.peers.redis_loop import LeastRecent, RemoteLoop, RowKeys, Uncached
    from benchmarks.peers.shared_model import Contender, Peer
    from benchmarks.peers.torchrec_loop import Group, TorchrecLoop

__all__ = ["run"]


def _group(task: Task) -> Group:
    group = Group(rank=task.rank, world_size=task.world_size, port=task.port)
    group.join()
    return group


def _remote(peer: Peer, task: Task, *, cached: bool) -> RemoteLoop:
    RowKeys(task.fill_url, peer).fill(peer)
    keys = RowKeys(task.url, peer)
    if not cached:
        return RemoteLoop(peer, Uncached(keys))
    num_slots = cache_rows(task, peer.sample)
    return RemoteLoop(peer, LeastRecent(keys, num_rows=peer.sample.num_rows, num_slots=num_slots))


#: Builders of the contenders other than ours.
_BUILDERS: Mapping[str, Callable[[Peer, Task], Contender]] = {
    "torchrec": lambda peer, task: TorchrecLoop(peer, _group(task)),
    "torchrec pipelined": lambda peer, task: TorchrecLoop(peer, _group(task), pipelined=True),
    "fbgemm tables": lambda peer, task: batched_tables(peer),
    "torchrec 2 ranks": lambda peer, task: TorchrecLoop(peer, _group(task)),
    "torch sparse": lambda peer, task: plain_modules(peer),
    "lru over redis-py": lambda peer, task: _remote(peer, task, cached=True),
    "redis-py": lambda peer, task: _remote(peer, task, cached=False),
}


def cache_rows(task: Task, sample: Sample) -> int:
    """Rows of a cache in this setting."""
    return int(SETTINGS[task.setting].cache_share * sample.num_rows)


def run(task: Task) -> Outcome:
    """Train once over the data, then score the held-out examples."""
    setting, trait = SETTINGS[task.setting], CONTENDERS[task.contender]
    torch.set_num_threads(setting.threads)
    data = DataConfig(**task.data)
    sample = read_sample(setting.config(data))
    slots = cache_rows(task, sample) if trait.cached else 0
    config = setting.config(data, cache_rows=slots, url=task.url, client=trait.client)
    meter = Meter(
        len(sample.train),
        lambda: interface_bytes(task.interface) // (2 if task.interface == "lo" else 1),
        {"server": task.server_pid} if trait.uses_store else {},
    )
    if trait.uses_store:
        redis.Redis.from_url(task.fill_url).flushall()
    hit_rate: float | None = None
    if task.contender not in _BUILDERS:
        auc, loss, hit_rate = run_ours(config, sample, meter, fill_url=task.fill_url)
    else:
        auc, loss = _run_peer(config, sample, meter, task)
    own_cores, other_cores = meter.cores()
    row_bytes = 2 * 4 * setting.embedding_dim
    most_rows = max(len(torch.unique(batch.table_rows)) for batch in sample.train)
    rows = slots if slots else most_rows if trait.uses_store else sample.num_rows // task.world_size
    return Outcome(
        setting=task.setting,
        contender=task.contender,
        repeat=task.repeat,
        step_s=meter.step_s(),
        auc=auc,
        loss=loss,
        bytes_per_step=meter.bytes_per_step(),
        peak_bytes=peak_rss_bytes(),
        helpers_peak_bytes=meter.helpers_peak_bytes,
        rows_peak_bytes=rows * row_bytes,
        hit_rate=hit_rate if slots else None,
        own_cores=own_cores,
        other_cores=other_cores,
        processor_ms=meter.processor_ms(),
    )


def _run_peer(config: Config, sample: Sample, meter: Meter, task: Task) -> tuple[float | None, float]:
    """Held-out AUC, and mean loss of the first steps."""
    contender = _BUILDERS[task.contender](Peer(config, sample), task)
    losses = []
    for loss in contender.steps(sample.train):
        meter.step()
        losses.append(loss)
    metrics = BinaryMetrics()
    for batch in sample.held_out:
        metrics.add(contender.score(batch), batch.labels)
    return metrics.quality().auc, float(torch.stack(losses[:LOSS_STEPS]).mean())


def main() -> None:
    """Run the task in the first file, write the outcome to the second."""
    configure_process()
    task = Task(**json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(asdict(run(task))))


if __name__ == "__main__":
    main()
