"""One batch over one table in the form each contestant of part `kernels` needs, and the bytes it must move.

    ids, drawn ──oracle──> unique rows, CSR ──prepare_batch──> tensors     (ours)
         └──> ids, offsets                                                         (torch's, FBGEMM's)

Slots are drawn at random: in a cache in steady state neighbouring rows lie anywhere.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bagpipe.cache.batch_context import GroupContext, prepare_batch
from bagpipe.cache.lookup_layout import LookupLayout
from bagpipe.cache.upload import Uploader
from bagpipe.embedding.plain_bags import CachedBags
from bagpipe.kernels.interface import Kernels
from bagpipe.oracle.plan import ConsumerPlan
from bagpipe.testing.plain_job import plan_rank_batches
from bagpipe.types.batch import Batch
from bagpipe.types.schema import DataSchema, Feature, RowSchema, Table
from data.zipf import ZipfLaw

__all__ = ["LAWS", "Bytes", "RowsBatch", "draw_ids", "make_batch"]

LAWS = ("uniform", "zipf")
_INDEX_BYTES, _SLOT_BYTES = 4, 8


def draw_ids(law: str, *, rows: int, count: int, exponent: float) -> NDArray[np.int64]:
    """int64 ``[count]`` ids in ``[0, rows)``; popular ones lie anywhere in the table."""
    generator = np.random.default_rng(11)
    if law == "uniform":
        return generator.integers(0, rows, count)
    ranks = ZipfLaw(vocabulary=rows, exponent=exponent).ranks(generator.random(count))
    return generator.permutation(rows)[ranks]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """Minimum bytes between the device and its memory; every row, vector and index counts once.

    Attributes:
        forward: unique rows' weights read, vectors written, one 4-byte index per id, bag offsets, 8-byte slots.
        update: vectors' gradients read, unique rows' records read and written, the same indices and slots.
    """

    forward: int
    update: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowsBatch:
    """A batch in the forms of all contestants.

    Attributes:
        schema: of the rows.
        num_unique, num_bags: U and G.
        ids: int64 ``[n]`` on the device, bag after bag.
        offsets: int64 ``[G + 1]`` on the device.
        layout, batch, consumer: host data from which our kernels' tensors are made.
        gradient: ``[G, dim]`` on the device.
        bytes: counted.
    """

    schema: RowSchema
    num_unique: int
    num_bags: int
    ids: Tensor
    offsets: Tensor
    layout: LookupLayout
    batch: Batch
    consumer: ConsumerPlan
    gradient: Tensor
    bytes: Bytes

    def context(self, kernels: Kernels) -> GroupContext:
        """The batch's tensors for these kernels."""
        upload = Uploader(self.ids.device, torch.float32, max_terms=kernels.max_terms)
        return prepare_batch(self.layout, self.batch, self.consumer, upload=upload).groups[0]


def make_batch(
    ids: NDArray[np.int64], *, bag: int, rows: int, dim: int, optimizer: str, device: torch.device
) -> RowsBatch:
    """The batch of these ids.

    Args:
        ids: int64 ``[n]``, a multiple of `bag`.
        bag: ids in a bag.
        rows: of the table, and slots of the cache.
        dim, optimizer: of a row.
        device: of the tensors.
    """
    num_bags = len(ids) // bag
    ids = ids[: num_bags * bag]
    data = DataSchema(
        label="label", dense=(), features=(Feature(name="f", table="t"),), tables=(Table(name="t", rows=rows, dim=dim),)
    )
    bags = CachedBags(data, dim)
    schema = RowSchema(tables=bags.row_tables, optimizer=optimizer)
    batch = Batch(
        index=0,
        dense=np.zeros((num_bags, 0), np.float32),
        values=ids,
        lengths=np.full((1, num_bags), bag, np.int32),
        labels=np.zeros(num_bags, np.float32),
    )
    (step,) = plan_rank_batches([batch], bags.spec(num_slots=rows, lookahead=1))
    num_unique = len(step.consumer.unique)
    slots = np.random.default_rng(12).permutation(rows)[:num_unique].astype(np.int32)
    consumer = dataclasses.replace(step.consumer, slots=slots)
    item, width = 4, schema.row_width(0)
    indices = len(ids) * _INDEX_BYTES + num_unique * _SLOT_BYTES
    return RowsBatch(
        schema=schema,
        num_unique=num_unique,
        num_bags=num_bags,
        ids=torch.from_numpy(ids).to(device),
        offsets=torch.arange(0, len(ids) + 1, bag, device=device),
        layout=bags.layout,
        batch=batch,
        consumer=consumer,
        gradient=torch.rand(num_bags, dim, device=device),
        bytes=Bytes(
            forward=item * dim * (num_unique + num_bags) + indices + (num_bags * _INDEX_BYTES if bag > 1 else 0),
            update=item * (dim * num_bags + 2 * width * num_unique) + indices + num_unique * _INDEX_BYTES,
        ),
    )
