"""Kernel tests under Triton's interpreter. `test_triton_kernels.py` runs them in a separate process, because Triton
reads the environment variable only on import.

    TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreted.py
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from bagpipe.kernels.select import select_kernels
from bagpipe.kernels.triton_kernels import TritonKernels
from bagpipe.kernels.triton_tiles import Tile, choose_tile
from bagpipe.optim import SGD, Frozen, Momentum, RowWiseAdagrad
from bagpipe.testing.plain_job import PlainJob, PlainSettings
from bagpipe.types.batch import Batch
from bagpipe.types.schema import DataSchema, Feature, RowSchema, Table
from tests.kernels.conformance import Bench, Case

CPU = torch.device("cpu")

SIZE = {"max_rows": 6, "max_length": 3}

#: Every optimizer, every dtype's arithmetic; widths that are powers of two, multiples of four, and neither.
CASES = (
    Case(seed=1, optimizer="sgd", dtype="float32", dim=4, max_terms=2, spare=1, **SIZE),
    Case(seed=2, optimizer="adagrad", dtype="float32", dim=48, max_terms=3, **SIZE),
    Case(seed=3, optimizer="rowwise_adagrad", dtype="float32", dim=12, max_terms=2, **SIZE),
    Case(seed=6, optimizer="adam", dtype="float64", dim=7, named=True, **SIZE),
    Case(seed=4, optimizer="momentum", dtype="float32", dim=6, max_terms=2, **SIZE),
    Case(seed=5, optimizer="ftrl", dtype="float64", dim=6, max_terms=2, named=True, **SIZE),
    Case(seed=7, optimizer="adagrad", dtype="bfloat16", rounding="stochastic", dim=9, max_terms=2, **SIZE),
    Case(seed=8, optimizer="rowwise_adagrad", dtype="float16", rounding="stochastic", dim=6, named=True, **SIZE),
    Case(seed=9, optimizer="sgd", dtype="bfloat16", dim=8, max_terms=3, **SIZE),
    Case(seed=10, optimizer="sgd", dtype="float16", rounding="stochastic", dim=9, **SIZE),
)


def small_tile(dim: int, item_bytes: int) -> Tile:
    """Tiles of few rows, so that the rows of a case need several programs."""
    return replace(choose_tile(dim, item_bytes), rows=4)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")  # numpy's, of infinite halves
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.optimizer}-{case.dtype}-{case.dim}")
def test_conformance(case: Case) -> None:
    Bench(partial(TritonKernels, tile=small_tile), case, CPU).check()


def test_cpu_kernels_by_name() -> None:
    schema = RowSchema(tables=(), optimizer="sgd")
    assert isinstance(select_kernels(schema, CPU, "triton"), TritonKernels)
    assert not isinstance(select_kernels(schema, CPU), TritonKernels)


# ---- whole jobs ------------------------------------------------------------------------------------------------------

SCHEMA = DataSchema(
    label="label",
    dense=("I0", "I1"),
    features=(Feature(name="a", table="a"), Feature(name="b", table="b"), Feature(name="c", table="b")),
    tables=(Table(name="a"), Table(name="b", pooling="mean")),
)


def batches(*, num_examples: int, hot: bool) -> list[Batch]:
    """Three batches of bags of up to three ids; `hot`: one id of the first table is in every example."""
    rng = np.random.default_rng(3)
    made = []
    for index in range(3):
        lengths = rng.integers(0, 4, (3, num_examples), dtype=np.int32)
        if hot:
            lengths[0] = 1
        values = rng.integers(0, 20, int(lengths.sum()))
        if hot:
            values[:num_examples] = 5
        dense = rng.standard_normal((num_examples, 2)).astype(np.float32)
        labels = rng.integers(0, 2, num_examples).astype(np.float32)
        made.append(Batch(index=index, dense=dense, values=values, lengths=lengths, labels=labels))
    return made


def train(kernels: str, *, hot: bool, num_examples: int = 9, **settings: object) -> tuple[str, str]:
    given = {"rows": "sgd", "cache_rows": 60, "lookahead": 2, "dim": 4, **settings}
    with PlainJob(PlainSettings(schema=SCHEMA, kernels=kernels, **given)) as job:  # type: ignore[arg-type]
        job.train(batches(num_examples=num_examples, hot=hot))
        return job.digests()


def test_a_job_ends_with_the_bits_of_torch_s_kernels() -> None:
    """No row is long, and SGD takes no square root, so the bits are equal."""
    assert train("triton", hot=False) == train("torch", hot=False)


def test_tables_of_several_optimizers_end_with_the_bits_of_direct_ones() -> None:
    rows = {"a": RowWiseAdagrad(0.1), "b": Frozen()}
    assert train("triton", hot=False, optimizers=rows) == train("triton", hot=False, optimizers=rows, cache_rows=0)
    rates = {"a": Momentum(0.1, weight_decay=0.5), "b": SGD(lambda step: 0.1 / (1 + step))}  # no square root
    assert train("triton", hot=False, optimizers=rates) == train("torch", hot=False, optimizers=rates)


def test_a_cached_job_ends_with_the_bits_of_a_direct_one() -> None:
    """One row has more terms than a chunk."""
    settings = {"hot": True, "num_examples": 40, "rows": "adagrad"}
    assert train("triton", cache_rows=0, **settings) == train("triton", **settings)  # type: ignore[arg-type]
