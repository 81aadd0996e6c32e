"""The cache of embedding rows on the device: slots, lookups, updates, and the exchange between ranks.

    plan ──FetchRequests──> store ──results──> insert ──> slab[slot] ──lookup──> pooled vectors ──> model
                                                            │    ↑                                    │
                                                            │    └─update── segment sum <── gradient ─┘
                                                            └─evict, flush, snapshot──> WriteRequest ──> store

`row_cache` holds the rows, `row_history` knows the decay they have missed, `earlier_rows` their weights before an
update; `reached_rows` leaves out those without a gradient; `cache_statistics` counts; `auto_rows` sizes a cache that
grows; `slots` and `row_transfer` are its bookkeeping and its copies, `snapshot` its copy-on-write snapshots,
`resident_rows` an index of it at rest.
`lookup_layout` groups tables; `batch_context`, `pooling` and `row_exchange_plan` turn a plan into index tensors,
`derived_lookup` other bags of the same ids; `lookup` is forward and backward, `gradient_squares` the norm of its
result; `row_exchange` talks to other ranks; `upload` and `staging` copy between host and device, and `verdicts` are
what a device has found.
"""
