"""Splits a model into an embedding stage and dense stages.

model ──trace──> Traced ──propagate_shapes──> NodeShape per node ──classify_nodes──> ModelParts: operators
  ModelParts ──assignment──> stage per node ──split──> StagedModel: stage modules and the values between them
  ModelParts ──measure──> partition.OperatorGraph          StagedModel ──batch_dependence──> unsplittable operators

extract: nodes of a graph as a module. fake_embedding: outputs of embedding collections without rows.
"""
