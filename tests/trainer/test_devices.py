"""Device checks before a job: the device exists, and the cache fits."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from bagpipe.cache.slots import Slab
from bagpipe.errors import InputError
from bagpipe.types.schema import RowSchema, RowTable
from trainer.devices import (
    BatchSize,
    MemoryNeed,
    activation_bytes,
    check_device,
    check_memory,
    free_bytes,
    memory_need,
)

SCHEMA = RowSchema(
    tables=tuple(RowTable(name=f"t{dim}", dim=dim, rows=None, init_bound=0.1) for dim in (4, 48)), optimizer="adagrad"
)
BATCH = BatchSize(num_ids=425_984, read_ahead=6, dense_bytes=1_000_000, activation_bytes=800_000_000)


@pytest.mark.parametrize(
    ("device", "count", "words"),
    [
        ("cuda", 0, "run.device is cuda, but this machine has no usable CUDA device"),
        ("cuda:1", 0, "run.device is cuda:1, but this machine has no usable CUDA device"),
        ("cuda:1", 1, "run.device is cuda:1, but this machine has only cuda:0"),
        ("cuda:9", 4, "run.device is cuda:9, but this machine has only cuda:0 to cuda:3"),
    ],
)
def test_a_device_that_is_not_there_is_one_line(device: str, count: int, words: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(words)}$"):
        check_device(device, lambda: count)


@pytest.mark.parametrize(("device", "count"), [("cpu", 0), ("cuda", 1), ("cuda:0", 1), ("cuda:3", 4)])
def test_devices_that_are_there(device: str, count: int) -> None:
    check_device(device, lambda: count)


def test_a_cpu_device_does_not_query_cuda() -> None:
    check_device("cpu", lambda: pytest.fail("asked"))
    assert free_bytes("cpu") is None


@pytest.mark.parametrize("num_rows", [0, 1_000, 40_000_000])
def test_the_rows_are_those_of_the_slab(num_rows: int) -> None:
    need = memory_need(SCHEMA, num_rows, BATCH)
    slab = Slab(1, SCHEMA.row_bytes(1), torch.device("cpu"))
    assert need.row_bytes == slab.records(torch.float32).nbytes
    assert need.is_direct is (num_rows == 0)
    assert need.num_rows >= BATCH.num_ids if need.is_direct else need.num_rows == num_rows
    assert need.num_bytes > need.num_rows * need.row_bytes


def test_a_cache_that_does_not_fit_is_refused_with_the_numbers() -> None:
    need = memory_need(SCHEMA, 40_000_000, BATCH)
    with pytest.raises(InputError) as caught:
        check_memory(need, 10_000_000_000, "cuda:0")
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith("with cache.rows = 40000000 the job needs ")
    for number in (need.num_bytes, need.other_bytes, 46_666_666 * 384 + need.other_bytes):
        assert f"{number} bytes" in line
    assert "10000000000 bytes are free" in line
    found = re.search(r"lower cache.rows to at most (\d+)$", line)
    assert found is not None
    fitting = int(found[1])
    check_memory(dataclasses.replace(need, num_rows=fitting), 10_000_000_000, "cuda:0")
    with pytest.raises(InputError):
        check_memory(dataclasses.replace(need, num_rows=fitting + 1), 10_000_000_000, "cuda:0")


@pytest.mark.parametrize("num_rows", [0, 1_000])
def test_where_no_cache_would_fit_the_batch_is_too_large(num_rows: int) -> None:
    with pytest.raises(InputError, match=r"with cache.rows = \d+ the job needs .*: lower data.batch_size$"):
        check_memory(memory_need(SCHEMA, num_rows, BATCH), 1 << 28, "cuda")


def test_activations_are_not_underestimated() -> None:
    """Compared with the tensors that autograd keeps of a forward, plus one gradient of the widest layer."""
    layers = [
        torch.nn.Linear(13, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 32),
        torch.nn.ReLU(),
        torch.nn.Linear(32, 1),
    ]
    model = torch.nn.Sequential(*layers)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and storage.data_ptr() != given.untyped_storage().data_ptr():
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    given = torch.randn(100, 13)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(given).sum()
    gradient = 100 * 64 * 4
    assert sum(kept.values()) + gradient < activation_bytes(model.parameters(), 100) < 4 * sum(kept.values())


def test_a_cache_that_fits_or_has_unknown_size_is_accepted() -> None:
    need = MemoryNeed(num_rows=10, row_bytes=16, other_bytes=40, is_direct=False)
    check_memory(need, 216, "cuda")
    check_memory(need, None, "cpu")
