"""Records that several rooms share: batch, batch_identity, schema, model_inputs."""
