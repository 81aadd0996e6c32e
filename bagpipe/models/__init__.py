"""Models: called as ``model(dense, sparse)``, they return logits.

    (DataSchema, ModelConfig) ──torchrec_models.build_model──> torchrec model, tables on the meta device
        ──bagpipe.embedding.torchrec_collections.convert──> the same model, rows in a cache
    bagpipe.embedding.plain_bags.CachedBags ──plain_dlrm.PlainDLRM──> DLRM in plain torch

`torchrec_models` holds the models of `model.name` (dlrm, dcnv2, deepfm, wide-deep, towers) and loads a user's
`model.factory`. `mixed_bags` joins a weighted and an unweighted embedding-bag collection. `plain_dlrm` works where
torchrec is not installed.
"""
