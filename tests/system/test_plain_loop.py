"""Direct mode on one rank equals `tests.system.reference`: losses, parameters, rows and optimizer state."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from bagpipe.config.sections import Config
from bagpipe.models import torchrec_models
from bagpipe.models.task_models import TASK_MODELS
from tests.effort import some_of
from tests.system.jobs import JobOutcome, change, largest_batch, run_job
from tests.system.plain_jobs import plain_job
from tests.system.reference import Trained, row_state
from tests.system.test_exactness import MODELS

#: Rounding of float32 over 26 steps with rows of order 0.1 and gradients of order 1.
TOLERANCE = {"float64": 1e-12, "float32": 2e-5}
OPTIMIZERS = ["sgd", "adagrad", "rowwise_adagrad", "adam"]


@pytest.fixture(autouse=True)
def _checked_sparse_tensors() -> Iterator[None]:
    """Silences torch's one-time warning about sparse tensor checks that are neither on nor off."""
    with torch.sparse.check_sparse_tensor_invariants(True):  # type: ignore[no-untyped-call]
        yield


def assert_same(end: JobOutcome, plain: Trained, config: Config) -> None:
    tolerance: dict[str, Any] = {"rtol": TOLERANCE[config.run.dtype], "atol": TOLERANCE[config.run.dtype]}
    np.testing.assert_allclose(end.losses, plain.losses, **tolerance)
    parameters = dict(plain.model.named_parameters())
    names = [name for name, _ in end.built.converted.model.named_parameters()]
    for name in names:
        torch.testing.assert_close(end.dense[name], parameters[name].detach(), **tolerance, msg=name)
    state = plain.dense.state_dict()["state"]
    assert end.state.keys() == state.keys()
    for number, values in end.state.items():
        for name, value in values.items():
            torch.testing.assert_close(value, state[number][name], **tolerance)
    assert end.rows.keys() == {table.name for table in plain.tables.tables}
    for number, table in enumerate(plain.tables.tables):
        ids, records = end.rows[table.name]
        np.testing.assert_array_equal(ids, table.ids, "every row that occurs is stored, and no other")
        expected = row_state(plain, config.optim.rows, number).numpy()
        np.testing.assert_allclose(records, expected, **tolerance, err_msg=table.name)


Case = tuple[tuple[str, str], str, str]

#: Model with schema, row optimizer, type.
ALL: list[Case] = list(itertools.product(MODELS, OPTIMIZERS, TOLERANCE))
#: Every model with every optimizer, and either of them with both types.
PAIRS = [case for case in ALL if (MODELS.index(case[0]) + OPTIMIZERS.index(case[1]) + (case[2] == "float32")) % 2]
#: Half of them: every model and every optimizer with both types. `test_every_setting_equals_the_plain_loop` has all.
DEFAULT = [case for case in PAIRS if (MODELS.index(case[0]) - OPTIMIZERS.index(case[1])) % 4 < 2]


def check(clicks: Callable[..., Config], case: Case) -> None:
    (model, schema), optimizer, dtype = case
    config = change(clicks(schema, model, optimizer), cache__rows=0, run__dtype=dtype)
    assert_same(run_job(config), plain_job(config), config)


@pytest.mark.parametrize("case", DEFAULT, ids=lambda case: "-".join([*case[0], *case[1:]]))
def test_equals_the_plain_loop(case: Case, clicks: Callable[..., Config]) -> None:
    check(clicks, case)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_setting_equals_the_plain_loop(clicks: Callable[..., Config]) -> None:
    for case in ALL:
        check(clicks, case)


# Models of several labels: test_several_labels.py.
@pytest.mark.parametrize("model", some_of(sorted({*torchrec_models.MODELS} - {*TASK_MODELS}), {0, 3, 4}))
def test_weights_and_means_in_one_schema_equal_the_plain_loop(model: str, clicks: Callable[..., Config]) -> None:
    config = change(clicks("weighted and mean", model), cache__rows=0, run__dtype="float64")
    direct = run_job(config)
    assert_same(direct, plain_job(config), config)
    cached = run_job(change(config, cache__rows=largest_batch(config), oracle__lookahead=8))
    assert (cached.digests, cached.losses) == (direct.digests, direct.losses)


@pytest.mark.parametrize("dense", ["sgd", "adam"])
def test_equals_the_plain_loop_with_other_dense_optimizers(dense: str, clicks: Callable[..., Config]) -> None:
    config = change(clicks(epochs=2), cache__rows=0, run__dtype="float64", optim__dense=dense)
    assert_same(run_job(config), plain_job(config), config)
