"""Embedding modules whose rows live in a `RowCache`. A module reads the rows of the batch that the cache has begun.

    torchrec model ──torchrec_collections.convert──> model with cached collections   ┐  row_tables, features, layout
    DataSchema ────────────plain_bags.CachedBags──> bags for a plain torch model     ┘  for oracle, cache and store

    forward(ids, weights) ──cached_lookup.CachedLookup: are these ids of the batch?──> lookup ──> vectors
                                                     ↑
                              RowCache.begin(batch) ─┘

`model_tables` and `table_configs` read the tables of a torchrec model, and `torchrec_collections` makes its collections
cached ones; `plain_bags` needs torch alone; `cached_lookup` is common to both, and `input_bags` reads what a collection
gets, with ids of any type (`integer_ids`). `stored_tables` stands where others expect the tables' modules.
`materialise` initialises the dense parameters of a model that was built on the meta device.
`numbered_tables`, `table_optimizers` and `table_dtypes` order the tables of a model, with their optimizers and dtypes.
"""
