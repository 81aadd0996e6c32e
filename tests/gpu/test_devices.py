"""Device queries before a job, on the real device."""

from __future__ import annotations

import pytest
import torch

from bagpipe.errors import InputError
from bagpipe.types.schema import RowSchema, RowTable
from trainer.devices import BatchSize, check_device, check_memory, cuda_devices, free_bytes, memory_need

pytestmark = pytest.mark.gpu

SCHEMA = RowSchema(tables=(RowTable(name="t", dim=64, rows=None, init_bound=0.1),), optimizer="adagrad")
BATCH = BatchSize(num_ids=1_000, read_ahead=6, dense_bytes=0, activation_bytes=0)


def test_device_existence(cuda: str) -> None:
    check_device(cuda, cuda_devices)
    with pytest.raises(InputError, match="this machine has only cuda:0"):
        check_device(f"cuda:{torch.cuda.device_count()}", cuda_devices)


def test_a_cache_as_large_as_the_device_is_refused(cuda: str) -> None:
    free = free_bytes(cuda)
    assert free is not None
    assert 0 < free <= torch.cuda.mem_get_info(cuda)[1]
    check_memory(memory_need(SCHEMA, 1_000, BATCH), free, cuda)
    with pytest.raises(InputError, match=r"lower cache.rows to at most \d+"):
        check_memory(memory_need(SCHEMA, free // 512 + 1, BATCH), free, cuda)


def test_memory_that_torch_keeps_is_free(cuda: str) -> None:
    before = free_bytes(cuda)
    block = torch.empty(1 << 28, dtype=torch.uint8, device=cuda)
    during = free_bytes(cuda)
    del block
    after = free_bytes(cuda)
    assert before is not None
    assert during is not None
    assert after is not None
    assert during <= before - (1 << 28) + (4 << 20)
    assert after >= before - (4 << 20)
