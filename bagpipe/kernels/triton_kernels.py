"""`TritonKernels`: row kernels in Triton. They read and write rows in their slots, once.

    pool        slots ──one kernel──> pooled vectors
    update      vectors ──sum──> partial sums of long rows, level by level ──┐
                vectors, slots ──sum, optimizer step──> slots                └─optimizer step──> slots
    sum         as update, to a matrix
    initialise  tables, ids ──one kernel──> slots

Sizes come from host arrays and tensor shapes, so no call waits for the device. `triton_sums` and `triton_rows` hold the
kernels, `triton_tiles` their tile sizes. Results have the bits of `TorchKernels` for the same sums in the same chunks,
with two exceptions in libraries: torch can fuse a product and a sum into one rounding (per-id weights, means), and
MKL's square root on a CPU is not correctly rounded.

Under ``TRITON_INTERPRET=1`` kernels run on a CPU, slowly, one launch at a time: all threads share the interpreter.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from bagpipe.errors import JobError
from bagpipe.kernels import triton_rows, triton_sums
from bagpipe.kernels.initialization import TORCH_DTYPE, InitialWeights, step_key
from bagpipe.kernels.interface import Bags, Gradients, RowNames, RowStep, RowView
from bagpipe.kernels.rounding import StochasticRounding
from bagpipe.kernels.row_format import row_type_of
from bagpipe.kernels.row_optimizer import ADAM_BETAS, adam_rate, decay_rows
from bagpipe.kernels.segment_sum import MAX_TERMS
from bagpipe.kernels.torch_kernels import gather, require_gradients, scatter
from bagpipe.kernels.torch_sums import add_in_order
from bagpipe.kernels.triton_tiles import Tile, choose_tile
from bagpipe.types.schema import OPTIMIZER_STATE_WIDTH, RowSchema, base_optimizer

__all__ = ["Launch", "TritonKernels"]

_TRITON_TYPE = {torch.float32: tl.float32, torch.float64: tl.float64}
_ALL_TERMS = 2**31 - 1

#: Serialises launches: the interpreter keeps the current program number in a global variable.
_INTERPRETER = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One kernel launch.

    Attributes:
        kernel: kernel of `triton_sums` or `triton_rows`.
        grid: number of programs.
        arguments: kernel arguments, by name.
        options: compiler options.
    """

    kernel: Any
    grid: tuple[int]
    arguments: Mapping[str, Any]
    options: Mapping[str, Any]

    def __call__(self) -> None:
        """Enqueue the kernel on the current stream of the current device. Compiles it on first use."""
        self.kernel[self.grid](**self.arguments, **self.options)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Ranges:
    """Sums of ranges of terms, one per row; without starts, one vector per row.

    Attributes:
        vectors: ``[num_vectors, dim]``.
        num_rows: k.
        starts, ends: int32 ``[>= k]``, the range of each row.
        sources: int32, vector of each term; None: the vectors are the terms.
        factors: factor of each term, or of each occurrence; None: ones.
        occurrences: int32, occurrence of each term.
        rows: int64 ``[k]``, row numbers; None: rows 0 to k.
        max_terms: rows with more terms are skipped.
    """

    vectors: Tensor
    num_rows: int
    starts: Tensor | None = None
    ends: Tensor | None = None
    sources: Tensor | None = None
    factors: Tensor | None = None
    occurrences: Tensor | None = None
    rows: Tensor | None = None
    max_terms: int = _ALL_TERMS

    def arguments(self) -> dict[str, Any]:
        return {
            "vectors": self.vectors,
            "sources": self.sources,
            "factors": self.factors,
            "occurrences": self.occurrences,
            "starts": self.starts,
            "ends": self.ends,
            "num_rows": self.num_rows,
            "max_terms": self.max_terms,
        }


class TritonKernels:
    """See `bagpipe.kernels.interface.Kernels`.

    Args:
        schema: tables, optimizer, dtypes and seed.
        device: device of the rows; a CPU only under the interpreter.
        launch: replaces the launch of kernels, for tests.
        tile: tile for a dimension and element size.
    """

    reads_slots = True
    max_terms: int | None = MAX_TERMS

    def __init__(
        self,
        schema: RowSchema,
        device: torch.device,
        *,
        launch: Callable[[Launch], None] = Launch.__call__,
        tile: Callable[[int, int], Tile] = choose_tile,
    ) -> None:
        self._schema = schema
        self._device = device
        self._launch = launch
        self._tile = tile
        self._dtype = TORCH_DTYPE[schema.row_type.compute]
        self._type = _TRITON_TYPE[self._dtype]
        self._initial = InitialWeights(schema, device)
        self._rounding_keys = StochasticRounding(schema, device).table_keys if schema.rounding == "stochastic" else None
        self.needs_names = self._rounding_keys is not None
        self._turn = _interpreter_turn if device.type == "cpu" else partial(torch.cuda.device, device)

    def pool(self, rows: RowView, bags: Bags) -> Tensor:
        num_bags = len(bags.indices) if bags.offsets is None else len(bags.offsets) - 1
        out = torch.empty(num_bags, rows.dim, dtype=self._dtype, device=self._device)
        tile = self._tile(rows.dim, self._dtype.itemsize)
        arguments = {
            "out": out,
            "records": rows.records,
            "slot_index": rows.slot_index,
            "indices": bags.indices,
            "offsets": bags.offsets,
            "factors": bags.factors,
            "num_bags": num_bags,
            "MEAN": bags.mean,
            **self._matrix(tile, rows.dim, rows.records),
        }
        self._enqueue(triton_sums.pool_kernel, tile, num_bags, arguments)
        return out

    def sum(self, gradients: Sequence[Gradients]) -> Tensor:
        require_gradients(gradients)
        return add_in_order(map(self._sum, gradients))

    def _sum(self, contribution: Gradients) -> Tensor:
        out = contribution.vectors.new_empty(len(contribution.segment_sum), contribution.vectors.shape[1])
        for ranges in self._ranges(contribution):
            self._sum_ranges(out, ranges)
        return out

    def update(
        self,
        records: Tensor,
        slot_index: Tensor,
        gradients: Sequence[Gradients],
        step: RowStep,
        names: RowNames | None = None,
        optimizer: str | None = None,
    ) -> None:
        contribution = require_gradients(gradients)
        rounds = self.needs_names and row_type_of(records.dtype).is_half
        if rounds and names is None:
            raise JobError("stochastic rounding needs the names of the rows, got none")
        name, decays = base_optimizer(optimizer or self._schema.optimizer)
        dim = contribution.vectors.shape[1]
        if decays:
            width = dim + OPTIMIZER_STATE_WIDTH[optimizer or self._schema.optimizer](dim)
            rows = gather(records, slot_index, width)
            decay_rows(rows, dim, step)
            scatter(records, slot_index, rows)
        if len(gradients) == 1:
            parts = self._ranges(contribution)
        else:
            parts = [_Ranges(vectors=self.sum(gradients), num_rows=len(slot_index))]
        for ranges in parts:
            self._update_ranges(records, slot_index, ranges, step, names if rounds else None, name)

    def initialise(
        self,
        records: Tensor,
        slot_index: Tensor,
        tables: Tensor,
        ids: Tensor,
        dim: int,
        optimizer: str | None = None,
    ) -> None:
        tile = self._tile(dim, self._dtype.itemsize)
        arguments = {
            "slot_index": slot_index,
            "tables": tables,
            "ids": ids,
            "keys": self._initial.keys,
            "scales": self._initial.scales,
            "num_rows": len(slot_index),
            "STATE_WIDTH": OPTIMIZER_STATE_WIDTH[optimizer or self._schema.optimizer](dim),
            "WEIGHT_WIDTH": row_type_of(records.dtype).weight_words(dim),
            "ROWS": tile.rows,
            "BLOCK": tile.block,
            "DIM": dim,
            "TYPE": self._type,
            **self._records(records, dim),
        }
        self._enqueue(triton_rows.initialise_kernel, tile, len(slot_index), arguments)

    # ---- segment sums --------------------------------------------------------------------------------------------

    def _ranges(self, contribution: Gradients) -> list[_Ranges]:
        """The ranges that give the sums of all rows: short rows from their terms, long rows from partial sums.

        Enqueues the partial sums.
        """
        segment_sum = contribution.segment_sum
        factors, occurrences = segment_sum.coefficients, None
        if contribution.weights is not None and segment_sum.occurrences is not None:
            factors, occurrences = contribution.weights, segment_sum.occurrences
        terms = _Ranges(
            vectors=contribution.vectors,
            num_rows=len(segment_sum),
            starts=segment_sum.row_offsets,
            ends=segment_sum.row_offsets[1:],
            sources=segment_sum.sources,
            factors=factors,
            occurrences=occurrences,
        )
        long = segment_sum.long
        if long is None:
            return [terms]
        short = replace(terms, max_terms=long.max_terms)
        ranges = terms
        for level in long.levels:
            partial = contribution.vectors.new_empty(len(level), contribution.vectors.shape[1])
            ranges = replace(ranges, num_rows=len(level), starts=level.starts, ends=level.ends)
            self._sum_ranges(partial, ranges)
            ranges = _Ranges(vectors=partial, num_rows=0)
        last = replace(ranges, num_rows=len(long), starts=long.offsets, ends=long.offsets[1:], rows=long.rows)
        return [short, last]

    def _sum_ranges(self, out: Tensor, ranges: _Ranges) -> None:
        dim = ranges.vectors.shape[1]
        tile = self._tile(dim, self._dtype.itemsize)
        arguments = {
            "out": out,
            "out_rows": ranges.rows,
            **ranges.arguments(),
            **self._matrix(tile, dim, ranges.vectors),
        }
        self._enqueue(triton_sums.sum_kernel, tile, ranges.num_rows, arguments)

    def _update_ranges(
        self,
        records: Tensor,
        slot_index: Tensor,
        ranges: _Ranges,
        step: RowStep,
        names: RowNames | None,
        optimizer: str,
    ) -> None:
        dim = ranges.vectors.shape[1]
        tile = self._tile(dim, self._dtype.itemsize)
        beta1, beta2 = ADAM_BETAS
        arguments = {
            "slot_index": slot_index,
            "row_map": ranges.rows,
            "lr_bits": _bits(_rate(optimizer, step)),
            "eps_bits": _bits(step.eps),
            "first_bits": _bits(step.momentum if optimizer == "momentum" else step.beta),
            "second_bits": _bits(step.l1),
            "third_bits": _bits(step.l2),
            "tables": None if names is None else names.tables,
            "ids": None if names is None else names.ids,
            "rounding_keys": None if names is None else self._rounding_keys,
            "step_bits": step_key(step.step),
            "OPTIMIZER": optimizer,
            "FIRST_RATE": 1 - beta1,
            "SECOND_RATE": 1 - beta2,
            "HALVINGS": tile.block.bit_length() - 1,
            **ranges.arguments(),
            **self._records(records, dim),
            **self._matrix(tile, dim, ranges.vectors),
        }
        self._enqueue(triton_rows.update_kernel, tile, ranges.num_rows, arguments)

    # ---- launching -----------------------------------------------------------------------------------------------

    def _matrix(self, tile: Tile, dim: int, vectors: Tensor) -> dict[str, Any]:
        return {
            "ROWS": tile.rows,
            "BLOCK": tile.block,
            "DIM": dim,
            "STRIDE": vectors.shape[1] if vectors.is_contiguous() else vectors.stride(0),
            "TYPE": self._type,
        }

    def _records(self, records: Tensor, dim: int) -> dict[str, Any]:
        """Arguments for weights and optimizer state: the same memory, the state viewed in the compute dtype."""
        state = records.view(self._dtype)
        return {
            "records": records,
            "state": state,
            "RECORD_STRIDE": records.stride(0),
            "STATE_STRIDE": state.stride(0),
            "STATE_FIRST": row_type_of(records.dtype).weight_words(dim) * records.itemsize // self._dtype.itemsize,
        }

    def _enqueue(self, kernel: Any, tile: Tile, num_rows: int, arguments: Mapping[str, Any]) -> None:
        if not num_rows:
            return
        options = {"num_warps": tile.num_warps, "enable_fp_fusion": False}
        launch = Launch(kernel=kernel, grid=tile.grid(num_rows), arguments=arguments, options=options)
        with self._turn():  # Triton launches on the current device of the thread, not on that of the tensors
            self._launch(launch)


def _interpreter_turn() -> AbstractContextManager[Any]:
    return _INTERPRETER


def _rate(optimizer: str, step: RowStep) -> float:
    """Final factor of an optimizer step, in Python's double arithmetic: the same on every device."""
    return adam_rate(step.lr, step.step) if optimizer == "adam" else step.lr


def _bits(value: float) -> int:
    """The bits of a double as a signed integer."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits
