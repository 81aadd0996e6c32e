"""One run of one contender in a process of its own: two passes over the sample, of which the second is measured.

python -m benchmarks.door.trial TASK.json OUTCOME.json        the launcher owns both files
"""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import redis
import torch
from torch.utils.data import DataLoader, Dataset

import bagpipe
from bagpipe.client.remote import RemoteBatches
from bagpipe.config.sections import Config, DataConfig
from bagpipe.training.progress import Progress
from benchmarks.door.contenders import Outcome, Task
from benchmarks.harness.job import open_engine
from benchmarks.peers.meter import Meter
from benchmarks.peers.sample import Sample, read_sample
from benchmarks.peers.settings import SETTINGS
from cacher.embedded import EmbeddedCacher
from trainer.assembly import build_training_model
from trainer.process import configure_process

with warnings.catch_warnings():  # importing torchrec and fbgemm warns about parts of their own that a CPU build lacks
    warnings.simplefilter("ignore")
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    from benchmarks.peers.shared_model import Peer
    from benchmarks.peers.torchrec_loop import Group, Input, TorchrecLoop, WithLoss

__all__ = ["PASSES", "run"]

#: Over the sample. The first fills the store, and is not measured.
PASSES = 2

#: Called at the end of a step with its loss, where it is known.
OnStep = Callable[[float | None], object]


def _train_as_program(config: Config, sample: Sample, task: Task, on_step: OnStep) -> None:
    """The parts of the training program; it owns the namespace, as a job does."""
    configure_process()
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, epochs=PASSES))

    def on_batch(totals: Callable[[], Progress]) -> None:
        on_step(None)

    with ExitStack() as stack:
        cacher = stack.enter_context(EmbeddedCacher(config))
        source = stack.enter_context(RemoteBatches(cacher.url, config))
        built = build_training_model(config, source.schema)
        engine = open_engine(built, source, stack)
        engine.train(source.batches("train", built.spec), on_batch=on_batch)


def _train_by_pipeline(planner: str) -> Callable[[Config, Sample, Task, OnStep], None]:
    def train(config: Config, sample: Sample, task: Task, on_step: OnStep) -> None:
        peer = Peer(config, sample)
        tables = EmbeddingBagCollection(tables=peer.configs(), device=torch.device("meta"))
        model = WithLoss(peer.put(tables))
        rows = bagpipe.optim.Adagrad(lr=config.optim.rows_lr, eps=config.optim.eps)
        loader: DataLoader[Input] = DataLoader(_Batches(peer), batch_size=None)
        with bagpipe.TrainPipeline(
            model,
            lambda parameters: peer.dense_optimizer(list(parameters)),
            rows=rows,
            store=config.store.url,
            namespace=config.store.namespace,
            lookahead=config.oracle.lookahead,
            cache_rows=config.cache.rows,
            prefetch_depth=config.cache.prefetch_depth,
            planner=planner,
        ) as pipeline:
            for _ in pipeline.train(loader):
                assert pipeline.loss is not None, "a batch is trained"
                on_step(float(pipeline.loss))

    return train


def _train_by_torchrec(config: Config, sample: Sample, task: Task, on_step: OnStep) -> None:
    group = Group(port=task.port)
    group.join()
    peer = Peer(config, sample)
    for loss in TorchrecLoop(peer, group, pipelined=True).steps(list(sample.train) * PASSES):
        on_step(float(loss))


class _Batches(Dataset[Input]):
    """The batches of all passes as a torchrec user has them, prepared."""

    def __init__(self, peer: Peer) -> None:
        sample = peer.sample.train
        self._batches = [Input(dense=part.dense, sparse=peer.keyed(part), labels=part.labels) for part in sample]

    def __len__(self) -> int:
        return len(self._batches) * PASSES

    def __getitem__(self, number: int) -> Input:
        if number >= len(self):
            raise IndexError(number)
        return self._batches[number % len(self._batches)]


_TRAINING: Mapping[str, Callable[[Config, Sample, Task, OnStep], None]] = {
    "trainer": _train_as_program,
    "process": _train_by_pipeline("process"),
    "inline": _train_by_pipeline("inline"),
    "torchrec": _train_by_torchrec,
}


def run(task: Task) -> Outcome:
    """Train; the last pass counts, without its first and last steps."""
    setting = SETTINGS[task.setting]
    torch.set_num_threads(setting.threads)
    data = DataConfig(**task.data)
    sample = read_sample(setting.config(data))
    config = setting.config(data, cache_rows=int(setting.cache_share * sample.num_rows), url=task.url)
    redis.Redis.from_url(task.fill_url).flushall()
    num_steps = len(sample.train)
    meter = Meter(num_steps, lambda: 0, {"server": task.server_pid})
    steps, losses = 0, []

    def on_step(loss: float | None) -> None:
        nonlocal steps
        steps += 1
        if steps > num_steps * (PASSES - 1):
            meter.step()
            losses.append(loss)

    _TRAINING[task.contender](config, sample, task, on_step)
    known = [loss for loss in losses if loss is not None]
    own_cores, other_cores = meter.cores()
    return Outcome(
        contender=task.contender,
        repeat=task.repeat,
        step_s=meter.step_s(),
        loss=sum(known) / len(known) if known else None,
        own_cores=own_cores,
        other_cores=other_cores,
    )


def main() -> None:
    """Run the task in the first file, write the outcome to the second."""
    task = Task(**json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(asdict(run(task))))


if __name__ == "__main__":
    main()
