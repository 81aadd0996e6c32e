"""Models: called as ``model(dense, sparse)``, they return logits; called with a batch, their loss and outputs.

    (DataSchema, ModelConfig) ──torchrec_models.build_model──> torchrec model, tables on the meta device
        ──bagpipe.embedding.torchrec_collections.convert──> the same model, rows in a cache
    embedding collection, numbers ──dcnv2.DCNv2, deepfm.DeepFM, finalmlp.FinalMLP──> FuxiCTR's forms of these models
    embedding collections, numbers ──mmoe, ple, esmm, din, sasrec, two_tower──> models of `bagpipe.TrainPipeline`
    (bags, DataSchema, ModelConfig) ──task_models.build_task_model──> mmoe, ple, esmm as models that return logits
    bagpipe.embedding.plain_bags.CachedBags ──plain_dlrm.PlainDLRM──> DLRM in plain torch

`torchrec_models` holds the builders of `model.name` and loads a user's `model.factory`. `dcnv2`, `deepfm` and
`finalmlp` hold models in FuxiCTR's forms, made of `layers`. Several labels: `mmoe`, `ple`, `esmm`,
over `tasks`; histories: `din`, `sasrec`; retrieval: `two_tower`. `mixed_bags` joins a weighted and an unweighted
embedding-bag collection. `plain_dlrm` works where torchrec is not installed.
"""
