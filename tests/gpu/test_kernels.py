"""Kernels on a GPU conform to the reference and are reproducible. Requirements of this folder: conftest.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch

from bagpipe.cache.upload import Uploader
from bagpipe.kernels.interface import Bags, Gradients, Kernels, RowStep, RowView
from bagpipe.kernels.segment_sum import HostSegmentSum
from bagpipe.kernels.select import TritonSupport, missing_support, select_kernels
from bagpipe.kernels.torch_kernels import TorchKernels
from bagpipe.types.schema import ROUNDINGS, RowSchema, RowTable
from tests.kernels.conformance import DIMS, DTYPES, OPTIMIZERS, Bench, Case

pytestmark = pytest.mark.gpu

CHOICES = ("torch", "triton")


def opener(choice: str, device: str) -> Callable[[RowSchema, torch.device], Kernels]:
    problem = missing_support(TritonSupport.of(torch.device(device)))
    if choice == "triton" and problem is not None:
        pytest.skip(problem)
    return partial(select_kernels, choice=choice)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("choice", CHOICES)
def test_conformance(device: str, choice: str, optimizer: str, dtype: str) -> None:
    """Bit for bit the results of numpy on the host, term by term: sums, steps, initial values, roundings."""
    make = opener(choice, device)
    rng = np.random.default_rng(17)
    # Triton compiles about twenty kernels per width: each optimizer, and each dtype, runs with each width once.
    turn = OPTIMIZERS.index(optimizer) + DTYPES.index(dtype)
    roundings = ROUNDINGS if dtype.endswith("16") else ("nearest",)
    for dim, rounding in product(DIMS[turn % len(DTYPES) :: len(DTYPES)], roundings):
        case = Case(
            seed=int(rng.integers(2**32)),
            optimizer=optimizer,
            dtype=dtype,
            dim=dim,
            rounding=rounding,
            max_rows=200,
            max_terms=[None, 2, 3][int(rng.integers(3))],
            spare=int(rng.integers(2)),
        )
        Bench(make, case, torch.device(device), exact_roots=device != "cpu").check()


def zipf_sums(num_rows: int, num_vectors: int) -> HostSegmentSum:
    """426,000 terms of skewed rows, as in a batch: one in ten terms belongs to the first row."""
    rng = np.random.default_rng(3)
    rows = np.minimum(rng.zipf(1.2, 26 * 16_384) - 1, num_rows - 1)
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=num_rows))]).astype(np.int32)
    return HostSegmentSum(row_starts=starts, sources=rng.integers(0, num_vectors, starts[-1]).astype(np.int32))


@pytest.mark.parametrize("choice", CHOICES)
def test_a_large_skewed_batch_ends_the_same_every_time(cuda: str, choice: str) -> None:
    """Full size, so that programs run concurrently in any order. Compared with torch's kernels on the host.

    Both sum in the same chunks, so only the host's square roots can differ.
    """
    dim, num_rows = 48, 60_000
    schema = RowSchema(tables=(RowTable(name="t", dim=dim),), optimizer="adagrad", seed=1)
    kernels = opener(choice, cuda)(schema, torch.device(cuda))
    host = zipf_sums(num_rows, 26 * 16_384)
    generator = torch.Generator().manual_seed(4)
    vectors = torch.randn(26 * 16_384, dim, generator=generator)
    slots = torch.randperm(num_rows, generator=generator)
    ids, tables = torch.arange(num_rows) * 7, torch.zeros(num_rows, dtype=torch.int64)
    step = RowStep(lr=0.05, eps=1e-8, step=1)

    def updated(mine: Kernels, device: str) -> torch.Tensor:
        records = torch.zeros(num_rows, 96, device=device)
        index = slots.to(device)
        mine.initialise(records, index, tables.to(device), ids.to(device), dim)
        segment_sum = Uploader(torch.device(device), torch.float32, max_terms=kernels.max_terms).segment_sum(host)
        mine.update(records, index, [Gradients(vectors=vectors.to(device), segment_sum=segment_sum)], step)
        return records.cpu()

    first = updated(kernels, cuda)
    assert all(torch.equal(updated(kernels, cuda), first) for _ in range(3))
    on_host = TorchKernels(schema, torch.device("cpu"))
    expected = updated(on_host, "cpu")
    assert torch.equal(first[:, dim:], expected[:, dim:]), "the sums of squares take no root"
    torch.testing.assert_close(first, expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("choice", CHOICES)
def test_slots_beyond_31_bits(cuda: str, choice: str) -> None:
    """Slot times width exceeds 2**31: the last slot of 9 GB of records is read and written."""
    width, dim = 256, 256
    num_slots = 2**31 // width + 1000
    if torch.cuda.mem_get_info()[0] < num_slots * width * 4 + 2**30:
        pytest.skip("wants 9.6 GB of free device memory")
    schema = RowSchema(tables=(RowTable(name="t", dim=dim),), optimizer="sgd", seed=1)
    kernels = opener(choice, cuda)(schema, torch.device(cuda))
    records = torch.empty(num_slots, width, device=cuda)
    slots = torch.tensor([num_slots - 1, 0], device=cuda)
    names = torch.tensor([0, 0], device=cuda), torch.tensor([5, 6], device=cuda)
    kernels.initialise(records, slots, *names, dim)
    bags = Bags(indices=torch.tensor([1, 0], dtype=torch.int32, device=cuda), offsets=None, factors=None, mean=False)
    pooled = kernels.pool(RowView(records=records, slot_index=slots, dim=dim), bags)
    assert torch.equal(pooled, records[[0, num_slots - 1]])
    assert not torch.equal(pooled[0], pooled[1])
    host = HostSegmentSum(row_starts=np.array([0, 1, 2], np.int32), sources=np.array([0, 1], np.int32))
    before = records[[num_slots - 1, 0]].clone()
    vectors = torch.ones(2, dim, device=cuda)
    terms = [Gradients(vectors=vectors, segment_sum=Uploader(torch.device(cuda), torch.float32).segment_sum(host))]
    kernels.update(records, slots, terms, RowStep(lr=0.5, eps=0.0, step=1))
    assert torch.equal(records[[num_slots - 1, 0]], before - 0.5)


def test_nothing_waits_for_the_device(cuda: str) -> None:
    """Torch's kernels do not wait either, even for chunked sums: their sizes are known on the host."""
    schema = RowSchema(tables=(RowTable(name="t", dim=16),), optimizer="adam", seed=1)
    host = zipf_sums(1000, 500)
    for choice in CHOICES:
        kernels = opener(choice, cuda)(schema, torch.device(cuda))
        segment_sum = Uploader(torch.device(cuda), torch.float32, max_terms=kernels.max_terms).segment_sum(host)
        terms = [Gradients(vectors=torch.randn(500, 16, device=cuda), segment_sum=segment_sum)]
        records, slots = torch.zeros(1000, 48, device=cuda), torch.arange(1000, device=cuda)
        step = RowStep(lr=0.1, eps=1e-8, step=1)
        kernels.update(records, slots, terms, step)  # compiles
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            kernels.update(records, slots, terms, step)
            kernels.sum(terms * 2)
        finally:
            torch.cuda.set_sync_debug_mode("default")
