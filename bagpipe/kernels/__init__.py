"""What is computed on rows, on their device: sums of vectors, optimizer steps, initial values.

    RowView, Bags ──pool──> pooled vectors ──> model ──> their gradient, as Terms ──update──> records, in their slots
                                                              └──sum──> row gradients for other ranks
    tables, ids ──initialise──> records of rows that the store does not have

`interface` says what each does. `torch_kernels` does it with torch's own operations on every device (`torch_sums`),
`triton_kernels` with kernels for GPUs (`triton_sums`, `triton_rows`, `tiles`); `open` chooses. `sums` holds the plan's
numbers; `optimizer`, `initial`, `records` and `rounding` define the results. The cache is built on top.
"""
