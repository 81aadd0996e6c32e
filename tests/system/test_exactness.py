"""Serial equivalence: for any cache, store and transport, a job ends with direct mode's bits."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from bagpipe.config.sections import CacheConfig, Config, DataConfig, ModelConfig, StoreConfig
from tests.effort import some_of
from tests.store.nodes import ClusterNodes
from tests.system.covering import covering
from tests.system.jobs import JobOutcome, change, largest_batch, run_job

#: Models, each with the schemas it supports.
MODELS = [
    ("dlrm", "sum"),
    ("dlrm", "weighted"),
    ("dcnv2", "mean"),
    ("deepfm", "mixed"),
    ("wide-deep", "ragged"),
    ("factory", "everything"),
]

#: Data types of rows and computation.
DTYPES = {
    "float32": {},
    "float64": {"run__dtype": "float64"},
    "float16": {"cache__dtype": "float16", "cache__rounding": "nearest"},
    "bfloat16": {"cache__dtype": "bfloat16"},
}

#: Settings that must not change a bit ...
FREE_AXES = {
    "lookahead": (1, 8, 64),
    "cache": ("smallest", "auto, a few more", "all rows"),
    "store": ("memory", "server", "servers", "cluster"),
    "transport": ("in-process", "in-process", "process"),  # starting a process takes a second: drawn less often
    "prefetch_depth": (1, 4),
    "policy": ("belady-window", "drop-unused"),
}
#: ... of a job defined by these.
JOB_AXES = {
    "model": MODELS,
    "optimizer": ("sgd", "adagrad", "rowwise_adagrad", "adam"),
    "dtype": tuple(DTYPES),
    "dense": ("adagrad", "adam", "sgd"),
    "epochs": (1, 2),
}
AXES = JOB_AXES | FREE_AXES

MakeConfig = Callable[..., Config]
Row = dict[str, object]


def job_config(clicks: MakeConfig, row: Row) -> Config:
    model, schema = cast("tuple[str, str]", row["model"])
    config = clicks(schema, model, row["optimizer"], epochs=row["epochs"], shuffle=row["epochs"] == 2)
    return change(config, optim__dense=row["dense"], cache__rows=0, **DTYPES[str(row["dtype"])])


class Reference:
    """Direct mode's final numbers of each job, run once."""

    def __init__(self, clicks: MakeConfig) -> None:
        self._clicks = clicks
        self._ends: dict[tuple[object, ...], tuple[JobOutcome, int]] = {}

    def of(self, row: Row) -> tuple[JobOutcome, int]:
        """The final numbers, and the most unique rows of any batch."""
        key = tuple(row[name] for name in JOB_AXES)
        if key not in self._ends:
            config = job_config(self._clicks, row)
            self._ends[key] = run_job(config), largest_batch(config)
        return self._ends[key]


@pytest.fixture(scope="module")
def reference(clicks: MakeConfig) -> Reference:
    return Reference(clicks)


@pytest.fixture(scope="module")
def stores(redis_servers: tuple[str, ...], redis_cluster: ClusterNodes) -> dict[str, str]:
    """URL of each store."""
    return {
        "memory": "memory://",
        "server": redis_servers[0],
        "servers": ",".join(redis_servers),
        "cluster": redis_cluster.url,
    }


def check(row: Row, clicks: MakeConfig, reference: Reference, stores: dict[str, str]) -> None:
    direct, smallest = reference.of(row)
    num_rows = sum(len(ids) for ids, _ in direct.rows.values())
    cache_rows = {"smallest": smallest, "auto, a few more": "auto", "all rows": num_rows}[str(row["cache"])]
    config = change(
        job_config(clicks, row),
        cache__rows=cache_rows,
        cache__max_rows=smallest + 9 if cache_rows == "auto" else 0,
        cache__prefetch_depth=row["prefetch_depth"],
        oracle__lookahead=row["lookahead"],
        oracle__policy=row["policy"],
        store__url=stores[str(row["store"])],
        store__namespace=f"exact-{uuid.uuid4().hex}",
    )
    end = run_job(config, transport=str(row["transport"]))
    assert end.digests == direct.digests
    assert end.losses == direct.losses
    if row["cache"] == "all rows" and row["policy"] == "belady-window":
        assert end.trained.progress.rows_inserted == num_rows, "with room for all, every row enters once"


#: Two of three rows, with most of the pairs; `make test-full` has the others, and combinations of four settings.
PAIRS = covering(AXES, strength=2)


@pytest.mark.redis
@pytest.mark.multiproc
@pytest.mark.parametrize(
    "row",
    some_of(PAIRS, [number for number in range(len(PAIRS)) if number % 3]),
    ids=lambda row: "-".join(map(str, row.values())),
)
def test_every_pair_of_settings(row: Row, clicks: MakeConfig, reference: Reference, stores: dict[str, str]) -> None:
    check(row, clicks, reference, stores)


def models_and_optimizers() -> Iterator[Any]:
    """All of them; by default each model with one optimizer, and each optimizer."""
    for (turn, model), (number, optimizer) in itertools.product(enumerate(MODELS), enumerate(JOB_AXES["optimizer"])):
        marks = () if (turn + number) % len(JOB_AXES["optimizer"]) == 0 else pytest.mark.slow
        yield pytest.param(model, optimizer, marks=marks, id=f"{'-'.join(model)}-{optimizer}")


@pytest.mark.redis
@pytest.mark.parametrize(("model", "optimizer"), list(models_and_optimizers()))
def test_every_model_and_optimizer(
    model: tuple[str, str],
    optimizer: str,
    clicks: MakeConfig,
    reference: Reference,
    stores: dict[str, str],
) -> None:
    """The tightest cache, where rows leave and come back within the window."""
    row: Row = {
        "model": model, "optimizer": optimizer, "dtype": "float32", "dense": "adagrad", "epochs": 1,
        "lookahead": 8, "cache": "smallest", "store": "server", "transport": "in-process", "prefetch_depth": 4,
        "policy": "belady-window",
    }  # fmt: skip
    check(row, clicks, reference, stores)


@pytest.mark.slow
@pytest.mark.redis
@pytest.mark.multiproc
@pytest.mark.timeout(1200)
def test_every_four_settings(clicks: MakeConfig, reference: Reference, stores: dict[str, str]) -> None:
    axes = {name: values for name, values in AXES.items() if name != "transport"}
    for row in covering(axes, strength=4, seed=1):
        check({**row, "transport": "in-process"}, clicks, reference, stores)


@pytest.mark.multiproc
@pytest.mark.parametrize("model", some_of(["dlrm", "dcnv2", "deepfm", "wide-deep"], {1}))
def test_large_matrix_kernels_keep_the_bits(model: str) -> None:
    """Blocked kernels sum in an order that depends on the alignment of their operands; results must not."""
    config = Config(
        data=DataConfig(limit=2900, batch_size=256, eval_fraction=0.0, epochs=2, workers=0),
        cache=CacheConfig(rows=0),
        store=StoreConfig(url="memory://"),
        model=ModelConfig(name=model, embedding_dim=8, bottom_mlp=(20, 12), top_mlp=(40, 9)),
    )
    direct = run_job(config)
    for cache_rows, lookahead, transport in ((4_000, 4, "process"), (0, 1, "in-process"), (50_000, 16, "in-process")):
        cached = run_job(change(config, cache__rows=cache_rows, oracle__lookahead=lookahead), transport=transport)
        assert cached.losses == direct.losses
        assert cached.digests == direct.digests


def test_direct_mode_sees_every_row_change(clicks: MakeConfig) -> None:
    """The reference is sensitive: another seed, step size or data set changes the digests."""
    config = change(clicks(), cache__rows=0)
    ends = [
        run_job(config),
        run_job(change(config, run__seed=1)),
        run_job(change(config, optim__rows_lr=0.2)),
        run_job(change(config, data__limit=200)),
    ]
    for one, other in itertools.combinations(ends, 2):
        assert one.dense_digest != other.dense_digest
        assert one.embedding_digest != other.embedding_digest
    assert run_job(config).digests == ends[0].digests


def test_evaluation_changes_nothing_and_is_the_same(clicks: MakeConfig) -> None:
    held_out = change(clicks(eval_fraction=0.3), cache__rows=0)
    with_evaluation = run_job(held_out)
    assert with_evaluation.auc is not None
    assert with_evaluation.ne is not None
    training_only = run_job(change(held_out, data__eval_fraction=0.0, data__limit=214))
    assert with_evaluation.digests == training_only.digests
    smallest = largest_batch(held_out)
    for cache_rows, lookahead in ((smallest, 1), (smallest, 64), (10_000, 8)):
        cached = run_job(change(held_out, cache__rows=cache_rows, oracle__lookahead=lookahead))
        assert cached.digests == with_evaluation.digests
        assert (cached.auc, cached.ne) == (with_evaluation.auc, with_evaluation.ne)


def test_a_limited_number_of_batches_with_any_lookahead(clicks: MakeConfig) -> None:
    """`run.steps` ends a job in the middle of its lookahead window."""
    direct = run_job(change(clicks(), cache__rows=0, run__steps=7))
    assert direct.trained.progress.steps == 7
    for lookahead in (1, 3, 64):
        cached = run_job(change(clicks(), cache__rows=100, oracle__lookahead=lookahead, run__steps=7))
        assert cached.digests == direct.digests


@pytest.mark.redis
def test_a_second_job_continues_from_the_stored_rows(clicks: MakeConfig, redis_server: object, namespace: str) -> None:
    """Rows found in a namespace are reused, not reinitialised, with and without a cache."""
    url = redis_server.url  # type: ignore[attr-defined]
    ends = []
    for number, cache_rows in enumerate((0, 90)):
        config = change(
            clicks(), cache__rows=cache_rows, store__url=url, store__namespace=f"{namespace}-{number}", run__steps=9
        )
        first, second = run_job(config), run_job(config)
        assert first.embedding_digest != second.embedding_digest
        ends.append((first.digests, second.digests))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_tables_with_data_types_of_their_own(optimizer: str, clicks: MakeConfig) -> None:
    """By the model's configs; `cache.dtype` comes before them."""
    config = change(clicks("everything", "factory", optimizer), model__factory="tests.system.factory:halves")
    direct = run_job(change(config, cache__rows=0))
    cached = run_job(change(config, cache__rows=largest_batch(config)))
    assert cached.digests == direct.digests
    assert {rows.dtype.str for _, rows in direct.rows.values()} == {"<f4", "<u2"}
    alike = run_job(change(config, cache__rows=0, cache__dtype="float16"))
    assert {rows.dtype.str for _, rows in alike.rows.values()} == {"<u2"}
