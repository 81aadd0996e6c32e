"""Jobs whose tables have optimizers of their own, and the same loop in torch's own parts: `plain_loop`.

It takes only initial values, as arrays. Every table is one `nn.EmbeddingBag` with an optimizer of its own.
"""

from __future__ import annotations

import dataclasses
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad as TorchRowWiseAdagrad

from bagpipe.kernels.initialization import initial_weights
from bagpipe.models.plain_dlrm import PlainDLRM
from bagpipe.optim import RowOptimizer, optimizers_of
from bagpipe.oracle.planner import plan_batches
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.store.memory.store import MemoryStore
from bagpipe.testing.local_peers import LocalPeers, local_peers
from bagpipe.testing.plain_job import PlainJob, PlainSettings
from bagpipe.training.part import LoopPart
from bagpipe.types.batch import Batch
from bagpipe.types.schema import DataSchema, Feature, RowTable, Table
from tests.system.plain_rows import PlainRows
from tests.system.rank_threads import RankOrderSum

__all__ = [
    "CACHE_ROWS",
    "DIM",
    "NAMES",
    "NUM_BATCHES",
    "ROWS",
    "Trained",
    "batches",
    "initial",
    "plain_loop",
    "same_as",
    "settings_for",
    "stored",
    "train_ranks",
]

NAMES = ("a", "b", "c", "d", "e")
ROWS, EXAMPLES, DIM, NUM_BATCHES = 30, 8, 4, 8

#: Sums and means in turn; two features read the last table. Bags have up to three ids.
SCHEMA = DataSchema(
    label="label",
    dense=("I1",),
    features=(*(Feature(name=f"f{name}", table=name) for name in NAMES), Feature(name="g", table="e")),
    tables=tuple(Table(name=name, rows=ROWS, pooling="mean" if name in "bd" else "sum") for name in NAMES),
)
CACHE_ROWS = 90  # of 150, and at most some 75 a batch
TABLE_OF = [NAMES.index(feature.table) for feature in SCHEMA.features]

Rows = Mapping[str, NDArray[np.float64]]


def batches(seed: int = 0, num_batches: int = NUM_BATCHES) -> list[Batch]:
    generator = np.random.default_rng(seed)
    made = []
    for index in range(num_batches):
        lengths = generator.integers(0, 4, (len(TABLE_OF), EXAMPLES), dtype=np.int32)
        made.append(
            Batch(
                index=index,
                dense=generator.random((EXAMPLES, 1), np.float32),
                values=generator.integers(0, ROWS, int(lengths.sum())),
                lengths=lengths,
                labels=(generator.random(EXAMPLES) < 0.4).astype(np.float32),
            )
        )
    return made


# ---- the reference ---------------------------------------------------------------------------------------------------


#: Row optimizers whose reference takes dense gradients.
_DENSE = ("adagrad", "rowwise_adagrad", "frozen")


def _is_sparse(optimizer: RowOptimizer) -> bool:
    return optimizer.name not in _DENSE or optimizer.record != optimizer.name


class Bags(nn.Module):
    """Whole tables, as parameters."""

    def __init__(self, weights: Sequence[Tensor], optimizers: Sequence[RowOptimizer]) -> None:
        super().__init__()
        self.tables = nn.ModuleList()
        for table, values, optimizer in zip(SCHEMA.tables, weights, optimizers, strict=True):
            module = nn.EmbeddingBag(ROWS, DIM, mode=table.pooling, sparse=_is_sparse(optimizer), dtype=torch.float64)
            module.weight.data.copy_(values)
            module.weight.requires_grad_(optimizer.name != "frozen")
            self.tables.append(module)

    def forward(self, batch: Batch) -> Tensor:
        starts = batch.feature_offsets()
        found = []
        for feature, table in enumerate(TABLE_OF):
            ids = torch.from_numpy(batch.values[starts[feature] : starts[feature + 1]])
            lengths = torch.from_numpy(batch.lengths[feature]).long()
            found.append(self.tables[table](ids, lengths.cumsum(0) - lengths))
        return torch.cat(found, dim=1)


def torch_optimizer(parameter: nn.Parameter, optimizer: RowOptimizer) -> torch.optim.Optimizer | None:
    kinds: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": lambda parameters, lr, eps: torch.optim.SGD(parameters, lr=lr),
        "adagrad": torch.optim.Adagrad,
        "rowwise_adagrad": TorchRowWiseAdagrad,
        "adam": torch.optim.SparseAdam,
        "momentum": lambda parameters, lr, eps: PlainRows(parameters, name="momentum", lr=lr, **optimizer.numbers),
        "ftrl": lambda parameters, lr, eps: PlainRows(parameters, name="ftrl", lr=lr, **optimizer.numbers),
    }
    if "weight_decay" in optimizer.numbers:
        numbers = dict(optimizer.numbers)
        return PlainRows(
            [parameter],
            name=optimizer.name,
            lr=1.0,
            eps=optimizer.epsilon,
            decay=numbers.pop("weight_decay"),
            decoupled=not numbers.pop("is_l2", False),
            **numbers,
        )
    make = kinds.get(optimizer.name)
    return None if make is None else make([parameter], lr=1.0, eps=optimizer.epsilon)


_STATES = ("z", "sum", "exp_avg", "exp_avg_sq", "momentum_buffer")


def state_of(parameter: nn.Parameter, optimizer: torch.optim.Optimizer | None) -> Tensor:
    """``[ROWS, state]``, in the order of a record."""
    state = {} if optimizer is None else optimizer.state[parameter]
    found = [state[name].reshape(ROWS, -1) for name in _STATES if name in state]
    return torch.cat([torch.empty(ROWS, 0, dtype=torch.float64), *found], dim=1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """The end of a loop: records by table, dense parameters by name, and logits of the first batch."""

    records: Rows
    dense: Mapping[str, Tensor]
    logits: Tensor


def initial(number: int) -> Tensor:
    table = RowTable(name=NAMES[number], dim=DIM, rows=ROWS, init_bound=ROWS**-0.5)
    return initial_weights(table, np.arange(ROWS), seed=0, dtype="float64")


def plain_loop(
    rows: Mapping[str, RowOptimizer], data: Sequence[Batch], weights: Sequence[Tensor] | None = None
) -> Trained:
    optimizers = optimizers_of(rows, NAMES)
    bags = Bags([initial(number) for number in range(len(NAMES))] if weights is None else weights, optimizers)
    torch.manual_seed(0)
    model = PlainDLRM(bags, num_dense=1, num_features=len(TABLE_OF), dim=DIM, bottom_mlp=(16,), top_mlp=(16,)).double()
    parameters = [module.weight for module in bags.tables]
    of_rows = [
        torch_optimizer(parameter, optimizer) for parameter, optimizer in zip(parameters, optimizers, strict=True)
    ]
    dense = [(name, value) for name, value in model.named_parameters() if not name.startswith("bags.")]
    of_dense = torch.optim.SGD([value for _, value in dense], lr=0.1)
    for batch in data:
        logits = model(torch.from_numpy(batch.dense).double(), batch).reshape(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(batch.labels).double())
        model.zero_grad()
        loss.backward()
        of_dense.step()
        for optimizer, torch_s in zip(optimizers, of_rows, strict=True):
            if torch_s is not None:
                torch_s.param_groups[0]["lr"] = optimizer.rate(batch.index)
                torch_s.step()
    records = {
        name: torch.cat([parameter.detach(), state_of(parameter, optimizer)], dim=1).numpy()
        for name, parameter, optimizer in zip(NAMES, parameters, of_rows, strict=True)
    }
    with torch.no_grad():
        logits = model(torch.from_numpy(data[0].dense).double(), data[0]).reshape(-1)
    return Trained(records=records, dense=dict(dense), logits=logits)


# ---- the jobs --------------------------------------------------------------------------------------------------------


def stored(store: MemoryStore) -> dict[str, tuple[NDArray[np.int64], NDArray[Any]]]:
    found = {}
    for number, table in enumerate(store.schema.tables):
        ids = store.ids(number)
        found[table.name] = ids, store.read(number, ids).rows.copy()
    return found


def same_as(expected: Trained, job: PlainJob, logits: Tensor | None = None) -> None:
    assert isinstance(job.store, MemoryStore)
    for number, (name, (ids, records)) in enumerate(stored(job.store).items()):
        if number in job.cache.history.decaying:
            steps = job.cache.history.steps_of(number, torch.from_numpy(records))
            assert bool((steps >= 1).all()), "every row is at the step of its last update"
            job.cache.history.catch_up(number, torch.from_numpy(records))
            records = records[:, :-1]
        np.testing.assert_allclose(records, expected.records[name][ids], rtol=1e-12, atol=1e-12, err_msg=name)
    for name, value in job.model.named_parameters():
        torch.testing.assert_close(value, expected.dense[name], rtol=1e-12, atol=1e-12)
    if logits is not None:
        torch.testing.assert_close(logits, expected.logits, rtol=1e-12, atol=1e-12)


def settings_for(rows: Mapping[str, RowOptimizer], **more: Any) -> PlainSettings:
    given = {"dtype": "float64", "dim": DIM, "optimizers": rows, "lookahead": 2, "read_ahead": 6, **more}
    return PlainSettings(schema=SCHEMA, **given)


def train_ranks(
    rows: Mapping[str, RowOptimizer],
    data: Sequence[Batch],
    world_size: int,
    *,
    check: Callable[[PlainJob], None],
    parts: Callable[[], Sequence[LoopPart]] = tuple,
    **more: Any,
) -> None:
    """Train with ranks in threads, then check the job of each.

    `parts` makes further parts of a rank's loop; `more` are settings of the jobs.
    """
    name, peers = f"optimizers-{uuid.uuid4().hex}", local_peers(world_size)
    sums: list[RankOrderSum] = []
    barrier = threading.Barrier(world_size, timeout=250)
    errors: list[BaseException] = []
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(
                PlainJob(
                    settings_for(rows, **{"cache_rows": CACHE_ROWS, **more}),
                    make_store=lambda schema: MemoryStore(schema, name=name, num_buckets=8),
                )
            )
            for _ in peers
        ]

        def work(job: PlainJob, peer: LocalPeers) -> None:
            spec = dataclasses.replace(job.spec, world_size=world_size)
            planned = (RankBatch.of(batch, plan, peer.rank) for batch, plan in plan_batches(data, spec))
            try:
                job.engine.train(planned)
            except BaseException as error:
                errors.append(error)
                peer.close()
                barrier.abort()

        for job, peer in zip(jobs, peers, strict=True):
            replicas = RankOrderSum(list(job.model.parameters()), sums, barrier)
            dense = job.make_dense(replicas=replicas)
            job.engine = job.make_engine(dense, peers=peer, claim=claim_of(peer, job), parts=parts())
        threads = [threading.Thread(target=work, args=pair) for pair in zip(jobs, peers, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        for job in jobs:
            check(job)


def claim_of(peer: LocalPeers, job: PlainJob) -> Callable[[], bool]:
    return lambda: any(peer.gather(peer.rank == 0 and job.store.claim()))
