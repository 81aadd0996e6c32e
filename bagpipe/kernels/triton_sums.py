"""Triton kernels for segment sums: pooled vectors and row gradients. `bagpipe.kernels.triton_kernels` launches them.

    program p ──> rows p * ROWS … + ROWS, all columns (BLOCK, masked to DIM)
                  add their terms in lockstep, four loads at a time, each row in plan order

Rules of this file and of `triton_rows`, which make results depend only on the plan and the numbers:

* One program sums a row, from its first to its last term. No atomics, no order left to the hardware.
* Every operation rounds once and correctly, as in `bagpipe.kernels.row_optimizer`: divisions and roots are the ``_rn``
  variants, and `enable_fp_fusion=False` prevents fused multiply-adds.
* Scalars are passed as the bits of a double (`lr_bits`): Triton converts Python floats to float32.
* Addresses have 64 bits: slots times width can exceed 2**31.

Matrices are passed as pointer, stride and first column, in elements. Strides and columns are constants, so that the
compiler can use 16-byte accesses. A None pointer removes its lines from the compiled function.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["divided", "pool_kernel", "segment_sums", "sum_kernel"]


@triton.jit
def divided(x, y):
    """x / y, correctly rounded. Plain float64 division is."""
    if x.dtype == tl.float32:
        return tl.div_rn(x, y)
    else:
        return x / y


@triton.jit
def _term(
    vectors,
    slot_index,
    sources,
    factors,
    occurrences,
    position,
    ends,
    columns,
    DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    TYPE: tl.constexpr,
):
    """[ROWS, BLOCK]: the term of each row at `position`; zero after its last term."""
    here = position < ends
    vector = position
    if sources is not None:
        vector = tl.load(sources + position, mask=here, other=0)
    if slot_index is not None:
        vector = tl.load(slot_index + vector, mask=here, other=0)
    at = vectors + vector.to(tl.int64)[:, None] * STRIDE + columns[None, :]
    value = tl.load(at, mask=here[:, None] & (columns < DIM)[None, :], other=0.0).to(TYPE)
    if factors is not None:
        if occurrences is not None:
            position = tl.load(occurrences + position, mask=here, other=0)
        value = value * tl.load(factors + position, mask=here, other=0.0)[:, None]
    return value


@triton.jit
def segment_sums(
    vectors,
    slot_index,
    sources,
    factors,
    occurrences,
    starts,
    ends,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    TYPE: tl.constexpr,
):
    """[ROWS, BLOCK]: the sum of each row's terms; columns from DIM on are zero."""
    columns = tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), dtype=TYPE)
    longest = tl.max(ends - starts, 0)
    for step in range(0, longest, 4):
        at = starts + step
        # Four loads are issued before the first addition, so their latencies overlap.
        a = _term(vectors, slot_index, sources, factors, occurrences, at, ends, columns, DIM, STRIDE, TYPE)
        b = _term(vectors, slot_index, sources, factors, occurrences, at + 1, ends, columns, DIM, STRIDE, TYPE)
        c = _term(vectors, slot_index, sources, factors, occurrences, at + 2, ends, columns, DIM, STRIDE, TYPE)
        d = _term(vectors, slot_index, sources, factors, occurrences, at + 3, ends, columns, DIM, STRIDE, TYPE)
        # Sums start at +0 and are never -0, so adding the zeros of rows that have ended is exact.
        total += a
        total += b
        total += c
        total += d
    return total


@triton.jit(do_not_specialize=["num_bags"])
def pool_kernel(
    out,
    records,
    slot_index,
    indices,
    offsets,
    factors,
    num_bags,
    MEAN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    TYPE: tl.constexpr,
):
    """``out[g]`` = sum or mean of the rows of bag g; without offsets: its single row."""
    bags = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    live = bags < num_bags
    wanted = live[:, None] & (columns < DIM)[None, :]
    if offsets is None:
        row = tl.load(indices + bags, mask=live, other=0)
        if slot_index is not None:
            row = tl.load(slot_index + row, mask=live, other=0)
        at = records + row.to(tl.int64)[:, None] * STRIDE + columns[None, :]
        total = tl.load(at, mask=wanted, other=0.0).to(TYPE)
    else:
        starts = tl.load(offsets + bags, mask=live, other=0)
        ends = tl.load(offsets + bags + 1, mask=live, other=0)
        total = segment_sums(records, slot_index, indices, factors, None, starts, ends, ROWS, BLOCK, DIM, STRIDE, TYPE)
        if MEAN:
            lengths = tl.maximum(ends - starts, 1).to(TYPE)
            total = divided(total, tl.broadcast_to(lengths[:, None], (ROWS, BLOCK)))
    tl.store(out + bags.to(tl.int64)[:, None] * DIM + columns[None, :], total, mask=wanted)


@triton.jit(do_not_specialize=["num_rows", "max_terms"])
def sum_kernel(
    out,
    out_rows,
    vectors,
    sources,
    factors,
    occurrences,
    starts,
    ends,
    num_rows,
    max_terms,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    TYPE: tl.constexpr,
):
    """``out[out_rows[r]]`` = sum of the terms of row r, unless there are more than `max_terms`."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    live = rows < num_rows
    first = tl.load(starts + rows, mask=live, other=0)
    last = tl.load(ends + rows, mask=live, other=0)
    live = live & (last - first <= max_terms)
    last = tl.where(live, last, first)
    total = segment_sums(vectors, None, sources, factors, occurrences, first, last, ROWS, BLOCK, DIM, STRIDE, TYPE)
    if out_rows is not None:
        rows = tl.load(out_rows + rows, mask=live, other=0)
    at = out + rows.to(tl.int64)[:, None] * DIM + columns[None, :]
    tl.store(at, total, mask=live[:, None] & (columns < DIM)[None, :])
