"""Records that several rooms share: batch, batch_identity, schema, labels, model_inputs; splitmix64: the mix of ids."""
