"""Kernels on embedding rows: pooling, gradient sums, optimizer steps, initial values.

    RowView, Bags ──pool──> pooled vectors ──> model ──> Gradients ──update──> records, in their slots
                                                             └──sum──> row gradients for other ranks
    tables, ids ──initialise──> records of rows that the store does not have

`interface` defines the operations, `select` chooses their implementation: `torch_kernels` (with `torch_sums`) on every
device, `triton_kernels` (with `triton_sums`, `triton_rows`, `triton_tiles`) on GPUs. `segment_sum` holds the index
arrays of gradient sums. `row_optimizer`, `row_decay`, `row_l2`, `initialization`, `row_format` and `rounding` define
the numbers; `exact_sum` adds them in any order. `bagpipe.cache` is built on top.
"""
