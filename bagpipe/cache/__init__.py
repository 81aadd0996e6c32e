"""Rows on the device: which slot holds which row, reading them for a batch, and updating each of them once.

    ReadResult (store) ──> insert ──> slab[slot] ──begin──> unique rows ──lookup──> pooled vectors ──> model
                             ↑           │  ↑                                                            │
      initial(seed, table, id, column)   │  └──update── row optimizer <── segment sum <── pooled gradient┘
                                         └──evict / flush──> WriteRequest (store)

`slots` is the bookkeeping (numpy), `rows` the slab and its lanes, `layout` and `step` turn a plan into tensors,
`lookup` is forward and backward; the numbers are those of `bagpipe.kernels`. `upload` and `transfer` move batches and
rows between host and device, on a device through the memory of `staging`. Nothing here imports torchrec.
"""
