"""Conformance suite of `Kernels`: bits of every operation. Needs only torch, numpy and pytest.

    Case ──numpy──> records, bags, sums, gradients ──> Kernels   ──> same bits as the reference
                                                   └─> reference ─┘

Two exceptions for libraries. Factors have few digits, so that products are exact even if fused into a sum. If a
device's square root is not correctly rounded (torch's on a CPU uses MKL and is not), results that depend on it are
compared within rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bagpipe.cache.upload import Uploader
from bagpipe.kernels.initialization import TORCH_DTYPE, initial_weights, random_words, step_key, table_key
from bagpipe.kernels.interface import Bags, Gradients, Kernels, RowNames, RowStep, RowView
from bagpipe.kernels.rounding import round_stochastic
from bagpipe.kernels.row_format import split_record
from bagpipe.kernels.row_optimizer import ROW_OPTIMIZERS
from bagpipe.kernels.segment_sum import HostSegmentSum
from bagpipe.types.schema import RowSchema, RowTable
from tests.kernels.reference import Array, optimizer_step, row_sums, segment_sum

__all__ = ["DIMS", "DTYPES", "OPTIMIZERS", "Bench", "Case", "Make"]

Make = Callable[[RowSchema, torch.device], Kernels]

OPTIMIZERS = tuple(ROW_OPTIMIZERS)
DTYPES = ("float32", "float64", "float16", "bfloat16")
DIMS = (1, 4, 6, 7, 12, 16, 33, 48, 64, 100, 256)

WORDS = {4: torch.int32, 8: torch.int64, 2: torch.int16}

NUM_TABLES, LR, EPS = 3, 0.05, 1e-7

#: Another dtype that tables beside those of a dtype can have.
OTHER_DTYPE = {"float32": "bfloat16", "bfloat16": "float16", "float16": "float32", "float64": "float64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Parameters of one case.

    Attributes:
        seed: of all numbers.
        optimizer, dtype, rounding, dim: of the rows.
        max_rows: upper bound of unique rows.
        max_length: upper bound of bags and of rows' sums; some case rows have `long` times as many terms.
        max_terms: of a chunk; None: no chunks.
        spare: unused columns of the records.
        named: calls name the optimizer, and tables their dtype, which are not the schema's.
    """

    seed: int
    optimizer: str
    dtype: str
    dim: int
    rounding: str = "nearest"
    max_rows: int = 9
    max_length: int = 4
    max_terms: int | None = None
    long: int = 4
    spare: int = 0
    named: bool = False


class Bench:
    """One implementation in one case.

    Args:
        make: the implementation.
        case: the case.
        device: where it runs.
        exact_roots: its square roots are correctly rounded.
    """

    def __init__(self, make: Make, case: Case, device: torch.device, *, exact_roots: bool = True) -> None:
        self.optimizer = case.optimizer if case.named else None
        tables = tuple(
            RowTable(
                name=f"t{i}",
                dim=case.dim,
                init_bound=0.5 / (i + 1),
                optimizer=self.optimizer,
                dtype=case.dtype if case.named else None,
            )
            for i in range(NUM_TABLES)
        )
        others = OPTIMIZERS[OPTIMIZERS.index(case.optimizer) - 1]
        self.schema = RowSchema(
            tables=tables,
            optimizer=others if case.named else case.optimizer,
            dtype=OTHER_DTYPE[case.dtype] if case.named else case.dtype,
            rounding=case.rounding,
            seed=case.seed,
        )
        self.is_half = self.schema.row_type_of(0).is_half
        self.case, self.device, self.exact_roots = case, device, exact_roots
        self.kernels = make(self.schema, device)
        self.dtype = TORCH_DTYPE[self.schema.row_type.compute]
        self.rng = np.random.default_rng(case.seed)
        self.num_rows = int(self.rng.integers(0, case.max_rows + 1))
        self.num_slots = self.num_rows + 3
        self.slots = self.rng.permutation(self.num_slots)[: self.num_rows].astype(np.int64)
        self.tables = self.rng.integers(0, NUM_TABLES, self.num_rows)
        self.ids = self.rng.integers(-(2**63), 2**63 - 1, self.num_rows)
        align = 16 // TORCH_DTYPE[case.dtype].itemsize
        width = -(-self.schema.row_width(0) // align) * align + case.spare * align
        self.records = torch.zeros(self.num_slots, width, dtype=TORCH_DTYPE[case.dtype])
        random = self.rng.integers(0, 256, self.records.view(torch.uint8).shape, dtype=np.uint8)
        self.records.view(torch.uint8).copy_(torch.from_numpy(random))

    def check(self) -> None:
        """Run all operations in sequence on the same records."""
        self.check_initialise()
        self.check_pool()
        self.check_sum()
        for step in (1, 2):
            self.check_update(step, num_lookups=step)
        if self.case.optimizer == "sgd" and self.is_half:
            self.check_rounding()

    def check_initialise(self) -> None:
        there = self._there(self.records)
        index = self._there(torch.from_numpy(self.slots))
        tables, ids = (self._there(torch.from_numpy(array)) for array in (self.tables, self.ids))
        self.kernels.initialise(there, index, tables, ids, self.case.dim, self.optimizer)
        words = self.schema.row_width(0)
        self.records[self.slots, :words] = 0
        for table in range(NUM_TABLES):
            rows = np.flatnonzero(self.tables == table)
            values = initial_weights(
                self.schema.tables[table], self.ids[rows], seed=self.case.seed, dtype=self.schema.row_type.compute
            )
            self.records[self.slots[rows], : self.case.dim] = values.to(self.records.dtype)
        self.same_bits(there, self.records)

    def check_pool(self) -> None:
        if not self.num_rows:
            return
        self.records[self.slots, : self.case.dim] = self._short_numbers(self.num_rows, self.case.dim).to(
            self.records.dtype
        )
        weights = self.records[self.slots, : self.case.dim].to(self.dtype).numpy()
        slots = self._there(torch.from_numpy(self.slots))
        everywhere = RowView(records=self._there(self.records), slot_index=slots, dim=self.case.dim)
        gathered = RowView(records=everywhere.gathered().contiguous(), slot_index=None, dim=self.case.dim)
        lengths = self._lengths(5)
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        indices = self.rng.integers(0, self.num_rows, starts[-1]).astype(np.int32)
        factors = self._short_numbers(starts[-1], 1)[:, 0]
        for rows in (everywhere, gathered):
            alone = self._pool(rows, indices, None, None)
            self.same_bits(alone, torch.from_numpy(weights[indices]))
            for factor in (None, factors):
                for mean in (False, True) if factor is None else (False,):
                    got = self._pool(rows, indices, starts, factor, mean=mean)
                    expected = np.array(
                        [
                            segment_sum(weights, indices, None if factor is None else factor.numpy(), start, end)
                            for start, end in pairwise(starts.tolist())
                        ]
                    )
                    if mean:
                        expected = expected / np.maximum(lengths, 1).astype(expected.dtype)[:, None]
                    self.same_bits(got, torch.from_numpy(expected))

    def _pool(
        self, rows: RowView, indices: Array, starts: Array | None, factors: Tensor | None, *, mean: bool = False
    ) -> Tensor:
        bags = Bags(
            indices=self._there(torch.from_numpy(indices)),
            offsets=None if starts is None else self._there(torch.from_numpy(starts)),
            factors=None if factors is None else self._there(factors),
            mean=mean,
        )
        return self.kernels.pool(rows, bags)

    def check_sum(self) -> None:
        for kind in ("plain", "coefficients", "weights"):
            terms, expected = self._terms(1 if kind == "plain" else 2, kind)
            self.same_bits(self.kernels.sum(terms), torch.from_numpy(expected))

    def check_update(self, step: int, num_lookups: int) -> None:
        terms, gradient = self._terms(num_lookups, "plain")
        there = self._there(self.records)
        slots = self._there(torch.from_numpy(self.slots))
        numbers = RowStep(lr=LR, eps=EPS, step=step, momentum=0.9, beta=0.5, l1=0.25, l2=0.125)
        self.kernels.update(there, slots, terms, numbers, self._names(), self.optimizer)
        rows = self.records[self.slots, : self.schema.row_width(0)].contiguous()
        weights, state = split_record(rows, self.schema, self.case.dim, self.optimizer)
        updated, new_state = optimizer_step(
            self.case.optimizer, weights.to(self.dtype).numpy(), state.numpy(), gradient, numbers
        )
        weights.copy_(self._rounded(torch.from_numpy(updated), step))
        state.copy_(torch.from_numpy(new_state))
        self.records[self.slots, : rows.shape[1]] = rows
        if self.exact_roots or self.case.optimizer in ("sgd", "momentum"):
            self.same_bits(there, self.records)
        else:
            self._same_values(there)
            self.records = there.cpu()

    def _names(self) -> RowNames | None:
        if not self.kernels.needs_names:
            return None
        tables = torch.from_numpy(self.tables).to(torch.int32)
        return RowNames(tables=self._there(tables), ids=self._there(torch.from_numpy(self.ids)))

    def check_rounding(self) -> None:
        """Round weights of all magnitudes to halves: a step of SGD from zero with a rate of 1."""
        shape = self.num_rows, self.case.dim
        values = np.ldexp(self.rng.standard_normal(shape), self.rng.integers(-34, 18, shape)).astype(np.float32)
        few = np.array([np.inf, -np.inf, 65519.9, -(2.0**-14), 2.0**-24, -(2.0**-25), 1e-40, -3e-45], np.float32)
        values.reshape(-1)[: len(few)] = few[: values.size]
        self.records[self.slots, : self.case.dim] = 0
        there = self._there(self.records)
        starts, sources = (np.arange(count, dtype=np.int32) for count in (self.num_rows + 1, self.num_rows))
        segment_sum = Uploader(self.device, self.dtype).segment_sum(HostSegmentSum(row_starts=starts, sources=sources))
        self.kernels.update(
            there,
            self._there(torch.from_numpy(self.slots)),
            [Gradients(vectors=self._there(torch.from_numpy(-values)), segment_sum=segment_sum)],
            RowStep(lr=1.0, eps=EPS, step=3),
            self._names(),
            self.optimizer,
        )
        rounded = self._rounded(torch.from_numpy(values), 3).to(self.records.dtype)
        self.records[self.slots, : self.case.dim] = rounded
        self.same_bits(there, self.records)

    def _rounded(self, weights: Tensor, step: int) -> Tensor:
        if self.case.rounding == "nearest" or not self.is_half:
            return weights.to(self.records.dtype)
        keys = [table_key(self.case.seed, table.name, purpose="rounding") for table in self.schema.tables]
        of_rows = torch.tensor(keys)[torch.from_numpy(self.tables)] + step_key(step)
        words = random_words(torch.from_numpy(self.ids), of_rows, self.case.dim)
        return round_stochastic(weights, words, self.records.dtype)

    def _same_values(self, there: Tensor) -> None:
        """Assert equality within rounding; unused columns must have equal bits."""
        words, dim = self.schema.row_width(0), self.case.dim
        got, expected = there.cpu(), self.records
        tolerance = 4 * max(torch.finfo(self.records.dtype).eps, torch.finfo(self.dtype).eps)
        for mine, other in zip(
            split_record(got[self.slots, :words].contiguous(), self.schema, dim, self.optimizer),
            split_record(expected[self.slots, :words].contiguous(), self.schema, dim, self.optimizer),
            strict=True,
        ):
            torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
        got, expected = got.clone(), expected.clone()
        got[self.slots, :words] = expected[self.slots, :words] = 0
        self.same_bits(got, expected)

    def _terms(self, num_lookups: int, kind: str) -> tuple[list[Gradients], Array]:
        """Lookups of the rows, and the sum of their gradients."""
        lengths = self._lengths(self.num_rows)
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        num_terms, num_vectors = int(starts[-1]), 6
        host = HostSegmentSum(
            row_starts=starts,
            sources=self.rng.integers(0, num_vectors, num_terms).astype(np.int32),
            coefficients=self._short_numbers(num_terms, 1)[:, 0].double().numpy() if kind == "coefficients" else None,
            occurrences=self.rng.permutation(num_terms).astype(np.int32) if kind == "weights" else None,
        )
        segment_sum = Uploader(self.device, self.dtype, max_terms=self.case.max_terms).segment_sum(host)
        terms, total = [], None
        for _ in range(num_lookups):
            vectors = self._numbers(num_vectors) if kind == "plain" else self._short_numbers(num_vectors, self.case.dim)
            weights = self._short_numbers(num_terms, 1)[:, 0] if kind == "weights" else None
            factors: Any = None if host.coefficients is None else host.coefficients.astype(vectors.numpy().dtype)
            if weights is not None:
                factors = weights.numpy()[host.occurrences]
            summed = row_sums(vectors.numpy(), host, factors, self.case.max_terms)
            total = summed if total is None else total + summed
            there = None if weights is None else self._there(weights)
            terms.append(Gradients(vectors=self._there(vectors), segment_sum=segment_sum, weights=there))
        assert total is not None
        return terms, total

    def _lengths(self, count: int) -> Array:
        lengths = self.rng.integers(0, self.case.max_length + 1, count)
        lengths[self.rng.random(count) < 0.2] *= self.case.long
        return lengths

    def _numbers(self, num_rows: int) -> Tensor:
        return torch.from_numpy(self.rng.standard_normal((num_rows, self.case.dim))).to(self.dtype)

    def _short_numbers(self, num_rows: int, dim: int) -> Tensor:
        """Numbers of 8 bits and many magnitudes: their products are exact in every compute dtype."""
        digits = self.rng.integers(-255, 256, (num_rows, dim))
        return torch.from_numpy(np.ldexp(digits.astype(np.float64), self.rng.integers(-10, 1, (num_rows, dim)))).to(
            self.dtype
        )

    def same_bits(self, got: Tensor, expected: Tensor) -> None:
        """Assert equal results."""
        same_bits(got, expected)

    def _there(self, tensor: Tensor) -> Tensor:
        """A copy on the device."""
        return tensor.clone().to(self.device)


def same_bits(got: Tensor, expected: Tensor) -> None:
    """Equal bits, NaN and signs of zeros included."""
    got, expected = got.cpu(), expected.cpu()
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    if not np.array_equal(_bytes(got), _bytes(expected)):
        wrong = (got != expected).nonzero()[:5].tolist()
        raise AssertionError(f"differ at {wrong}: {got - expected}")


def _bytes(tensor: Tensor) -> Array:
    return np.frombuffer(tensor.flatten().view(WORDS[tensor.itemsize]).numpy().tobytes(), np.uint8)
