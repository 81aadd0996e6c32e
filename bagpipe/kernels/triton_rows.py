"""Triton kernels on row records: optimizer step in place, initial values. `triton_kernels` launches them.

    update_kernel       segment_sums ──gradient──> optimizer ──rounding of half weights──> slots
    initialise_kernel   table key, id ──mixers──> words ──> weights, and zero state ──> slots

The rules of `bagpipe.kernels.triton_sums` apply. `optimizer`, `rounding` and `initialization` define the results,
operation by operation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bagpipe.kernels.triton_sums import divided, segment_sums

__all__ = ["initialise_kernel", "update_kernel"]

_MIX_64_A = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_64_B = tl.constexpr(0x94D049BB133111EB)
_MIX_32_A = tl.constexpr(0x7FEB352D)
_MIX_32_B = tl.constexpr(0x846CA68B)
_COLUMN_STEP = tl.constexpr(0x9E3779B9)


@triton.jit
def _root(x):
    if x.dtype == tl.float32:
        return tl.sqrt_rn(x)
    else:
        return tl.sqrt(x)


@triton.jit
def _scalar(bits, TYPE: tl.constexpr):
    """A Python float, passed as the integer of its bits."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True).to(TYPE)


@triton.jit
def _row_sums(x, ROWS: tl.constexpr, BLOCK: tl.constexpr, HALVINGS: tl.constexpr):
    """[ROWS, 1]: row sums of `x`. Repeatedly adds the second half of the columns to the first."""
    for halving in tl.static_range(HALVINGS):
        x = tl.sum(tl.reshape(x, (ROWS, 2, BLOCK >> (halving + 1))), axis=1)
    return x


@triton.jit
def _random_words(ids, keys, columns):
    """uint32 [ROWS, BLOCK]: `bagpipe.kernels.initialization.random_words`."""
    x = (ids + keys).to(tl.uint64, bitcast=True)
    x ^= x >> 30
    x *= _MIX_64_A
    x ^= x >> 27
    x *= _MIX_64_B
    x ^= x >> 31
    low = x.to(tl.uint32)
    high = (x >> 32).to(tl.uint32)
    y = low[:, None] + (columns.to(tl.uint32) * _COLUMN_STEP)[None, :]
    y ^= y >> 16
    y *= _MIX_32_A
    y ^= high[:, None]
    y ^= y >> 15
    y *= _MIX_32_B
    y ^= y >> 16
    return y


@triton.jit
def _nearest(weights, TYPE: tl.constexpr):
    """Weights rounded to TYPE, ties to even."""
    if TYPE == tl.bfloat16:
        # In integers: Triton's interpreter truncates, and is wrong for subnormal numbers.
        bits = weights.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        bits = tl.where(weights != weights, 0x7FC0, bits)  # the NaN of torch's conversion
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return weights.to(TYPE)


@triton.jit
def _rounded(weights, words, TYPE: tl.constexpr):
    """float32 weights that are exact in the half type TYPE: `bagpipe.kernels.rounding.round_stochastic`."""
    bits = weights.to(tl.uint32, bitcast=True)
    DROPPED: tl.constexpr = 16 if TYPE == tl.bfloat16 else 13
    magnitude = (bits & 0x7FFFFFFF) + (words >> (32 - DROPPED))
    carried = ((magnitude >> DROPPED << DROPPED) | (bits & 0x80000000)).to(tl.float32, bitcast=True)
    if TYPE == tl.float16:
        small = tl.abs(weights) < 0.00006103515625  # 2**-14, the smallest normal number
        units = tl.where(small, tl.abs(weights), 0.0) * 16777216.0
        whole = units.to(tl.int32).to(tl.float32)  # at most 1024; `tl.floor` flushes subnormals to zero
        fraction = ((units - whole) * 16777216.0).to(tl.uint32)
        carry = (fraction + (words >> 8)) >> 24
        value = (whole + carry.to(tl.float32)) * 0.000000059604644775390625
        # The sign of the weight, zeros included.
        signed = (value.to(tl.uint32, bitcast=True) | (bits & 0x80000000)).to(tl.float32, bitcast=True)
        carried = tl.where(small, signed, carried)
    return tl.where(weights != weights, weights, carried)


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "max_terms",
        "lr_bits",
        "eps_bits",
        "first_bits",
        "second_bits",
        "third_bits",
        "step_bits",
    ]
)
def update_kernel(
    records,
    state,
    slot_index,
    row_map,
    vectors,
    sources,
    factors,
    occurrences,
    starts,
    ends,
    tables,
    ids,
    rounding_keys,
    num_rows,
    max_terms,
    lr_bits,
    eps_bits,
    first_bits,
    second_bits,
    third_bits,
    step_bits,
    OPTIMIZER: tl.constexpr,
    FIRST_RATE: tl.constexpr,
    SECOND_RATE: tl.constexpr,
    RECORD_STRIDE: tl.constexpr,
    STATE_STRIDE: tl.constexpr,
    STATE_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HALVINGS: tl.constexpr,
    DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    TYPE: tl.constexpr,
):
    """One optimizer step for each row with at most `max_terms` terms, in its slot.

    Row r of the sums is row ``row_map[r]`` of the slots; without a map, row r. Without starts, its gradient is vector
    r. The optimizers are those of `bagpipe.kernels.row_optimizer`, operation by operation. Half weights are rounded to
    nearest, or stochastically if there are keys. The first, second and third number are those of one optimizer:
    momentum; or beta, l1 and l2.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    live = rows < num_rows
    row = rows
    if row_map is not None:
        row = tl.load(row_map + rows, mask=live, other=0)
    if starts is not None:
        first = tl.load(starts + rows, mask=live, other=0)
        last = tl.load(ends + rows, mask=live, other=0)
        live = live & (last - first <= max_terms)
        last = tl.where(live, last, first)
    wanted = live[:, None] & (columns < DIM)[None, :]
    # The row is loaded before its gradient is summed, so the latencies overlap.
    slot = tl.load(slot_index + row, mask=live, other=0).to(tl.int64)
    weights_at = records + slot[:, None] * RECORD_STRIDE + columns[None, :]
    weights = tl.load(weights_at, mask=wanted, other=0.0).to(TYPE)
    state_row = state + slot * STATE_STRIDE + STATE_FIRST
    state_at = state_row[:, None] + columns[None, :]
    if OPTIMIZER == "adagrad":
        square_sum = tl.load(state_at, mask=wanted, other=0.0)
    if OPTIMIZER == "rowwise_adagrad":
        row_square_sum = tl.load(state_row, mask=live, other=0.0)[:, None]
    if OPTIMIZER == "momentum":
        velocity = tl.load(state_at, mask=wanted, other=0.0)
    if OPTIMIZER == "ftrl":
        z = tl.load(state_at, mask=wanted, other=0.0)
        square = tl.load(state_at + DIM, mask=wanted, other=0.0)
    if OPTIMIZER == "adam":
        mean = tl.load(state_at, mask=wanted, other=0.0)
        square = tl.load(state_at + DIM, mask=wanted, other=0.0)
    if starts is None:
        vectors_at = vectors + rows.to(tl.int64)[:, None] * STRIDE + columns[None, :]
        gradient = tl.load(vectors_at, mask=wanted, other=0.0)
    else:
        gradient = segment_sums(
            vectors, None, sources, factors, occurrences, first, last, ROWS, BLOCK, DIM, STRIDE, TYPE
        )
    lr = _scalar(lr_bits, TYPE)
    eps = _scalar(eps_bits, TYPE)
    if OPTIMIZER == "sgd":
        change = gradient * lr
    if OPTIMIZER == "momentum":
        velocity *= _scalar(first_bits, TYPE)
        velocity += gradient
        tl.store(state_at, velocity, mask=wanted)
        change = velocity * lr
    if OPTIMIZER == "adagrad":
        square_sum += gradient * gradient
        tl.store(state_at, square_sum, mask=wanted)
        change = divided(gradient, _root(square_sum) + eps) * lr
    if OPTIMIZER == "rowwise_adagrad":
        added = _row_sums(gradient * gradient, ROWS, BLOCK, HALVINGS)
        row_square_sum += divided(added, tl.full((ROWS, 1), DIM, TYPE))
        tl.store(state_row[:, None], row_square_sum, mask=live[:, None])
        change = divided(gradient, tl.broadcast_to(_root(row_square_sum) + eps, (ROWS, BLOCK))) * lr
    if OPTIMIZER == "adam":
        gradient_square = gradient * gradient
        mean += (gradient - mean) * tl.full((ROWS, BLOCK), FIRST_RATE, TYPE)
        square += (gradient_square - square) * tl.full((ROWS, BLOCK), SECOND_RATE, TYPE)
        tl.store(state_at, mean, mask=wanted)
        tl.store(state_at + DIM, square, mask=wanted)
        change = divided(mean, _root(square) + eps) * lr
    if OPTIMIZER == "ftrl":
        alpha = tl.full((ROWS, BLOCK), 0.0, TYPE) + lr
        before = _root(square)
        square += gradient * gradient
        root = _root(square)
        z += gradient - divided(root - before, alpha) * weights
        tl.store(state_at, z, mask=wanted)
        tl.store(state_at + DIM, square, mask=wanted)
        shrunk = tl.abs(z) - _scalar(second_bits, TYPE)
        divisor = divided(root + _scalar(first_bits, TYPE), alpha) + _scalar(third_bits, TYPE)
        moved = divided(shrunk, tl.where(shrunk > 0, divisor, 1.0))
        weights = tl.where(shrunk > 0, tl.where(z > 0, -moved, moved), 0.0)
    else:
        weights -= change
    if rounding_keys is not None:
        keys = tl.load(rounding_keys + tl.load(tables + row, mask=live, other=0), mask=live, other=0)
        row_ids = tl.load(ids + row, mask=live, other=0)
        words = _random_words(row_ids, keys + step_bits.to(tl.int64), columns)
        weights = _rounded(weights, words, records.dtype.element_ty)
    tl.store(weights_at, _nearest(weights, records.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=["num_rows"])
def initialise_kernel(
    records,
    state,
    slot_index,
    tables,
    ids,
    keys,
    scales,
    num_rows,
    RECORD_STRIDE: tl.constexpr,
    STATE_STRIDE: tl.constexpr,
    STATE_FIRST: tl.constexpr,
    STATE_WIDTH: tl.constexpr,
    WEIGHT_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Initial weights of `bagpipe.kernels.initialization`, zeros from DIM to WEIGHT_WIDTH, and zero state."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    live = rows < num_rows
    slot = tl.load(slot_index + rows, mask=live, other=0).to(tl.int64)
    table = tl.load(tables + rows, mask=live, other=0)
    row_ids = tl.load(ids + rows, mask=live, other=0)
    words = _random_words(row_ids, tl.load(keys + table, mask=live, other=0), columns)
    draws = (words.to(tl.int32, bitcast=True) >> 8).to(TYPE)
    weights = draws * tl.load(scales + table, mask=live, other=0.0)[:, None]
    weights = tl.where((columns < DIM)[None, :], weights, 0.0)
    weights_at = records + slot[:, None] * RECORD_STRIDE + columns[None, :]
    padded = live[:, None] & (columns < WEIGHT_WIDTH)[None, :]
    tl.store(weights_at, _nearest(weights, records.dtype.element_ty), mask=padded)
    zeros = tl.zeros((ROWS, BLOCK), dtype=TYPE)
    for part in tl.static_range((STATE_WIDTH + BLOCK - 1) // BLOCK):
        state_columns = part * BLOCK + columns
        state_at = state + slot[:, None] * STATE_STRIDE + STATE_FIRST + state_columns[None, :]
        tl.store(state_at, zeros, mask=live[:, None] & (state_columns < STATE_WIDTH)[None, :])
